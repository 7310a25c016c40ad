"""DCP's side of a save: a ``SavePlanner`` and a ``StorageWriter`` for ``torch.distributed.checkpoint.save``.

:class:`ShardedSavePlanner` works with any writer, and :class:`ShardedWriter` with any planner. Together they write the
same checkpoint, committed by the same rule, as :func:`dcp_plugin.save`, which uses neither.
"""

from __future__ import annotations

import io
import os
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
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
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_plugin.core.errors import CheckpointError, CheckpointMismatch, SaveFailed, logger, refuse_other_systems
from dcp_plugin.core.format import stock_objects
from dcp_plugin.core.format.derived_index import index_of
from dcp_plugin.core.format.index import NO_TENSOR, KeyPath, Location
from dcp_plugin.core.format.keys import encode_state, flatten, is_empty_mapping, walked_by_stock
from dcp_plugin.core.format.metadata import Aliases, Views
from dcp_plugin.core.format.values import WholeItem
from dcp_plugin.core.media import locate, medium_of, uncommitted_reason
from dcp_plugin.core.paths import StorageOptions, Where, as_path, is_path
from dcp_plugin.core.planning.global_plan import Share, make_global_plan
from dcp_plugin.core.planning.local_inventory import VALUE, LocalInventory, OfKey, ties_of
from dcp_plugin.core.records import NewItem
from dcp_plugin.core.storage.part_writer import Facts, PartWriter, Publication
from dcp_plugin.core.storage.reuse import Reuse
from dcp_plugin.core.tensors._torch_sharded import settled
from dcp_plugin.core.tensors.kinds import is_stored_whole, part_of, require_memory
from dcp_plugin.core.types import EncodedValue, ShardedValue, public_class


@dataclass(frozen=True)
class LocalFacts:
    """Facts that a rank's plan carries to the coordinator when DCP drives the planner."""

    paths: dict[str, KeyPath]
    ties: dict[str, str]
    stored_whole: frozenset[str]


_NO_FACTS = LocalFacts({}, {}, frozenset())


@public_class()
class ShardedSavePlanner(SavePlanner):
    """Planner for ``torch.distributed.checkpoint.save``; saves of this package do not use it.

    DCP drives this planner with plans of write items. At each save it sends every item of every rank to rank 0 and
    back, as about six Python objects per tensor. Saves of this package use
    :class:`~dcp_plugin.core.planning.save.PlanExchange` instead, which makes the same plan and sends only digests while
    the plan is unchanged. Loads need no exchange, since each rank plans alone; they use the planner and the reader that
    DCP would drive.

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

        An empty mapping gets no key. With one, stock's load planner would mistake the checkpoint for one of torch 2.3.
        """
        leaves, paths = flatten(state_dict, walked_by_stock)
        leaves = {key: leaf for key, leaf in leaves.items() if not is_empty_mapping(leaf)}
        self._paths = {key: paths[key] for key in leaves}
        self._state = encode_state(leaves, self._allow_pickle)

    def create_local_plan(self) -> SavePlan:
        items = [item for key, value in self._state.items() for item in _items(key, value)]
        tensors = {key: value for key, value in self._state.items() if isinstance(value, ShardedValue)}
        stored_whole = frozenset(key for key, value in tensors.items() if value.stored_whole)
        return SavePlan(items, planner_data=LocalFacts(self._paths, ties_of(self._state), stored_whole))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Distribute the items of all ranks so that each is written once.

        Raises:
            CheckpointMismatch: Ranks disagree on a shape or dtype, or together do not hold a complete tensor.
        """
        # A subclass may use planner_data for other data. The paths then follow from the keys.
        facts = [plan.planner_data if isinstance(plan.planner_data, LocalFacts) else _NO_FACTS for plan in all_plans]
        inventories = [_inventory_of(plan, rank_facts) for plan, rank_facts in zip(all_plans, facts, strict=True)]
        global_plan = make_global_plan(inventories)
        plans = [
            replace(plan, items=items_of(share, inventory), planner_data=None)
            for plan, share, inventory in zip(all_plans, global_plan.shares(len(all_plans)), inventories, strict=True)
        ]
        table = global_plan.table
        paths = {key: table.path_of(key) for key in table.keys}
        return plans, Metadata(stock_objects.state_metadata(table), planner_data=paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self._state[write_item.index.fqn]
        if isinstance(value, EncodedValue):
            return io.BytesIO(value.data)
        assert write_item.tensor_data is not None
        box = write_item.tensor_data.chunk
        return _narrow(value, write_item.index.fqn, tuple(box.offsets), tuple(box.sizes))


def _narrow(value: ShardedValue, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    """Return the view of a box that is inside one of this rank's chunks."""
    for chunk in value.chunks:
        edges = zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
        if all(origin <= at and at + size <= origin + extent for at, size, origin, extent in edges):
            return part_of(key, chunk, offsets, sizes, value.stored_whole)
    raise CheckpointMismatch(f"{key}: this rank holds no chunk of shape {sizes} at {offsets}")


