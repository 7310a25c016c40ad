"""Assignment of boxes to writers: each byte is written once, and the ranks that hold it write about equally much.

Boxes held by the same ranks (replicas: DDP, HSDP, replicated norms) form a tape. The tapes with the fewest holders are
assigned first. Each tape fills up the least loaded of its holders to a common level:

1. The small boxes of the tape are assigned. They are never cut.
2. The large boxes are laid end to end, and cut where a holder reaches the level. This evens out the differences that
   the small boxes made. At most ``holders - 1`` boxes of a tape are cut.

If all ranks hold everything, no rank writes more than its share plus :data:`MIN_SPLIT`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import numpy as np

from dcp_plugin.core.format.columns import product

MIN_SPLIT = 1 << 18
"""Boxes of fewer bytes are not cut: an item costs about as much as writing 100 KiB."""

_GRAIN = 1 << 16
"""Precision of a cut, in bytes: a row longer than this is cut itself."""

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class HeldBoxes:
    """Different boxes and their holders: ``ranks[first[i] : first[i] + count[i]]`` hold box ``i``, ascending."""

    sizes: Ints
    itemsize: Ints
    first: Ints
    count: Ints
    ranks: Ints

    @functools.cached_property
    def nbytes(self) -> Ints:
        return product(self.sizes) * self.itemsize


@dataclass(frozen=True)
class BoxPart:
    """A part of a box, contiguous in its memory: all sizes before the first cut dimension are 1."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        return prod(self.sizes) * self.itemsize

    def divide(self, at: int) -> tuple[list[BoxPart], list[BoxPart]]:
        """Return two lists of parts that together are this part. The first has ``at`` bytes, give or take half a grain.

        A cut between two rows of the first dimension is enough if rows are short. Otherwise the row at ``at`` is itself
        divided.
        """
        dim = next((dim for dim, size in enumerate(self.sizes) if size > 1), None)
        if dim is None:
            return ([self], []) if 2 * at > self.nbytes else ([], [self])
        count = self.sizes[dim]
        row = self.nbytes // count
        if row <= _GRAIN:
            cut = round(at / row)
            return self._rows(dim, 0, cut), self._rows(dim, cut, count)
        cut = min(at // row, count - 1)
        (middle,) = self._rows(dim, cut, cut + 1)
        before, after = middle.divide(at - cut * row)
        return self._rows(dim, 0, cut) + before, after + self._rows(dim, cut + 1, count)

    def at_most(self, max_bytes: int) -> Iterator[BoxPart]:
        """Yield this part in parts of at most ``max_bytes``. A single element is never divided."""
        if self.nbytes <= max_bytes or max(self.sizes, default=1) == 1:
            yield self
            return
        dim = next(dim for dim, size in enumerate(self.sizes) if size > 1)
        step = max(1, self.sizes[dim] * max_bytes // self.nbytes)
        for start in range(0, self.sizes[dim], step):
            for part in self._rows(dim, start, min(start + step, self.sizes[dim])):
                yield from part.at_most(max_bytes)

    def _rows(self, dim: int, start: int, stop: int) -> list[BoxPart]:
        if start >= stop:
            return []
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim] += start
        sizes[dim] = stop - start
        return [BoxPart(tuple(offsets), tuple(sizes), self.itemsize)]


Cuts = dict[int, list[tuple[int, BoxPart]]]
"""Number of a cut box -> its parts in order, each with the position of its writer among the holders of the box."""


@dataclass(frozen=True)
class BoxParts:
    """The parts to write, sorted by box.

    A row has the number of the box, the position of the writer among its holders, and the place in the box.
    """

    box: Ints
    holder: Ints
    offsets: Ints
    sizes: Ints

    @classmethod
    def joined(cls, *parts_lists: BoxParts) -> BoxParts:
        columns = [np.concatenate([getattr(parts, field.name) for parts in parts_lists]) for field in fields(cls)]
        order = np.argsort(columns[0], kind="stable")
        return cls(*(column[order] for column in columns))


def assign(held: HeldBoxes, key_of_box: Ints, ties: Mapping[int, int], loads: Ints, max_bytes: int) -> BoxParts:
    """Assign each box, or parts that together are the box, to its holders.

    Args:
        ties: Each tied key -> the first key with the same memory, which has as many boxes on the same ranks.
        loads: Bytes that each rank writes of other boxes.
        max_bytes: Bytes of the largest part.
    """
    kept = np.flatnonzero(~np.isin(key_of_box, list(ties)))
    fewer = HeldBoxes(held.sizes[kept], held.itemsize[kept], held.first[kept], held.count[kept], held.ranks)
    parts = balance_load(fewer, loads, max_bytes)
    return _with_ties(BoxParts(kept[parts.box], parts.holder, parts.offsets, parts.sizes), key_of_box, ties)


def _with_ties(parts: BoxParts, key_of_box: Ints, ties: Mapping[int, int]) -> BoxParts:
    """Assign the boxes of each tied key like those of its first key: same cuts, same ranks.

    The writer then has both, and writes their bytes once.
    """
    if not ties:
        return parts
    copies = []
    for key, first in ties.items():
        parts_of_first = slice(*np.searchsorted(key_of_box[parts.box], (first, first + 1)))
        # Both keys have equally many boxes, so the parts differ only in the box's number.
        shift = np.searchsorted(key_of_box, key) - np.searchsorted(key_of_box, first)
        copies.append(
            BoxParts(
                parts.box[parts_of_first] + shift,
                parts.holder[parts_of_first],
                parts.offsets[parts_of_first],
                parts.sizes[parts_of_first],
            )
        )
    return BoxParts.joined(parts, *copies)


def balance_load(held: HeldBoxes, loads: Ints, max_bytes: int) -> BoxParts:
    """Assign each box, or parts that together are the box, to holders. No part is larger than ``max_bytes``. ``loads``
    are the bytes that each rank has been assigned already."""
    nbytes = held.nbytes
    holder = np.zeros(len(nbytes), np.int64)
    cuts: Cuts = {}
    alone = held.count == 1
    # bincount sums in floating point, which is exact here: no rank writes 2^53 bytes.
    loads = loads + np.bincount(held.ranks[held.first[alone]], nbytes[alone], len(loads)).astype(np.int64)
    for tape in _tapes(held, len(loads)):
        holders = held.ranks[held.first[tape[0]] :][: held.count[tape[0]]]
        small = tape[nbytes[tape] < MIN_SPLIT]
        large = tape[nbytes[tape] >= MIN_SPLIT]
        # The small boxes are laid end to end, and the middle of a box decides on which side of an edge it is.
        middles = np.cumsum(nbytes[small]) - nbytes[small] / 2
        edges = _edges(loads[holders], nbytes[small].sum())
        holder[small] = np.searchsorted(edges, middles)
        np.add.at(loads, holders[holder[small]], nbytes[small])
        cuts_of_tape = _cut(held, large, _edges(loads[holders], nbytes[large].sum()), holder)
        uncut = np.setdiff1d(large, list(cuts_of_tape))
        np.add.at(loads, holders[holder[uncut]], nbytes[uncut])
        for position, part in (taken for parts in cuts_of_tape.values() for taken in parts):
            loads[holders[position]] += part.nbytes
        cuts.update(cuts_of_tape)
    # Balancing may leave parts that are too large for an item.
    for box in np.flatnonzero(nbytes > max_bytes).tolist():
        pieces = cuts.get(box) or [(int(holder[box]), _entire(held, box))]
        cuts[box] = [(position, small) for position, part in pieces for small in part.at_most(max_bytes)]
    return _parts(held, holder, cuts)


def _tapes(held: HeldBoxes, world_size: int) -> Iterator[Ints]:
    """Yield groups of boxes that the same ranks hold, fewest holders first, without boxes of a single holder."""
    # Each rank has a random 64-bit number. Sets of ranks count as equal if the sums of their numbers are. The sums are
    # differences of running sums; comparing the sets would cost a Python loop over the boxes.
    shared = np.flatnonzero(held.count > 1)
    if not len(shared):
        return
    numbers = np.random.default_rng(0).integers(0, 1 << 63, world_size, dtype=np.uint64)
    first, count = held.first[shared], held.count[shared]
    running = np.append(np.uint64(0), np.cumsum(numbers[held.ranks]))
    signature = running[first + count] - running[first]
    order = np.lexsort((signature, count))
    changes = (np.diff(signature[order]) != 0) | (np.diff(count[order]) != 0)
    yield from np.split(shared[order], np.flatnonzero(changes) + 1)


def _edges(loads: Ints, total: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the positions at which to cut ``total`` bytes into one stretch per holder.

    With their stretches, the least loaded holders reach a common level. Other holders get empty stretches.
    """
    # Like filling water into vessels: with the n least loaded holders, the level is (total + their loads) / n. The n
    # holders to fill are those whose load is below that level.
    filled = np.sort(loads)
    levels = (total + np.cumsum(filled)) / np.arange(1, len(loads) + 1)
    below = max(1, int((levels > filled).sum()))
    return np.cumsum(np.maximum(levels[below - 1] - loads, 0))[:-1]


def _cut(held: HeldBoxes, tape: Ints, edges: np.ndarray[Any, Any], holder: Ints) -> Cuts:
    """Lay boxes end to end and assign the bytes between two edges to one holder. Return the boxes that were cut."""
    # A box first gets the holder of its first byte. Then the boxes with an edge inside are divided at the edges.
    nbytes = held.nbytes[tape]
    ends = np.cumsum(nbytes)
    starts = ends - nbytes
    holder[tape] = np.searchsorted(edges, starts, side="right")
    inside = np.searchsorted(ends, edges, side="right")
    cuts: Cuts = {}
    for at in np.unique(inside[inside < len(tape)]).tolist():
        position = int(starts[at])
        remaining = [_entire(held, int(tape[at]))]
        taken: list[tuple[int, BoxPart]] = []
        numbers = np.flatnonzero(inside == at).tolist()
        for number in numbers:
            taken_now, remaining = _divide(remaining, round(edges[number]) - position)
            position += sum(part.nbytes for part in taken_now)
            taken += [(number, part) for part in taken_now]
        cuts[int(tape[at])] = taken + [(numbers[-1] + 1, part) for part in remaining]
    return cuts


def _divide(parts: list[BoxPart], at: int) -> tuple[list[BoxPart], list[BoxPart]]:
    # BoxPart.divide() for consecutive parts.
    for number, part in enumerate(parts):
        if at < part.nbytes:
            before, after = part.divide(max(at, 0))
            return parts[:number] + before, after + parts[number + 1 :]
        at -= part.nbytes
    return parts, []


def _entire(held: HeldBoxes, box: int) -> BoxPart:
    return BoxPart((0,) * held.sizes.shape[1], tuple(held.sizes[box].tolist()), int(held.itemsize[box]))


def _parts(held: HeldBoxes, holder: Ints, cuts: Cuts) -> BoxParts:
    width = held.sizes.shape[1]
    if not cuts:
        return BoxParts(np.arange(len(holder)), holder, np.zeros((len(holder), width), np.int64), held.sizes)
    uncut = np.setdiff1d(np.arange(len(holder)), np.fromiter(cuts, np.int64, len(cuts)), assume_unique=True)
    taken = [(box, position, part) for box, parts in cuts.items() for position, part in parts]
    numbers = np.array([(box, position) for box, position, _ in taken], np.int64).reshape(-1, 2)
    offsets = np.array([part.offsets for _, _, part in taken], np.int64).reshape(len(taken), width)
    sizes = np.array([part.sizes for _, _, part in taken], np.int64).reshape(len(taken), width)
    return BoxParts.joined(
        BoxParts(uncut, holder[uncut], np.zeros((len(uncut), width), np.int64), held.sizes[uncut]),
        BoxParts(numbers[:, 0], numbers[:, 1], offsets, sizes),
    )
