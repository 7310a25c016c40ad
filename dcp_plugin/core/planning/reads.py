"""The plan of a load: the boxes of stored chunks that this rank's targets need.

A plan needs no communication: every rank knows its targets and the index. :class:`ReadPlanner` makes it, and no other
stage adds a read. The planner for stock DCP (:mod:`~dcp_plugin.core.storage.stock.stock_load`) compares targets with
stored tensors by the functions of this module.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from operator import add, sub
from typing import Any, NamedTuple

import numpy as np
import torch

from dcp_plugin.core.errors import CheckpointCorrupt, CheckpointMismatch, first
from dcp_plugin.core.format import values
from dcp_plugin.core.format.columns import NO_TENSOR, Column, in_all
from dcp_plugin.core.format.index import CheckpointIndex
from dcp_plugin.core.records import LARGEST_CHUNK, BoxRead, ReadPlan
from dcp_plugin.core.tensors.host_memory import is_plain_memory
from dcp_plugin.core.tensors.kinds import part_of
from dcp_plugin.core.types import LocalChunk, ShardedValue


class ReadPlanner:
    """Planner of the reads of one rank.

    Most chunks of most checkpoints are small, and are read as they are stored. Columns select the candidates among
    them, so that Python looks at each tensor once.

    Args:
        targets: Targets by key. A target that is no tensor is None.
        stored: The key in the checkpoint of each target. Several targets may share a key.
        scales: Keys in the checkpoint of quantized tensors -> True to multiply the elements with their scale.
    """

    def __init__(
        self,
        targets: Mapping[str, ShardedValue | None],
        index: CheckpointIndex,
        stored: Mapping[str, str],
        scales: Mapping[str, bool] | None = None,
    ) -> None:
        self._targets, self._index, self._stored, self._scales = targets, index, stored, scales or {}
        self._chunks = self._wanted_as_stored()
        # The layout of a value has nothing to compare, and a state may have thousands of values.
        self._values = {
            key: stored[key]
            for key, target in targets.items()
            if target is None and index.table.dtype_of(index.slots[stored[key]]) is None
        }
        others = [key for key in targets if key not in self._chunks and key not in self._values]
        slots, table = {key: index.slots[stored[key]] for key in others}, index.table
        self._layouts = {
            key: StoredLayout(table.dtype_of(slot), table.shape_of(slot), *table.boxes_of(slot))
            for key, slot in slots.items()
        }
        # The scales that a conversion would lose: not those that the caller applies, or loads beside the tensor.
        lost = {name: scaled.scale for name, scaled in index.scaled.items()} | dict.fromkeys(self._scales, "")
        self.misfits = [
            reason
            for key, layout in self._layouts.items()
            if (
                reason := misfit_of(
                    key, targets[key], layout, lost.get(stored[key], scale_of(stored[key], index.slots))
                )
            )
        ]
        """A line for each target that cannot be filled: its shape or kind differs."""

    def plan(self) -> ReadPlan:
        """Return the reads.

        Raises:
            CheckpointMismatch: Targets have another shape or kind. The message names them.
        """
        if self.misfits:
            raise CheckpointMismatch("\n  ".join(first(self.misfits)))
        boxes = list[BoxRead]()
        for key, layout in self._layouts.items():
            target = self._targets[key]
            assert target is not None, "a value where a tensor is stored is a misfit"
            boxes.extend(self._boxes(key, target, layout))
        return ReadPlan(boxes, list(self._chunks.values()), self._values)

    def _wanted_as_stored(self) -> dict[str, BoxRead]:
        """Return the reads of targets whose only chunk is a small stored chunk."""
        index, table, chunks = self._index, self._index.table, dict[str, BoxRead]()
        wanted = [
            (key, target) for key, target in self._targets.items() if target is not None and len(target.chunks) == 1
        ]
        if not len(index.columns["file"]):  # tensors without elements need no items
            return chunks
        names = [self._stored[key] for key, _ in wanted]
        slots = np.array([index.slots[name] for name in names], np.int64)
        starts = table.chunk_starts[slots]
        counts = table.chunk_starts[slots + 1] - starts
        numbers = np.where(counts > 0, 0, -1)  # a damaged index may have a key without chunks
        for at in np.flatnonzero(counts > 1).tolist():
            numbers[at] = _number_of(wanted[at][1].chunks[0], *table.boxes_of(slots[at]))
        rows = starts + numbers
        place = index.columns["place"][np.maximum(index.places.rows_of(rows)[0], 0)]
        lengths = np.where((place[:, 2] >= 0) & (place[:, 3] <= LARGEST_CHUNK) & (numbers >= 0), place[:, 3], 0)
        dtypes = [*table.torch_dtypes, *[None] * (NO_TENSOR + 1 - len(table.dtypes))]
        candidates = zip(
            names, rows.tolist(), lengths.tolist(), (counts == 1).tolist(), table.columns["dtype"][slots].tolist(),
            table.shapes_of(slots), strict=True,
        )  # fmt: skip
        for (key, target), (name, row, length, is_alone, dtype, shape) in zip(wanted, candidates, strict=True):
            if length and target.dtype == dtypes[dtype] and target.shape == shape and name not in index.strides:
                _, sizes, tensor = target.chunks[0]
                is_as_stored = length == tensor.nbytes and target.dtype == tensor.dtype and not target.stored_whole
                if is_as_stored and (not is_alone or sizes == shape) and is_plain_memory(tensor):
                    chunks[key] = BoxRead(name, row, tensor, (0,) * len(shape), sizes, sizes == shape)
        return chunks

    def _boxes(self, key: str, target: ShardedValue, layout: StoredLayout) -> Iterator[BoxRead]:
        """Yield the reads that fill a target."""
        name = self._stored[key]
        rows = self._index.rows_of(name)
        for overlap in overlaps_of(name, target, layout):
            chunk = target.chunks[overlap.here]
            memory = part_of(key, chunk, overlap.offsets, overlap.sizes, target.stored_whole)
            offsets = tuple(map(sub, overlap.offsets, overlap.stored_offsets))
            is_complete = chunk.sizes == target.shape
            is_scaled = self._scales.get(name, False)
            yield BoxRead(name, rows[overlap.stored], memory, offsets, overlap.sizes, is_complete, is_scaled)


def decoded(
    plan: ReadPlan,
    data: Mapping[str, bytes | bytearray | memoryview],
    allow_pickle: tuple[str, ...] = (),
    notes: list[str] | None = None,
) -> dict[str, Any]:
    """Return the values of a plan by target.

    Args:
        data: The bytes of the values, by key in the checkpoint.
        allow_pickle: Keys (globs) whose values may be loaded by executing pickled code.
        notes: List to which a line is added for each value that is loaded without its class.
    """
    return {key: values.decode(name, bytes(data[name]), allow_pickle, notes) for key, name in plan.values.items()}


class Overlap(NamedTuple):
    """Elements that a chunk of a target and a stored chunk share."""

    here: int
    """Number of the target's chunk."""
    stored: int
    """Number of the stored chunk among those of its key."""
    stored_offsets: tuple[int, ...]
    """Offsets of the stored chunk."""
    offsets: tuple[int, ...]
    """Offsets of the common box, in the tensor."""
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class StoredLayout:
    """Dtype, shape and chunks of a stored tensor. A row of the columns is a chunk."""

    dtype: torch.dtype | None
    """None for a value that is no tensor."""
    shape: tuple[int, ...]
    offsets: Column
    sizes: Column

    def overlaps(self, name: str, here: int, chunk: LocalChunk) -> list[Overlap]:
        """Return the stored chunks that share elements with ``chunk``, whose number is ``here``.

        Stored chunks are mostly sorted by their first row, so a binary search finds the candidates. All stored chunks
        are compared if the candidates do not cover ``chunk``, as with shards of columns or another tool's order.

        Raises:
            CheckpointCorrupt: All stored chunks together do not cover ``chunk``.
        """
        wanted = prod(chunk.sizes)
        for near in (self._near, self._touching):
            boxes = ((number, self.offsets[number].tolist(), self.sizes[number].tolist()) for number in near(chunk))
            shared = ((number, offsets, _intersection(chunk, offsets, sizes)) for number, offsets, sizes in boxes)
            overlaps = [
                Overlap(here, number, tuple(offsets), *both) for number, offsets, both in shared if both is not None
            ]
            if sum(prod(overlap.sizes) for overlap in overlaps) == wanted:
                return overlaps
        raise CheckpointCorrupt(f"{name}: the checkpoint does not have all {wanted} elements of a part")

    def _near(self, chunk: LocalChunk) -> Iterable[int]:
        if not self.shape:
            return range(len(self.offsets))
        row = chunk.offsets[0]
        behind, end = self.offsets[:, 0].searchsorted((row + 1, row + chunk.sizes[0])).tolist()
        return range(max(behind - 1, 0), end)

    def _touching(self, chunk: LocalChunk) -> Iterable[int]:
        ends = np.add(chunk.offsets, chunk.sizes)
        touching = (self.offsets < ends) & (self.offsets + self.sizes > chunk.offsets)
        return np.flatnonzero(in_all(touching)).tolist()


