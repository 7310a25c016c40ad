"""Writes a checkpoint: data files on every rank, then the metadata and the commit on the coordinator.

A real DCP ``StorageWriter``: ``torch.distributed.checkpoint.save(sd, storage_writer=ShardedWriter(path))`` uses it
with any planner, and gets the same checkpoint, committed by the same rule, as :func:`dcp_plugin.save`.

The planner resolves an item to a tensor or to bytes, :mod:`~dcp_plugin.storage.write_items` writes it. Two items
on one rank that are the same memory or the same bytes (tied weights, equal values) are written once.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_plugin._torch import settled
from dcp_plugin.config import local_path
from dcp_plugin.errors import CheckpointMismatch, SaveFailed, UnsafeCheckpoint
from dcp_plugin.format.columns import NO_TENSOR, Places, Table
from dcp_plugin.format.index import (
    CheckpointIndex,
    Entry,
    Location,
    StoredChunk,
    StoredTensor,
    StoredValue,
)
from dcp_plugin.format.metadata import encode as encode_metadata
from dcp_plugin.format.metadata import planner_paths, storage_info
from dcp_plugin.format.names import DATA_SUFFIX, INDEX, METADATA, SUMMARY
from dcp_plugin.format.stock_views import Aliases, Views, encoded_views, with_aliases
from dcp_plugin.format.summary import Summary
from dcp_plugin.format.torch_zip import padded
from dcp_plugin.media import Medium, Reservation
from dcp_plugin.media.disk import LocalDisk
from dcp_plugin.media.disk.hard_links import LinkableFile
from dcp_plugin.storage import write_items
from dcp_plugin.storage.open import newest_time
from dcp_plugin.storage.reuse import NOTHING, WORTH_LINKING, Candidate, Item, Reuse
from dcp_plugin.tensors import WholeItem, is_stored_whole, require_memory
from dcp_plugin.types import memory_of


@dataclass(frozen=True)
class Assignment:
    """What the coordinator tells each rank with its plan: who it is and where this save's files go."""

    rank: int
    directory: Path

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


def _received(rank: int, directory: Path) -> Assignment:
    """An assignment that has come from the coordinator, noted for :meth:`ShardedWriter.write_data`.

    It comes with the plan, but the planner need not hand that on: one that caches plans (``enable_plan_caching``) gives
    the writer the plan of an earlier save, with the directory of that save. Nothing else that DCP calls on every rank
    hears from the coordinator, and the process group is not told to a writer that would ask there itself. The thread
    that receives a plan is the one that writes.
    """
    _of_this_thread.assignment = Assignment(rank, directory)
    return _of_this_thread.assignment


class _OfThisThread(threading.local):
    assignment: Assignment | None = None


_of_this_thread = _OfThisThread()


