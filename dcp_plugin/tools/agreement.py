"""Compare the bytes of two checkpoints' keys by their stored checksums, without reading the bytes.

The comparison uses full columns, as a checkpoint may have a million keys. Tensors stored in equal chunks have checksums
of the same bytes on both sides: a CRC32 at the end of each block, and an XXH3-128 if the writer computed it. A change
within 32 bits always changes the CRC32 of its block. A check misses any other change once in 2^32 times.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

import numpy as np

from dcp_plugin.format.columns import NO_TENSOR, Column, in_all, in_any, ranges
from dcp_plugin.format.index import CheckpointIndex

_TELLING = 16
"""Size in bytes from which on two tensors are hardly equal by chance."""
_MOST_PARTS = 32
"""Largest number of trailing parts of a name that are compared to pair equal tensors."""


class Agreement:
    """Comparison of some keys of a checkpoint with as many keys of another, pair by pair.

    Args:
        one: The index of the first checkpoint.
        of_one: The slots of its keys in the index.
        other: The index of the second checkpoint.
        of_other: The slots of its keys, in the same order.
    """

    def __init__(self, one: CheckpointIndex, of_one: Column, other: CheckpointIndex, of_other: Column) -> None:
        self._one, self._other = one, other
        self._of_one, self._of_other = of_one, of_other
        numbers = {name: number for number, name in enumerate(dict.fromkeys((*one.table.dtypes, *other.table.dtypes)))}
        self._dtype_numbers = numbers
        self.same_dtype = self._dtypes(one, of_one) == self._dtypes(other, of_other)
        """For each pair, true if both have the same dtype, or neither is a tensor."""
        self.tensors = (one.table.columns["dtype"][of_one] != NO_TENSOR) & (
            other.table.columns["dtype"][of_other] != NO_TENSOR
        )
        """For each pair, true if both are tensors."""
        self.same_shape = self._same_shape()
        self.known, self.equal = self._by_checksums()
        """For each pair, true if the checksums decide; and true if by these the bytes are the same."""

    def _dtypes(self, index: CheckpointIndex, slots: Column) -> Column:
        numbers = np.full(NO_TENSOR + 1, NO_TENSOR, np.uint8)
        numbers[: len(index.table.dtypes)] = [self._dtype_numbers[name] for name in index.table.dtypes]
        return np.asarray(numbers[index.table.columns["dtype"][slots]])

    def _same_shape(self) -> Column:
        first, second = self._one.table, self._other.table
        ndim = first.columns["ndim"][self._of_one].astype(np.int64)
        same = ndim == second.columns["ndim"][self._of_other]
        some = np.flatnonzero(same)
        starts = first.shape_starts[self._of_one][some], second.shape_starts[self._of_other][some]
        same[some] = _rows_agree(first.columns["shape"], starts[0], second.columns["shape"], starts[1], ndim[some])
        return np.asarray(same)

    def _by_checksums(self) -> tuple[Column, Column]:
        first, second = self._one, self._other
        decided, equal = np.zeros(len(self._of_one), bool), np.zeros(len(self._of_one), bool)
        counts = np.diff(first.table.chunk_starts)[self._of_one]
        alike = self.same_dtype & self.same_shape & (counts == np.diff(second.table.chunk_starts)[self._of_other])
        pairs = np.flatnonzero(alike)
        ndim = first.table.columns["ndim"][self._of_one][pairs].astype(np.int64)
        first_slots, second_slots, counts = self._of_one[pairs], self._of_other[pairs], counts[pairs]
        boxes = first.table.columns["box"], second.table.columns["box"]
        starts = first.table.box_starts[first_slots], second.table.box_starts[second_slots]
        laid = _rows_agree(boxes[0], starts[0], boxes[1], starts[1], 2 * ndim * counts)
        pairs, first_slots, second_slots, counts = pairs[laid], first_slots[laid], second_slots[laid], counts[laid]
        chunks = (
            ranges(first.table.chunk_starts[first_slots], counts),
            ranges(second.table.chunk_starts[second_slots], counts),
        )
        chunks_decided, chunks_same = _chunks_agree(first, chunks[0], second, chunks[1])
        ends = np.cumsum(counts)
        decided[pairs] = _all(chunks_decided, ends, counts)
        equal[pairs] = _all(chunks_decided & chunks_same, ends, counts)
        return decided, equal


def _all(flags: Column, ends: Column, counts: Column) -> Column:
    """Return for each run of flags whether all are set."""
    sums = np.concatenate(([0], np.cumsum(~flags)))
    return np.asarray(sums[ends] == sums[ends - counts])


def _rows_agree(first: Column, first_starts: Column, second: Column, second_starts: Column, counts: Column) -> Column:
    """Return for each pair of runs of ``counts`` numbers whether they are equal."""
    same = first[ranges(first_starts, counts)] == second[ranges(second_starts, counts)]
    return _all(same, np.cumsum(counts), counts)


def _chunks_agree(
    first: CheckpointIndex, first_chunks: Column, second: CheckpointIndex, second_chunks: Column
) -> tuple[Column, Column]:
    """Return for each pair of chunks whether the checksums decide, and whether they agree."""
    first_places, second_places = first.columns["place"][first_chunks], second.columns["place"][second_chunks]
    alike = (first_places[:, 3] == second_places[:, 3]) & ((first_places[:, 2] >= 0) == (second_places[:, 2] >= 0))
    starts, second_starts = first.block_starts[first_chunks], second.block_starts[second_chunks]
    blocks = first.block_starts[first_chunks + 1] - starts
    second_blocks = second.block_starts[second_chunks + 1] - second_starts
    empty = (first_places[:, 3] == 0) & (first_places[:, 2] >= 0)
    decided = alike & (empty | ((blocks > 0) & (blocks == second_blocks)))
    if first.smallest_block != second.smallest_block:
        decided &= empty
    blocks = np.where(decided, blocks, 0)
    crcs = first.columns["block_crc"], second.columns["block_crc"]
    same = _rows_agree(crcs[0], starts, crcs[1], second_starts, blocks)
    if "hashed" in first.columns and "hashed" in second.columns:
        hashes = first.places.hash[first_chunks], second.places.hash[second_chunks]
        hashed = alike & in_any(hashes[0]) & in_any(hashes[1])
        same &= ~hashed | in_all(hashes[0] == hashes[1])
        decided |= hashed
    return decided, same


def signatures(index: CheckpointIndex, keys: Iterable[str]) -> dict[str, tuple[bytes, bytes]]:
    """Return for each key its layout and the checksums of its bytes; an empty layout for a key without checksums."""
    table, places, block_starts = index.table, index.columns["place"], index.block_starts
    signed: dict[str, tuple[bytes, bytes]] = {}
    for key in keys:
        slot = index.slots[key]
        first, last = table.chunk_starts[slot : slot + 2].tolist()
        has_checksums = (places[first:last, 3] == 0) | (np.diff(block_starts[first : last + 1]) > 0)
        if first == last or not has_checksums.all():
            signed[key] = b"", b""
            continue
        layout = table.columns["box"][table.box_starts[slot] : table.box_starts[slot + 1]].tobytes()
        layout += places[first:last, 3].tobytes() + bytes(places[first:last, 2] >= 0)
        layout += index.smallest_block.to_bytes(8, "little")
        signed[key] = layout, index.columns["block_crc"][block_starts[first] : block_starts[last]].tobytes()
    return signed


def paired(removed: Sequence[str], added: Sequence[str], nbytes: int) -> dict[str, str]:
    """Pair removed with added keys of the same bytes. Keys whose names share the longest ending are paired first."""
    pairs: dict[str, str] = {}
    least = 1 if nbytes < _TELLING else 0  # small tensors are equal by chance: the last part of the name has to agree
    most = min(_MOST_PARTS, max(key.count(".") + 1 for key in (*removed, *added)))
    for parts in range(most, least - 1, -1):
        taken = set(pairs.values())
        by_end: dict[str, deque[str]] = defaultdict(deque)
        for key in added:
            if key not in taken:
                by_end[_end(key, parts)].append(key)
        for key in removed:
            if key not in pairs and (candidates := by_end[_end(key, parts)]):
                pairs[key] = candidates.popleft()
        if len(pairs) == min(len(removed), len(added)):
            break
    return pairs


def _end(key: str, parts: int) -> str:
    return ".".join(key.split(".")[-parts:]) if parts else ""
