"""The save planner: what each rank holds, and from all of that, what each rank writes.

A real DCP ``SavePlanner``; ``torch.distributed.checkpoint.save(sd, planner=ShardedSavePlanner())`` works with any
writer.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
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
from dcp_plugin.planning.flatten import flatten, holds_sharded
from dcp_plugin.planning.partition import Box, partition
from dcp_plugin.storage import values
from dcp_plugin.storage.framing import MAX_PAYLOAD
from dcp_plugin.types import EncodedValue, Flat, KeyPath, LocalChunk, ShardedValue, memory_of


@dataclass(frozen=True)
class LocalFacts:
    """What travels to the coordinator with a rank's plan."""

    paths: dict[str, KeyPath]
    ties: dict[str, str]
    """Keys whose tensor is the same memory as an earlier key's, and that key."""


class ShardedSavePlanner(SavePlanner):
    """Planner of one save.

    Args:
        allow_pickle: Keys (globs) whose values may be stored although only unpickling code restores them.
    """

    def __init__(self, allow_pickle: tuple[str, ...] = ()) -> None:
        self._allow_pickle = allow_pickle

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state: nested and of any content, or already flat and encoded by :func:`encode_state`."""
        leaves, self._paths = flatten(state_dict)
        self._state = encode_state(leaves, self._allow_pickle)

    def use_paths(self, paths: dict[str, KeyPath]) -> None:
        """The paths of a state that was flattened before it was handed over."""
        self._paths = paths

    def create_local_plan(self) -> SavePlan:
        items = [item for key, value in self._state.items() for item in _items(key, value)]
        return SavePlan(items, planner_data=LocalFacts(self._paths, _ties(self._state)))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Distribute the items of all ranks so that each is written once.

        Raises:
            CheckpointMismatch: Ranks disagree on a shape or dtype, or together do not hold a whole tensor.
        """
        tensors, value_writers = _merge(all_plans)
        facts = [plan.planner_data for plan in all_plans]
        assigned: list[list[WriteItem]] = [[] for _ in all_plans]
        state: dict[str, Any] = {}
        for key in _in_order(all_plans):
            if key in value_writers:
                assigned[value_writers[key].rank].append(value_writers[key].item)
                state[key] = BytesStorageMetadata()
            else:
                data = tensors[key].data
                state[key] = TensorStorageMetadata(replace(data.properties), data.size, [])
        for key, box, rank in _writers(tensors, _common_ties(facts, tensors)):
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            index = MetadataIndex(key, chunk.offsets, len(state[key].chunks))
            state[key].chunks.append(chunk)
            data = tensors[key].data
            assigned[rank].append(
                WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, data.properties, data.size))
            )
        paths = {key: path for fact in reversed(facts) for key, path in fact.paths.items()}
        plans = [replace(plan, items=items, planner_data=None) for plan, items in zip(all_plans, assigned, strict=True)]
        return plans, Metadata(state, planner_data={key: paths[key] for key in state})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self._state[write_item.index.fqn]
        if isinstance(value, EncodedValue):
            return io.BytesIO(value.data)
        assert write_item.tensor_data is not None
        return narrow(value, write_item.index.fqn, write_item.tensor_data.chunk)


def encode_state(leaves: Mapping[str, Any], allow_pickle: tuple[str, ...] = ()) -> Flat:
    """Leaves as the planner wants them: tensors as the chunks on this rank, anything else as bytes.

    Raises:
        UnsafeCheckpoint: Naming every value that only executing pickled code would restore.
    """
    flat: Flat = {}
    unsafe: list[str] = []
    for key, leaf in leaves.items():
        if isinstance(leaf, (ShardedValue, EncodedValue)):
            flat[key] = leaf
        elif is_tensor(leaf):
            if type(leaf) is torch.Tensor and (leaf.layout != torch.strided or leaf.is_quantized):
                raise CheckpointMismatch(f"{key} is a sparse or quantized tensor, which is not supported: densify it")
            flat[key] = sharded_value(leaf)
        else:
            if holds_sharded(leaf):
                raise CheckpointMismatch(
                    f"{key} is a {type(leaf).__name__} with sharded tensors inside; only one rank's part of them would "
                    f"be stored. Keep sharded tensors in dicts or lists of the state, or directly in optimizer slots."
                )
            try:
                flat[key] = EncodedValue(values.encode(leaf, any(fnmatchcase(key, glob) for glob in allow_pickle)))
            except UnsafeCheckpoint as error:
                unsafe.append(f"{key} is {error}")
    if unsafe:
        raise UnsafeCheckpoint(
            f"{len(unsafe)} value(s) cannot be saved: {'; '.join(unsafe)}. Make them plain (numbers, text, lists, "
            f"dicts, tensors), or name them in allow_pickle if you trust everybody who can write to the checkpoints."
        )
    return flat


