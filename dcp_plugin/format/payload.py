"""An item of a data file: a tensor's payload, the bytes around it, its checksums and its hash.

An item is a complete ``torch.save`` file: a zip archive of stored records, which are a pickle that describes the
tensor, a few markers, and the payload, 64-byte aligned. Everything but the payload depends on dtype and shape alone,
and on the payload's CRC32 at two places behind it. So an item is written as ``head + payload + tail(crc)`` straight
from tensor memory; torch reads it, ``zipfile`` verifies it, and the CRC is our integrity checksum at the same time.
Layout as in ``torch/csrc/.../inline_container.cc``: every record has a data descriptor behind its data, and an
extra field ``FB`` that pads its local header so that the data is aligned. Archives are limited to 32-bit sizes;
the planner keeps chunks below that (:data:`MAX_PAYLOAD`).

A CRC32 is *running*: each block continues the value of the block before. So one pass over the memory gives the value at
the end of each block and, as the last of them, the CRC that the zip format wants; and a single block is verified by
continuing from the value before it. A block is a 256th of its item, between 4 KiB and 1 MiB: checksums take little
space, and whoever reads a part of an item reads little more than that part.

The XXH3-128 of a tensor decides whether its bytes have changed. A sample of it only proves that they have.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from isal.isal_zlib import crc32
from xxhash import xxh3_128, xxh3_128_digest

from dcp_plugin.format import torch_archive
from dcp_plugin.format.torch_archive import BEHIND, Record
from dcp_plugin.tensors._torch import pickled_tensor
from dcp_plugin.tensors.host_memory import Rings, is_plain_memory, memory_view
from dcp_plugin.types import Shape

SMALLEST_BLOCK = 4096
BLOCKS_PER_ITEM = 256
LARGEST_BLOCK = 1 << 20


def block_size(payload_length: int, smallest: int = SMALLEST_BLOCK) -> int:
    """Bytes per checksum of a payload; always a power of two."""
    return min(max(smallest, 1 << ((payload_length - 1) // BLOCKS_PER_ITEM).bit_length()), LARGEST_BLOCK)


def block_counts(payload_lengths: np.ndarray[Any, Any], smallest: int) -> np.ndarray[Any, Any]:
    """How many blocks payloads of these lengths have."""
    powers = np.frexp(np.maximum(payload_lengths - 1, 0) // BLOCKS_PER_ITEM)[1].astype(np.int64)
    counts: np.ndarray[Any, Any] = -(-payload_lengths // np.clip(1 << powers, smallest, LARGEST_BLOCK))
    return counts


class RunningCrc:
    """The CRC of bytes that come in pieces of any size, noted at the end of each block."""

    def __init__(self, block: int, before: int = 0) -> None:
        self.crc = before
        self.ends: list[int] = []
        """The CRC at the end of each block; of the last one as far as it has come."""
        self._block = block
        self._in_block = 0

    def add(self, data: memoryview) -> None:
        start, crc, block = 0, self.crc, self._block
        if self._in_block:
            start = block - self._in_block
            crc = self.ends[-1] = crc32(data[:start], crc)
        self.ends += [crc := crc32(data[at : at + block], crc) for at in range(start, len(data), block)]
        self.crc = crc
        self._in_block = (self._in_block + len(data)) % block


RunningHash = xxh3_128
_WORTH_THREADS = 1 << 20
_PLACES, _PLACE = 8, 128


def hashes_of(tensors: Sequence[torch.Tensor], threads: int) -> list[bytes]:
    """The XXH3-128 of the bytes of each tensor in row-major order."""
    if sum(tensor.nbytes for tensor in tensors) < _WORTH_THREADS:
        threads = 1
    largest_first = sorted(range(len(tensors)), key=lambda slot: tensors[slot].nbytes, reverse=True)
    hashes = [b""] * len(tensors)

    def work(first: int) -> None:
        rings = Rings()
        for slot in largest_first[first::threads]:
            running = RunningHash()
            for piece in rings.pieces(tensors[slot], tensors[slot].nbytes or 1):  # all of what is plain memory at once
                running.update(piece)
            hashes[slot] = running.digest()

    if threads == 1:
        work(0)
    else:
        with ThreadPoolExecutor(threads, thread_name_prefix="dcp-hash") as pool:
            list(pool.map(work, range(threads)))
    return hashes


def sample_of(tensor: torch.Tensor) -> bytes | None:
    """A hash of a few places of a tensor; None where they are not easily had."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    last = max(0, tensor.nbytes - _PLACE)
    starts = [last * number // (_PLACES - 1) for number in range(_PLACES)]
    if is_plain_memory(tensor):
        memory = memory_view(tensor)
        return xxh3_128_digest(b"".join([memory[start : start + _PLACE] for start in starts]))
    data = tensor.view(-1).view(torch.uint8)
    places = torch.cat([data[start : start + _PLACE] for start in starts]).cpu()  # one copy from the device, not eight
    return xxh3_128_digest(memory_view(places))


_Number = TypeVar("_Number", int, np.ndarray[Any, np.dtype[np.int64]])
ALIGNMENT = 64
MAX_PAYLOAD = 1 << 30
"""Largest payload of an item that we write, in bytes."""

_MOST = (1 << 32) - (1 << 20)  # where zip64 begins; stock writes items that large

_CRC = struct.Struct("<I")
_BEFORE = ("data.pkl", ".format_version", ".storage_alignment", "byteorder")
"""The records before the payload."""


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
        tail = bytearray(len(self._tail))
        self.put_tail(tail, 0, crc)
        return tail

    def put_tail(self, memory: bytearray, at: int, crc: int) -> int:
        """Write these bytes at a position of ``memory``; where they end."""
        end = at + len(self._tail)
        memory[at:end] = self._tail
        for position in self._crc_at:
            _CRC.pack_into(memory, at + position, crc)
        return end


def padded(length: _Number) -> _Number:
    """What an item of this length takes in its file; or each of several."""
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
    return _around(pickled_tensor(dtype, shape), payload_length)


def _around(records: Mapping[str, bytes], payload_length: int) -> Frame:
    small = {name: records[name] for name in _BEFORE} | BEHIND
    sizes = [(name, len(small[name])) for name in _BEFORE]
    sizes += [("data/0", payload_length), *((name, len(data)) for name, data in BEHIND.items())]
    there = torch_archive.records(sizes)
    crcs = [crc32(small.get(record.name, b"")) for record in there]

    def written(some: Sequence[Record]) -> bytes:
        return b"".join(one.header + small[one.name] + one.descriptor(crc32(small[one.name])) for one in some)

    payload = len(_BEFORE)
    head = written(there[:payload]) + there[payload].header
    tail = there[payload].descriptor(0)
    crc_at = [torch_archive.CRC_OF_DESCRIPTOR] if tail else []
    tail += written(there[payload + 1 :])
    entries = sum(len(record.entry(0)) for record in there[:payload])
    crc_at.append(len(tail) + entries + torch_archive.CRC_OF_ENTRY)
    tail += torch_archive.directory(there, crcs)
    length = len(head) + payload_length + len(tail)
    return Frame(head, crc32(head), payload_length, length, tail, tuple(crc_at))


END_BEGINS = b"PK\x06\x06"
"""What the end of an item begins with."""
END_LENGTH = torch_archive.END_LENGTH


def directory_at(end: bytes) -> tuple[int, int] | None:
    """Where the directory of an item begins, and its length, if these bytes are the end of an item of ours."""
    if len(end) != END_LENGTH:
        return None
    entries, size, offset = torch_archive.read_end(end)
    ours = offset <= _MOST and max(entries, size) < 1 << 16
    return (offset, size) if ours and end == torch_archive.end(entries, size, offset) else None


def frame_in(head: bytes, directory: bytes) -> Frame | None:
    """The frame of an item of a tensor of which nothing is known, made again from what is in it.

    Args:
        head: Its first bytes, more than there are before the payload.

    Returns:
        What is around the payload if nothing there has changed. None if this is no such item.
    """
    try:
        sizes = torch_archive.sizes_in(directory)
        records, at = {}, 0
        for name in _BEFORE:
            record = Record(name, at, sizes[name])
            begin = at + len(record.header)
            records[name] = head[begin : begin + record.size]
            at = record.end
        return _around(records, sizes["data/0"])
    except (struct.error, KeyError, ValueError):
        return None
