"""DCP's side of a load: a ``StorageReader`` and a ``LoadPlanner`` for ``torch.distributed.checkpoint.load``.

:class:`ShardedReader` works with any planner, on our checkpoints and on stock ones. :class:`ShardedLoadPlanner` works
with any reader. Loads of this package use neither: they make a :class:`~dcp_plugin.core.records.ReadPlan`, without
DCP's six objects for each item.
"""

from __future__ import annotations

import functools
import io
import os
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from operator import add, sub
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_plugin.core.errors import CheckpointCorrupt, CheckpointMismatch, first, nearest, warn
from dcp_plugin.core.format import values
from dcp_plugin.core.format.columns import KeyPath, filled_rows
from dcp_plugin.core.format.index import StoredTensor
from dcp_plugin.core.format.keys import flatten, is_empty_mapping, require_names, step_of, walked_as_stored
from dcp_plugin.core.format.stock_objects import metadata_of
from dcp_plugin.core.paths import as_path, is_path
from dcp_plugin.core.planning.reads import StoredLayout, misfit_of, overlaps_of, scale_of
from dcp_plugin.core.records import BoxRead, ReadPlan
from dcp_plugin.core.storage.reader import CheckpointReader
from dcp_plugin.core.tensors._torch import is_tensor, sharded_value, with_memory
from dcp_plugin.core.tensors.kinds import is_stored_whole, part_of, require_memory
from dcp_plugin.core.types import ShardedValue, public_class


