"""Which keys of two checkpoints have the same bytes, as far as their checksums tell: nothing is read.

Over full columns, as a checkpoint may have a million keys. What is stored in equal chunks has checksums of the same
bytes on both sides: a CRC32 at the end of each block, and an XXH3-128 where the writer has computed one. A change
within 32 bits surely changes the CRC32 of its block; any other does, all but one time in 2^32.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

import numpy as np

from dcp_plugin.format.columns import NO_TENSOR, Column, in_all, in_any, ranges
from dcp_plugin.format.index import CheckpointIndex

_TELLING = 16
"""Bytes from which on two tensors are hardly the same by chance."""
_MOST_PARTS = 32
"""Of a name, that are compared to find which of several equal tensors is meant."""


class Agreement:
    """Some keys of a checkpoint, and as many of another, pair by pair.

    Args:
        one: The first checkpoint's index.
        of_one: Numbers of its keys.
        other: The second's.
        of_other: Numbers of its keys.
    """

    def __init__(self, one: CheckpointIndex, of_one: Column, other: CheckpointIndex, of_other: Column) -> None:
        self._one, self._other = one, other
        self._of_one, self._of_other = of_one, of_other
        numbers = {name: number for number, name in enumerate(dict.fromkeys((*one.table.dtypes, *other.table.dtypes)))}
        self._dtype_numbers = numbers
        self.same_dtype = self._dtypes(one, of_one) == self._dtypes(other, of_other)
        """Whether both are of one dtype, or both no tensor."""
        self.tensors = (one.table.columns["dtype"][of_one] != NO_TENSOR) & (
            other.table.columns["dtype"][of_other] != NO_TENSOR
        )
        """Whether both are tensors."""
        self.same_shape = self._same_shape()
        self.known, self.equal = self._by_checksums()
        """Whether the checksums tell, and if so, whether the bytes are the same."""

    def _dtypes(self, index: CheckpointIndex, slots: Column) -> Column:
        numbers = np.full(NO_TENSOR + 1, NO_TENSOR, np.uint8)
        numbers[: len(index.table.dtypes)] = [self._dtype_numbers[name] for name in index.table.dtypes]
        return np.asarray(numbers[index.table.columns["dtype"][slots]])

    def _same_shape(self) -> Column:
        one, other = self._one.table, self._other.table
        ndim = one.columns["ndim"][self._of_one].astype(np.int64)
        same = ndim == other.columns["ndim"][self._of_other]
        some = np.flatnonzero(same)
        starts = one.shape_starts[self._of_one][some], other.shape_starts[self._of_other][some]
        same[some] = _rows_agree(one.columns["shape"], starts[0], other.columns["shape"], starts[1], ndim[some])
        return np.asarray(same)

    def _by_checksums(self) -> tuple[Column, Column]:
        one, other = self._one, self._other
        known, equal = np.zeros(len(self._of_one), bool), np.zeros(len(self._of_one), bool)
        counts = np.diff(one.table.chunk_starts)[self._of_one]
        alike = self.same_dtype & self.same_shape & (counts == np.diff(other.table.chunk_starts)[self._of_other])
        pairs = np.flatnonzero(alike)
        ndim = one.table.columns["ndim"][self._of_one][pairs].astype(np.int64)
        mine, theirs, counts = self._of_one[pairs], self._of_other[pairs], counts[pairs]
        boxes = one.table.columns["box"], other.table.columns["box"]
        starts = one.table.box_starts[mine], other.table.box_starts[theirs]
        laid = _rows_agree(boxes[0], starts[0], boxes[1], starts[1], 2 * ndim * counts)
        pairs, mine, theirs, counts = pairs[laid], mine[laid], theirs[laid], counts[laid]
        chunks = ranges(one.table.chunk_starts[mine], counts), ranges(other.table.chunk_starts[theirs], counts)
        told, same = _chunks_agree(one, chunks[0], other, chunks[1])
        ends = np.cumsum(counts)
        known[pairs] = _all(told, ends, counts)
        equal[pairs] = _all(told & same, ends, counts)
        return known, equal


def _all(flags: Column, ends: Column, counts: Column) -> Column:
    """For each run of flags, whether all are set."""
    sums = np.concatenate(([0], np.cumsum(~flags)))
    return np.asarray(sums[ends] == sums[ends - counts])


def _rows_agree(one: Column, of_one: Column, other: Column, of_other: Column, counts: Column) -> Column:
    """For each pair of runs of numbers, as long as ``counts`` says, whether they are the same."""
    same = one[ranges(of_one, counts)] == other[ranges(of_other, counts)]
    return _all(same, np.cumsum(counts), counts)


def _checksums(index: CheckpointIndex) -> tuple[Column, Column]:
    """Where the checksums of each chunk begin, and how many it has."""
    ends = index.columns["block_ends"]
    counts = np.diff(ends, prepend=0)
    return ends - counts, counts


def _chunks_agree(
    one: CheckpointIndex, of_one: Column, other: CheckpointIndex, of_other: Column
) -> tuple[Column, Column]:
    """For each pair of chunks, whether checksums tell, and whether these agree."""
    mine, theirs = one.columns["place"][of_one], other.columns["place"][of_other]
    alike = (mine[:, 3] == theirs[:, 3]) & ((mine[:, 2] >= 0) == (theirs[:, 2] >= 0))
    (starts, counts), (other_starts, other_counts) = _checksums(one), _checksums(other)
    blocks = counts[of_one]
    empty = (mine[:, 3] == 0) & (mine[:, 2] >= 0)
    told = alike & (empty | ((blocks > 0) & (blocks == other_counts[of_other])))
    if one.smallest_block != other.smallest_block:
        told &= empty
    blocks = np.where(told, blocks, 0)
    crcs = one.columns["block_crc"], other.columns["block_crc"]
    same = _rows_agree(crcs[0], starts[of_one], crcs[1], other_starts[of_other], blocks)
    if "hashed" in one.columns and "hashed" in other.columns:
        hashes = one.places.hash[of_one], other.places.hash[of_other]
        hashed = alike & in_any(hashes[0]) & in_any(hashes[1])
        same &= ~hashed | in_all(hashes[0] == hashes[1])
        told |= hashed
    return told, same


def signatures(index: CheckpointIndex, keys: Iterable[str]) -> dict[str, tuple[bytes, bytes] | None]:
    """For each key its layout, and the checksums of its bytes; None where it has none."""
    table, places = index.table, index.columns["place"]
    starts, counts = _checksums(index)
    ends, box_starts, chunk_starts = starts + counts, table.box_starts, table.chunk_starts
    found: dict[str, tuple[bytes, bytes] | None] = {}
    for key in keys:
        slot = index.slots[key]
        first, last = int(chunk_starts[slot]), int(chunk_starts[slot + 1])
        empty = places[first:last, 3] == 0
        if first == last or not (empty | (counts[first:last] > 0)).all():
            found[key] = None
            continue
        layout = table.columns["box"][box_starts[slot] : box_starts[slot + 1]].tobytes()
        layout += places[first:last, 3].tobytes() + bytes(places[first:last, 2] >= 0)
        layout += index.smallest_block.to_bytes(8, "little")
        found[key] = layout, index.columns["block_crc"][starts[first] : ends[last - 1]].tobytes()
    return found


def paired(removed: Sequence[str], added: Sequence[str], nbytes: int) -> dict[str, str]:
    """Which is which of keys with the same bytes: those whose names have the most in common at their ends."""
    found: dict[str, str] = {}
    left, right = list(removed), list(added)
    least = 1 if nbytes < _TELLING else 0  # a single number says little: then the last part of the name has to agree
    most = min(_MOST_PARTS, max(key.count(".") + 1 for key in (*left, *right)))
    for parts in range(most, least - 1, -1):
        by_end: dict[str, deque[str]] = defaultdict(deque)
        for key in right:
            by_end[_end(key, parts)].append(key)
        for key in left:
            if candidates := by_end.get(_end(key, parts)):
                found[key] = candidates.popleft()
        taken = set(found.values())
        left, right = [key for key in left if key not in found], [key for key in right if key not in taken]
        if not left or not right:
            break
    return found


def _end(key: str, parts: int) -> str:
    return ".".join(key.split(".")[-parts:]) if parts else ""