def _inventory_of(plan: SavePlan, facts: LocalFacts) -> LocalInventory:
    """Return the inventory of a rank whose plan consists of DCP's own write items."""
    items: dict[str, OfKey] = {}
    boxes: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = defaultdict(list)
    for item in plan.items:
        key, data = item.index.fqn, item.tensor_data
        if data is None:
            items[key] = VALUE
            continue
        boxes[key].append((tuple(data.chunk.offsets), tuple(data.chunk.sizes)))
        any_rank = item.type == WriteItemType.SHARD
        dtype, shape = data.properties.dtype, tuple(data.size)
        items.setdefault(key, (dtype, shape, any_rank, key in facts.stored_whole, boxes[key]))
    return LocalInventory.of_items(list(items), list(items.values()), facts.paths, facts.ties)


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
    """Return a rank's share as DCP's write items."""
    described = inventory.description
    properties = [TensorProperties(dtype=dtype) for dtype in described.dtypes]
    offsets, sizes = share.boxes(inventory)
    numbers = described.key[share.chunk]
    kinds = np.column_stack((described.dtype[numbers], described.ndim[numbers], described.shape[numbers]))
    same: dict[tuple[int, ...], TensorWriteData] = {}  # many tensors have equal boxes and share the object
    items = []
    width = offsets.shape[1]
    rows = np.hstack((kinds.astype(np.int64), offsets, sizes)).tolist()
    for number, row in zip(numbers.tolist(), map(tuple, rows), strict=True):
        name, dtype = described.keys[number], row[0]
        if dtype == NO_TENSOR:
            items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(0)))
            continue
        if row not in same:
            shape, at, size = (torch.Size(row[2 + n * width : 2 + n * width + row[1]]) for n in range(3))
            same[row] = TensorWriteData(ChunkStorageMetadata(at, size), properties[dtype], shape)
        data = same[row]
        items.append(WriteItem(MetadataIndex(name, data.chunk.offsets), WriteItemType.SHARD, tensor_data=data))
    return items


@dataclass(frozen=True)
class _PlannedDirectory:
    """Rank and directory of a part, as the coordinator sends them with the plan."""

    rank: int
    directory: Where

    @property
    def prefix(self) -> str:
        """Prefix of file names. Stock's own writer reads it if a planner's cache returns our plan to it."""
        return f"__{self.rank}_"

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.rank, self.directory)


def _received(rank: int, directory: Where) -> _PlannedDirectory:
    """Record a destination received from the coordinator, for :meth:`ShardedWriter.write_data`, and return it.

    It arrives with the plan, but the planner need not pass that on: a planner that caches plans
    (``enable_plan_caching``) gives the writer the plan of an earlier save, with the directory of that save. No other
    call of DCP on every rank carries data from the coordinator, and the writer does not know the process group, so it
    cannot communicate itself. The thread that receives a plan is the thread that writes.
    """
    _of_this_thread.destination = _PlannedDirectory(rank, directory)
    return _of_this_thread.destination


class _OfThisThread(threading.local):
    destination: _PlannedDirectory | None = None


_of_this_thread = _OfThisThread()


