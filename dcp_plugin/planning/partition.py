"""Who writes what: every byte once, and about the same number of bytes on every rank that holds them.

Chunks that the same ranks hold (replicas: DDP, HSDP, replicated norms) are laid end to end on a tape. The tape is
cut into as many equal parts as there are holders, each takes one, and a tensor that lies across a cut is split there
by rows. So at most ``holders - 1`` tensors of a tape are split, and no rank writes more than its share plus one row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from dcp_plugin.types import Shape

MIN_SPLIT = 1 << 18
"""Tensors below this many bytes are not split: an item costs about as much as writing 100 KiB."""


@dataclass(frozen=True)
class Box:
    """A part of a global tensor."""

    key: str
    offsets: Shape
    sizes: Shape
    itemsize: int

    @property
    def nbytes(self) -> int:
        return prod(self.sizes) * self.itemsize

    def rows(self) -> int:
        """How often it can be split along its first dimension that is larger than one."""
        return next((size for size in self.sizes if size > 1), 1)

    def split(self, start: int, stop: int) -> Box:
        """The rows ``start`` to ``stop`` along that dimension: contiguous in memory, as all dimensions before are 1."""
        dim = next(dim for dim, size in enumerate(self.sizes) if size > 1)
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim] += start
        sizes[dim] = stop - start
        return Box(self.key, tuple(offsets), tuple(sizes), self.itemsize)


def partition(holders_of: dict[Box, tuple[int, ...]], max_bytes: int) -> Iterator[tuple[Box, int]]:
    """Every box, or the parts of it, with the rank that writes it; no part larger than ``max_bytes`` if rows allow."""
    tapes: dict[tuple[int, ...], list[Box]] = defaultdict(list)
    for box, holders in holders_of.items():
        tapes[holders].append(box)
    for holders, boxes in tapes.items():
        for box, rank in _cut(boxes, holders):
            for part in _at_most(box, max_bytes):
                yield part, rank


def _cut(boxes: list[Box], holders: tuple[int, ...]) -> Iterator[tuple[Box, int]]:
    total = sum(box.nbytes for box in boxes)
    begin = 0
    for box in boxes:
        end = begin + box.nbytes
        first = begin * len(holders) // total if total else 0
        last = max(first, (end - 1) * len(holders) // total) if total else 0
        if first == last or box.nbytes < MIN_SPLIT or box.rows() == 1:
            yield box, holders[min(first, len(holders) - 1)]
        else:
            cuts = [total * part / len(holders) - begin for part in range(first + 1, last + 1)]
            rows = [0, *(round(cut * box.rows() / box.nbytes) for cut in cuts), box.rows()]
            for position, (start, stop) in enumerate(pairwise(rows)):
                if start < stop:
                    yield box.split(start, stop), holders[first + position]
        begin = end


def _at_most(box: Box, max_bytes: int) -> Iterator[Box]:
    rows = box.rows()
    if box.nbytes <= max_bytes or rows == 1:
        yield box
        return
    step = max(1, rows * max_bytes // box.nbytes)
    for start in range(0, rows, step):
        yield from _at_most(box.split(start, min(start + step, rows)), max_bytes)
