"""The load planner: the boxes of stored chunks that this rank's targets need.

A real DCP ``LoadPlanner``; ``torch.distributed.checkpoint.load(sd, planner=ShardedLoadPlanner())`` works with any
reader. It needs no communication: every rank knows its targets and the metadata.
"""

from __future__ import annotations

import difflib
import io
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from dcp_plugin._torch import is_tensor, sharded_value
from dcp_plugin.errors import CheckpointCorrupt, CheckpointMismatch
from dcp_plugin.planning.flatten import flatten
from dcp_plugin.planning.save import narrow
from dcp_plugin.storage import values
from dcp_plugin.types import KeyPath, LocalChunk, Shape, ShardedValue


class ShardedLoadPlanner(LoadPlanner):
    """Planner of one load.

    Targets are tensors (filled in place) and other values (replaced in the state that was handed over).

    Args:
        strict: Whether a target that the checkpoint does not have is an error.
        allow_pickle: Keys (globs) whose values may be loaded by executing pickled code.
    """

    def __init__(self, strict: bool = True, allow_pickle: tuple[str, ...] = ()) -> None:
        self._strict = strict
        self._allow_pickle = allow_pickle
        self.missing: list[str] = []
        """Targets that the checkpoint does not have."""
        self.cast: list[str] = []
        """Targets of another dtype than the checkpoint's."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._metadata = metadata
        self._tree = state_dict
        self._targets, self._paths = flatten(state_dict)
        for key, target in self._targets.items():
            if is_tensor(target):
                self._targets[key] = sharded_value(target)

    def create_local_plan(self) -> LoadPlan:
        """The reads of this rank.

        Raises:
            CheckpointMismatch: Naming all targets that are missing (if strict) or of another shape or kind.
        """
        stored = self._metadata.state_dict_metadata
        self.missing = [key for key in self._targets if key not in stored]
        present = [key for key in self._targets if key in stored]
        wrong = [problem for key in present for problem in _misfit(key, self._targets[key], stored[key])]
        if self._strict:
            wrong += [f"{key} is not in the checkpoint{nearest(key, stored)}" for key in self.missing]
        if wrong:
            raise CheckpointMismatch(some(wrong, 50, "; "))
        items: list[ReadItem] = []
        for key in present:
            target, source = self._targets[key], stored[key]
            if isinstance(target, ShardedValue) and isinstance(source, TensorStorageMetadata):
                if target.dtype != source.properties.dtype:
                    self.cast.append(key)
                items.extend(_reads(key, target, source))
            else:
                items.append(_read_of_value(key))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return new_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        allowed = any(fnmatchcase(key, glob) for glob in self._allow_pickle)
        _set(self._tree, self._paths[key], values.decode(key, value.getvalue(), allowed))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._targets[read_item.dest_index.fqn]
        chunk = target.chunks[read_item.dest_index.index]
        box = ChunkStorageMetadata(
            torch.Size(o + c for o, c in zip(read_item.dest_offsets, chunk.offsets, strict=True)), read_item.lengths
        )
        return narrow(target, read_item.dest_index.fqn, box)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: the tensor is a view of the target."""


def _misfit(key: str, target: Any, stored: Any) -> Iterator[str]:
    if isinstance(target, ShardedValue) and isinstance(stored, BytesStorageMetadata):
        yield f"{key} is a tensor here and another value in the checkpoint"
    elif not isinstance(target, ShardedValue) and isinstance(stored, TensorStorageMetadata):
        yield f"{key} is a {type(target).__name__} here and a tensor in the checkpoint"
    elif isinstance(target, ShardedValue) and target.shape != tuple(stored.size):
        yield f"{key} has shape {target.shape} here and {tuple(stored.size)} in the checkpoint"
    elif isinstance(target, ShardedValue) and not torch.can_cast(stored.properties.dtype, target.dtype):
        yield f"{key} is {target.dtype} here, which cannot hold the checkpoint's {stored.properties.dtype}"


def nearest(key: str, stored: Iterable[str]) -> str:
    """A hint at the stored key that a missing one may be a misspelling of."""
    near = difflib.get_close_matches(key, list(stored)[:20_000], n=1, cutoff=0.8)
    return f" (did you mean {near[0]}?)" if near else ""


def some(items: list[str], limit: int = 8, separator: str = ", ") -> str:
    """The first items for a message, and how many more there are."""
    more = f"{separator}and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + more


def _read_of_value(key: str) -> ReadItem:
    none = torch.Size()
    return ReadItem(LoadItemType.BYTE_IO, MetadataIndex(key), none, MetadataIndex(key), none, none)


def _reads(key: str, target: ShardedValue, stored: TensorStorageMetadata) -> Iterator[ReadItem]:
    for number, chunk in enumerate(target.chunks):
        covered = 0
        for hint, source in enumerate(stored.chunks):
            box = _intersection(chunk, source)
            if box is None:
                continue
            offsets, lengths = box
            covered += prod(lengths)
            yield ReadItem(
                LoadItemType.TENSOR,
                MetadataIndex(key, chunk.offsets, number),
                torch.Size(a - b for a, b in zip(offsets, chunk.offsets, strict=True)),
                MetadataIndex(key, source.offsets, hint),
                torch.Size(a - b for a, b in zip(offsets, source.offsets, strict=True)),
                torch.Size(lengths),
            )
        if covered != prod(chunk.sizes):
            raise CheckpointCorrupt(f"the checkpoint has {covered} of {prod(chunk.sizes)} elements of a part of {key}")


def _intersection(chunk: LocalChunk, source: ChunkStorageMetadata) -> tuple[Shape, Shape] | None:
    """Offsets and lengths of what two boxes share; None if nothing. Boxes without dimensions share their element."""
    offsets, lengths = [], []
    for at, size, there, extent in zip(chunk.offsets, chunk.sizes, source.offsets, source.sizes, strict=True):
        start, stop = max(at, there), min(at + size, there + extent)
        if start >= stop:
            return None
        offsets.append(start)
        lengths.append(stop - start)
    return tuple(offsets), tuple(lengths)


def _set(tree: Any, path: KeyPath, value: Any) -> None:
    steps = [part[1] if isinstance(part, tuple) else part for part in path]
    for step in steps[:-1]:
        tree = tree[step]
    tree[steps[-1]] = value