def narrow(value: ShardedValue, key: str, box: ChunkStorageMetadata) -> torch.Tensor:
    """The view of a box that lies inside one of this rank's chunks."""
    for chunk in value.chunks:
        if _contains(chunk, box):
            view = chunk.tensor
            for dim, (at, size, origin) in enumerate(zip(box.offsets, box.sizes, chunk.offsets, strict=True)):
                view = view.narrow(dim, at - origin, size)
            return view
    raise CheckpointMismatch(f"{key}: this rank holds no chunk with {tuple(box.sizes)} at {tuple(box.offsets)}")


def _contains(chunk: LocalChunk, box: ChunkStorageMetadata) -> bool:
    return all(
        origin <= at and at + size <= origin + extent
        for at, size, origin, extent in zip(box.offsets, box.sizes, chunk.offsets, chunk.sizes, strict=True)
    )


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


def _ties(state: Flat) -> dict[str, str]:
    seen: dict[Any, str] = {}
    ties = {}
    for key, value in state.items():
        if isinstance(value, ShardedValue) and any(chunk.tensor.numel() for chunk in value.chunks):
            chunks = ((chunk.offsets, memory_of(chunk.tensor)) for chunk in value.chunks)
            first = seen.setdefault((value.shape, *chunks), key)
            if first != key:
                ties[key] = first
    return ties


@dataclass(frozen=True)
class _ValueWriter:
    rank: int
    item: WriteItem


@dataclass(frozen=True)
class _Tensor:
    """All that the ranks hold of one tensor."""

    data: TensorWriteData
    holders: dict[Box, list[int]]


def _merge(plans: list[SavePlan]) -> tuple[dict[str, _Tensor], dict[str, _ValueWriter]]:
    tensors: dict[str, _Tensor] = {}
    value_writers: dict[str, _ValueWriter] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            key = item.index.fqn
            data = item.tensor_data
            if data is None:
                value_writers.setdefault(key, _ValueWriter(rank, item))
                continue
            tensor = tensors.setdefault(key, _Tensor(data, defaultdict(list)))
            if data.size != tensor.data.size or data.properties.dtype != tensor.data.properties.dtype:
                raise CheckpointMismatch(
                    f"rank {rank} holds {key} as {tuple(data.size)} {data.properties.dtype}, another rank as "
                    f"{tuple(tensor.data.size)} {tensor.data.properties.dtype}"
                )
            itemsize = data.properties.dtype.itemsize
            box = Box(key, tuple(data.chunk.offsets), tuple(data.chunk.sizes), itemsize)
            if item.type == WriteItemType.SHARD or not tensor.holders[box]:
                tensor.holders[box].append(rank)
    for key, tensor in tensors.items():
        if key in value_writers:
            raise CheckpointMismatch(f"{key} is a tensor on some ranks and another value on others")
        held = sum(box.nbytes for box in tensor.holders)
        whole = tensor.data.size.numel() * tensor.data.properties.dtype.itemsize
        if held != whole:
            raise CheckpointMismatch(
                f"the ranks hold {held} bytes of {key}, {tuple(tensor.data.size)} needs {whole}: a part is missing, or "
                f"parts overlap. Is every rank of the mesh saving?"
            )
    return tensors, value_writers


def _in_order(plans: list[SavePlan]) -> dict[str, None]:
    """All keys, in the order in which the first rank that has them lists them."""
    return {item.index.fqn: None for plan in plans for item in plan.items}


def _common_ties(facts: list[LocalFacts], tensors: dict[str, _Tensor]) -> dict[str, str]:
    """Ties that every rank which holds a part of the tensor sees."""
    common = {}
    for key, first in {k: f for fact in facts for k, f in fact.ties.items()}.items():
        holders = {rank for ranks in tensors[key].holders.values() for rank in ranks}
        if all(facts[rank].ties.get(key) == first for rank in holders):
            common[key] = first
    return common


def _writers(tensors: dict[str, _Tensor], ties: dict[str, str]) -> list[tuple[str, Box, int]]:
    """(key, box, rank) of everything that is written. A tied key goes where the first one goes, box by box, so that
    the writer sees both and writes one."""
    holders_of = {
        box: tuple(ranks) for key, tensor in tensors.items() if key not in ties for box, ranks in tensor.holders.items()
    }
    followers = defaultdict(list)
    for key, first in ties.items():
        followers[first].append(key)
    return [
        (key, box, rank)
        for box, rank in partition(holders_of, MAX_PAYLOAD)
        for key in (box.key, *followers.get(box.key, ()))
    ]
