"""Writes a checkpoint: data files on every rank, then the metadata and the commit on the coordinator.

- :class:`PartWriter` writes one rank's part of a save and returns where each item is.
- :class:`Publication` is the checkpoint in the making on the coordinator: reserved, then published or discarded.
- :class:`ShardedWriter` is a DCP ``StorageWriter`` made of the two:
  ``torch.distributed.checkpoint.save(sd, storage_writer=ShardedWriter(path))`` works with any planner, and gives the
  same checkpoint, committed by the same rule, as :func:`dcp_plugin.save`.

Two items on one rank that are the same memory or the same bytes (tied weights, equal values) are written once.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
import uuid
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_plugin.errors import CheckpointError, CheckpointMismatch, SaveFailed, UnsafeCheckpoint
from dcp_plugin.format import DATA_SUFFIX, INDEX, METADATA, SUMMARY, index_file
from dcp_plugin.format import metadata as dcp_metadata
from dcp_plugin.format.columns import NO_TENSOR, Places
from dcp_plugin.format.index import CheckpointIndex, Location
from dcp_plugin.format.metadata import Aliases, Views
from dcp_plugin.format.summary import Summary, fingerprint
from dcp_plugin.format.whole_tensors import WholeItem
from dcp_plugin.launcher import launch_record
from dcp_plugin.media import Medium, Readable, Reservation, medium_of
from dcp_plugin.paths import StorageOptions, Where, as_path, is_path
from dcp_plugin.records import NewItem, Spent, WrittenPart  # noqa: F401  (journals name Spent here)
from dcp_plugin.storage import check_rest, write_items
from dcp_plugin.storage.published import newest_time
from dcp_plugin.storage.reuse import NOTHING, WORTH_LINKING, Candidate, Findings, Item, Reuse
from dcp_plugin.tensors._torch import settled
from dcp_plugin.tensors.kinds import is_stored_whole, memory_of, require_memory
from dcp_plugin.types import VERSION

logger = logging.getLogger("dcp_plugin")


@dataclass(frozen=True)
class RankDirectory:
    """What the coordinator tells each rank with its plan: who it is and where this save's files go."""

    rank: int
    directory: Where

    @property
    def token(self) -> str:
        """The reservation's: unique to this save, and the same on all ranks."""
        return self.directory.stem

    @property
    def prefix(self) -> str:
        """Of file names. Stock's own writer asks for it if a planner's cache has our plan for it."""
        return f"__{self.rank}_"

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.rank, self.directory)


def _received(rank: int, directory: Where) -> RankDirectory:
    """A destination that has come from the coordinator, noted for :meth:`ShardedWriter.write_data`.

    It comes with the plan, but the planner need not hand that on: one that caches plans (``enable_plan_caching``) gives
    the writer the plan of an earlier save, with the directory of that save. Nothing else that DCP calls on every rank
    hears from the coordinator, and the process group is not told to a writer that would ask there itself. The thread
    that receives a plan is the one that writes.
    """
    _of_this_thread.destination = RankDirectory(rank, directory)
    return _of_this_thread.destination


class _OfThisThread(threading.local):
    destination: RankDirectory | None = None


_of_this_thread = _OfThisThread()


@dataclass(frozen=True)
class PartWriter:
    """Writes one rank's part of a save into its data files, and syncs them."""

    path: Where
    """The checkpoint's final path, for events and errors."""
    medium: Medium
    io_threads: int
    checksum: bool
    reuse: Reuse | None
    """What this rank knows of the run's last checkpoint; without it everything is written."""

    def write(self, items: Sequence[NewItem], to: RankDirectory, frozen: Collection[str] = ()) -> WrittenPart:
        """Link what is unchanged and write the rest.

        Args:
            frozen: Keys of tensors that the training does not mean to change.

        Raises:
            SaveFailed: The files could not be written.
        """
        self.medium.join(to.directory, self.path)
        unique, first = _without_duplicates(items)
        try:
            places, nbytes, found = self._write(unique, to, frozen)
            self.medium.flush(to.directory)
        except OSError as error:
            raise SaveFailed(f"cannot save {self.path}: {error}. {self.medium.advice}") from error
        if len(unique) < len(items):
            places = places.take(np.array(first))
        return WrittenPart(places, nbytes, len(found.linked), found.bytes, found.why_not)

    def _write(self, items: list[NewItem], to: RankDirectory, frozen: Collection[str]) -> tuple[Places, int, Findings]:
        reuse, found = self.reuse, NOTHING
        token = to.token if reuse is not None or self.medium.keeps_names else ""
        into = write_items.Destination(self.medium, to.directory, to.rank, token, self.io_threads, self.checksum)
        candidates: list[Candidate | None] = []
        if reuse is not None:
            candidates = [_candidate(item, frozen) for item in items]
            found = reuse.examine(candidates, into)
        left = [slot for slot in range(len(items)) if slot not in found.linked]
        stable = {position for position, slot in enumerate(left) if slot in found.stable}
        places = write_items.write([items[slot].data for slot in left], into, self.path, stable, found.names)
        nbytes = places.nbytes
        if reuse is not None:
            kept = ((candidates[left[at]], places.location(at)) for at in stable)
            reuse.wrote({one.item: where for one, where in kept if one is not None}, self.medium, to.directory)
        if found.linked:
            places = Places.joined([Places.of(list(found.linked.values())), places])
            places = places.take(np.argsort([*found.linked, *left], kind="stable"))
        return places, nbytes, found


