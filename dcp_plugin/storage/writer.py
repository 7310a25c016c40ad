"""Writer of a checkpoint: data files on every rank, then the metadata and the commit on the coordinator.

- :class:`PartWriter` writes one rank's part of a save and returns the place of each item.
- :class:`Publication` is the unpublished checkpoint on the coordinator: reserved, then published or discarded.
- :class:`ShardedWriter` is a DCP ``StorageWriter`` made of the two: ``torch.distributed.checkpoint.save(sd,
  storage_writer=ShardedWriter(path))`` works with any planner, and writes the same checkpoint, committed by the same
  rule, as :func:`dcp_plugin.save`.

Two items on one rank that have the same memory or the same bytes (tied weights, equal values) are written once.
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
from dcp_plugin.media import Medium, Readable, Reservation, locate, medium_of
from dcp_plugin.media.packed import uncommitted_reason
from dcp_plugin.paths import StorageOptions, Where, as_path, is_path
from dcp_plugin.records import NewItem, Spent, WrittenPart  # noqa: F401  (journals name Spent here)
from dcp_plugin.storage import extra_files, write_items
from dcp_plugin.storage.published import newest_time
from dcp_plugin.storage.reuse import NOTHING, WORTH_LINKING, Candidate, Findings, Item, Reuse
from dcp_plugin.tensors._torch import settled
from dcp_plugin.tensors.kinds import is_stored_whole, memory_of, require_memory
from dcp_plugin.types import VERSION

logger = logging.getLogger("dcp_plugin")


@dataclass(frozen=True)
class RankDirectory:
    """Message of the coordinator to each rank, with its plan: the rank and the directory of this save's files."""

    rank: int
    directory: Where

    @property
    def token(self) -> str:
        """Token of the reservation: unique to this save, and the same on all ranks."""
        return self.directory.stem

    @property
    def prefix(self) -> str:
        """Prefix of file names. Stock's own writer reads it if a planner's cache returns our plan to it."""
        return f"__{self.rank}_"

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.rank, self.directory)


def _received(rank: int, directory: Where) -> RankDirectory:
    """Record a destination received from the coordinator, for :meth:`ShardedWriter.write_data`, and return it.

    It arrives with the plan, but the planner need not pass that on: a planner that caches plans
    (``enable_plan_caching``) gives the writer the plan of an earlier save, with the directory of that save. No other
    call of DCP on every rank carries data from the coordinator, and the writer does not know the process group, so it
    cannot communicate itself. The thread that receives a plan is the thread that writes.
    """
    _of_this_thread.destination = RankDirectory(rank, directory)
    return _of_this_thread.destination


class _OfThisThread(threading.local):
    destination: RankDirectory | None = None


_of_this_thread = _OfThisThread()


