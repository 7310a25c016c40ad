"""The plan of a load: the boxes of stored chunks that this rank's targets need.

:class:`ShardedLoadPlanner` is a real DCP ``LoadPlanner``;
``torch.distributed.checkpoint.load(sd, planner=ShardedLoadPlanner())`` works with any reader. It needs no
communication: every rank knows its targets and the metadata.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from operator import add, sub
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import planner as stock
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcp_plugin.core.errors import CheckpointCorrupt, CheckpointMismatch, first, nearest, warn
from dcp_plugin.core.format import values
from dcp_plugin.core.format.columns import NO_TENSOR, Column, KeyColumns, filled_rows, in_all
from dcp_plugin.core.format.index import CheckpointIndex
from dcp_plugin.core.format.keys import flatten, is_empty_mapping, require_names, step_of, walked_as_stored
from dcp_plugin.core.planning.save import narrow
from dcp_plugin.core.records import LARGEST_CHUNK, LoadPlan, WholeChunk
from dcp_plugin.core.tensors._torch import is_tensor, sharded_value, with_memory
from dcp_plugin.core.tensors.host_memory import is_plain_memory
from dcp_plugin.core.types import KeyPath, LocalChunk, Shape, ShardedValue, public_class


@public_class()
class ShardedLoadPlanner(LoadPlanner):
    """Planner of one load.

    Targets are tensors (filled in place) and other values (replaced in the caller's state).

    Args:
        strict: If true, a target that the checkpoint does not have is an error.
        allow_pickle: Keys (globs) whose values may be loaded by executing pickled code.

    Example:
        >>> import tempfile, warnings, torch, torch.distributed.checkpoint as stock, dcp_plugin
        >>> warnings.simplefilter("ignore")  # stock warns where there is no process group
        >>> path, state = tempfile.mkdtemp(), {"w": torch.zeros(2)}
        >>> _ = stock.save({"w": torch.ones(2)}, checkpoint_id=path, no_dist=True)
        >>> stock.load(state, checkpoint_id=path, planner=dcp_plugin.ShardedLoadPlanner(), no_dist=True)
        >>> state["w"]
        tensor([1., 1.])
    """

    def __init__(self, strict: bool = True, allow_pickle: tuple[str, ...] = ()) -> None:
        self._strict = strict
        self._tree: dict[str, Any] = {}
        self._targets: dict[str, Any] = {}
        self._names: Mapping[str, str] = {}
        self._index: CheckpointIndex | None = None
        self._allow_pickle = allow_pickle
        self.missing: list[str] = []
        """Targets that the checkpoint does not have."""
        self.misfits: list[str] = []
        """A line for each target that cannot be filled: its shape or kind differs or, if strict, it is missing."""
        self.plain: list[str] = []
        """A line for each value that was loaded without its class, with the reason."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self.metadata = metadata  # the attribute of DefaultLoadPlanner that code written for it reads
        self._tree = state_dict
        self._keys: Collection[str] = (stored := metadata.state_dict_metadata)
        leaves, self._paths = flatten(state_dict, walked_as_stored(stored))
        leaves = {key: leaf for key, leaf in leaves.items() if key in stored or not is_empty_mapping(leaf)}
        self._targets = self._described(leaves)
        self._stored = {key: _Stored.of_metadata(stored[key]) for key in leaves if key in stored}
        self._present, self._index = list(self._stored), None

    def _described(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """Describe the targets. Tensors on the meta device are replaced in the caller's state by tensors with memory,
        as in stock DCP."""
        targets: dict[str, Any] = {}
        misfits: list[str] = []
        for key, leaf in leaves.items():
            if not is_tensor(leaf):
                targets[key] = leaf
                continue
            try:
                filled = with_memory(leaf)
                targets[key] = sharded_value(filled)
                if filled is not leaf:
                    _set(self._tree, self._paths[key], filled)
            except CheckpointMismatch as error:
                misfits.append(f"{key} is {error}")
        if misfits:
            raise CheckpointMismatch("\n  ".join(first(misfits)))
        return targets

    def use_index(self, targets: dict[str, Any], index: CheckpointIndex, names: Mapping[str, str]) -> None:
        """Set the planner up from an index, without an object for every stored chunk.

        Args:
            targets: Targets by key; tensors as :class:`ShardedValue`.
            names: The key in the checkpoint of each target. Several targets may share a key.
        """
        self._tree = self._targets = targets
        self._paths = {key: (key,) for key in targets}
        self._names = names
        self._index = index
        self._keys = slots = index.slots
        self._stored = {}
        self._present = [key for key in targets if names[key] in slots]

    def create_local_plan(self) -> stock.LoadPlan:
        """Return the reads of this rank.

        Raises:
            CheckpointMismatch: Targets have another shape or kind or, if strict, are missing. The message names them.
        """
        fitting = self._fitting(self._present)
        return stock.LoadPlan([item for key, stored in fitting.items() for item in self._items_of(key, stored)])

    def plan_apart(self) -> LoadPlan:
        """Return the reads of this rank, with a WholeChunk in place of the items for a small chunk that is read as
        stored.

        Most chunks of most checkpoints are of this kind, and stock's plan has about six objects for each item.

        Raises:
            CheckpointMismatch: See :meth:`create_local_plan`.
        """
        complete = self._wanted_as_stored()
        items, chunks = list[ReadItem](), list(complete.values())
        for key, stored in self._fitting([key for key in self._present if key not in complete]).items():
            if (chunk := self._same_chunk(key, stored)) is not None:
                chunks.append(chunk)
            else:
                items.extend(self._items_of(key, stored))
        return LoadPlan(items, chunks)

    def _fitting(self, keys: Iterable[str]) -> dict[str, _Stored]:
        """Return the entries of targets. Record the targets that are missing, and those that do not fit.

        Raises:
            CheckpointMismatch: See :meth:`create_local_plan`.
        """
        present = set(self._present)
        self.missing = [key for key in self._targets if key not in present]
        stored_under = {key: self._stored_for(key) for key in keys}
        problems = (_misfit(key, self._targets[key], each, self._scales_of(key)) for key, each in stored_under.items())
        self.misfits = list(filter(None, problems))
        if self._strict:
            self.misfits += [f"{key} is not in the checkpoint{nearest(key, self._keys)}" for key in self.missing]
        if self.misfits:
            raise CheckpointMismatch("\n  ".join(first(self.misfits)))
        return stored_under

    def _items_of(self, key: str, stored: _Stored) -> Iterator[ReadItem]:
        """Yield the reads that fill a target."""
        target, name = self._targets[key], self._names.get(key, key)
        if isinstance(target, ShardedValue):
            yield from _reads(key, name, target, stored)
        else:
            indices = MetadataIndex(key), torch.Size(), MetadataIndex(name), torch.Size(), torch.Size()
            yield ReadItem(LoadItemType.BYTE_IO, *indices)

    def _stored_for(self, key: str) -> _Stored:
        if self._index is None:
            return self._stored[key]
        return _Stored.of_table(self._index.table, self._index.slots[self._names[key]])

    def _wanted_as_stored(self) -> dict[str, WholeChunk]:
        """Return the targets that equal one stored chunk each. Columns select the candidates, so that Python looks at
        each tensor once."""
        index, chunks = self._index, dict[str, WholeChunk]()
        assert index is not None
        keys = [key for key in self._present if isinstance(self._targets[key], ShardedValue)]
        names = [self._names[key] for key in keys]
        slots = np.array([index.slots[name] for name in names], np.int64)
        table = index.table
        rows = table.chunk_starts[slots]
        place = index.columns["place"][rows]
        alone = (table.chunk_starts[slots + 1] - rows == 1) & (place[:, 2] >= 0) & (place[:, 3] <= LARGEST_CHUNK)
        candidates = zip(alone.tolist(), rows.tolist(), place[:, 3].tolist(), table.shapes_of(slots), strict=True)
        dtypes = [*table.torch_dtypes, *[None] * (NO_TENSOR + 1 - len(table.dtypes))]
        dtype_of = table.columns["dtype"][slots].tolist()
        for key, name, dtype, (is_alone, row, length, shape) in zip(keys, names, dtype_of, candidates, strict=True):
            target = self._targets[key]
            if is_alone and target.dtype == dtypes[dtype] and target.shape == shape and len(target.chunks) == 1:
                (chunk,) = target.chunks
                if chunk.sizes == shape and _takes(target, length) and name not in index.strides:
                    chunks[key] = WholeChunk(name, row, chunk.tensor)
        return chunks

    def _same_chunk(self, key: str, stored: _Stored) -> WholeChunk | None:
        """Return the stored chunk with the box of the target's only chunk if it is small and can be read as stored."""
        index, target, name = self._index, self._targets[key], self._names[key]
        assert index is not None
        is_single = isinstance(target, ShardedValue) and len(target.chunks) == 1
        if not is_single or target.dtype != stored.dtype or name in index.strides:
            return None
        number = stored.number_of(target.chunks[0])
        if number is None:
            return None
        row = int(index.table.chunk_starts[index.slots[name]]) + number
        _, _, start, length = index.columns["place"][row].tolist()
        fits = start >= 0 and length <= LARGEST_CHUNK and _takes(target, length)
        return WholeChunk(name, row, target.chunks[0].tensor) if fits else None

    def _scales_of(self, key: str) -> str:
        """Return the key of a quantized weight's scales, recognized by DeepSeek's suffix; empty if there is none."""
        scales = self._names.get(key, key) + "_scale_inv"
        return scales if scales in self._keys else ""

    def create_global_plan(self, global_plan: list[stock.LoadPlan]) -> list[stock.LoadPlan]:
        return global_plan

    def finish_plan(self, new_plan: stock.LoadPlan) -> stock.LoadPlan:
        return new_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        stored = read_item.storage_index.fqn
        allowed = any(fnmatchcase(stored, glob) for glob in self._allow_pickle)
        key = read_item.dest_index.fqn
        target, loaded = self._targets[key], values.decode(stored, value.getvalue(), allowed, self.plain)
        if self.plain and self._tree is not self._targets:  # DCP drives this load and never reads self.plain
            warn(f"a value was loaded without its class: {self.plain.pop()}.")
        if self._strict:
            require_names(key, target, loaded)
        _set(self._tree, self._paths[key], values.on_devices_of(target, loaded))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._targets[read_item.dest_index.fqn]
        chunk = target.chunks[read_item.dest_index.index]
        box = ChunkStorageMetadata(
            torch.Size(o + c for o, c in zip(read_item.dest_offsets, chunk.offsets, strict=True)), read_item.lengths
        )
        return narrow(target, read_item.dest_index.fqn, box)

    def fills_whole_tensor(self, read_item: ReadItem) -> bool:
        """Return whether this rank wants the complete tensor, of which the item may be a part."""
        target = self._targets[read_item.dest_index.fqn]
        return bool(target.chunks[read_item.dest_index.index].sizes == target.shape)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the tensor is a view of the target."""


@dataclass(frozen=True)
class _Stored:
    """The checkpoint's entry under a key; ``dtype`` is None if it is no tensor. A row of the columns is a chunk."""

    dtype: torch.dtype | None
    shape: Shape
    offsets: Column
    sizes: Column

    @classmethod
    def of_metadata(cls, stored: Any) -> _Stored:
        if isinstance(stored, BytesStorageMetadata):
            return cls(None, (), np.empty((1, 0), np.int64), np.empty((1, 0), np.int64))
        offsets = filled_rows([chunk.offsets for chunk in stored.chunks], len(stored.size), 0)
        sizes = filled_rows([chunk.sizes for chunk in stored.chunks], len(stored.size), 0)
        return cls(stored.properties.dtype, tuple(stored.size), offsets, sizes)

    @classmethod
    def of_table(cls, table: KeyColumns, slot: int) -> _Stored:
        return cls(table.dtype_of(slot), table.shape_of(slot), *table.boxes_of(slot))

    def overlaps(self, chunk: LocalChunk) -> list[tuple[int, list[int], Shape, Shape]]:
        """Return the stored chunks that share elements with ``chunk``: number and offsets of each stored chunk, and
        offsets and lengths of the common box.

        Stored chunks are mostly sorted by their first row, so a binary search finds the candidates. If these do not
        cover ``chunk`` (shards of columns, or another tool's order), all stored chunks are compared.

        Raises:
            CheckpointCorrupt: All stored chunks together do not cover ``chunk``.
        """
        wanted = prod(chunk.sizes)
        for near in (self._near, self._touching):
            boxes = ((number, self.offsets[number].tolist(), self.sizes[number].tolist()) for number in near(chunk))
            shared = ((number, offsets, _intersection(chunk, offsets, sizes)) for number, offsets, sizes in boxes)
            overlapping = [(number, offsets, *both) for number, offsets, both in shared if both is not None]
            if sum(prod(lengths) for *_, lengths in overlapping) == wanted:
                return overlapping
        raise CheckpointCorrupt(f"the checkpoint does not have all {wanted} elements of a part")

    def number_of(self, chunk: LocalChunk) -> int | None:
        """Return the number of the stored chunk with the same box; None if the binary search over rows finds none."""
        box = list(chunk.offsets), list(chunk.sizes)
        same = (at for at in self._near(chunk) if (self.offsets[at].tolist(), self.sizes[at].tolist()) == box)
        return next(same, None)

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


def _takes(target: ShardedValue, length: int) -> bool:
    """Return whether a payload of ``length`` bytes can be read straight into the memory of the target's only chunk."""
    tensor = target.chunks[0].tensor
    same = 0 < length == tensor.nbytes and target.dtype == tensor.dtype and not target.stored_whole
    return same and is_plain_memory(tensor)


def _misfit(key: str, target: Any, stored: _Stored, scales: str) -> str:
    """Return the reason why a target cannot be filled; empty if it can be filled."""
    if not isinstance(target, ShardedValue):
        kind = type(target).__name__
        return "" if stored.dtype is None else f"{key} is a {kind} here and a tensor in the checkpoint"
    if stored.dtype is None:
        return f"{key} is a tensor here and another value in the checkpoint"
    if target.shape != stored.shape:
        return f"{key} has shape {target.shape} here and {stored.shape} in the checkpoint"
    if not torch.can_cast(stored.dtype, target.dtype):
        return f"{key} is {target.dtype} here, which cannot hold the checkpoint's {stored.dtype}"
    if scales and stored.dtype.itemsize == 1 and target.dtype != stored.dtype:
        return (
            f"{key} is {target.dtype} here and quantized in the checkpoint: {stored.dtype}, to be multiplied with "
            f"{scales}, as torch.distributed.checkpoint.QuantizedHuggingFaceStorageReader does"
        )
    edges = (zip(chunk.tensor.stride(), chunk.tensor.shape, strict=True) for chunk in target.chunks)
    if any(stride == 0 and size > 1 for stride, size in itertools.chain.from_iterable(edges)):
        return f"{key} has several elements in the same memory, as expand() makes them: load into a clone() of it"
    return ""


def _reads(key: str, name: str, target: ShardedValue, stored: _Stored) -> Iterator[ReadItem]:
    for number, chunk in enumerate(target.chunks):
        if 0 in chunk.sizes:
            continue
        here = MetadataIndex(key, chunk.offsets, number)
        try:
            overlaps = stored.overlaps(chunk)
        except CheckpointCorrupt as error:
            raise CheckpointCorrupt(f"{name}: {error}") from error
        for source, source_offsets, offsets, lengths in overlaps:
            yield ReadItem(
                LoadItemType.TENSOR,
                here,
                torch.Size(map(sub, offsets, chunk.offsets)),
                MetadataIndex(name, torch.Size(source_offsets), source),
                torch.Size(map(sub, offsets, source_offsets)),
                torch.Size(lengths),
            )


def _intersection(chunk: LocalChunk, offsets: list[int], sizes: list[int]) -> tuple[Shape, Shape] | None:
    """Return the offsets and lengths of the box that two boxes share, or None. Boxes without dimensions share their
    element."""
    begins = tuple(map(max, chunk.offsets, offsets))
    lengths = tuple(map(sub, map(min, map(add, chunk.offsets, chunk.sizes), map(add, offsets, sizes)), begins))
    return (begins, lengths) if min(lengths, default=1) > 0 else None


def _set(tree: Any, path: KeyPath, value: Any) -> None:
    """Replace the value at a path. Tuples on the path are immutable and so are rebuilt with the new item."""
    step, *tail = step_of(path[0]), *path[1:]
    if isinstance(tree, Mapping) and step not in tree:  # the path has the text of a key of another type
        step = next((key for key in tree if str(key) == step), step)
    if not tail:
        tree[step] = value
    elif isinstance(tree[step], tuple):
        items = list(tree[step])
        _set(items, tuple(tail), value)
        tree[step] = tuple(items)
    else:
        _set(tree[step], tuple(tail), value)
