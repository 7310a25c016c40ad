"""Check of the pickle of a ``torch.save`` archive before it is loaded: the effect of every opcode.

The unpickler trusts a file with memory and time. Deeply nested tuples end the process when they are hashed as a key,
integers can be made to collide as keys, a few bytes make a ``bytearray`` of any size, and one text is copied each time
it is named. The unpickler also fills and changes any object that the pickle names, including classes of libraries.
:func:`check_pickle` follows the pickle without making an object. It records for each object how deep tuples are nested
in it, how large a copy would be, and whether it may be called or filled.
"""

from __future__ import annotations

import codecs
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch

_DEPTH = 2000
_FREE = 1 << 26
_COPIES = 40
"""Factor of the memory allowance: copies may take 64 MiB, and 40 times the size of the pickle."""
_MOST_UNUSUAL = 10_000
"""Most keys that are tuples, and large numbers in a set: an attacker can make these collide."""
MOST_PICKLE = 1 << 33
"""Largest pickle in bytes, nearly all of them in texts. The bytes of an array are a text, too."""
_MOST_OPCODES = 1 << 28
"""Most bytes besides the texts, each of which takes time. The pickle of a million tensors takes half of it."""
_MOST_LATE = 100
"""Largest size added to containers that are already in a tuple, as in objects that refer to themselves."""
_MOST_UNUSED = 256
"""Most numbers of the memo that a pickle may skip. The unpickler allocates a table up to the largest number."""

# Marks of an object. A container of the object inherits these five:
_BIG, _NUMBER, _ARRAY, _ENCODE, _SETSTATE = 1, 2, 4, 8, 512
"""Marks of a number of more than 53 bits, a number, the class ``bytearray``, the function ``encode``, and the name of
the method that the unpickler looks up on an object before it sets its state."""
# The others concern only the object itself:
_CODEC, _GLOBAL, _LIST, _MAPPING, _STATE = 16, 32, 64, 128, 256
"""Marks of the name of a fast codec, or a pair that ends in such a name; a global, which may be called; a list; a
mapping; an object that takes a state. The last two marks of a global concern the objects that it makes."""
_BYTES, _OF_BYTES = 1024, 2048
"""Marks of bytes, and of a tuple whose only item is bytes."""
_PASSED_ON = _BIG | _NUMBER | _ARRAY | _ENCODE | _SETSTATE
_ARRAYS = _ARRAY | _GLOBAL

_FAST_CODECS = {b"utf8", b"latin1", b"ascii"}
"""Names without hyphens and underscores. Other codecs, such as punycode, take quadratic time."""
_MARKS_OF = {bytearray: _ARRAY, codecs.encode: _ENCODE, OrderedDict: _MAPPING, Counter: _MAPPING}
_WITHOUT_STATE = (Counter, set, complex, bytearray, torch.Tensor, torch.nn.Parameter, torch.Size, torch.UntypedStorage)

# An object that cannot change is a tuple of its depth, its size and its marks. A list or a dictionary is a Python list
# of these three, and a flag that is true if it is in a tuple.
_FIXED = {
    **dict.fromkeys(b"N\x88\x89", (0, (0, 1, 0))),
    **{opcode: (size, (0, 1, _NUMBER)) for opcode, size in ((ord("K"), 1), (ord("M"), 2), (ord("J"), 4))},
    ord("G"): (8, (0, 1, 0)),
    ord(")"): (0, (1, 1, 0)),
    0x8F: (0, (0, 1, 0)),  # an empty set
}


def allowance(nbytes: int) -> int:
    """Return how many bytes of memory ``nbytes`` of a file may expand to."""
    return _FREE + _COPIES * nbytes