@dataclass(frozen=True)
class PartWriter:
    """Writer of one rank's part of a save into its data files, which it syncs."""

    path: Where
    """Final path of the checkpoint, for events and errors."""
    medium: Medium
    io_threads: int
    checksum: bool
    reuse: Reuse | None
    """This rank's knowledge of the run's last checkpoint; if None, everything is written."""

    def write(self, items: Sequence[NewItem], to: RankDirectory, frozen: Collection[str] = ()) -> WrittenPart:
        """Link the unchanged items and write the others.

        Args:
            frozen: Keys of tensors that the training is not meant to change.

        Raises:
            SaveFailed: The files could not be written.
        """
        self.medium.join(to.directory, self.path)
        unique, first = _without_duplicates(items)
        try:
            places, nbytes, findings = self._write(unique, to, frozen)
            self.medium.flush(to.directory)
        except OSError as error:
            raise SaveFailed(f"cannot save {self.path}: {error}. {self.medium.advice}") from error
        if len(unique) < len(items):
            places = places.take(np.array(first))
        return WrittenPart(places, nbytes, len(findings.linked), findings.bytes, findings.why_not)

    def _write(self, items: list[NewItem], to: RankDirectory, frozen: Collection[str]) -> tuple[Places, int, Findings]:
        reuse, findings = self.reuse, NOTHING
        into = write_items.Destination(self.medium, to.directory, to.rank, to.token, self.io_threads, self.checksum)
        candidates: list[Candidate | None] = []
        if reuse is not None:
            candidates = [_candidate(item, frozen) for item in items]
            findings = reuse.examine(candidates, into)
        new_slots = [slot for slot in range(len(items)) if slot not in findings.linked]
        stable = {position for position, slot in enumerate(new_slots) if slot in findings.stable}
        places = write_items.write([items[slot].data for slot in new_slots], into, self.path, stable, findings.names)
        nbytes = places.nbytes
        if reuse is not None:
            kept = ((candidates[new_slots[at]], places.location(at)) for at in stable)
            reuse.wrote(
                {candidate.item: location for candidate, location in kept if candidate is not None},
                self.medium,
                to.directory,
            )
        if findings.linked:
            places = Places.joined([Places.of(list(findings.linked.values())), places])
            # The argsort of a permutation is its inverse, which restores the order of the items.
            places = places.take(np.argsort([*findings.linked, *new_slots], kind="stable"))
        return places, nbytes, findings


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
    """Facts that a checkpoint records about itself in addition to its index: in its summary, and for stock readers.

    All but ``views`` and ``aliases`` are fields of :class:`~dcp_plugin.format.summary.Summary`.
    """

    step: int | None = None
    world_size: int = 1
    views: Views = field(default_factory=dict)
    """Additional tables of contents, see :mod:`dcp_plugin.format.metadata`."""
    aliases: Aliases = field(default_factory=dict)
    """Additional keys for stock readers, see :mod:`dcp_plugin.format.metadata`."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    optimizers: Mapping[str, str] = field(default_factory=dict)
    layouts: Sequence[str] = ()
    exclude: Sequence[str] = ()
    base: Mapping[str, str] = field(default_factory=dict)
    reused: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the defaults of fields that are newer than the keeper's journal that the state comes from."""
        vars(self).update(vars(Facts()) | state)


class Publication:
    """Checkpoint that is not yet published.

    The coordinator reserves its directory, then publishes or discards it. On other ranks nothing is reserved, and
    :meth:`discard` has no effect.
    """

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
        """Directory for the files of this save; None if none is reserved."""
        return self._reservation.directory if self._reservation else None

    @property
    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)

    def reserve(self, among_other_files: bool = False) -> Where:
        """Return the directory that this save writes into, and make it at the first call.

        See :meth:`dcp_plugin.media.Medium.reserve`.
        """
        if self._reservation is None:
            self._reservation = self.medium.reserve(self.path, among_other_files)
        directory: Where = self._reservation.directory
        return directory

    def file_sizes(self) -> dict[str, int]:
        """Return the sizes in bytes of the data files of all ranks, by name."""
        self._written = files = self.medium.open(self.reserve())
        return {name: files.size(name) for name in files.names() if name.endswith(DATA_SUFFIX)}

    def publish(self, index: CheckpointIndex, facts: Facts, time: float | None = None) -> Summary:
        """Write the metadata and make the directory the checkpoint at ``path``, replacing an existing one.

        Args:
            time: Time of the save, in seconds since the epoch; by default now.

        Returns:
            The content of ``dcp_plugin.json``.

        Raises:
            SaveFailed: The file system failed; ``path`` keeps its earlier content.
            DurabilityUnknown: The checkpoint is published, but a loss of power may undo that.
            UnsafeCheckpoint: The ``planner_data`` of another package's planner needs code to be restored.
        """
        assert self._reservation is not None, "the coordinator has reserved it"
        names = (self._written or self.medium.open(self._reservation.directory)).names()
        attached = {name.rstrip("/") for name in names if not name.endswith(DATA_SUFFIX)} - set(facts.views)
        saved = self._reservation.time or time or recorded_time(newest_time(self.medium, self.path.parent))
        index.extra_files = self._comparisons() if attached else {}
        files, summary = compose(self.path, self.storage_meta, index, facts, attached, saved)
        try:
            self.medium.publish(self._reservation, files)
        except OSError as error:
            raise SaveFailed(f"cannot commit {self.path}: {error}. {self.medium.advice}") from error
        self._reservation, self.published = None, True
        return summary

    def _comparisons(self) -> dict[str, str]:
        try:
            return extra_files.comparisons_below(self.medium, self.reserve())
        except OSError as error:
            raise SaveFailed(f"cannot commit {self.path}: {error}. {self.medium.advice}") from error

    def discard(self, all_ended: bool = True) -> None:
        """Delete the files that this save has written, unless it is published.

        Args:
            all_ended: True if no rank writes to it any more.
        """
        if self._reservation is not None:
            self.medium.discard(self._reservation, all_ended)
            self._reservation = None