class ShardedWriter(StorageWriter):
    """Writer of one checkpoint directory.

    Args:
        path: The final directory. It appears when the save is complete, and replaces a checkpoint that is there.
        step: Training step, for the summary.
        io_threads: Threads, and data files, per rank.
        direct_io: Whether to write past the page cache; ``"auto"``: where the file system lets us.
        checksum: Whether to compute CRC32 checksums.
        views: More tables of contents, see :mod:`dcp_plugin.format.stock_views`.
        reuse: What this rank knows of the run's last checkpoint; without it everything is written.
        aliases: More keys for stock readers, see there too.
        overwrite: Whether a checkpoint that is there already is replaced; otherwise that is a ``RuntimeError``.
        facts: More for the summary: ``kinds`` and ``layouts`` (see :class:`~dcp_plugin.format.summary.Summary`).

    Raises:
        SaveFailed: From any method: the checkpoint was not committed; what was at ``path`` is untouched.
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
        **facts: Any,
    ) -> None:
        self.path = local_path(path)
        self._step = step
        self._io_threads = io_threads
        self.medium: Medium = LocalDisk(direct_io)
        self._checksum = checksum
        self._views = views or {}
        self._reuse = reuse
        self.frozen: Collection[str] = ()
        """Keys of tensors that the training does not mean to change."""
        self.left_out: dict[str, str] = {}
        """Keys that are not in the plan because the base has them, and their keys there. ``base`` is in the facts."""
        self.empty: Collection[str] = ()
        """Keys of empty mappings, of which stock readers are not told."""
        self._aliases = aliases or {}
        self.overwrite = overwrite
        self._driven_by_stock = False
        self.facts = facts
        self._reservation: Reservation | None = None
        self.save_id = str(uuid.uuid4())
        self.bytes_written = 0
        """Bytes of this rank's data files."""
        self.findings = NOTHING
        """What this rank did not have to write."""

    # torch.distributed.checkpoint.StorageWriter

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = local_path(checkpoint_id)
        self._reservation = None
        self.save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise SaveFailed(
                f"cannot save {self.path} with use_collectives=False: without a coordinator nobody commits it."
            )
        self._driven_by_stock = True
        _of_this_thread.assignment = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not self.overwrite and self.medium.uncommitted_reason(self.medium.locate(self.path)) == "":
            raise RuntimeError(f"Checkpoint already exists and {self.overwrite=}.")  # as stock's FileSystemWriter
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        directory = self.reserve()
        return [replace(plan, storage_data=Assignment(rank, directory)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assignment = self._assignment(plan)
        self.medium.join(assignment.directory, self.path)
        resolved = [(item, _resolve(planner, item)) for item in plan.items]
        unique, same_as = _without_duplicates(resolved)
        try:
            locations = self._write(unique, assignment)
            self.medium.flush(assignment.directory)
        except OSError as error:
            raise SaveFailed(f"cannot save {self.path}: {error}. Is the file system full or gone?") from error
        places = {item.index: location for (item, _), location in zip(unique, locations, strict=True)}
        places |= {item.index: places[original.index] for item, original in same_as}
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(index, where.length, where) for index, where in places.items()])
        return done

    def _assignment(self, plan: SavePlan) -> Assignment:
        """Who this rank is in this save. A plan from a planner's cache has the directory of an earlier save."""
        planned: Assignment = plan.storage_data
        if not self._driven_by_stock:
            return planned
        received, _of_this_thread.assignment = _of_this_thread.assignment, None
        if self._reservation is not None:  # the coordinator; without a process group it receives nothing
            return Assignment(planned.rank, self._reservation.directory)
        return received or planned

    def _write(self, items: list[tuple[WriteItem, Any]], assignment: Assignment) -> list[Location]:
        """Link what is unchanged, write the rest; where each item is."""
        directory, rank, threads = assignment.directory, assignment.rank, self._io_threads
        token = assignment.token if self._reuse else ""
        candidates = [self._candidate(item, data) for item, data in items] if self._reuse else []
        found = self._reuse.examine(candidates, directory, rank, token, threads) if self._reuse else NOTHING
        left = [slot for slot in range(len(items)) if slot not in found.linked]
        stable = {position for position, slot in enumerate(left) if slot in found.stable}
        to = write_items.Destination(self.medium, directory, rank, token, threads, self._checksum)
        written = write_items.write([items[slot][1] for slot in left], to, self.path, stable, found.names)
        locations = {**found.linked, **dict(zip(left, written, strict=True))}
        if self._reuse:
            self._remember(self._reuse, candidates, {slot: locations[slot] for slot in found.stable}, directory)
        ends = {at.file: at.offset + padded(at.length) for at in sorted(written, key=lambda at: at.offset)}
        self.bytes_written = sum(ends.values())
        self.findings = found
        return [locations[slot] for slot in range(len(items))]

    def _candidate(self, item: WriteItem, data: Any) -> Candidate | None:
        key = item.index.fqn
        frozen = key in self.frozen
        if not isinstance(data, torch.Tensor) or data.nbytes < (1 if frozen else WORTH_LINKING):
            return None
        assert item.tensor_data is not None
        box = item.tensor_data.chunk
        return Candidate(Item(key, tuple(box.offsets), tuple(box.sizes), data.dtype), data, frozen)

    @staticmethod
    def _remember(
        reuse: Reuse, candidates: list[Candidate | None], stable: dict[int, Location], directory: Path
    ) -> None:
        linkable: dict[str, LinkableFile] = {}
        for slot, location in stable.items():
            candidate = candidates[slot]
            assert candidate is not None, "values are not looked at"
            if location.file not in linkable:
                linkable[location.file] = LinkableFile.written(directory / location.file)
            reuse.wrote(candidate.item, location, linkable[location.file])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places: dict[MetadataIndex, Location] = {r.index: r.storage_data for rank in results for r in rank}
        try:
            entries = list(_entries(metadata, places))
        except KeyError as error:
            raise SaveFailed(f"cannot save {self.path}: no rank wrote {error}") from error
        paths = planner_paths(metadata.planner_data, metadata.state_dict_metadata)
        index = CheckpointIndex.build(entries, _file_sizes(self._directory()), paths)
        if paths is None:
            index.planner_data = (metadata.planner_data,)
        self._commit(index, len(results))
        metadata.storage_data = {item: storage_info(where) for item, where in places.items()}
        metadata.storage_meta = self.storage_meta()

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self.path

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)

    # Beyond the interface

    def reserve(self, among_other_files: bool = False) -> Path:
        """The directory that this save writes into, made if there is none yet. On the coordinator.

        See :meth:`dcp_plugin.media.Medium.reserve`.
        """
        if self._reservation is None:
            self._reservation = self.medium.reserve(self.path, among_other_files)
        return self._reservation.directory

    def finish_columns(self, table: Table, places: Places, world_size: int) -> None:
        """:meth:`finish` for results in columns, in the order of the table's chunks."""
        self._commit(CheckpointIndex.of(table, places, _file_sizes(self._directory())), world_size)

    def _directory(self) -> Path:
        assert self._reservation is not None, "the coordinator has reserved it"
        return self._reservation.directory

    def _commit(self, index: CheckpointIndex, world_size: int) -> None:
        assert self._reservation is not None
        directory = self._reservation.directory
        index.left_out = self.left_out
        index.empty = [key for key in self.empty if key in index]
        try:
            encoded = index.encode()
        except UnsafeCheckpoint as error:
            raise UnsafeCheckpoint(
                f"cannot save {self.path}: the planner_data that the planner has put into the metadata is {error}. "
                f"Make it plain (numbers, text, lists, dicts, tensors)."
            ) from error
        for_stock = encode_metadata(with_aliases(index, self._aliases), self.storage_meta())
        values = int((index.table.columns["dtype"] == NO_TENSOR).sum())
        attached = {name for name in os.listdir(directory) if not name.endswith(DATA_SUFFIX)}
        summary = Summary.describe(
            encoded,
            for_stock,
            newest_time(self.medium, self.path.parent),
            save_id=self.save_id,
            attached=sorted(attached.union(self._views)),
            step=self._step,
            world_size=world_size,
            tensors=len(index) - values,
            values=values,
            payload_bytes=index.payload_bytes,
            **self.facts,
        )
        described = summary.encode()
        try:
            views = encoded_views(self._views, index, self.storage_meta())
            files = {INDEX: encoded, SUMMARY: described, **views, METADATA: for_stock}
            self.medium.publish(self._reservation, files)
        except OSError as error:
            raise SaveFailed(f"cannot commit {self.path}: {error}. Is the file system full or gone?") from error
        self._reservation = None

    def discard(self) -> None:
        """Delete what this save has written so far. On the coordinator; elsewhere nothing happens."""
        if self._reservation is not None:
            self.medium.discard(self._reservation)
            self._reservation = None


