"""The save planner: what each rank holds, and from all of that, what each rank writes.

A real DCP ``SavePlanner``; ``torch.distributed.checkpoint.save(sd, planner=ShardedSavePlanner())`` works with any
writer.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from dcp_plugin._torch import is_tensor, sharded_value
from dcp_plugin.errors import CheckpointMismatch, UnsafeCheckpoint
from dcp_plugin.format import values
from dcp_plugin.format.columns import NO_TENSOR, default_path
from dcp_plugin.format.metadata import state_metadata
from dcp_plugin.planning.flatten import flatten, holds_sharded, is_empty_mapping, walked_by_stock
from dcp_plugin.planning.global_plan import Share, make_global_plan
from dcp_plugin.planning.local_inventory import LocalInventory, ties_of
from dcp_plugin.tensors import narrowed
from dcp_plugin.types import EncodedValue, Flat, KeyPath, LocalChunk, ShardedValue


@dataclass(frozen=True)
class LocalFacts:
    """What a rank's plan takes to the coordinator when DCP drives the planner."""

    paths: dict[str, KeyPath]
    ties: dict[str, str]
    stored_whole: frozenset[str]


_NO_FACTS = LocalFacts({}, {}, frozenset())


class ShardedSavePlanner(SavePlanner):
    """Planner of one save.

    DCP drives it with plans of write items. Our own saves use :mod:`dcp_plugin.planning.plan_exchange` instead,
    which takes a few bytes per rank; who writes what is decided by the same code.

    Args:
        allow_pickle: Keys (globs) whose values may be stored although only unpickling code restores them.

    Example:
        >>> import tempfile, warnings, torch, torch.distributed.checkpoint as stock, dcp_plugin
        >>> warnings.simplefilter("ignore")  # stock warns where there is no process group
        >>> path, planner = tempfile.mkdtemp(), dcp_plugin.ShardedSavePlanner()
        >>> _ = stock.save({"w": torch.ones(2)}, checkpoint_id=path, planner=planner, no_dist=True)
        >>> dcp_plugin.inspect(path).tensors[0].key
        'w'
    """

    def __init__(self, allow_pickle: tuple[str, ...] = ()) -> None:
        self._allow_pickle = allow_pickle

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state, nested and of any content, under the keys that stock's planner gives it.

        An empty mapping has none. If it had, stock's load planner would take the checkpoint for one of torch 2.3.
        """
        leaves, paths = flatten(state_dict, walked_by_stock)
        leaves = {key: leaf for key, leaf in leaves.items() if not is_empty_mapping(leaf)}
        self._paths = {key: paths[key] for key in leaves}
        self._state = encode_state(leaves, self._allow_pickle)

    def take(self, state: Flat, paths: dict[str, KeyPath]) -> None:
        """:meth:`set_up_planner` for what is flat and encoded already, and the paths that its keys do not tell."""
        self._state, self._paths = state, paths

    def create_local_plan(self) -> SavePlan:
        items = [item for key, value in self._state.items() for item in _items(key, value)]
        stored_whole = frozenset(
            key for key, value in self._state.items() if isinstance(value, ShardedValue) and value.stored_whole
        )
        return SavePlan(items, planner_data=LocalFacts(self._paths, ties_of(self._state), stored_whole))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Distribute the items of all ranks so that each is written once.

        Raises:
            CheckpointMismatch: Ranks disagree on a shape or dtype, or together do not hold a whole tensor.
        """
        # A planner made from this one may put something of its own there; then keys alone tell the paths.
        facts = [plan.planner_data if isinstance(plan.planner_data, LocalFacts) else _NO_FACTS for plan in all_plans]
        inventories = [
            LocalInventory.of_plan(plan, said.paths, said.ties, said.stored_whole)
            for plan, said in zip(all_plans, facts, strict=True)
        ]
        global_plan = make_global_plan(inventories)
        plans = [
            replace(plan, items=items_of(share, inventory), planner_data=None)
            for plan, share, inventory in zip(all_plans, global_plan.shares(len(all_plans)), inventories, strict=True)
        ]
        table = global_plan.table
        paths = {key: table.paths.get(key) or default_path(key) for key in table.keys}
        return plans, Metadata(state_metadata(table), planner_data=paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = data_of(write_item, self._state)
        return io.BytesIO(data) if isinstance(data, bytes) else data


def data_of(item: WriteItem, state: Flat) -> torch.Tensor | bytes:
    """What is written for an item: the view of its box in this rank's memory, or the bytes of a value."""
    value = state[item.index.fqn]
    if isinstance(value, EncodedValue):
        return value.data
    assert item.tensor_data is not None
    return narrow(value, item.index.fqn, item.tensor_data.chunk)


def encode_state(leaves: Mapping[str, Any], allow_pickle: tuple[str, ...] = ()) -> Flat:
    """Describe leaves for the planner: tensors as the chunks on this rank, anything else as bytes.

    Raises:
        CheckpointMismatch: Naming every tensor that has nothing to store: no memory, and no parts that have.
        UnsafeCheckpoint: Naming every value that only executing pickled code would restore.
    """
    flat: Flat = {}
    unsafe: list[str] = []
    misfits: list[str] = []
    changed: list[str] = []
    same: dict[int, EncodedValue] = {}  # the parameters of an optimizer's group have the same objects
    for key, leaf in leaves.items():
        if id(leaf) in same:
            flat[key] = same[id(leaf)]
        elif values.is_plain(leaf):
            flat[key] = same[id(leaf)] = EncodedValue(values.encode(leaf))
        elif isinstance(leaf, (ShardedValue, EncodedValue)):
            flat[key] = leaf
        elif is_tensor(leaf):
            try:
                flat[key] = sharded_value(leaf)
            except CheckpointMismatch as error:
                misfits.append(f"{key} is {error}")
        else:
            if holds_sharded(leaf):
                raise CheckpointMismatch(
                    f"{key} is a {type(leaf).__name__} with sharded tensors inside; only one rank's part of them would "
                    f"be stored. Keep sharded tensors in dicts or lists of the state, or directly in optimizer slots."
                )
            notes: list[str] = []
            try:
                encoded = values.encode(leaf, any(fnmatchcase(key, glob) for glob in allow_pickle), notes)
                flat[key] = EncodedValue(encoded, is_empty_mapping(leaf))
                changed += [f"{key} ({note})" for note in notes]
            except UnsafeCheckpoint as error:
                unsafe.append(f"{key} is {error}")
    if misfits:
        count = f"{len(misfits)} tensors cannot be saved: " if len(misfits) > 1 else ""
        raise CheckpointMismatch(count + "; ".join(misfits))
    if unsafe:
        raise UnsafeCheckpoint(
            f"{len(unsafe)} value(s) cannot be saved: {'; '.join(unsafe)}. Make them plain (numbers, text, lists, "
            f"dicts, tensors), or name them in allow_pickle if you trust everybody who can write to the checkpoints."
        )
    if changed:
        warnings.warn(f"stored as another type: {'; '.join(changed[:20])}.", stacklevel=2)
    return flat


def narrow(value: ShardedValue, key: str, box: ChunkStorageMetadata) -> torch.Tensor:
    """The view of a box that lies inside one of this rank's chunks."""
    for chunk in value.chunks:
        edges = zip(box.offsets, box.sizes, chunk.offsets, chunk.sizes, strict=True)
        if all(origin <= at and at + size <= origin + extent for at, size, origin, extent in edges):
            try:
                return _part_of(chunk, box, value.stored_whole)
            except CheckpointMismatch as error:
                raise CheckpointMismatch(f"{key} is {error}") from error
    raise CheckpointMismatch(f"{key}: this rank holds no chunk with {tuple(box.sizes)} at {tuple(box.offsets)}")


def _part_of(chunk: LocalChunk, box: ChunkStorageMetadata, stored_whole: bool) -> torch.Tensor:
    """The part of a chunk that lies in a box. All of it is the chunk itself, since not every class can narrow."""

    def narrow(view: torch.Tensor) -> torch.Tensor:
        for dim, (at, size, origin) in enumerate(zip(box.offsets, box.sizes, chunk.offsets, strict=True)):
            if size < view.shape[dim]:
                view = view.narrow(dim, at - origin, size)
        return view

    if tuple(box.sizes) == chunk.sizes:
        return chunk.tensor
    return narrowed(chunk.tensor, narrow) if stored_whole else narrow(chunk.tensor)


def _items(key: str, value: ShardedValue | EncodedValue) -> list[WriteItem]:
    if isinstance(value, EncodedValue):
        data = BytesIOWriteData(len(value.data))
        return [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, bytes_io_data=data)]
    properties = TensorProperties(dtype=value.dtype)
    kind = WriteItemType.SHARD if value.any_rank else WriteItemType.TENSOR
    items = []
    for number, chunk in enumerate(value.chunks):
        box = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        data_of = TensorWriteData(box, properties, torch.Size(value.shape))
        items.append(WriteItem(MetadataIndex(key, box.offsets, number), kind, tensor_data=data_of))
    return items


def items_of(share: Share, inventory: LocalInventory) -> list[WriteItem]:
    """A rank's share of what it holds, as DCP's write items."""
    described = inventory.description
    properties = [TensorProperties(dtype=dtype) for dtype in described.dtypes]
    shapes = [torch.Size(shape[:ndim]) for shape, ndim in zip(described.shape.tolist(), described.ndim, strict=True)]
    items = []
    offsets, sizes = share.boxes(inventory)
    for key, at, size in zip(described.key[share.chunk].tolist(), offsets.tolist(), sizes.tolist(), strict=True):
        name, dtype, ndim = described.keys[key], described.dtype[key], described.ndim[key]
        if dtype == NO_TENSOR:
            items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(0)))
        else:
            box = ChunkStorageMetadata(torch.Size(at[:ndim]), torch.Size(size[:ndim]))
            data = TensorWriteData(box, properties[dtype], shapes[key])
            items.append(WriteItem(MetadataIndex(name, box.offsets), WriteItemType.SHARD, tensor_data=data))
    return items
