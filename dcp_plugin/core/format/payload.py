"""Item of a data file: a tensor's payload, the bytes around it, and the hashes of both.

An item is a complete ``torch.save`` file, as stock readers expect: a zip archive of stored records. The records are a
pickle that describes the tensor, a few markers, and the payload, aligned to 64 bytes. The bytes around the payload, its
*frame*, depend on dtype and shape alone, so the frame is made and hashed once for each of these. An item is written as
``head + payload + tail`` straight from tensor memory.

The archive's CRC fields are zero, as ``torch.save`` writes them under
``torch.serialization.set_crc32_options(False)``: torch reads them, and never compares them. The layout is that of
``torch/csrc/.../inline_container.cc``. Every record has a data descriptor behind its data, and an extra field ``FB``
that pads its local header, so that the data is aligned. Archives are limited to 32-bit sizes; the planner keeps chunks
below that (:data:`MAX_PAYLOAD`).

The checksum of an item is the row of the XXH3-64 of its payload's blocks. The same row decides whether the bytes have
changed since another save. A block is a 256th of its item, between 64 KiB and 1 MiB. Hashes then take little space, and
the reader of a part of an item reads little more than that part. Smaller blocks would be slower to hash, since each is
a call of its own.

A hash of samples (:func:`sample_of`) can only prove that bytes have changed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from xxhash import xxh3_64, xxh3_64_digest, xxh3_64_intdigest

from dcp_plugin.core.format import torch_archive
from dcp_plugin.core.format.torch_archive import BEHIND, Record

if TYPE_CHECKING:
    import torch

SMALLEST_BLOCK = 64 << 10
BLOCKS_PER_ITEM = 256
LARGEST_BLOCK = 1 << 20


@functools.lru_cache(maxsize=4096)  # layers are mostly alike
def block_size(payload_length: int) -> int:
    """Return the bytes per hash of a payload; always a power of two."""
    return min(max(SMALLEST_BLOCK, 1 << ((payload_length - 1) // BLOCKS_PER_ITEM).bit_length()), LARGEST_BLOCK)


def block_counts(payload_lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return how many blocks payloads of these lengths have."""
    counts: np.ndarray[Any, Any] = (payload_lengths > 0).astype(np.int64)  # most items are one block
    large = np.flatnonzero(payload_lengths > SMALLEST_BLOCK)
    lengths = payload_lengths[large]
    # The exponent of a float is the bit length of an integer, which numpy has no function for.
    powers = np.frexp((lengths - 1) // BLOCKS_PER_ITEM)[1].astype(np.int64)
    counts[large] = -(-lengths // np.clip(1 << powers, SMALLEST_BLOCK, LARGEST_BLOCK))
    return counts


class BlockHashes:
    """XXH3-64 of each block of bytes that arrive in pieces of any size."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._complete: list[int] = []
        self._begun, self._in_block = xxh3_64(), 0

    def add(self, data: memoryview) -> None:
        block, at = self._block, 0
        if not self._in_block:
            # Blocks that arrive in one piece are hashed by one call each, without the running hash.
            at = len(data) // block * block
            self._complete += [xxh3_64_intdigest(data[start : start + block]) for start in range(0, at, block)]
        while at < len(data):
            part = data[at : at + block - self._in_block]
            at += len(part)
            self._begun.update(part)
            self._in_block += len(part)
            if self._in_block == block:
                self._complete.append(self._begun.intdigest())
                self._begun, self._in_block = xxh3_64(), 0

    @property
    def row(self) -> list[int]:
        """Hash of each block. The hash of the last block covers its bytes up to now."""
        return [*self._complete, self._begun.intdigest()] if self._in_block else self._complete


def hashes_in(payload: memoryview) -> list[int]:
    """Return the hashes of a complete payload."""
    block = block_size(len(payload))
    return [xxh3_64_intdigest(payload[at : at + block]) for at in range(0, len(payload), block)]


def frame_hash(running: xxh3_64) -> int:
    """Return the 32 bits of the hash of a frame that the index holds."""
    return running.intdigest() & 0xFFFFFFFF


NO_FRAME = frame_hash(xxh3_64())
"""Hash of the frame of an item that is only a payload."""


_WORTH_THREADS = 1 << 20
_PLACES, _PLACE = 8, 128  # samples of a tensor, and bytes of each


def hashes_of(tensors: Sequence[torch.Tensor], threads: int) -> list[bytes]:
    """Return the row of hashes of the bytes of each tensor in row-major order."""
    from dcp_plugin.core.tensors.host_memory import Rings, device_of_thread

    if sum(tensor.nbytes for tensor in tensors) < _WORTH_THREADS:
        threads = 1
    # Dealt in turn, largest first, the tensors keep all threads busy about equally long.
    largest_first = sorted(range(len(tensors)), key=lambda slot: tensors[slot].nbytes, reverse=True)
    hashes = [b""] * len(tensors)

    def work(first: int) -> None:
        rings = Rings()
        for slot in largest_first[first::threads]:
            running = BlockHashes(block_size(tensors[slot].nbytes))
            for piece in rings.pieces(tensors[slot], tensors[slot].nbytes or 1):  # plain memory comes as one piece
                running.add(piece)
            hashes[slot] = np.array(running.row, np.uint64).tobytes()

    if threads == 1:
        work(0)
    else:
        with ThreadPoolExecutor(threads, "dcp-hash", device_of_thread()) as pool:
            list(pool.map(work, range(threads)))
    return hashes


def sample_of(tensor: torch.Tensor) -> bytes | None:
    """Return a hash of eight samples of a tensor's bytes; None if they cannot be read without copying the tensor."""
    import torch

    from dcp_plugin.core.tensors.host_memory import is_plain_memory, memory_view

    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    last = max(0, tensor.nbytes - _PLACE)
    starts = [last * number // (_PLACES - 1) for number in range(_PLACES)]
    if is_plain_memory(tensor):
        memory = memory_view(tensor)
        return xxh3_64_digest(b"".join([memory[start : start + _PLACE] for start in starts]))
    data = tensor.view(-1).view(torch.uint8)
    # Joined on the device: one copy to the host instead of eight.
    places = torch.cat([data[start : start + _PLACE] for start in starts]).cpu()
    return xxh3_64_digest(memory_view(places))


_Number = TypeVar("_Number", int, np.ndarray[Any, np.dtype[np.int64]])
ALIGNMENT = 64
MAX_PAYLOAD = 1 << 30
"""Largest payload, in bytes, of an item that this package writes."""

_MOST = (1 << 32) - (1 << 20)  # larger archives need zip64. A stock item may have more than MAX_PAYLOAD bytes

_BEFORE = ("data.pkl", ".format_version", ".storage_alignment", "byteorder")
"""Records before the payload."""


@dataclass(frozen=True)
class Frame:
    """Bytes around a payload. ``payload_offset`` is the length of ``head``."""

    head: bytes
    tail: bytes
    payload_length: int
    hash: int
    """:func:`frame_hash` of head and tail."""
    _crc_at: tuple[int, ...]
    """Positions of the CRC fields in the head."""

    @property
    def payload_offset(self) -> int:
        return len(self.head)

    @property
    def length(self) -> int:
        """Length of the item."""
        return len(self.head) + self.payload_length + len(self.tail)

    def begins(self, item: bytearray) -> bool:
        """Return whether the first bytes of an item are the head. The CRC fields are not compared; ``item`` loses them.

        An item of stock has CRC values there, and an item of this package has zeros.
        """
        for at in self._crc_at:
            item[at : at + 4] = bytes(4)
        return item == self.head


def padded(length: _Number) -> _Number:
    """Return the space that an item of this length takes in its file; an array gives an array."""
    return length + -length % ALIGNMENT


def frame_if_possible(dtype: torch.dtype, shape: tuple[int, ...]) -> Frame | None:
    """Return the frame; None for a tensor that torch stores in another form."""
    try:
        return frame(dtype, shape)
    except (ValueError, KeyError, RuntimeError):  # too large; of no dtype that torch saves; quantized
        return None


@functools.lru_cache(maxsize=4096)
def frame(dtype: torch.dtype, shape: tuple[int, ...]) -> Frame:
    """Return the frame of a contiguous CPU tensor of this dtype and shape.

    Raises:
        ValueError: The payload is so large that the archive needs zip64.
    """
    import torch

    from dcp_plugin.core.tensors._torch import pickled_parts

    payload_length = torch.Size(shape).numel() * dtype.itemsize
    if payload_length > _MOST:
        raise ValueError(f"an item of {payload_length} bytes is too large for one chunk; the planner splits those.")
    # Torch pickles an uninitialized tensor. Its memory is never touched: only the size of the payload's record counts.
    records, _ = pickled_parts(torch.empty(shape, dtype=dtype, device="cpu"))
    small = {name: records[name] for name in _BEFORE} | BEHIND
    sizes = [*((name, len(small[name])) for name in _BEFORE), ("data/0", payload_length)]
    placed = torch_archive.records([*sizes, *((name, len(data)) for name, data in BEHIND.items())])

    def written(small_records: Sequence[Record]) -> bytes:
        return b"".join(record.header + small[record.name] + record.descriptor(0) for record in small_records)

    before, payload, behind = placed[: len(_BEFORE)], placed[len(_BEFORE)], placed[len(_BEFORE) + 1 :]
    head = written(before) + payload.header
    tail = payload.descriptor(0) + written(behind) + torch_archive.directory(placed, [0] * len(placed))
    return Frame(
        head, tail, payload_length, frame_hash(xxh3_64(head + tail)), tuple(record.crc_at for record in before)
    )