def _candidate(item: NewItem, frozen_keys: Collection[str]) -> Candidate | None:
    key, data, offsets, sizes = item
    if not isinstance(data, torch.Tensor):
        return None
    frozen = key in frozen_keys
    if data.nbytes < (1 if frozen else WORTH_LINKING):
        return None
    return Candidate(Item(key, offsets, sizes, data.dtype), data, frozen)


@dataclass(frozen=True)
class Facts:
    """What a checkpoint says of itself beside its index: in its summary, and to stock readers.

    All but ``views`` and ``aliases`` are fields of :class:`~dcp_plugin.format.summary.Summary`.
    """

    step: int | None = None
    world_size: int = 1
    views: Views = field(default_factory=dict)
    """More tables of contents, see :mod:`dcp_plugin.format.metadata`."""
    aliases: Aliases = field(default_factory=dict)
    """More keys for stock readers, see there too."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    optimizers: Mapping[str, str] = field(default_factory=dict)
    layouts: Sequence[str] = ()
    exclude: Sequence[str] = ()
    base: Mapping[str, str] = field(default_factory=dict)
    reused: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take defaults for fields that are newer than the keeper's journal that this comes from."""
        vars(self).update(vars(Facts()) | state)


class Publication:
    """One checkpoint in the making. The coordinator reserves its directory, then publishes or discards it; on other
    ranks nothing is reserved, and to discard does nothing."""

    def __init__(self, path: Where, medium: Medium) -> None:
        self.path = path
        self.medium = medium
        self.save_id = str(uuid.uuid4())
        self.published = False
        """Whether the checkpoint is at ``path``."""
        self._reservation: Reservation[Any] | None = None
        self._written: Readable | None = None

    @property
    def directory(self) -> Where | None:
        """Where the files of this save go; None if nothing is reserved."""
        return self._reservation.directory if self._reservation else None

    @property
    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)

    def reserve(self, among_other_files: bool = False) -> Where:
        """The directory that this save writes into, made if there is none yet.

        See :meth:`dcp_plugin.media.Medium.reserve`.
        """
        if self._reservation is None:
            self._reservation = self.medium.reserve(self.path, among_other_files)
        directory: Where = self._reservation.directory
        return directory

    def file_sizes(self) -> dict[str, int]:
        """Bytes of the data files of all ranks, by name."""
        self._written = files = self.medium.open(self.reserve())
        return {name: files.size(name) for name in files.names() if name.endswith(DATA_SUFFIX)}

    def publish(self, index: CheckpointIndex, facts: Facts, time: float | None = None) -> Summary:
        """Write the metadata and make the directory the checkpoint at ``path``, in place of one that is there.

        Args:
            time: When it was saved, in seconds since the epoch; by default now.

        Returns:
            What ``dcp_plugin.json`` says.

        Raises:
            SaveFailed: The file system failed; what was at ``path`` is untouched.
            DurabilityUnknown: The checkpoint is there, but a loss of power may undo that.
            UnsafeCheckpoint: The ``planner_data`` of somebody else's planner needs code to be restored.
        """
        assert self._reservation is not None, "the coordinator has reserved it"
        names = (self._written or self.medium.open(self._reservation.directory)).names()
        attached = {name.rstrip("/") for name in names if not name.endswith(DATA_SUFFIX)} - set(facts.views)
        saved = self._reservation.time or time or later_than_beside(self.medium, self.path)
        index.beside = self._told_beside() if attached else {}
        files, summary = compose(self.path, self.storage_meta, index, facts, attached, saved)
        try:
            self.medium.publish(self._reservation, files)
        except OSError as error:
            raise SaveFailed(f"cannot commit {self.path}: {error}. {self.medium.advice}") from error
        self._reservation, self.published = None, True
        return summary

    def _told_beside(self) -> dict[str, str]:
        try:
            return check_rest.told_beside(self.medium, self.reserve())
        except OSError as error:
            raise SaveFailed(f"cannot commit {self.path}: {error}. {self.medium.advice}") from error

    def discard(self, all_ended: bool = True) -> None:
        """Delete what this save has written so far, unless it is published.

        Args:
            all_ended: No rank writes to it any more.
        """
        if self._reservation is not None:
            self.medium.discard(self._reservation, all_ended)
            self._reservation = None


