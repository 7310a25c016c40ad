"""Running CRC32 checksums of a payload, block by block.

A *running* CRC lets one pass over the memory produce both the block checksums and the CRC that the zip format wants
(the last one), and still verifies a block alone: continue from the previous value.

A block is a 256th of its item, between 4 KiB and 1 MiB: so the checksums of any checkpoint are small, whoever reads a
part of an item reads little more than the part, and a checksum costs little more than its bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from isal.isal_zlib import crc32

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
