"""Reads of quantized tensors: their elements times their scales, in float32, converted to the dtype of the target.

The rule: a rank reads the elements of its own boxes, and the complete scales of their tensors, which are a thousandth
of the size. A box may begin and end inside a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import add
from typing import Any

import torch

from dcp_plugin.core.format.foreign.scales import Scaled, grid
from dcp_plugin.core.format.index import CheckpointIndex, StoredTensor
from dcp_plugin.core.planning.load_balance import BoxPart
from dcp_plugin.core.planning.reads import ReadPlanner
from dcp_plugin.core.records import BoxRead, ReadPlan
from dcp_plugin.core.tensors.kinds import fill, is_stored_whole
from dcp_plugin.core.types import LocalChunk, Shape, ShardedValue

_WINDOW = 32 << 20
"""Elements that are read together. Each takes nine bytes of memory: the stored one, the product and its scale."""


def read_scaled(index: CheckpointIndex, reads: Sequence[BoxRead], read: Callable[[ReadPlan], Any]) -> None:
    """Fill the targets of reads with the product of elements and scales.

    Args:
        read: Reads a plan without scales.

    Raises:
        CheckpointError: As ``read``.
    """
    scales = _scales(index, {box.key for box in reads}, read)
    window: list[BoxRead] = []
    for part in (part for box in reads for part in _parts(box)):
        window.append(part)
        if sum(box.target.numel() for box in window) >= _WINDOW:
            _fill(index, window, scales, read)
            window = []
    _fill(index, window, scales, read)


def _scales(index: CheckpointIndex, keys: set[str], read: Callable[[ReadPlan], Any]) -> dict[str, torch.Tensor]:
    """Return the scales of some tensors, by the tensor's key, with a dimension for each of the tensor's."""
    memory, targets = dict[str, torch.Tensor](), dict[str, ShardedValue | None]()
    for key in sorted(keys):
        entry = index[index.scaled[key].scale]
        assert isinstance(entry, StoredTensor), "only a tensor is a scale"
        memory[key] = entry.empty()
        chunk = LocalChunk((0,) * len(entry.shape), entry.shape, memory[key])
        targets[key] = ShardedValue(entry.shape, entry.dtype, (chunk,))
    read(ReadPlanner(targets, index, {key: index.scaled[key].scale for key in keys}).plan())
    shapes = {key: grid(index.table.shape_of(index.slots[key]), index.scaled[key].block) for key in keys}
    return {key: scale.to(torch.float32).reshape(shapes[key]) for key, scale in memory.items()}


def _parts(box: BoxRead) -> list[BoxRead]:
    """Return parts of a read that fit in a window. A target without memory of its own cannot be divided."""
    if is_stored_whole(box.target):
        return [box]
    parts = BoxPart((0,) * len(box.sizes), box.sizes, 1).at_most(_WINDOW)
    return [
        box._replace(
            target=box.target[tuple(slice(at, at + size) for at, size in zip(part.offsets, part.sizes, strict=True))],
            offsets=tuple(map(add, box.offsets, part.offsets)),
            sizes=part.sizes,
        )
        for part in parts
    ]


def _fill(
    index: CheckpointIndex,
    reads: Sequence[BoxRead],
    scales: Mapping[str, torch.Tensor],
    read: Callable[[ReadPlan], Any],
) -> None:
    stored = {key: index[key] for key in {box.key for box in reads}}
    raw = [
        box._replace(target=torch.empty(box.sizes, dtype=stored[box.key].dtype, device="cpu"), is_scaled=False)  # type: ignore[union-attr]
        for box in reads
    ]
    read(ReadPlan(raw))
    for box, elements in zip(reads, raw, strict=True):
        chunk = stored[box.key].chunks[box.number - index.rows_of(box.key)[0]]  # type: ignore[union-attr]
        begins = tuple(map(add, chunk.offsets, box.offsets))
        scale = _expanded(scales[box.key], index.scaled[box.key], begins, box.sizes)
        fill(box.target, elements.target.to(torch.float32).mul_(scale))


def _expanded(scale: torch.Tensor, scaled: Scaled, begins: Shape, sizes: Shape) -> torch.Tensor:
    """Return the scale of each element of a box. A dimension with one number keeps the length 1."""
    for dim, (begin, size, block) in enumerate(zip(begins, sizes, scaled.block, strict=True)):
        if scale.shape[dim] > 1:
            scale = scale.index_select(dim, torch.arange(begin, begin + size, dtype=torch.int64, device="cpu") // block)
    return scale
