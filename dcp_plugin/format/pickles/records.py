"""Plain records in place of the objects of a ``.metadata``: no class of a library is touched, and no object is hashed.

The unpickler gets a checked and changed pickle:

- A pass over the opcodes accepts only those that DCP's metadata needs, and no length or memo number that is too large
  for the file.
- Dictionaries become :class:`Pairs`, lists of alternating keys and values. The unpickler would hash keys while it
  reads, and tuples nested some 100 000 deep end the process in the hash; numbers that collide take quadratic time. It
  would also set attributes from dictionaries, even on classes.
- Globals become our records (:class:`Record`) or functions that return their argument. The caller makes torch's objects
  from the records after checking them.

The pass is one regular expression, as Python takes half a minute for the 70 million opcodes of a million tensors.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import numpy as np

from dcp_plugin.errors import UnsafeCheckpoint

_MOST_FIELDS = 16
"""Most attributes of an object. A list of millions may be the state of millions of objects."""
_FEW = 1 << 21
"""Memo numbers that need no comparison with the size of the file: the unpickler takes 32 MiB for them."""


def _counted(behind: bytes = b"", most: int = 255) -> bytes:
    """Return a pattern for a length of one byte, the bytes ``behind`` it, and as many bytes as the length."""
    return b"(?:" + b"|".join(re.escape(bytes([n])) + behind + b".{%d}" % n for n in range(most + 1)) + b")"


_OPCODES = b"|".join(
    (
        rb"[()\]aet0bR\x81\x85-\x89\x93\x94N]++",  # tuples, lists, constants; memoize, build, reduce and similar
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
"""Replacements of the opcodes of dictionaries: an empty dictionary (``}``) becomes the result of
``persistent_load(None)``, many items (``u``) extend a list, and one item (``s``) becomes a tuple that the list is built
with."""


class _Sealed(type):
    """Metaclass of classes that cannot be called or changed."""

    def __call__(cls, *args: Any) -> NoReturn:
        raise UnsafeCheckpoint(f"calls {cls.__name__}, which no metadata of DCP does; nothing was executed")

    def __setattr__(cls, name: str, value: Any) -> NoReturn:
        raise TypeError(f"{cls.__name__}.{name} cannot be set")


class Record(list[Any], metaclass=_Sealed):
    """Object in a pickle: a list of the states that it was built with, at most one.

    Its methods are implemented in C, because each tensor has five records. ``append`` keeps its argument without a
    copy, so that no pickle becomes large in memory by naming one object many times.
    """

    __slots__ = ()
    __setstate__ = list.append


def kind_of_record(name: str) -> type[Record]:
    """Return a class of records that stands for a class in a pickle."""
    return cast(type[Record], _Sealed(name, (Record,), {"__slots__": ()}))


class Pairs(list[Any], metaclass=_Sealed):
    """Dictionary in a pickle: key, value, key, value, …"""

    __slots__ = ()

    def __setstate__(self, item: Any) -> None:
        if type(item) is not tuple or len(item) != 2:
            raise ValueError("a dictionary is built from something other than an item")
        self.extend(item)


def argument(value: Any) -> Any:
    """Return the argument; stands for a class or a function with one argument."""
    return value


def new_pairs(_: Any) -> Pairs:
    """Return an empty dictionary: the ``persistent_load`` of the unpickler."""
    pairs: Pairs = list.__new__(Pairs)
    return pairs


def without_dictionaries(data: bytes, _: object = None) -> bytes:
    """Check the opcodes of a pickle, and return it with :class:`Pairs` in place of dictionaries.

    Raises:
        ValueError: An opcode is none that DCP's metadata needs, an operand reads past the end of the file, or bytes
            follow the pickle.
    """
    if data[:1] != b"\x80" or data[1:2] not in (b"\2", b"\3", b"\4", b"\5"):
        raise ValueError("it does not begin like a pickle")
    places, end = _dictionaries(data)
    if end < len(data):  # a damaged end of a packed checkpoint, for example: no stock file has bytes there
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
    """Return the positions of the opcodes of dictionaries, and the end of the pickle. Raises ValueError for others."""
    places, at = array("q"), 2
    while True:
        for match in _UP_TO_DICTIONARY.finditer(data, at):
            if match.lastindex is None:
                break
            places.append(match.end() - 1)
        at = match.end()
        opcode, number = data[at : at + 1], int.from_bytes(data[at + 1 : at + 5], "little")
        if opcode == b".":
            return places, at + 1
        if opcode == b"X" and at + 5 + number < len(data):
            at += 5 + number
        elif opcode == b"r" and number < len(data):
            at += 5
        else:
            raise ValueError(
                f"opcode {opcode!r} at byte {at} is not used by DCP's metadata, or its argument ends after the file"
            )


def fields(record: Any, kind: type[Record]) -> dict[str, Any]:
    """Return the attributes that an object was built with. Raises ValueError for an object of another class."""
    state = record[0] if type(record) is kind and len(record) == 1 else () if record == [] else None
    if (type(state) is not Pairs and state != ()) or len(state) > 2 * _MOST_FIELDS:
        raise ValueError(f"a record is not a {kind.__name__}")
    if not all(type(name) is str for name in state[::2]):
        raise ValueError(f"a {kind.__name__} whose attributes have no names")
    return dict(zip(state[::2], state[1::2], strict=True))


def columns_of(records: Sequence[Any], kind: type[Record], *names: str, maybe: str = "") -> list[list[Any]]:
    """Return attributes of many objects of a class, one list per attribute: :func:`fields` for millions.

    Args:
        maybe: Another attribute, which is None for an object without it.

    Raises:
        ValueError, KeyError: A record is no such object, or lacks an attribute.
    """
    columns: list[list[Any]] = [[] for _ in range(len(names) + bool(maybe))]
    field_names: list[str] | None = None
    for record in records:
        state = record[0] if type(record) is kind and record else ()
        if (
            field_names is None
            or type(state) is not Pairs
            or state[: 2 * _MOST_FIELDS : 2] != field_names
            or len(record) != 1
        ):
            values_by_name = fields(record, kind)  # nearly all objects have the same attributes in the same order
            state = record[0] if record else ()
            field_names = list(state[::2])
            at = [
                2 * field_names.index(name) + 1 if name in values_by_name else None
                for name in (*names, maybe)[: len(columns)]
            ]
            if None in at[: len(names)]:
                raise KeyError(f"a {kind.__name__} without {names}")
        for column, place in zip(columns, at, strict=True):
            column.append(None if place is None else state[place])
    return columns
