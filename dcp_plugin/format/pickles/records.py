"""Plain records in place of the objects of a ``.metadata``: no class of a library is touched, and nothing is hashed.

The unpickler gets a pickle that has been checked and changed before:

- A pass over the opcodes accepts only those that DCP's metadata needs, and no length or number of the memo that the
  file does not have room for.
- Dictionaries become :class:`Pairs`, lists of keys and values by turns. The unpickler would hash keys while it
  reads, and tuples nested some 100 000 deep end the process there; numbers that collide take forever. It would also set
  attributes from dictionaries, on classes too.
- Globals become records of ours (:class:`Record`) or functions that return their argument. The caller makes torch's
  objects of records that it has checked.

The pass is one regular expression, as Python takes half a minute for the 70 million opcodes of a million tensors.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from dcp_plugin.errors import UnsafeCheckpoint

_MOST_FIELDS = 16
"""Attributes of an object. A list of millions may be the state of millions of objects."""
_FEW = 1 << 21
"""Numbers of the memo that need no look at how large the file is: the unpickler takes 32 MiB for them."""


def _counted(behind: bytes = b"", most: int = 255) -> bytes:
    """A length of one byte, what is behind it, and as many bytes."""
    return b"(?:" + b"|".join(re.escape(bytes([n])) + behind + b".{%d}" % n for n in range(most + 1)) + b")"


_OPCODES = b"|".join(
    (
        rb"[()\]aet0bR\x81\x85-\x89\x93\x94N]++",  # tuples, lists, constants; memoize, build, reduce and their kin
        rb"[Khq].|M..|[Jj]....|G.{8}|\x95.{4}\0{4}|r..[\0-\x1f]\0",  # numbers, the memo, frames
        rb"\x8c" + _counted() + rb"|X" + _counted(rb"\0\0\0"),  # text
        rb"\x8a" + _counted(most=9),  # large numbers
        rb"c[\w.]{1,99}\n\w{1,99}\n",  # names
    )
)
_UP_TO_DICTIONARY = re.compile(b"(?:" + _OPCODES + b")*+([}us])?", re.DOTALL)
assert _FEW == 0x20 << 16

_NOW = np.arange(256, dtype=np.uint8)
_NOW[list(b"}us")] = list(b"Ne\x86")
_AND_THEN = np.zeros(256, np.uint8)
_AND_THEN[list(b"}s")] = list(b"Qb")
"""What stands for opcodes of dictionaries: an empty one (``}``) is what ``persistent_load(None)`` returns, many items
(``u``) extend a list, and one item (``s``) is a tuple that the list is built with."""


class _Sealed(type):
    """Classes that cannot be called or changed."""

    def __call__(cls, *args: Any) -> NoReturn:
        raise UnsafeCheckpoint(f"calls {cls.__name__}, which no metadata of DCP does; nothing was executed")

    def __setattr__(cls, name: str, value: Any) -> NoReturn:
        raise TypeError(f"{cls.__name__}.{name} cannot be set")


class Record(list[Any], metaclass=_Sealed):
    """An object in a pickle: a list of the states that it was built with, which is one at most.

    Its parts are methods in C, since there are five for each tensor. ``append`` keeps what it is given and copies
    nothing, so that no pickle becomes large in memory by naming one thing many times.
    """

    __slots__ = ()
    __setstate__ = list.append


class Pairs(list[Any], metaclass=_Sealed):
    """A dictionary in a pickle: key, value, key, value, …"""

    __slots__ = ()

    def __setstate__(self, item: Any) -> None:
        if type(item) is not tuple or len(item) != 2:
            raise ValueError("a dictionary is built with something else than an item")
        self.extend(item)


def argument(value: Any) -> Any:
    """In place of a class or a function with one argument."""
    return value


def new_pairs(_: Any) -> Pairs:
    """Return an empty dictionary: the ``persistent_load`` of the unpickler."""
    pairs: Pairs = list.__new__(Pairs)
    return pairs


def without_dictionaries(data: bytes, _: object = None) -> bytes:
    """Check the opcodes of a pickle, and return it with :class:`Pairs` in place of dictionaries.

    Raises:
        ValueError: It has an opcode that the metadata of DCP does not need, leads out of the file, or bytes follow.
    """
    if data[:1] != b"\x80" or data[1:2] not in (b"\2", b"\3", b"\4", b"\5"):
        raise ValueError("it does not begin like a pickle")
    places, end = _dictionaries(data)
    if end < len(data):  # the end of one of ours that is damaged, for example: no file of a stock save has more
        raise ValueError(f"{len(data) - end} bytes follow the end of the pickle")
    pickled = np.frombuffer(data, np.uint8)[2:end].copy()
    at = np.frombuffer(places, np.int64) - 2
    opcodes = pickled[at]
    pickled[at] = _NOW[opcodes]
    longer = _AND_THEN[opcodes] != 0
    pickled = np.insert(pickled, at[longer] + 1, _AND_THEN[opcodes[longer]])
    frame = b"\x95" + len(pickled).to_bytes(8, "little")  # so that the unpickler reads it at once
    return b"\x80\4" + frame + pickled.tobytes()


def _dictionaries(data: bytes) -> tuple[array[int], int]:
    """Where the opcodes of dictionaries are, and where the pickle ends. Raises ValueError for an opcode too many."""
    places, at = array("q"), 2
    while True:
        for found in _UP_TO_DICTIONARY.finditer(data, at):
            if found.lastindex is None:
                break
            places.append(found.end() - 1)
        at = found.end()
        opcode, number = data[at : at + 1], int.from_bytes(data[at + 1 : at + 5], "little")
        if opcode == b".":
            return places, at + 1
        if opcode == b"X" and at + 5 + number < len(data):
            at += 5 + number
        elif opcode == b"r" and number < len(data):
            at += 5
        else:
            raise ValueError(f"opcode {opcode!r} at byte {at} is none that it needs, or leads out of the file")


def fields(record: Any, kind: type[Record]) -> dict[str, Any]:
    """The attributes that an object of a class was built with. Raises ValueError if it is none."""
    state = record[0] if type(record) is kind and len(record) == 1 else () if record == [] else None
    if (type(state) is not Pairs and state != ()) or len(state) > 2 * _MOST_FIELDS:
        raise ValueError(f"something that is no {kind.__name__}")
    if not all(type(name) is str for name in state[::2]):
        raise ValueError(f"a {kind.__name__} whose attributes have no names")
    return dict(zip(state[::2], state[1::2], strict=True))


def columns_of(records: Sequence[Any], kind: type[Record], *names: str, maybe: str = "") -> list[list[Any]]:
    """Attributes of many objects of a class, a list of each attribute: :func:`fields` for millions.

    Args:
        maybe: One more attribute, which is None where it is missing.

    Raises:
        ValueError, KeyError: One of them is no such object, or lacks an attribute.
    """
    columns: list[list[Any]] = [[] for _ in range(len(names) + bool(maybe))]
    known: list[str] | None = None
    for record in records:
        state = record[0] if type(record) is kind and record else ()
        if known is None or type(state) is not Pairs or state[: 2 * _MOST_FIELDS : 2] != known or len(record) != 1:
            said = fields(record, kind)  # nearly all objects have the same attributes in the same order
            state = record[0] if record else ()
            known = list(state[::2])
            at = [2 * known.index(name) + 1 if name in said else None for name in (*names, maybe)[: len(columns)]]
            if None in at[: len(names)]:
                raise KeyError(f"a {kind.__name__} without {names}")
        for column, place in zip(columns, at, strict=True):
            column.append(None if place is None else state[place])
    return columns
