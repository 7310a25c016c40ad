"""Writers of a checkpoint: data files on every rank, then the metadata and the commit on the coordinator.

- :class:`PartWriter` writes one rank's part of a save and returns the place of each item.
- :class:`Publication` is the unpublished checkpoint on the coordinator: reserved, then published or discarded.

Two items on one rank that have the same memory or the same bytes (tied weights, equal values) are written once.
"""

from __future__ import annotations

import platform
import time
import uuid
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import StorageMeta

from dcp_plugin.core.errors import SaveFailed, UnsafeCheckpoint
from dcp_plugin.core.format import DATA_SUFFIX, INDEX, METADATA, SUMMARY, Pieces, index_file
from dcp_plugin.core.format import metadata as dcp_metadata
from dcp_plugin.core.format.index import NO_TENSOR, CheckpointIndex, Places
from dcp_plugin.core.format.metadata import Aliases, Views
from dcp_plugin.core.format.summary import MOST_DIFFERING, Summary, fingerprint, time_after
from dcp_plugin.core.format.values import WholeItem
from dcp_plugin.core.media import Medium, Readable, Reservation, refuse_real_run
from dcp_plugin.core.paths import Where
from dcp_plugin.core.ranks.launcher import launch_record
from dcp_plugin.core.records import NewItem, Spent, WrittenPart  # noqa: F401  (journals name Spent here)
from dcp_plugin.core.storage import write_items
from dcp_plugin.core.storage.published import comparisons_below, hash_of, newest_time
from dcp_plugin.core.storage.reuse import NOTHING, Findings, Reuse
from dcp_plugin.core.tensors.kinds import memory_of
from dcp_plugin.core.types import VERSION


@dataclass(frozen=True)
class PartWriter:
    """Writer of one rank's part of a save into its data files, which it syncs."""

    path: Where
    """Final path of the checkpoint, for events and errors."""
    medium: Medium
    io_threads: int
    reuse: Reuse | None
    """This rank's knowledge of the run's last checkpoint; if None, everything is written."""

    def write(self, items: Sequence[NewItem], rank: int, directory: Where, frozen: Collection[str] = ()) -> WrittenPart:
        """Link the unchanged items and write the others.

        Args:
            rank: The rank whose part this is.
            directory: The reserved directory of the save, for the files of all ranks.
            frozen: Keys of parameters that are not trained.

        Raises:
            SaveFailed: The files could not be written.
        """
        self.medium.join(directory, self.path)
        to = write_items.Destination(self.medium, directory, rank, self.io_threads)
        unique, first = _without_duplicates(items)
        try:
            places, nbytes, findings = self._write(unique, to, frozen)
            self.medium.flush(directory)
        except OSError as error:
            raise SaveFailed(f"cannot save {self.path}: {error}. {self.medium.advice}") from error
        if len(unique) < len(items):
            places = places.take(np.array(first))
        return WrittenPart(places, nbytes, len(findings.linked), findings.bytes, findings.why_not)

    def _write(
        self, items: list[NewItem], to: write_items.Destination, frozen: Collection[str]
    ) -> tuple[Places, int, Findings]:
        reuse, findings = self.reuse, NOTHING
        if reuse is not None:
            findings = reuse.examine(items, frozen, to)
        new_slots = [slot for slot in range(len(items)) if slot not in findings.linked]
        stable = {position for position, slot in enumerate(new_slots) if slot in findings.stable}
        places = write_items.write([items[slot].data for slot in new_slots], to, self.path, stable, findings.names)
        nbytes = places.nbytes
        if reuse is not None and stable:  # if nothing is stable, wrote() would list the objects of a store in vain
            reuse.wrote({new_slots[at]: places.location(at) for at in stable}, self.medium, to.directory)
        if findings.linked:
            linked = replace(Places.of(list(findings.linked.values())), linkable=findings.names)
            places = Places.joined([linked, places])
            # Linked items are first in the columns now. The argsort of a permutation is its inverse, which restores the
            # order of the items.
            places = places.take(np.argsort([*findings.linked, *new_slots], kind="stable"))
        return places, nbytes, findings


