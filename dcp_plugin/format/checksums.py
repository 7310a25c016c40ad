"""Checksums of a payload, block by block, and hashes of tensors.

A CRC32 is *running*: each block continues the value of the block before. So one pass over the memory gives the value at
the end of each block and, as the last of them, the CRC that the zip format wants; and a single block is verified by
continuing from the value before it. A block is a 256th of its item, between 4 KiB and 1 MiB: checksums take little
space, and whoever reads a part of an item reads little more than that part.

The XXH3-128 of a tensor decides whether its bytes have changed. A sample of it only proves that they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from isal.isal_zlib import crc32
from xxhash import xxh3_128, xxh3_128_digest

from dcp_plugin.host_memory import Rings, is_plain_memory, memory_view

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
            hashes[slot] = _hash(tensors[slot], rings)

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


def _hash(tensor: torch.Tensor, rings: Rings) -> bytes:
    if is_plain_memory(tensor):
        return xxh3_128_digest(memory_view(tensor))
    running = RunningHash()
    for piece in rings.pieces(tensor):
        running.update(piece)
    return running.digest()