def recorded_time(seen: float) -> float:
    """Return the recorded time of a save that begins now, in seconds since the epoch.

    Checkpoints are sorted by it, so it never runs back: a clock may be set back, and that of another host be ahead.

    Args:
        seen: The greatest recorded time that is known of the run.
    """
    return max(time.time(), seen + 0.001)


def compose(
    path: Where, meta: StorageMeta, index: CheckpointIndex, facts: Facts, attached: Collection[str], saved: float
) -> tuple[dict[str, bytes], Summary]:
    """Return the files that turn data files into a checkpoint, in the order in which they are to be written, and the
    summary.

    Args:
        path: Path of the checkpoint, for errors.
        index: The index of all data files. ``index.extra_files`` has the comparisons of ``attached``; those of
            views are added.
        attached: The names of extra files and folders next to the data files.
        saved: Time of the save, in seconds since the epoch.

    Raises:
        UnsafeCheckpoint: The ``planner_data`` of another package's planner needs code to be restored.
    """
    views = dcp_metadata.encoded_views(facts.views, index, meta)
    index.extra_files |= {name: extra_files.hash_of(data) for name, data in views.items()}
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
    """Writer for ``torch.distributed.checkpoint.save``; saves of this package do not use it.

    They call its two parts, :class:`PartWriter` and :class:`Publication`, directly: their plan has no items of
    DCP (:class:`~dcp_plugin.planning.save.PlanExchange`), and their ranks return columns, not a result per item.

    Args:
        path: The final directory. It appears when the save is complete, and replaces an existing checkpoint.
        step: Training step, for the summary.
        io_threads: Threads, and data files, per rank.
        direct_io: Write past the page cache; ``"auto"``: for files that are large compared with the memory.
        checksum: Whether to compute CRC32 checksums.
        views: Additional tables of contents, see :mod:`dcp_plugin.format.metadata`.
        reuse: This rank's knowledge of the run's last checkpoint; if None, everything is written.
        aliases: Additional keys for stock readers, see :mod:`dcp_plugin.format.metadata`.
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
        location = as_path(path, storage_options)
        self._publication = Publication(location, medium_of(location, direct_io))
        self._options = PartWriter(self.path, self._publication.medium, io_threads, checksum, reuse)
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
        self._options = replace(self._options, medium=self._publication.medium)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise SaveFailed(
                f"cannot save {self.path} with use_collectives=False: without a coordinator, no rank commits the "
                f"checkpoint."
            )
        _of_this_thread.destination = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not self.overwrite and uncommitted_reason(locate(self.path), self._options.medium) == "":
            raise RuntimeError(f"Checkpoint already exists and {self.overwrite=}.")  # as stock's FileSystemWriter
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        directory = self._publication.reserve()
        return [replace(plan, storage_data=RankDirectory(rank, directory)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            items = [_new_item(item, planner.resolve_data(item)) for item in plan.items]
            written = replace(self._options, path=self.path).write(items, self._destination(plan))
        except CheckpointError as error:  # logged, because stock shows it only after the tracebacks of all ranks
            logger.error("%s", error)
            raise
        self.bytes_written = written.nbytes
        done: Future[list[WriteResult]] = Future()
        located = zip(plan.items, map(written.places.location, range(len(plan.items))), strict=True)
        done.set_result([WriteResult(item.index, location.length, location) for item, location in located])
        return done

    def _destination(self, plan: SavePlan) -> RankDirectory:
        """Return the rank and directory of this save. A plan from a planner's cache has the directory of an earlier
        save."""
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
        metadata.storage_data = {item: dcp_metadata.storage_info(location) for item, location in places.items()}
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


def _without_duplicates(items: Sequence[NewItem]) -> tuple[list[NewItem], list[int]]:
    """Return the items to write, each once, and for each of ``items`` its position among these.

    Two items are the same if their bytes are equal, or if they are the same view of the same memory.
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
        identity: Any = address  # sufficient if no other tensor begins at this address
        if isinstance(data, bytes):
            identity = data
        elif address in several:
            tensor = data.tensor if isinstance(data, WholeItem) else data
            identity = memory_of(tensor) if tensor is not data or tensor.numel() else (item.key, item.offsets)
        first.append(position.setdefault(identity, len(unique)))
        if first[-1] == len(unique):
            unique.append(item)
    return unique, first
