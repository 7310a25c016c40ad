"""Zip of a ``torch.save`` file: its writer for tensors of any size, and its reader.

The rule of the writer: the result is, to the byte, what torch itself writes. ``torch.load`` computes the offsets of
records from their sizes alone (``_get_offset`` in ``torch/serialization.py``, after ``mz_zip_writer_add_mem_ex_v2`` of
miniz.c). The tensors are written one after the other. All sizes are known before the first byte is written. A checksum
is known only after its record, and follows the data.

The rule of the reader, :class:`Archive`: a file never expands to more bytes than it has. A record of a zip may be
compressed a thousandfold, and many records may share bytes. Here a record must be stored uncompressed, in bytes of its
own. Torch's own reader is not used: it ignores the case of names, and calculates offsets from values in the pickle.
"""

from __future__ import annotations

import struct
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from dcp_plugin.core.format import expect

PICKLE = "data.pkl"
_ROOT = "archive/"
_ALIGNMENT = 64
_MOST, _MOST_ENTRIES = 0xFFFFFFFF, 0xFFFF
_UTF8_NAMES, _HAS_DESCRIPTOR = 0x0800, 0x0008
MAGIC = b"PK\x03\x04"
"""First bytes of a ``torch.save`` file."""
LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END64 = struct.Struct("<IQHHIIQQQQ")
_END64_LOCATOR = struct.Struct("<IIQI")
_END = struct.Struct("<IHHHHIIH")

BEHIND = {"version": b"3\n", ".data/serialization_id": b"0" * 40}
"""Records after the tensors."""