@public_class()
class ShardedReader(CheckpointReader, StorageReader):
    """Reader of one checkpoint: ours, any of DCP's, or another tool's (:mod:`dcp_plugin.core.format.foreign`).

    It reads as :class:`~dcp_plugin.core.storage.reader.CheckpointReader` does, and DCP can drive it.

    Args:
        path: The checkpoint: a directory, or a file of another tool.
        io_threads: Threads that read, per rank.
        verify: Compare the bytes with the checksums.
        check_files: Compare the sizes of all data files with the index when the checkpoint is opened.
        storage_options: Options of the store of a URL, see :class:`~dcp_plugin.CheckpointConfig`.
        files: The files of the checkpoint, if those at the path are not to be read. :meth:`close` closes them.

    Raises:
        CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt, UnsafeCheckpoint: When the index is first used.

    Example:
        >>> import dcp_plugin, torch, torch.distributed.checkpoint as stock
        >>> dcp_plugin.save({"weights": torch.ones(3)}, "run/step-1")
        >>> state = {"weights": torch.zeros(3)}
        >>> stock.load(state, storage_reader=dcp_plugin.ShardedReader("run/step-1"))
        >>> state["weights"]
        tensor([1., 1., 1.])
    """

    @functools.cached_property
    def load_id(self) -> str:
        """Identifier that differs for every load."""
        return str(uuid.uuid4())

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self._asked_for = as_path(checkpoint_id, self._storage_options)
        super().reset()
        self.load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the checkpoint that is at the path now. DCP requests it at the start of each load."""
        super().reset()
        save_id = self.summary.save_id if self.summary else None
        noted = self.index.storage_meta or StorageMeta(str(self.open().path), save_id)
        return metadata_of(self.index, replace(noted, load_id=self.load_id))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the index is read at its first use."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self.identity)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check on one rank that all ranks have opened the same save: each has opened the checkpoint for itself."""
        saves = [plan.storage_data for plan in plans]
        other = next((rank for rank, save in enumerate(saves) if save != saves[0]), None)
        if other is not None:
            raise CheckpointMismatch(
                f"rank {other} and rank 0 opened different checkpoints at {self._asked_for}: it was replaced "
                f"meanwhile, or the ranks load from different paths. Load again."
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of any planner, which is called from this thread alone."""
        of_tensors, of_values = list[ReadItem](), list[ReadItem]()
        for item in plan.items:
            is_tensor = isinstance(self.index[item.storage_index.fqn], StoredTensor)
            (of_tensors if is_tensor else of_values).append(item)
        boxes = [self._box_read(item, _target_of(item, planner)) for item in of_tensors]
        data = self.read(ReadPlan(boxes, values={item.storage_index.fqn: item.storage_index.fqn for item in of_values}))
        for item in of_values:
            planner.load_bytes(item, io.BytesIO(data[item.storage_index.fqn]))
        for item, box in zip(of_tensors, boxes, strict=True):
            planner.commit_tensor(item, box.target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _box_read(self, item: ReadItem, target: torch.Tensor) -> BoxRead:
        """Return the read of an item. Planners give the offset of its stored chunk, and a hint at the number."""
        name, offset, hint = item.storage_index.fqn, tuple(item.storage_index.offset or ()), item.storage_index.index
        rows = self.index.rows_of(name)
        stored, _ = self.index.table.boxes_of(self.index.slots[name])
        near = [hint] if hint is not None and 0 <= hint < len(rows) else []
        number = next((at for at in (*near, *range(len(rows))) if tuple(stored[at].tolist()) == offset), None)
        if number is None:
            raise CheckpointCorrupt(f"{self.path}: {name} has no chunk at {offset}")
        return BoxRead(name, rows[number], target, tuple(item.storage_offsets), tuple(item.lengths))

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_path(checkpoint_id)


def _target_of(item: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    """Return the target of an item. Planners of other packages hand over any tensor of the state."""
    target = planner.resolve_tensor(item)
    if is_stored_whole(target):
        return target
    try:
        target = target.detach()
        require_memory(target)
    except CheckpointMismatch as error:
        raise CheckpointMismatch(f"{item.dest_index.fqn} is {error}") from error
    return target


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
        self._stored = {key: _layout_of(stored[key]) for key in leaves if key in stored}

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

    def create_local_plan(self) -> LoadPlan:
        """Return the reads of this rank.

        Raises:
            CheckpointMismatch: Targets have another shape or kind or, if strict, are missing. The message names them.
        """
        self.missing = [key for key in self._targets if key not in self._stored]
        self.misfits = [
            reason
            for key, layout in self._stored.items()
            if (reason := misfit_of(key, self._targets[key], layout, scale_of(key, self._keys)))
        ]
        if self._strict:
            self.misfits += [f"{key} is not in the checkpoint{nearest(key, self._keys)}" for key in self.missing]
        if self.misfits:
            raise CheckpointMismatch("\n  ".join(first(self.misfits)))
        return LoadPlan([item for key, layout in self._stored.items() for item in self._items_of(key, layout)])

    def _items_of(self, key: str, layout: StoredLayout) -> Iterator[ReadItem]:
        """Yield the items that fill a target."""
        target, nowhere = self._targets[key], torch.Size()
        if not isinstance(target, ShardedValue):
            yield ReadItem(LoadItemType.BYTE_IO, MetadataIndex(key), nowhere, MetadataIndex(key), nowhere, nowhere)
            return
        for overlap in overlaps_of(key, target, layout):
            here, stored_offsets = target.chunks[overlap.here].offsets, overlap.stored_offsets
            yield ReadItem(
                LoadItemType.TENSOR,
                MetadataIndex(key, here, overlap.here),
                torch.Size(map(sub, overlap.offsets, here)),
                MetadataIndex(key, torch.Size(stored_offsets), overlap.stored),
                torch.Size(map(sub, overlap.offsets, stored_offsets)),
                torch.Size(overlap.sizes),
            )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return new_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        stored, key = read_item.storage_index.fqn, read_item.dest_index.fqn
        target, loaded = self._targets[key], values.decode(stored, value.getvalue(), self._allow_pickle, self.plain)
        if self.plain:  # DCP never reads it
            warn(f"a value was loaded without its class: {self.plain.pop()}.")
        if self._strict:
            require_names(key, target, loaded)
        _set(self._tree, self._paths[key], values.on_devices_of(target, loaded))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        key = read_item.dest_index.fqn
        target = self._targets[key]
        chunk = target.chunks[read_item.dest_index.index]
        offsets = tuple(map(add, read_item.dest_offsets, chunk.offsets))
        return part_of(key, chunk, offsets, tuple(read_item.lengths), target.stored_whole)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the tensor is a view of the target."""


def _layout_of(stored: Any) -> StoredLayout:
    """Return the layout that DCP's metadata of a key describe."""
    if isinstance(stored, BytesStorageMetadata):
        return StoredLayout(None, (), np.empty((1, 0), np.int64), np.empty((1, 0), np.int64))
    offsets = filled_rows([chunk.offsets for chunk in stored.chunks], len(stored.size), 0)
    sizes = filled_rows([chunk.sizes for chunk in stored.chunks], len(stored.size), 0)
    return StoredLayout(stored.properties.dtype, tuple(stored.size), offsets, sizes)


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