class _Follower:
    """Stack of the unpickler, with marks in place of objects."""

    def __init__(self, data: bytes, get: Callable[[str, str], Any]) -> None:
        self.data = data
        self.get_global = get
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.left = allowance(len(data))
        self.in_texts = 0
        self.unusual = self.late = 0

    def run(self) -> None:
        data = self.data
        at = 2 if data.startswith(b"\x80") else 0  # after the number of the protocol
        fixed, steps, longer_steps, end = _FIXED, _STEPS, _LONGER_STEPS, _MOST_OPCODES
        while at < end:
            opcode = data[at]
            if opcode in fixed:
                size, marked = fixed[opcode]
                self.stack.append(marked)
                at += 1 + size
            elif opcode in steps:
                size, step = steps[opcode]
                step(self, at + 1)
                at += 1 + size
            elif opcode == 0x2E:
                return
            else:
                at = longer_steps[opcode](self, at + 1)
                end = _MOST_OPCODES + self.in_texts
        raise ValueError(f"its pickle has more than {_MOST_OPCODES} bytes besides texts")

    def pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def mark(self, at: int) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def put(self, at: int) -> None:
        self.memo[self.data[at]] = self.stack[-1]

    def long_put(self, at: int) -> None:
        number = int.from_bytes(self.data[at : at + 4], "little")
        if number > len(self.memo) + _MOST_UNUSED:
            raise ValueError("its pickle skips numbers of the memo")
        self.memo[number] = self.stack[-1]

    def get(self, at: int) -> None:
        self._push_again(self.memo[self.data[at]])

    def long_get(self, at: int) -> None:
        self._push_again(self.memo[int.from_bytes(self.data[at : at + 4], "little")])

    def _push_again(self, marked: Any) -> None:
        self._spend(marked[1])
        self.stack.append(marked)

    def _spend(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise ValueError("its pickle refers to large objects too often")

    def text(self, at: int) -> int:
        size = int.from_bytes(self.data[at : at + 4], "little")
        return self._text(at + 4, size)

    def short_text(self, at: int) -> int:
        return self._text(at + 1, self.data[at])

    def _text(self, at: int, size: int) -> int:
        text = self.data[at : at + size] if size <= 12 else b""
        is_codec = size <= 8 and text.lower().replace(b"-", b"").replace(b"_", b"") in _FAST_CODECS
        marks = _CODEC if is_codec else _SETSTATE if text == b"__setstate__" else 0
        self.stack.append((0, size + 1, marks))
        self.in_texts += size
        return at + size

    def large_number(self, at: int) -> int:
        size = self.data[at]
        self.stack.append((0, size + 1, _NUMBER | (_BIG if size >= 7 else 0)))
        return at + 1 + size

    def name(self, at: int) -> int:
        middle = self.data.index(b"\n", at)
        end = self.data.index(b"\n", middle + 1)
        module, name = self.data[at:middle].decode(), self.data[middle + 1 : end].decode()
        accepted = self.get_global(module, name)
        marks = _GLOBAL | _MARKS_OF.get(accepted, 0)
        if isinstance(accepted, type) and accepted not in _WITHOUT_STATE:
            marks |= _STATE
        self.stack.append((0, 1, marks))
        return end + 1

    def tuple_of(self, items: list[Any]) -> None:
        depth = size = marks = 0
        for item in items:
            depth, size, marks = max(depth, item[0]), size + item[1], marks | item[2]
            if type(item) is list:
                item[3] = True
        if depth >= _DEPTH:
            raise ValueError("its pickle nests tuples too deep")
        if marks & _ARRAY:
            self._check_no_class(items)
        is_call_with_codec = len(items) == 2 and items[1][2] & _CODEC
        of_bytes = _OF_BYTES if len(items) == 1 and marks & _BYTES else 0
        self.stack.append(
            (depth + 1, size + 1, marks & (_PASSED_ON | (_CODEC if is_call_with_codec else 0)) | of_bytes)
        )

    def _check_no_class(self, items: list[Any]) -> None:
        """Raise if the class ``bytearray`` itself is among the items: the receiver of the items may call it."""
        if any(item[2] & _ARRAYS == _ARRAYS for item in items):
            raise ValueError("its pickle has the class bytearray as a value")

    def marked_tuple(self, at: int) -> None:
        self.tuple_of(self.pop_mark())

    def last_as_tuple(self, at: int) -> None:
        count = self.data[at - 1] - 0x84
        items = self.stack[-count:]
        if len(items) != count:
            raise ValueError("its pickle takes more objects from the stack than it has")
        del self.stack[-count:]
        self.tuple_of(items)

    def empty_list(self, at: int) -> None:
        self.stack.append([0, 1, _LIST, False])

    def empty_dictionary(self, at: int) -> None:
        self.stack.append([0, 1, _MAPPING, False])

    def _add(self, items: list[Any], kind: int) -> None:
        """Add items to a list or a mapping. The size of a mapping that a call made is unknown."""
        target = self.stack[-1]
        if target[2] & (kind | _GLOBAL) != kind:
            raise ValueError("its pickle fills an object as if it were a list or a dictionary")
        self._check_no_class(items)
        if type(target) is list:
            for item in items:
                target[1] += item[1]
                target[2] |= item[2] & _PASSED_ON
            if target[3]:
                self.late += sum(item[1] for item in items)
                if self.late > _MOST_LATE:
                    raise ValueError("its pickle adds too much to containers that are already in a tuple")

    def append(self, at: int) -> None:
        self._add([self.stack.pop()], _LIST)

    def extend(self, at: int) -> None:
        self._add(self.pop_mark(), _LIST)

    def set_item(self, at: int) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._add_items([key, value])

    def set_items(self, at: int) -> None:
        self._add_items(self.pop_mark())

    def _add_items(self, items: list[Any]) -> None:
        for key in items[::2]:
            if key[2] & _SETSTATE:
                raise ValueError("its pickle has the key __setstate__")
            if key[0] or key[2] & _BIG:
                self._spend(key[1])
                self.unusual += 1
                if self.unusual > _MOST_UNUSUAL:
                    raise ValueError("its pickle has too many keys that are tuples or large numbers")
        self._add(items, _MAPPING)

    def call(self, at: int) -> None:
        """Call a global, or make an object. The result may be a copy of the arguments, and is hashed as they are."""
        depth, size, marks, *_ = self.stack.pop()
        function = self.stack.pop()
        if not function[2] & _GLOBAL:
            raise ValueError("its pickle calls an object that is not a global")
        self._spend(size)
        if marks & _ENCODE or (function[2] & _ENCODE and not marks & _CODEC):
            raise ValueError("its pickle encodes text with a codec other than UTF-8, Latin-1 and ASCII")
        if marks & _SETSTATE:
            raise ValueError("its pickle calls something with the name __setstate__")
        if function[2] & _ARRAY and size > 1 and not marks & (_CODEC | _OF_BYTES):
            raise ValueError("its pickle makes a bytearray from something other than bytes")
        is_bytes = _BYTES if function[2] & _ENCODE else 0
        marks = (marks | function[2]) & _PASSED_ON
        if marks & _ARRAY and marks & _NUMBER:
            raise ValueError("its pickle makes a bytearray from a number, which may be its size")
        if marks & _BIG and size > _MOST_UNUSUAL:
            raise ValueError("its pickle builds an object from too many large numbers")
        self.stack.append(
            (depth, size, (marks & ~(_NUMBER | _ENCODE)) | (function[2] & (_MAPPING | _STATE)) | is_bytes)
        )

    def build(self, at: int) -> None:
        state = self.stack.pop()
        self._check_no_class([state])
        self._spend(state[1])
        if self.stack[-1][2] & (_STATE | _GLOBAL) != _STATE:
            raise ValueError("its pickle changes an object that takes no state")

    def storage(self, at: int) -> None:
        self.stack.pop()
        self.stack.append((0, 1, 0))


_STEPS = {
    **{ord(opcode): (size, step) for opcode, size, step in (
        ("(", 0, _Follower.mark), ("q", 1, _Follower.put), ("r", 4, _Follower.long_put), ("h", 1, _Follower.get),
        ("j", 4, _Follower.long_get), ("t", 0, _Follower.marked_tuple), ("]", 0, _Follower.empty_list),
        ("}", 0, _Follower.empty_dictionary), ("a", 0, _Follower.append), ("e", 0, _Follower.extend),
        ("s", 0, _Follower.set_item), ("u", 0, _Follower.set_items), ("R", 0, _Follower.call),
        ("b", 0, _Follower.build), ("Q", 0, _Follower.storage),
    )},
    0x81: (0, _Follower.call), 0x85: (0, _Follower.last_as_tuple), 0x86: (0, _Follower.last_as_tuple),
    0x87: (0, _Follower.last_as_tuple),
}  # fmt: skip
"""Steps of opcodes, with the bytes of their arguments."""

_LONGER_STEPS = {
    ord("X"): _Follower.text, ord("U"): _Follower.short_text, ord("c"): _Follower.name, 0x8A: _Follower.large_number,
}  # fmt: skip
"""Steps of opcodes whose arguments have any length; they return the position of the next opcode."""


def check_pickle(data: bytes, get: Callable[[str, str], Any]) -> bytes:
    """Follow the pickle of a ``torch.save`` file, and return it.

    Args:
        get: Function that returns the object in place of a global, by module and name. It raises for a refused global.

    Raises:
        ValueError, LookupError: The pickle is damaged, would take more memory or time than its size explains, or does
            to an object an operation that ``torch.save`` never writes.
    """
    if len(data) > MOST_PICKLE:
        raise ValueError(f"its pickle has {len(data)} bytes, more than the limit of {MOST_PICKLE}")
    _Follower(data, get).run()
    return data