@dataclass(frozen=True)
class Facts:
    """Facts that a checkpoint records about itself in addition to its index: in its summary, and for stock readers.

    All but ``views`` and ``aliases`` are fields of :class:`~dcp_plugin.core.format.summary.Summary`.
    """

    step: int | None = None
    world_size: int = 1
    views: Views = field(default_factory=dict)
    """Additional tables of contents, see :mod:`dcp_plugin.core.format.metadata`."""
    aliases: Aliases = field(default_factory=dict)
    """Additional keys for stock readers, see :mod:`dcp_plugin.core.format.metadata`."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    optimizers: Mapping[str, str] = field(default_factory=dict)
    layouts: Sequence[str] = ()
    exclude: Sequence[str] = ()
    base: Mapping[str, str] = field(default_factory=dict)
    reused: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    differing: Mapping[str, Sequence[int]] = field(default_factory=dict)


class Publication:
    """Checkpoint that is not yet published.

    The coordinator reserves its directory, and later publishes or discards it. Other ranks reserve nothing, so their
    :meth:`discard` has no effect.
    """

    def __init__(self, path: Where, medium: Medium) -> None:
        self.path = path
        self.medium = medium
        # Every rank makes an identity, and only that of the coordinator is recorded and reported. A common identity
        # would take a message before the plan.
        self.save_id = str(uuid.uuid4())
        self.published = False
        """True if the checkpoint is at ``path``."""
        self._reservation: Reservation[Any] | None = None
        self._written: Readable | None = None

    @property
    def directory(self) -> Where | None:
        """Directory for the files of this save; None if none is reserved."""
        return self._reservation.directory if self._reservation else None

    @property
    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)

    def reserve(self, among_other_files: bool = False, recorded: float | None = None) -> Where:
        """Return the directory that this save writes to. The first call makes it.

        See :meth:`dcp_plugin.core.media.medium.Medium.reserve`.
        """
        if self._reservation is None:
            refuse_real_run(self.path.parent, self.medium, self.path.name)
            self._reservation = self.medium.reserve(self.path, among_other_files, recorded=recorded)
        return cast(Where, self._reservation.directory)

    def file_sizes(self) -> dict[str, int]:
        """Return the sizes in bytes of the data files of all ranks, by name."""
        assert self._reservation is not None, "the coordinator has reserved it"
        self._written = files = self.medium.open(self._reservation.directory)
        return {name: files.size(name) for name in files.names() if name.endswith(DATA_SUFFIX)}

    def compose_and_commit(self, index: CheckpointIndex, facts: Facts, seen: float = 0.0) -> Summary:
        """Publish: write the metadata and make the directory the checkpoint at ``path``, replacing an existing one.

        The medium commits (:meth:`~dcp_plugin.core.media.medium.Medium.publish`).

        Args:
            seen: The greatest recorded time that the caller knows of the run. The times of the checkpoints next to
                ``path`` are read in addition.

        Returns:
            The content of ``dcp_plugin.json``.

        Raises:
            SaveFailed: The file system failed; ``path`` keeps its earlier content.
            DurabilityUnknown: The checkpoint is published, but a loss of power may undo that.
            UnsafeCheckpoint: The ``planner_data`` of another package's planner needs code to be restored.
        """
        assert self._reservation is not None, "the coordinator has reserved it"
        # The listing of file_sizes() serves again: in a store, another one takes more requests.
        names = (self._written or self.medium.open(self._reservation.directory)).names()
        extra_files = {name.rstrip("/") for name in names if not name.endswith(DATA_SUFFIX)} - set(facts.views)
        saved = self._reservation.time or recorded_time(
            max(seen, newest_time(self.medium, self.path.parent)), time.time()
        )
        try:
            index.extra_files = comparisons_below(self.medium, self._reservation.directory) if extra_files else {}
            files, summary = compose(self.path, self.storage_meta, index, facts, extra_files, saved)
            self.medium.publish(self._reservation, files)
        except OSError as error:
            raise SaveFailed(f"cannot commit {self.path}: {error}. {self.medium.advice}") from error
        self._reservation, self.published = None, True
        return summary

    def discard(self, all_ended: bool = True) -> None:
        """Delete the files that this save has written, unless it is published.

        Args:
            all_ended: True if no rank writes to the directory any more.
        """
        if self._reservation is not None:
            self.medium.discard(self._reservation, all_ended)
            self._reservation = None


def recorded_time(seen: float, now: float) -> float:
    """Return the recorded time of a save that begins now, in seconds since the epoch.

    Checkpoints are sorted by this time, so it must not be earlier than that of an older save. A clock may be set back,
    or the clock of another host may be ahead.

    Args:
        seen: The greatest recorded time that is known of the run.
        now: The time by the clock of the store, or of this host without a store.
    """
    return max(now, time_after(seen))


def compose(
    path: Where, meta: StorageMeta, index: CheckpointIndex, facts: Facts, extra_files: Collection[str], saved: float
) -> tuple[dict[str, bytes | Pieces], Summary]:
    """Return the files that turn data files into a checkpoint, in the order of their writing, and the summary.

    Args:
        path: Path of the checkpoint, for errors.
        index: The index of all data files. ``index.extra_files`` has the comparisons of ``extra_files``. The function
            adds those of views.
        extra_files: The names of extra files and folders next to the data files.
        saved: Time of the save, in seconds since the epoch.

    Raises:
        UnsafeCheckpoint: The ``planner_data`` of another package's planner needs code to be restored.
    """
    views = dcp_metadata.encoded_views(facts.views, index, meta)
    index.extra_files |= {name: hash_of(data) for name, data in views.items()}
    try:
        encoded = index_file.encode(index)
    except UnsafeCheckpoint as error:
        raise UnsafeCheckpoint(
            f"cannot save {path}: the planner_data that the planner has put into the metadata is {error}. "
            f"Make it plain (numbers, text, lists, dicts, tensors)."
        ) from error
    for_stock = Pieces(partial(dcp_metadata.pieces, dcp_metadata.with_aliases(index, facts.aliases), meta))
    values = int((index.table.columns["dtype"] == NO_TENSOR).sum())
    summary = Summary(
        step=facts.step,
        time=saved,
        world_size=facts.world_size,
        tensors=len(index) - values,
        values=values,
        payload_bytes=index.payload_bytes,
        index_sha256=fingerprint(encoded),
        metadata_sha256=for_stock.sha256,
        save_id=str(meta.save_id),
        kinds=dict(facts.kinds),
        optimizers=dict(facts.optimizers),
        layouts=list(facts.layouts),
        attached=sorted({*extra_files, *facts.views}),
        versions={"dcp_plugin": VERSION, "torch": torch.__version__, "python": platform.python_version()},
        reused=dict(facts.reused),
        base=dict(facts.base),
        exclude=list(facts.exclude),
        metrics=dict(facts.metrics),
        launch=launch_record(),
        differing={key: list(ranks) for key, ranks in islice(facts.differing.items(), MOST_DIFFERING)},
    )
    return {INDEX: encoded, SUMMARY: summary.encode(), **views, METADATA: for_stock}, summary


def _without_duplicates(items: Sequence[NewItem]) -> tuple[list[NewItem], list[int]]:
    """Return the items to write, each once, and for each of ``items`` its position among these.

    Values are the same if their bytes are equal, tensors if they are the same view of the same memory.
    """
    # Most tensors share no address with another, and need no further comparison. Address 0 stands for data without an
    # address of its own: values, empty tensors and tensors that torch.save writes.
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
