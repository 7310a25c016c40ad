"""Reads of quantized tensors: their elements times their scales, in float32, converted to the dtype of the target.

The rule: a rank reads the elements of its own boxes, and the complete scales of their tensors, which are a thousandth
of the size. A box may begin and end inside a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from operator import add
from typing import Any

import numpy as np
import torch

from dcp_plugin.core.format.foreign.scales import grid
from dcp_plugin.core.format.index import CheckpointIndex
from dcp_plugin.core.planning.load_balance import BoxPart
from dcp_plugin.core.planning.reads import ReadPlanner
from dcp_plugin.core.records import BoxRead, ReadPlan
from dcp_plugin.core.tensors._torch import sharded_value
from dcp_plugin.core.tensors.kinds import fill, is_stored_whole

# Elements that are read together. Each takes nine bytes of memory: the stored one, the product and its scale.
_WINDOW = 32 << 20

# The numbers of four bits: a sign, two bits of exponent, and one of mantissa.
_FP4 = [sign * number for sign in (1.0, -1.0) for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]


def read_scaled(index: CheckpointIndex, reads: Sequence[BoxRead], read: Callable[[ReadPlan], Any]) -> None:
    """Fill the targets of reads with the product of elements and scales.

    Args:
        read: Reads a plan without scales.

    Raises:
        CheckpointError: As ``read``.
    """
    slots = {box.key: index.slots[index.scaled[box.key].scale] for box in reads}
    memory = {key: _empty(index, slot, index.table.shape_of(slot)) for key, slot in slots.items()}
    targets = {key: sharded_value(scale) for key, scale in memory.items()}
    read(ReadPlanner(targets, index, {key: index.scaled[key].scale for key in memory}).plan())
    scales = {
        # Exponents, with the dimensions in the order of the packed tensor.
        key: scale.transpose(1, 2).to(torch.int32) - 127 if index.scaled[key].packed else scale.to(torch.float32)
        for key, scale in memory.items()
    }
    parts = [part for box in reads for part in _parts(box)]
    starts = itertools.accumulate((part.target.numel() for part in parts), initial=0)
    for _, window in itertools.groupby(zip(starts, parts, strict=False), lambda pair: pair[0] // _WINDOW):
        _fill(index, [part for _, part in window], scales, read)


def _empty(index: CheckpointIndex, slot: int, sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(sizes, dtype=index.table.dtype_of(slot), device="cpu")


def _parts(box: BoxRead) -> list[BoxRead]:
    """Return parts of a read that fit in a window. A target without memory of its own cannot be divided."""
    if is_stored_whole(box.target):
        return [box]
    return [
        box._replace(
            target=box.target[tuple(slice(at, at + size) for at, size in zip(part.offsets, part.sizes, strict=True))],
            offsets=tuple(map(add, box.offsets, part.offsets)),
            sizes=part.sizes,
        )
        for part in BoxPart((0,) * len(box.sizes), box.sizes, 1).at_most(_WINDOW)
    ]


def _fill(
    index: CheckpointIndex,
    reads: Sequence[BoxRead],
    scales: Mapping[str, torch.Tensor],
    read: Callable[[ReadPlan], Any],
) -> None:
    raw = [_raw(index, box) for box in reads]
    read(ReadPlan(raw))
    for box, elements in zip(reads, raw, strict=True):
        slot, block = index.slots[box.key], index.scaled[box.key].block
        scale = scales[box.key].reshape(grid(index.table.shape_of(slot), block))
        chunk = index.table.boxes_of(slot)[0][box.number - index.rows_of(box.key).start]
        for dim, (begin, size) in enumerate(zip(np.add(chunk, box.offsets).tolist(), box.sizes, strict=True)):
            if scale.shape[dim] > 1:  # one number is for all elements
                numbers = torch.arange(begin, begin + size, dtype=torch.int64, device="cpu") // block[dim]
                scale = scale.index_select(dim, numbers)
        if index.scaled[box.key].packed:
            fill(box.target, torch.ldexp(_unpacked(box, elements.target), scale))
        else:
            fill(box.target, elements.target.to(torch.float32).mul_(scale))


def _raw(index: CheckpointIndex, box: BoxRead) -> BoxRead:
    """Return the read of the stored elements of a box. These are complete blocks of packed elements."""
    name, offsets, sizes = index.scaled[box.key].packed, box.offsets, box.sizes
    if name:
        first, end = offsets[1] // 32, -(-(offsets[1] + sizes[1]) // 32)
        offsets, sizes = (offsets[0], offsets[2], first, 0), (sizes[0], sizes[2], end - first, 16)
    name, number = (name, index.rows_of(name).start) if name else (box.key, box.number)
    return BoxRead(name, number, _empty(index, index.slots[name], sizes), offsets, sizes)


def _unpacked(box: BoxRead, blocks: torch.Tensor) -> torch.Tensor:
    """Return the elements of a box from its blocks, in float32."""
    values = torch.tensor(_FP4, dtype=torch.float32, device="cpu")
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), 1)  # of each byte: its lower half first
    rows = pairs[blocks.to(torch.int32)].flatten(2)
    return rows.narrow(2, box.offsets[1] % 32, box.sizes[1]).transpose(1, 2)
