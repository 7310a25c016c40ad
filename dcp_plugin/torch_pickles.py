"""What a ``torch.save`` archive would do to the process that loads it, found out before torch loads it.

``torch.load(weights_only=True)`` executes nothing that a file names, but it trusts the file with memory and time.
Tuples that are nested deeply end the process when they are hashed as a key, whole numbers can be made to collide as
keys, a few bytes make a ``bytearray`` of any size, one text is copied as often as it is named, and a record of a zip
may be compressed a thousandfold. :func:`check` follows the pickle without making any of it: it keeps of each object
how deep tuples are nested in it and how large a copy would be.
"""

from __future__ import annotations

import io
import re
import zipfile
from typing import Any, BinaryIO

_SMALL = 4096
"""Bytes of an archive with so little in it that nothing can be nested deep or copied often."""
_DEPTH = 2000
_FREE = 1 << 26
_COPIES = 40
"""What is copied may take 64 MiB, and as many times the size of the pickle."""
_MOST_UNUSUAL = 10_000
"""Keys that are tuples, and large numbers in a set: for these, collisions can be made."""
_MOST_PICKLE = 1 << 28
"""Bytes of a pickle. That of a million tensors takes half of it."""

_ENTRY_COMPRESSED = re.compile(rb"PK\x01\x02.{6}(?!\0\0)", re.DOTALL)
_BIG, _NUMBER, _ARRAY, _ENCODE, _CODEC = 1, 2, 4, 8, 16
"""Marks of an object: it has a number of more than 53 bits in it, a number, the class ``bytearray``, the function
``encode``; it is the name of a fast codec, or a pair that ends in one."""
_FAST_CODECS = {b"utf8", b"latin1", b"ascii"}
"""Without hyphens and underscores. Others, such as punycode, take quadratic time."""

_MARK_OF = {b"bytearray": _ARRAY, b"encode": _ENCODE}

_MOST_LATE = 100
"""How much may be added to containers that are in a tuple already, as in objects that lead to themselves."""

# What is said of an object: how deep tuples are nested in it, how large it is, its marks. Of a list or a dictionary it
# is a list of these, and of whether it is in a tuple.
_FIXED = {
    **dict.fromkeys(b"N\x88\x89", (0, (0, 1, 0))),
    **{opcode: (size, (0, 1, _NUMBER)) for opcode, size in ((ord("K"), 1), (ord("M"), 2), (ord("J"), 4))},
    ord("G"): (8, (0, 1, 0)),
    ord(")"): (0, (1, 1, 0)),
}


def allowance(nbytes: int) -> int:
    """Return how many bytes of memory ``nbytes`` of a file may expand to."""
    return _FREE + _COPIES * nbytes


