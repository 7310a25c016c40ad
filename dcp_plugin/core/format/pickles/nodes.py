"""Inert nodes of a pickle: the unpickler makes nothing else, calls nothing that the pickle names, and hashes nothing.

Python's unpickler trusts a file. It calls and fills the objects that the pickle names. Tuples nested some 100 000 deep
end the process when they are hashed. Numbers can be made to collide as keys. Nine bytes can ask for a memo of 4 GiB.

One pass over the opcodes therefore accepts only those that torch and DCP write, and no length or memo number that is
too large for the file. It replaces opcodes that call, fill or hash. The remaining opcodes make numbers, text, tuples,
lists and :class:`Node`. Then Python's unpickler in C reads the result.

The pass is one regular expression: a Python loop takes half a minute for the 70 million opcodes of a million tensors.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from typing import Any


def _counted(behind: bytes = b"", most: int = 255) -> bytes:
    """Return a pattern for a length of one byte, the bytes ``behind`` it, and as many bytes as the length."""
    # A regular expression cannot count by a byte that it has read, so each length is an alternative.
    return b"(?:" + b"|".join(re.escape(bytes([n])) + behind + b".{%d}" % n for n in range(most + 1)) + b")"


# Possessive quantifiers (``++``, ``*+``) give nothing back, so that no file makes the matching backtrack.
_KEPT = b"|".join(
    (
        rb"[()\]aet0\x85-\x89\x8f\x93\x94N]++",  # tuples, lists, constants, an empty set, memoize
        rb"[Khq].|M..|[Jj]....|G.{8}|\x95.{4}\0{4}|r..[\0-\x1f]\0",  # numbers, the memo, frames
        rb"\x8c" + _counted() + rb"|X" + _counted(rb"\0\0\0"),  # text
        rb"\x8a" + _counted(most=9),  # large numbers
        rb"c[^\n]{1,255}+\n[^\n]{1,255}+\n",  # names
    )
)
"""Opcodes that are kept as they are. Memo numbers below 2^21 are not compared with the file: their table takes at most
32 MiB."""
_NEXT = re.compile(b"((?:" + _KEPT + b")*+)(.)", re.DOTALL)
MOST_PICKLE = 1 << 28
"""Most bytes of a pickle, without long texts such as those of an array. The pickle of a million tensors takes half of
it."""
_LONGEST = 520
"""Bytes of the longest opcode that is kept."""
_LONG = {b"X": 4, b"U": 1, b"\x8a": 1, b"r": 4}
"""Opcodes that are kept after a comparison with the file -> bytes of their length or memo number."""
_REPLACED = {
    b"}": b"N\x85Q",  # an empty dictionary
    b"u": b"e",  # items
    b"s": b"\x86b",  # one item
    b"R": b"\x89\x87Q",  # a call
    b"\x81": b"\x88\x87Q",  # a new object, without a call of its class
    b"b": b"\x85b",  # a state
    b"Q": b"\x85Q",  # a storage
}


class Node(list[Any]):
    """Object that a pickle makes of other objects, in one of three forms:

    - a dictionary: None, key, value, key, value, …
    - a call: :class:`Name`, arguments, True if only ``__new__`` is called, key, value, …, and perhaps a state
    - a storage: its identifier
    """

    __slots__ = ()
    __setstate__ = list.extend  # makes the opcode BUILD append a tuple of items


class Name:
    """Global that a pickle names: its name, and the object in its place. No opcode can change it."""

    __slots__ = ("of", "value")

    def __init__(self, of: str, value: Any) -> None:
        self.of, self.value = of, value


class _Unpickler(pickle.Unpickler):
    """Python's unpickler in C, for a pickle without the replaced opcodes."""

    persistent_load = Node  # makes the opcode BINPERSID turn a tuple into a node

    def __init__(self, data: bytearray, get: Callable[[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._get = get

    def find_class(self, module: str, name: str) -> Any:
        return self._get(module, name)


def nodes_of(data: bytes, get: Callable[[str, str], Any]) -> Any:
    """Unpickle without a call of what the pickle names.

    Args:
        get: Function that returns the object in place of a global, by module and name. It raises for a refused global.

    Raises:
        Exception: The pickle is damaged, has an opcode that neither torch nor DCP writes, or is followed by bytes.
    """
    return _Unpickler(_inert(data), get).load()


def _inert(data: bytes) -> bytearray:
    """Return a pickle that makes inert nodes."""
    if data[:1] != b"\x80" or data[1:2] not in (b"\2", b"\3", b"\4", b"\5"):
        raise ValueError("it does not begin like a pickle")
    # One frame around all: the unpickler reads it at once. Its length is filled in at the end.
    inert, at, opcode = bytearray(b"\x80\4\x95" + bytes(8)), 2, b""
    end_of_opcodes = MOST_PICKLE
    while opcode != b"." and (match := _NEXT.match(data, at, end_of_opcodes)):
        kept, opcode = match.groups()
        at = match.end()
        inert += kept
        if opcode in _REPLACED:
            inert += _REPLACED[opcode]
        elif opcode != b".":
            width = _LONG.get(opcode, 0)
            number = int.from_bytes(data[at : at + width], "little")
            end = at + width + (0 if opcode == b"r" else number)
            if at + _LONGEST > end_of_opcodes:  # an opcode that is cut by the limit looks like an unknown one
                raise ValueError(f"its pickle has more than {MOST_PICKLE} bytes besides long texts")
            if not width or max(number, end) >= len(data):
                raise ValueError(f"its opcode {opcode!r} at byte {at - 1} is unknown, or has an argument after its end")
            inert += data[at - 1 : end]
            # The limit is for opcodes, each of which takes time. The bytes of a long text do not count.
            at, end_of_opcodes = end, end_of_opcodes + end - at
    if opcode != b".":
        raise ValueError("its pickle has no end")
    if at < len(data):  # a damaged end of a packed checkpoint, for example: no stock file has bytes there
        raise ValueError(f"{len(data) - at} bytes follow the end of the pickle")
    inert += b"."
    inert[3:11] = (len(inert) - 11).to_bytes(8, "little")
    return inert