def _number_of(chunk: LocalChunk, offsets: Column, sizes: Column) -> int:
    """Return the number of the stored chunk with the same box; -1 if none is at the place that it has in a grid.

    Meshes store row-major grids, so no search is needed. The first stored chunk has the size of most chunks.
    """
    number = 0
    for offset, size, length in zip(chunk.offsets, sizes[0].tolist(), (offsets[-1] + sizes[-1]).tolist(), strict=False):
        number = number * -(-length // max(size, 1)) + offset // max(size, 1)
    number = min(number, len(sizes) - 1)
    is_same = (offsets[number].tolist(), sizes[number].tolist()) == (list(chunk.offsets), list(chunk.sizes))
    return number if is_same else -1


def scale_of(name: str, keys: Container[str]) -> str:
    """Return the key of the scale that belongs to a stored tensor if that is quantized; empty without one."""
    return next((scale for end in ("_scale_inv", "_scale") if (scale := name + end) in keys), "")


def misfit_of(key: str, target: Any, stored: StoredLayout, scale: str) -> str:
    """Return the reason why a target cannot be filled; empty if it can be filled.

    Args:
        scale: The key of the scale that a conversion of the stored tensor would lose; empty for none.
    """
    if not isinstance(target, ShardedValue):
        kind = type(target).__name__
        return "" if stored.dtype is None else f"{key} is a {kind} here and a tensor in the checkpoint"
    if stored.dtype is None:
        return f"{key} is a tensor here and another value in the checkpoint"
    if target.shape != stored.shape:
        return f"{key} has shape {target.shape} here and {stored.shape} in the checkpoint"
    if not torch.can_cast(stored.dtype, target.dtype):
        return f"{key} is {target.dtype} here, which cannot hold the checkpoint's {stored.dtype}"
    if scale and stored.dtype.itemsize == 1 and target.dtype != stored.dtype:
        return (
            f"{key} is {target.dtype} here and quantized in the checkpoint: {stored.dtype}, to be multiplied with "
            f"{scale}. Load both as they are stored, and multiply"
        )
    edges = (zip(chunk.tensor.stride(), chunk.tensor.shape, strict=True) for chunk in target.chunks)
    if any(stride == 0 and size > 1 for stride, size in itertools.chain.from_iterable(edges)):
        return f"{key} has several elements in the same memory, as expand() makes them: load into a clone() of it"
    return ""


def overlaps_of(name: str, target: ShardedValue, layout: StoredLayout) -> Iterator[Overlap]:
    """Yield the boxes that together fill the target's chunks.

    Raises:
        CheckpointCorrupt: Elements of a chunk are not stored.
    """
    for here, chunk in enumerate(target.chunks):
        if 0 not in chunk.sizes:
            yield from layout.overlaps(name, here, chunk)


def _intersection(
    chunk: LocalChunk, offsets: list[int], sizes: list[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the offsets and lengths of the box that two boxes share, or None. Boxes without dimensions share their
    element."""
    begins = tuple(map(max, chunk.offsets, offsets))
    lengths = tuple(map(sub, map(min, map(add, chunk.offsets, chunk.sizes), map(add, offsets, sizes)), begins))
    return (begins, lengths) if min(lengths, default=1) > 0 else None