class _Followed:
    """The stack of a pickle, with what is said of the objects in place of these."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.left = allowance(len(data))
        self.unusual = self.late = 0

    def run(self) -> None:
        """Raises ValueError or LookupError for what is hostile or damaged."""
        data, at = self.data, 0
        fixed, steps = _FIXED, _STEPS
        while True:
            opcode = data[at]
            if opcode in fixed:
                size, said = fixed[opcode]
                self.stack.append(said)
                at += 1 + size
            elif opcode == 0x2E:
                return
            else:
                at = steps[opcode](self, at + 1)

    def pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def mark(self, at: int) -> int:
        self.marks.append(self.stack)
        self.stack = []
        return at

    def put(self, at: int) -> int:
        self.memo[self.data[at]] = self.stack[-1]
        return at + 1

    def long_put(self, at: int) -> int:
        self.memo[int.from_bytes(self.data[at : at + 4], "little")] = self.stack[-1]
        return at + 4

    def get(self, at: int) -> int:
        self._push_again(self.memo[self.data[at]])
        return at + 1

    def long_get(self, at: int) -> int:
        self._push_again(self.memo[int.from_bytes(self.data[at : at + 4], "little")])
        return at + 4

    def _push_again(self, said: Any) -> None:
        self._spend(said[1])
        self.stack.append(said)

    def _spend(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise ValueError("its pickle names large things again and again")

    def text(self, at: int) -> int:
        size = int.from_bytes(self.data[at : at + 4], "little")
        return self._text(at + 4, size)

    def short_text(self, at: int) -> int:
        return self._text(at + 1, self.data[at])

    def _text(self, at: int, size: int) -> int:
        text = self.data[at : at + size] if size <= 8 else b""
        is_codec = text.lower().replace(b"-", b"").replace(b"_", b"") in _FAST_CODECS
        self.stack.append((0, size + 1, _CODEC if is_codec else 0))
        return at + size

    def large_number(self, at: int) -> int:
        size = self.data[at]
        self.stack.append((0, size + 1, _NUMBER | (_BIG if size >= 7 else 0)))
        return at + 1 + size

    def name(self, at: int) -> int:
        middle = self.data.index(b"\n", at)
        end = self.data.index(b"\n", middle + 1)
        self.stack.append((0, 1, _MARK_OF.get(self.data[middle + 1 : end], 0)))
        return end + 1

    def tuple_of(self, items: list[Any]) -> None:
        depth = size = marks = 0
        for one in items:
            depth, size, marks = max(depth, one[0]), size + one[1], marks | one[2]
            if type(one) is list:
                one[3] = True
        if depth >= _DEPTH:
            raise ValueError("its pickle nests tuples too deep")
        is_call_with_codec = len(items) == 2 and items[1][2] & _CODEC
        self.stack.append((depth + 1, size + 1, marks if is_call_with_codec else marks & ~_CODEC))

    def marked_tuple(self, at: int) -> int:
        self.tuple_of(self.pop_mark())
        return at

    def last_as_tuple(self, at: int) -> int:
        count = self.data[at - 1] - 0x84
        items = self.stack[-count:]
        if len(items) != count:
            raise ValueError("its pickle lacks objects")
        del self.stack[-count:]
        self.tuple_of(items)
        return at

    def container(self, at: int) -> int:
        self.stack.append([0, 1, 0, False])
        return at

    def _add(self, items: list[Any]) -> None:
        """To a list or a dictionary, or to what was made of one: that is a tuple, and nothing is known about it."""
        target = self.stack[-1]
        if type(target) is list:
            for one in items:
                target[1] += one[1]
                target[2] |= one[2] & ~_CODEC
            if target[3]:
                self.late += sum(one[1] for one in items)
                if self.late > _MOST_LATE:
                    raise ValueError("its pickle adds to what is in a tuple")

    def append(self, at: int) -> int:
        self._add([self.stack.pop()])
        return at

    def extend(self, at: int) -> int:
        self._add(self.pop_mark())
        return at

    def set_item(self, at: int) -> int:
        value, key = self.stack.pop(), self.stack.pop()
        self._add_items([key, value])
        return at

    def set_items(self, at: int) -> int:
        self._add_items(self.pop_mark())
        return at

    def _add_items(self, items: list[Any]) -> None:
        for key in items[::2]:
            if key[0] or key[2] & _BIG:
                self._spend(key[1])
                self.unusual += 1
                if self.unusual > _MOST_UNUSUAL:
                    raise ValueError("its pickle has too many keys that are tuples or large numbers")
        self._add(items)

    def call(self, at: int) -> int:
        """A call, or a new object. What is made of its arguments may be a copy, and be hashed as these would."""
        depth, size, marks, *_ = self.stack.pop()
        function = self.stack.pop()
        self._spend(size)
        if function[2] & _ENCODE and not marks & _CODEC:
            raise ValueError("its pickle encodes text, and not as UTF-8, Latin-1 or ASCII")
        marks |= function[2]
        if marks & _ARRAY and marks & _NUMBER:
            raise ValueError("its pickle makes a bytearray of any size")
        if marks & _BIG and size > _MOST_UNUSUAL:
            raise ValueError("its pickle makes something of many large numbers")
        self.stack.append((depth, size, marks & ~(_NUMBER | _CODEC)))
        return at

    def build(self, at: int) -> int:
        state = self.stack.pop()
        self._spend(state[1])
        return at

    def storage(self, at: int) -> int:
        self.stack.pop()
        self.stack.append((0, 1, 0))
        return at

    def protocol(self, at: int) -> int:
        return at + 1


_STEPS = {
    **{ord(opcode): step for opcode, step in (
        ("(", _Followed.mark), ("q", _Followed.put), ("r", _Followed.long_put), ("h", _Followed.get),
        ("j", _Followed.long_get), ("X", _Followed.text), ("U", _Followed.short_text), ("c", _Followed.name),
        ("t", _Followed.marked_tuple), ("]", _Followed.container), ("}", _Followed.container),
        ("a", _Followed.append), ("e", _Followed.extend), ("s", _Followed.set_item), ("u", _Followed.set_items),
        ("R", _Followed.call), ("b", _Followed.build), ("Q", _Followed.storage),
    )},
    0x80: _Followed.protocol, 0x81: _Followed.call, 0x85: _Followed.last_as_tuple, 0x86: _Followed.last_as_tuple,
    0x87: _Followed.last_as_tuple, 0x8A: _Followed.large_number, 0x8F: _Followed.container,
}  # fmt: skip


def check_bytes(data: bytes | bytearray) -> None:
    """:func:`check` of an archive in memory; of one that is small, in some microseconds."""
    small = len(data) <= _SMALL and data[:4] == b"PK\3\4" and b"bytearray" not in data
    if not small or _ENTRY_COMPRESSED.search(data):
        check(io.BytesIO(data), len(data))


def check(file: BinaryIO, size: int) -> None:
    """Check an archive of ``torch.save``'s: its zip, and what its pickle would do.

    Args:
        size: Bytes of the file.

    Raises:
        ValueError: It would take more memory or time than a file of that size needs, or it is no such archive.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            check_pickle(pickle_in(archive, size))
    except (zipfile.BadZipFile, NotImplementedError, OSError, RuntimeError, LookupError, TypeError) as error:
        raise ValueError(f"no archive of torch.save's: {error!r}") from error


def check_pickle(data: bytes) -> None:
    """Follow a pickle. Raises ValueError or LookupError for what is hostile or damaged."""
    _Followed(data).run()


def pickle_in(archive: zipfile.ZipFile, size: int) -> bytes:
    """``data.pkl`` of an archive in which nothing is compressed, and no two records are the same bytes.

    Raises:
        ValueError, zipfile.BadZipFile, …: It is no such archive.
    """
    members = archive.infolist()
    if any(one.compress_type != zipfile.ZIP_STORED or one.compress_size != one.file_size for one in members):
        raise ValueError("a record is compressed")
    if sum(one.file_size for one in members) > size or min((one.header_offset for one in members), default=1):
        raise ValueError("its records are larger than the file, or do not begin where it begins")
    pickles = [one for one in members if one.filename.endswith("/data.pkl")]
    if len(pickles) != 1 or pickles[0].file_size > _MOST_PICKLE:
        raise ValueError("it has no data.pkl, several, or one that is too large")
    return archive.read(pickles[0])
