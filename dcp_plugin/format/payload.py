"""Item of a data file: a tensor's payload, the bytes around it, its checksums and its hash.

An item is a complete ``torch.save`` file: a zip archive of stored records, which are a pickle that describes the
tensor, a few markers, and the payload, 64-byte aligned. Everything but the payload depends on dtype and shape alone,
and on the payload's CRC32 at two places behind it. So an item is written as ``head + payload + tail(crc)`` straight
from tensor memory; torch reads it, ``zipfile`` verifies it, and the CRC is our integrity checksum at the same time.
Layout as in ``torch/csrc/.../inline_container.cc``: every record has a data descriptor behind its data, and an
extra field ``FB`` that pads its local header so that the data is aligned. Archives are limited to 32-bit sizes;
the planner keeps chunks below that (:data:`MAX_PAYLOAD`).

A CRC32 is *running*: each block continues the value of the previous block. So one pass over the memory gives the value
at the end of each block and, as the last of them, the CRC that the zip format needs; and a single block is verified by
continuing from the value before it. A block is a 256th of its item, between 4 KiB and 1 MiB: checksums take little
space, and the reader of a part of an item reads little more than that part.

The XXH3-128 of a tensor decides whether its bytes have changed. A hash of samples only proves that they have.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from isal.isal_zlib import crc32
from xxhash import xxh3_128, xxh3_128_digest

from dcp_plugin.format import torch_archive
from dcp_plugin.format.torch_archive import BEHIND, Record
from dcp_plugin.types import Shape

if TYPE_CHECKING:
    import torch

SMALLEST_BLOCK = 4096
BLOCKS_PER_ITEM = 256
LARGEST_BLOCK = 1 << 20


def block_size(payload_length: int) -> int:
    """Return the bytes per checksum of a payload; always a power of two."""
    return min(max(SMALLEST_BLOCK, 1 << ((payload_length - 1) // BLOCKS_PER_ITEM).bit_length()), LARGEST_BLOCK)


def block_counts(payload_lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return how many blocks payloads of these lengths have."""
    powers = np.frexp(np.maximum(payload_lengths - 1, 0) // BLOCKS_PER_ITEM)[1].astype(np.int64)
    counts: np.ndarray[Any, Any] = -(-payload_lengths // np.clip(1 << powers, SMALLEST_BLOCK, LARGEST_BLOCK))
    return counts


class RunningCrc:
    """CRC of bytes that arrive in pieces of any size, recorded at the end of each block."""

    def __init__(self, block: int, before: int = 0) -> None:
        self.crc = before
        self.ends: list[int] = []
        """CRC at the end of each block; for the last block, of its bytes up to now."""
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


class ItemSums(NamedTuple):
    """Checksums of the bytes of an item."""

    crcs: list[int]
    """Running CRC32 at the end of each block of the payload; empty if none was computed."""
    frame_crc: int = 0
    """CRC32 of the item without its payload."""
    hash: bytes | None = None
    """XXH3-128 of the payload; None if it was not computed."""


RunningHash = xxh3_128
_WORTH_THREADS = 1 << 20
_PLACES, _PLACE = 8, 128


def hashes_of(tensors: Sequence[torch.Tensor], threads: int) -> list[bytes]:
    """Return the XXH3-128 of the bytes of each tensor in row-major order."""
    from dcp_plugin.tensors.host_memory import Rings

    if sum(tensor.nbytes for tensor in tensors) < _WORTH_THREADS:
        threads = 1
    largest_first = sorted(range(len(tensors)), key=lambda slot: tensors[slot].nbytes, reverse=True)
    hashes = [b""] * len(tensors)

    def work(first: int) -> None:
        rings = Rings()
        for slot in largest_first[first::threads]:
            running = RunningHash()
            for piece in rings.pieces(tensors[slot], tensors[slot].nbytes or 1):  # plain memory comes as one piece
                running.update(piece)
            hashes[slot] = running.digest()

    if threads == 1:
        work(0)
    else:
        with ThreadPoolExecutor(threads, thread_name_prefix="dcp-hash") as pool:
            list(pool.map(work, range(threads)))
    return hashes


def sample_of(tensor: torch.Tensor) -> bytes | None:
    """Return a hash of a few places of a tensor; None if they cannot be read without copying the tensor."""
    import torch

    from dcp_plugin.tensors.host_memory import is_plain_memory, memory_view

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
"""Largest payload, in bytes, of an item that this package writes."""

_MOST = (1 << 32) - (1 << 20)  # zip64 begins here; stock writes items of this size

_CRC = struct.Struct("<I")
_BEFORE = ("data.pkl", ".format_version", ".storage_alignment", "byteorder")
"""Records before the payload."""


@dataclass(frozen=True)
class Frame:
    """Bytes around a payload. ``payload_offset`` is the length of ``head``."""

    head: bytes
    head_crc: int
    payload_length: int
    length: int
    """Length of the item with its frame."""
    _tail: bytes
    _crc_at: tuple[int, ...]

    @property
    def payload_offset(self) -> int:
        return len(self.head)

    def tail(self, crc: int) -> bytearray:
        """Return the bytes after a payload whose CRC32 is ``crc``."""
        tail = bytearray(self._tail)
        for position in self._crc_at:
            _CRC.pack_into(tail, position, crc)
        return tail


def padded(length: _Number) -> _Number:
    """Return the space that an item of this length takes in its file; an array gives an array."""
    return length + -length % ALIGNMENT


def frame_if_possible(dtype: torch.dtype, shape: Shape) -> Frame | None:
    """Return the frame, or None for a tensor that torch stores in another form."""
    try:
        return frame(dtype, shape)
    except (ValueError, KeyError, RuntimeError):  # too large; of no dtype that torch saves; quantized
        return None


@functools.lru_cache(maxsize=4096)
def frame(dtype: torch.dtype, shape: Shape) -> Frame:
    """Return the frame of a contiguous CPU tensor of this dtype and shape.

    Raises:
        ValueError: The payload is so large that the archive needs zip64.
    """
    import torch

    from dcp_plugin.tensors._torch import pickled_parts

    payload_length = torch.Size(shape).numel() * dtype.itemsize
    if payload_length > _MOST:
        raise ValueError(f"an item of {payload_length} bytes is too large for one chunk; the planner splits those.")
    records, _ = pickled_parts(torch.empty(shape, dtype=dtype, device="cpu"))
    return _around(records, payload_length)


def _around(records: Mapping[str, bytes], payload_length: int) -> Frame:
    small = {name: records[name] for name in _BEFORE} | BEHIND
    sizes = [(name, len(small[name])) for name in _BEFORE]
    sizes += [("data/0", payload_length), *((name, len(data)) for name, data in BEHIND.items())]
    records_of_item = torch_archive.records(sizes)
    crcs = [crc32(small.get(record.name, b"")) for record in records_of_item]

    def written(small_records: Sequence[Record]) -> bytes:
        return b"".join(
            record.header + small[record.name] + record.descriptor(crc32(small[record.name]))
            for record in small_records
        )

    payload = len(_BEFORE)
    head = written(records_of_item[:payload]) + records_of_item[payload].header
    tail = records_of_item[payload].descriptor(0)
    crc_at = [torch_archive.CRC_OF_DESCRIPTOR] if tail else []
    tail += written(records_of_item[payload + 1 :])
    entries = sum(len(record.entry(0)) for record in records_of_item[:payload])
    crc_at.append(len(tail) + entries + torch_archive.CRC_OF_ENTRY)
    tail += torch_archive.directory(records_of_item, crcs)
    length = len(head) + payload_length + len(tail)
    return Frame(head, crc32(head), payload_length, length, tail, tuple(crc_at))
