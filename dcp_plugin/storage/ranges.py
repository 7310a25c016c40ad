"""Which bytes of a stored payload to read for a box of its tensor.

The bytes of a box are runs of one length: one run for rows, one per row for columns. A checksum covers a block, so to
check a run, the blocks that it touches are read whole. For a box of one run that is at most a block at either end.
Narrow columns touch every block; there it would mean to read the columns of all other ranks too. So whole blocks are
read where that costs at most a quarter more, and otherwise only the runs: then blocks that happen to lie inside of
them are checked, the rest is not.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from dcp_plugin.types import Shape

MOST_WASTE = 0.25

Positions = np.ndarray[Any, np.dtype[np.int64]]
Range = tuple[int, int]


def strides_of(sizes: Shape) -> Shape:
    """Row-major strides in elements."""
    return tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def runs_of(sizes: Shape, offsets: Shape, lengths: Shape, itemsize: int) -> tuple[Positions, int]:
    """Where the runs of a box of a row-major tensor start, in bytes, and how long each of them is."""
    whole = len(sizes)
    while whole and lengths[whole - 1] == sizes[whole - 1]:
        whole -= 1
    strides = strides_of(sizes)
    starts = np.zeros(1, np.int64)
    for dim in range(whole - 1):
        rows = (offsets[dim] + np.arange(lengths[dim], dtype=np.int64)) * strides[dim]
        starts = (starts[:, None] + rows).reshape(-1)
    if whole:
        starts = starts + offsets[whole - 1] * strides[whole - 1]
    return starts * itemsize, prod(lengths[max(whole - 1, 0) :]) * itemsize


def covering_one(start: int, stop: int, block: int | None, end: int) -> list[Range]:
    """The range to read for one run of a payload that ends at ``end``; ``block`` is None without checksums."""
    if block is None:
        return [(start, stop)]
    return [(start // block * block, min(-(-stop // block) * block, end))]


def covering(starts: Positions, length: int, block: int | None, end: int) -> list[Range]:
    """The ranges to read for these runs."""
    if len(starts) == 1:
        return covering_one(int(starts[0]), int(starts[0]) + length, block, end)
    stops = starts + length
    if block is not None:
        whole = _merged(starts // block * block, np.minimum(-(-stops // block) * block, end), 0)
        if sum(b - a for a, b in whole) <= (1 + MOST_WASTE) * length * len(starts):
            return whole
    return _merged(starts, stops, int(MOST_WASTE * length))


def _merged(starts: Positions, stops: Positions, gap: int) -> list[Range]:
    """Sorted ranges, those that overlap or have at most ``gap`` bytes between them made one."""
    apart = starts[1:] - stops[:-1] > gap
    first = np.concatenate(([True], apart))
    last = np.concatenate((apart, [True]))
    return list(zip(starts[first].tolist(), stops[last].tolist(), strict=True))