@dataclass(frozen=True)
class Record:
    """File in the archive, stored uncompressed."""

    name: str
    offset: int
    """Offset of its header in the archive."""
    size: int
    """Bytes of its data."""

    @property
    def header(self) -> bytes:
        """Local header, padded in the extra field ``FB`` so that the data is aligned."""
        # The extra field has 4 bytes of its own before its padding. CRC and sizes are 0 here: the descriptor has them.
        name, extra = (_ROOT + self.name).encode(), self._extra
        padding = -(self.offset + LOCAL_HEADER.size + len(name) + len(extra) + 4) % _ALIGNMENT
        extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
        return LOCAL_HEADER.pack(MAGIC, 0, self._flags, 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra

    def descriptor(self, crc: int) -> bytes:
        """Return the bytes after the data, which hold its CRC32."""
        if not self.size:
            return b""
        # A large offset, too, makes miniz write sizes of 64 bits here, and ``torch.load`` counts on it.
        large = max(self.size, self.offset) >= _MOST
        return struct.pack("<IIQQ" if large else "<IIII", 0x08074B50, crc, self.size, self.size)

    def entry(self, crc: int) -> bytes:
        """Return the entry of the record in the directory."""
        name, extra = (_ROOT + self.name).encode(), self._extra
        size, offset = min(self.size, _MOST), min(self.offset, _MOST)
        counts = (len(name), len(extra), 0, 0, 0, 0, offset)
        return _CENTRAL.pack(0x02014B50, 0, 0, self._flags, 0, 0, 0, crc, size, size, *counts) + name + extra

    @property
    def end(self) -> int:
        return self.offset + len(self.header) + self.size + len(self.descriptor(0))

    @property
    def crc_at(self) -> int:
        """Position of the CRC32 in the descriptor of a record without zip64, whose last 12 bytes are CRC and sizes."""
        return self.end - 12

    @property
    def _flags(self) -> int:
        return _UTF8_NAMES | (_HAS_DESCRIPTOR if self.size else 0)

    @property
    def _extra(self) -> bytes:
        """Zip64 field with the numbers that do not fit in 32 bits."""
        numbers = [self.size] * 2 if self.size >= _MOST else []
        numbers += [self.offset] if self.offset >= _MOST else []
        return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""


def records(sizes: Iterable[tuple[str, int]]) -> list[Record]:
    """Return the records of an archive, given the names and sizes of its files in order."""
    placed: list[Record] = []
    at = 0
    for name, size in sizes:
        placed.append(Record(name, at, size))
        at = placed[-1].end
    return placed


def directory(placed: list[Record], crcs: Iterable[int]) -> bytes:
    """Return the end of an archive: its directory, with the CRC32 of each file."""
    entries = b"".join(record.entry(crc) for record, crc in zip(placed, crcs, strict=True))
    return entries + end(len(placed), len(entries), placed[-1].end if placed else 0)


def end(count: int, size: int, begin: int) -> bytes:
    """Return the bytes after the entries: their number, their bytes, and their offset.

    Torch always writes the zip64 records too.
    """
    end64 = _END64.pack(0x06064B50, _END64.size - 12, 0x031E, 0x002D, 0, 0, count, count, size, begin)
    locator = _END64_LOCATOR.pack(0x07064B50, 0, begin + size, 1)
    few, small, low = min(count, _MOST_ENTRIES), min(size, _MOST), min(begin, _MOST)
    return end64 + locator + _END.pack(0x06054B50, 0, 0, few, few, small, low, 0)


def first_size(data: bytes | bytearray) -> int:
    """Return the size of the first record of an archive. Raises struct.error if the bytes have no directory."""
    begin = _END.unpack_from(data, len(data) - _END.size)[6]
    return int(_CENTRAL.unpack_from(data, begin)[9])


class Archive:
    """Records of a ``torch.save`` file.

    Args:
        size: Bytes of the file.

    Raises:
        ValueError: A record is compressed, shares bytes with another record, or is outside of the file.
        Exception: The zip is damaged otherwise.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        with zipfile.ZipFile(file) as archive:
            members = sorted(archive.infolist(), key=lambda member: member.header_offset)
        roots = [name.removesuffix(PICKLE) for member in members if (name := member.filename).endswith(f"/{PICKLE}")]
        if len(roots) > 1:
            raise ValueError(f"it has more than one {PICKLE}")
        self.is_of_torch = bool(roots)
        """False if it is a zip of something else."""
        self.records: dict[str, tuple[int, int]] = {}
        """Position and size in bytes of each record, by its name below the root."""
        self.checksums: dict[int, int] = {}
        """CRC32 of each record by its position, as the directory has it: 0 if the writer left it out."""
        expect(file, [(member.header_offset, member.header_offset + LOCAL_HEADER.size) for member in members])
        end = 0
        for member in members if roots else ():
            begin = self._begin_of(member)
            if member.header_offset < end or begin + member.file_size > size:
                raise ValueError(f"the record {member.filename} overlaps another record or lies outside the file")
            end = begin + member.file_size
            if member.filename.startswith(roots[0]):
                self.records[member.filename.removeprefix(roots[0])] = begin, member.file_size
                self.checksums[begin] = member.CRC
        order = self.read("byteorder").tobytes() if "byteorder" in self.records else b"little"
        self.is_swapped = order != sys.byteorder.encode()
        """True if its tensors have the other byte order than this machine."""

    def _begin_of(self, member: zipfile.ZipInfo) -> int:
        """Return the position of the first byte of a record. Its local header may be longer than the directory says."""
        self._file.seek(member.header_offset)
        magic, *_, name, extra = LOCAL_HEADER.unpack(self._file.read(LOCAL_HEADER.size))
        is_stored = member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1
        if magic != MAGIC or not is_stored or member.compress_size != member.file_size:
            raise ValueError(f"the record {member.filename} is compressed, encrypted or damaged")
        return member.header_offset + LOCAL_HEADER.size + int(name) + int(extra)

    def read(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of a record. Raises KeyError if it has no such record."""
        begin, size = self.records[name]
        content = np.empty(size, np.uint8)
        self._file.seek(begin)
        if self._file.readinto(content) != size:  # type: ignore[attr-defined]
            raise EOFError(f"the record {name} is truncated")
        return content