def _resolve(planner: SavePlanner, item: WriteItem) -> write_items.Data:
    """What to write; other planners than ours hand over whatever the state has."""
    data = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        return cast(Any, data).getvalue()  # type: ignore[no-any-return]
    assert isinstance(data, torch.Tensor)
    data = settled(data)
    try:
        if is_stored_whole(data):
            return WholeItem.of(data)
        data = data.detach()
        require_memory(data)
    except CheckpointMismatch as error:
        raise CheckpointMismatch(f"{item.index.fqn} is {error}") from error
    return data


def _without_duplicates(
    resolved: list[tuple[WriteItem, Any]],
) -> tuple[list[tuple[WriteItem, Any]], list[tuple[WriteItem, WriteItem]]]:
    """The items to write, and those that equal one of them: the same bytes, or the same memory seen the same way."""
    first: dict[Any, WriteItem] = {}
    unique, same_as = [], []
    for item, data in resolved:
        if isinstance(data, bytes):
            identity: Any = data
        elif isinstance(data, WholeItem):
            identity = memory_of(data.tensor)
        elif data.numel() == 0:
            identity = item.index
        else:
            identity = memory_of(data)
        if identity in first:
            same_as.append((item, first[identity]))
        else:
            first[identity] = item
            unique.append((item, data))
    return unique, same_as


def _file_sizes(directory: Path) -> dict[str, int]:
    names = sorted(name for name in os.listdir(directory) if name.endswith(DATA_SUFFIX))
    return {name: (directory / name).stat().st_size for name in names}


def _entries(metadata: Metadata, places: dict[MetadataIndex, Location]) -> Iterator[tuple[str, Entry]]:
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            yield key, StoredValue(places[MetadataIndex(key)])
        else:
            chunks = tuple(
                StoredChunk(tuple(c.offsets), tuple(c.sizes), places[MetadataIndex(key, c.offsets)])
                for c in stored.chunks
            )
            yield key, StoredTensor(stored.properties.dtype, tuple(stored.size), chunks)