def later_than_beside(medium: Medium, path: Where) -> float:
    """Now; but later than all beside it, even if the clock was set back or another host's clock is ahead."""
    return max(time.time(), newest_time(medium, path.parent) + 0.001)


def compose(
    path: Where, meta: StorageMeta, index: CheckpointIndex, facts: Facts, attached: Collection[str], saved: float
) -> tuple[dict[str, bytes], Summary]:
    """The files that make a checkpoint of data files, in the order in which they are to be written.

    Args:
        path: Of the checkpoint, for errors.
        index: Of all data files. ``index.beside`` says what is in ``attached``; more is added.
        attached: What has been put beside the data files.
        saved: When it was saved, in seconds since the epoch.

    Raises:
        UnsafeCheckpoint: The ``planner_data`` of somebody else's planner needs code to be restored.
    """
    views = dcp_metadata.encoded_views(facts.views, index, meta)
    index.beside |= {name: check_rest.hash_of(data) for name, data in views.items()}
    try:
        encoded = index_file.encode(index)
    except UnsafeCheckpoint as error:
        raise UnsafeCheckpoint(
            f"cannot save {path}: the planner_data that the planner has put into the metadata is {error}. "
            f"Make it plain (numbers, text, lists, dicts, tensors)."
        ) from error
    for_stock = dcp_metadata.encode(dcp_metadata.with_aliases(index, facts.aliases), meta)
    values = int((index.table.columns["dtype"] == NO_TENSOR).sum())
    summary = Summary(
        step=facts.step,
        time=saved,
        world_size=facts.world_size,
        tensors=len(index) - values,
        values=values,
        payload_bytes=index.payload_bytes,
        index_sha256=fingerprint(encoded),
        metadata_sha256=fingerprint(for_stock),
        save_id=str(meta.save_id),
        kinds=dict(facts.kinds),
        optimizers=dict(facts.optimizers),
        layouts=list(facts.layouts),
        attached=sorted({*attached, *facts.views}),
        versions={"dcp_plugin": VERSION, "torch": torch.__version__, "python": platform.python_version()},
        reused=dict(facts.reused),
        base=dict(facts.base),
        exclude=list(facts.exclude),
        metrics=dict(facts.metrics),
        launch=launch_record(),
    )
    return {INDEX: encoded, SUMMARY: summary.encode(), **views, METADATA: for_stock}, summary


