"""The bytes around a tensor's payload that make an item a complete ``torch.save`` file.

A DCP item is a zip archive of stored records: a pickle that describes the tensor, a few markers, and the payload,
64-byte aligned. Everything but the payload depends on dtype and shape alone, and on the payload's CRC32 at two
places behind it. So an item is written as ``head + payload + tail(crc)`` straight from tensor memory; torch reads
it, ``zipfile`` verifies it, and the CRC is our integrity checksum at the same time.

Layout as in ``torch/csrc/.../inline_container.cc``: every record has a data descriptor behind its data, and an
extra field ``FB`` that pads its local header so that the data is aligned. Archives are limited to 32-bit sizes;
the planner keeps chunks below that (:data:`MAX_PAYLOAD`).
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import torch
from isal.isal_zlib import crc32

from dcp_plugin._torch import pickled_tensor
from dcp_plugin.types import Shape

ALIGNMENT = 64
MAX_PAYLOAD = 1 << 30
"""Largest payload of an item that we write, in bytes."""

_MOST = (1 << 32) - (1 << 20)  # where zip64 begins; stock writes items that large

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_CRC = struct.Struct("<I")
_DESCRIPTOR = struct.Struct("<IIII")
_END64 = struct.Struct("<IQHHIIQQQQ")
_END64_LOCATOR = struct.Struct("<IIQI")
_END = struct.Struct("<IHHHHIIH")
_UTF8_NAMES = 0x0800
_HAS_DESCRIPTOR = 0x0008  # size and CRC stand behind the data; torch leaves it out for empty records
_ROOT = "archive/"


@dataclass(frozen=True)
class Frame:
    """What surrounds one payload. ``payload_offset`` is the length of ``head``."""

    head: bytes
    head_crc: int
    payload_length: int
    length: int
    """Of the item with its frame."""
    _tail: bytes
    _crc_at: tuple[int, ...]

    @property
    def payload_offset(self) -> int:
        return len(self.head)

    def tail(self, crc: int) -> bytearray:
        """The bytes behind a payload whose CRC32 is ``crc``."""
        tail = bytearray(self._tail)
        for position in self._crc_at:
            _CRC.pack_into(tail, position, crc)
        return tail


def padded(length: int) -> int:
    """What an item of this length takes in its file."""
    return length + -length % ALIGNMENT


def frame_if_possible(dtype: torch.dtype, shape: Shape) -> Frame | None:
    """The frame, or None for a tensor that torch stores in another form."""
    try:
        return frame(dtype, shape)
    except (ValueError, KeyError, RuntimeError):  # too large; of no dtype that torch saves; quantized
        return None


@functools.lru_cache(maxsize=4096)
def frame(dtype: torch.dtype, shape: Shape) -> Frame:
    """The frame of a contiguous CPU tensor of this dtype and shape.

    Raises:
        ValueError: The payload is so large that zip64 begins.
    """
    payload_length = torch.Size(shape).numel() * dtype.itemsize
    if payload_length > _MOST:
        raise ValueError(f"an item of {payload_length} bytes is too large for one chunk; the planner splits those.")
    records = pickled_tensor(dtype, shape)
    before = [(name, records[name]) for name in ("data.pkl", ".format_version", ".storage_alignment", "byteorder")]
    behind = [("version", b"3\n"), (".data/serialization_id", b"0" * 40)]

    head = b""
    entries = []
    for name, data in before:
        entries.append((name, len(head), crc32(data), len(data)))
        head += _record(name, len(head), data)
    entries.append(("data/0", len(head), 0, payload_length))
    head += _local_header("data/0", len(head), payload_length)

    tail = _descriptor(0, payload_length)
    crc_at = [4] if tail else []
    for name, data in behind:
        entries.append((name, len(head) + payload_length + len(tail), crc32(data), len(data)))
        tail += _record(name, len(head) + payload_length + len(tail), data)

    central_at = len(tail)
    for name, offset, crc, size in entries:
        if name == "data/0":
            crc_at.append(len(tail) + 16)
        full = (_ROOT + name).encode()
        flags = _flags(size)
        tail += _CENTRAL.pack(0x02014B50, 0, 0, flags, 0, 0, 0, crc, size, size, len(full), 0, 0, 0, 0, 0, offset)
        tail += full
    tail += _end(len(entries), len(tail) - central_at, len(head) + payload_length + central_at)
    length = len(head) + payload_length + len(tail)
    return Frame(head, crc32(head), payload_length, length, tail, tuple(crc_at))


def _end(entries: int, central_size: int, central_offset: int) -> bytes:
    """The end of the archive; torch always writes the zip64 records too."""
    end64 = _END64.pack(
        0x06064B50, _END64.size - 12, 0x031E, 0x002D, 0, 0, entries, entries, central_size, central_offset
    )
    locator = _END64_LOCATOR.pack(0x07064B50, 0, central_offset + central_size, 1)
    return end64 + locator + _END.pack(0x06054B50, 0, 0, entries, entries, central_size, central_offset, 0)


def _flags(size: int) -> int:
    return _UTF8_NAMES | (_HAS_DESCRIPTOR if size else 0)


def _record(name: str, offset: int, data: bytes) -> bytes:
    return _local_header(name, offset, len(data)) + data + _descriptor(crc32(data), len(data))


def _local_header(name: str, offset: int, size: int) -> bytes:
    """The header of a record at ``offset`` of the archive, padded so that its data is aligned."""
    full = (_ROOT + name).encode()
    padding = -(offset + _LOCAL.size + len(full) + 4) % ALIGNMENT
    extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    return _LOCAL.pack(0x04034B50, 0, _flags(size), 0, 0, 0, 0, 0, 0, len(full), len(extra)) + full + extra


def _descriptor(crc: int, size: int) -> bytes:
    return _DESCRIPTOR.pack(0x08074B50, crc, size, size) if size else b""