@public_class()
class ShardedWriter(StorageWriter):
    """Writer for ``torch.distributed.checkpoint.save``; saves of this package do not use it.

    They call its two parts, :class:`~dcp_plugin.core.storage.part_writer.PartWriter` and
    :class:`~dcp_plugin.core.storage.part_writer.Publication`, directly: their plan has no items of DCP
    (:class:`~dcp_plugin.core.planning.save.PlanExchange`), and their ranks return columns, not a result per item.

    Args:
        path: The final directory. It appears when the save is complete, and replaces an existing checkpoint.
        step: Training step, for the summary.
        io_threads: Threads, and data files, per rank.
        direct_io: Write past the page cache; ``"auto"``: for files that are large compared with the memory.
        views: Additional tables of contents, see :mod:`dcp_plugin.core.format.metadata`.
        reuse: This rank's knowledge of the run's last checkpoint; if None, everything is written.
        aliases: Additional keys for stock readers, see :mod:`dcp_plugin.core.format.metadata`.
        overwrite: Replace an existing checkpoint; if False, an existing one raises ``RuntimeError``.
        kinds: For the summary: which names of the state are a ``"module"`` and which an ``"optimizer"``.
        layouts: For the summary: how the tensors are distributed, in words.
        storage_options: Options of the store of a URL, see :class:`~dcp_plugin.CheckpointConfig`.

    Raises:
        SaveFailed: From any method: the checkpoint was not committed; ``path`` keeps its earlier content.

    Example:
        >>> import dcp_plugin, torch, torch.distributed.checkpoint as stock
        >>> metadata = stock.save({"weights": torch.ones(3)}, storage_writer=dcp_plugin.ShardedWriter("run/step-1"))
        >>> print(dcp_plugin.inspect("run/step-1").format)
        dcp_plugin
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        io_threads: int = 2,
        direct_io: bool | Literal["auto"] = "auto",
        views: Views | None = None,
        reuse: Reuse | None = None,
        aliases: Aliases | None = None,
        overwrite: bool = True,
        kinds: Mapping[str, str] | None = None,
        layouts: Sequence[str] = (),
        storage_options: StorageOptions | None = None,
    ) -> None:
        refuse_other_systems()
        self.overwrite = overwrite
        self.bytes_written = 0
        """Bytes of this rank's data files."""
        self._storage_options, self._direct_io = storage_options, direct_io
        location = as_path(path, storage_options)
        self._publication = Publication(location, medium_of(location, direct_io))
        self._part_writer = PartWriter(location, self._publication.medium, io_threads, reuse)
        self._facts = Facts(step, 1, views or {}, aliases or {}, kinds or {}, layouts=layouts)

    @property
    def path(self) -> Where:
        return self._publication.path

    @property
    def save_id(self) -> str:
        return self._publication.save_id

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        location = as_path(checkpoint_id, self._storage_options) if checkpoint_id else self.path
        self._publication = Publication(location, medium_of(location, self._direct_io))
        self._part_writer = replace(self._part_writer, path=location, medium=self._publication.medium)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise SaveFailed(
                f"cannot save {self.path} with use_collectives=False: without a coordinator, no rank commits the "
                f"checkpoint."
            )
        _of_this_thread.destination = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not self.overwrite and uncommitted_reason(locate(self.path), self._publication.medium) == "":
            raise RuntimeError(f"Checkpoint already exists and {self.overwrite=}.")  # as stock's FileSystemWriter
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        directory = self._publication.reserve()
        return [replace(plan, storage_data=_PlannedDirectory(rank, directory)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            items = [_new_item(item, planner.resolve_data(item)) for item in plan.items]
            to = self._destination(plan)
            written = self._part_writer.write(items, to.rank, to.directory)
        except CheckpointError as error:  # logged, because stock shows it only after the tracebacks of all ranks
            logger.error("%s", error)
            raise
        self.bytes_written = written.nbytes
        done: Future[list[WriteResult]] = Future()
        located = zip(plan.items, map(written.places.location, range(len(plan.items))), strict=True)
        done.set_result([WriteResult(item.index, location.length, location) for item, location in located])
        return done

    def _destination(self, plan: SavePlan) -> _PlannedDirectory:
        """Return the rank and directory of this save. A plan from a planner's cache has those of an earlier save, by
        this writer or by stock's."""
        planned: object = plan.storage_data
        received, _of_this_thread.destination = _of_this_thread.destination, None
        if received is not None:
            return received
        directory = self._publication.directory  # the coordinator's; without a process group it receives nothing
        if directory is None:
            assert isinstance(planned, _PlannedDirectory), "another rank has received what the coordinator sent"
            return planned
        return _PlannedDirectory(planned.rank if isinstance(planned, _PlannedDirectory) else 0, directory)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places: dict[MetadataIndex, Location] = {r.index: r.storage_data for rank in results for r in rank}
        try:
            entries = list(stock_objects.entries_of(metadata, places))
        except KeyError as error:
            raise SaveFailed(f"cannot save {self.path}: no rank wrote {error}") from error
        paths = stock_objects.planner_paths(metadata.planner_data, metadata.state_dict_metadata)
        index = index_of(entries, self._publication.file_sizes(), paths)
        if paths is None:
            index.planner_data = (metadata.planner_data,)
        self._publication.compose_and_commit(index, replace(self._facts, world_size=len(results)))
        metadata.storage_data = {item: stock_objects.storage_info(location) for item, location in places.items()}
        metadata.storage_meta = self.storage_meta()

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self.path

    def storage_meta(self) -> StorageMeta | None:
        return self._publication.storage_meta

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_path(checkpoint_id)


def _new_item(item: WriteItem, data: Any) -> NewItem:
    """Return the data that any planner hands over for an item, in the form in which it is written.

    Raises:
        CheckpointMismatch: A tensor has no memory to store.
    """
    key = item.index.fqn
    if item.type == WriteItemType.BYTE_IO:
        return NewItem(key, data.getvalue())
    assert item.tensor_data is not None, "it is a tensor"
    box, data = item.tensor_data.chunk, settled(data)
    try:
        if is_stored_whole(data):
            return NewItem(key, WholeItem.of(data), tuple(box.offsets), tuple(box.sizes))
        if data.requires_grad or type(data) is not torch.Tensor:
            data = data.detach()
        require_memory(data)
    except CheckpointMismatch as error:
        raise CheckpointMismatch(f"{key} is {error}") from error
    return NewItem(key, data, tuple(box.offsets), tuple(box.sizes))