class ShardedWriter(StorageWriter):
    """Writer of one checkpoint directory, for ``torch.distributed.checkpoint.save``.

    Our own saves call its two parts, :class:`PartWriter` and :class:`Publication`, without it: their plan has no items
    of DCP (:class:`~dcp_plugin.planning.save.PlanExchange`), and their ranks return columns, not a result per item.

    Args:
        path: The final directory. It appears when the save is complete, and replaces a checkpoint that is there.
        step: Training step, for the summary.
        io_threads: Threads, and data files, per rank.
        direct_io: Whether to write past the page cache; ``"auto"``: files that are large for the memory there is.
        checksum: Whether to compute CRC32 checksums.
        views: More tables of contents, see :mod:`dcp_plugin.format.metadata`.
        reuse: What this rank knows of the run's last checkpoint; without it everything is written.
        aliases: More keys for stock readers, see there too.
        overwrite: Whether a checkpoint that is there already is replaced; otherwise that is a ``RuntimeError``.
        kinds: For the summary: which names of the state are a ``"module"`` and which an ``"optimizer"``.
        layouts: For the summary: how the tensors are distributed, in words.
        storage_options: How the store of a URL is reached, see :class:`~dcp_plugin.CheckpointConfig`.

    Raises:
        SaveFailed: From any method: the checkpoint was not committed; what was at ``path`` is untouched.

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
        checksum: bool = True,
        views: Views | None = None,
        reuse: Reuse | None = None,
        aliases: Aliases | None = None,
        overwrite: bool = True,
        kinds: Mapping[str, str] | None = None,
        layouts: Sequence[str] = (),
        storage_options: StorageOptions | None = None,
    ) -> None:
        self.overwrite = overwrite
        self.bytes_written = 0
        """Bytes of this rank's data files."""
        self._storage_options, self._direct_io = storage_options, direct_io
        where = as_path(path, storage_options)
        self._publication = Publication(where, medium_of(where, direct_io))
        self._options = PartWriter(self.path, self._publication.medium, io_threads, checksum, reuse)
        self._facts = Facts(step, 1, views or {}, aliases or {}, kinds or {}, layouts=layouts)

    @property
    def path(self) -> Where:
        return self._publication.path

    @property
    def save_id(self) -> str:
        return self._publication.save_id

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        where = as_path(checkpoint_id, self._storage_options) if checkpoint_id else self.path
        self._publication = Publication(where, medium_of(where, self._direct_io))
        self._options = replace(self._options, medium=self._publication.medium)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise SaveFailed(
                f"cannot save {self.path} with use_collectives=False: without a coordinator nobody commits it."
            )
        _of_this_thread.destination = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        medium = self._options.medium
        if not self.overwrite and medium.uncommitted_reason(medium.locate(self.path)) == "":
            raise RuntimeError(f"Checkpoint already exists and {self.overwrite=}.")  # as stock's FileSystemWriter
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        directory = self._publication.reserve()
        return [replace(plan, storage_data=RankDirectory(rank, directory)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            items = [_new_item(item, planner.resolve_data(item)) for item in plan.items]
            written = replace(self._options, path=self.path).write(items, self._destination(plan))
        except CheckpointError as error:  # stock puts it behind the tracebacks of all ranks
            logger.error("%s", error)
            raise
        self.bytes_written = written.nbytes
        done: Future[list[WriteResult]] = Future()
        located = zip(plan.items, map(written.places.location, range(len(plan.items))), strict=True)
        done.set_result([WriteResult(item.index, where.length, where) for item, where in located])
        return done

    def _destination(self, plan: SavePlan) -> RankDirectory:
        """Who this rank is in this save. A plan from a planner's cache has the directory of an earlier save."""
        planned: RankDirectory = plan.storage_data
        received, _of_this_thread.destination = _of_this_thread.destination, None
        directory = self._publication.directory  # the coordinator's; without a process group it receives nothing
        return received or planned if directory is None else RankDirectory(planned.rank, directory)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places: dict[MetadataIndex, Location] = {r.index: r.storage_data for rank in results for r in rank}
        try:
            entries = list(dcp_metadata.entries_of(metadata, places))
        except KeyError as error:
            raise SaveFailed(f"cannot save {self.path}: no rank wrote {error}") from error
        paths = dcp_metadata.planner_paths(metadata.planner_data, metadata.state_dict_metadata)
        index = CheckpointIndex.build(entries, self._publication.file_sizes(), paths)
        if paths is None:
            index.planner_data = (metadata.planner_data,)
        self._publication.publish(index, replace(self._facts, world_size=len(results)))
        metadata.storage_data = {item: dcp_metadata.storage_info(where) for item, where in places.items()}
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
    """What any planner hands over for an item, as it is written.

    Raises:
        CheckpointMismatch: A tensor has nothing to store.
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


def _without_duplicates(items: Sequence[NewItem]) -> tuple[list[NewItem], list[int]]:
    """The items to write, each once; and the position among these that stands for each of ``items``.

    The same are: equal bytes, and the same memory seen the same way.
    """
    addresses = [item.data.data_ptr() if isinstance(item.data, torch.Tensor) else 0 for item in items]
    several = {0, *(address for address, count in Counter(addresses).items() if count > 1)}
    if len(several) == 1 and 0 not in addresses:
        return list(items), list(range(len(items)))
    position: dict[Any, int] = {}
    unique: list[NewItem] = []
    first: list[int] = []
    for item, address in zip(items, addresses, strict=True):
        data = item.data
        identity: Any = address  # which says it all if no other tensor begins there
        if isinstance(data, bytes):
            identity = data
        elif address in several:
            tensor = data.tensor if isinstance(data, WholeItem) else data
            identity = memory_of(tensor) if tensor is not data or tensor.numel() else (item.key, item.offsets)
        first.append(position.setdefault(identity, len(unique)))
        if first[-1] == len(unique):
            unique.append(item)
    return unique, first
