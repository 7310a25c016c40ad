"""Work of a keeper for its own node: write parts, store the index, copy to other nodes and to the durable path.

The rule: each request can be repeated, and then skips finished work. The coordinator repeats requests after a keeper or
a connection has died.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
import uuid
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from dcp_plugin.core.errors import SaveFailed
from dcp_plugin.core.format import DATA_SUFFIX
from dcp_plugin.core.media import CannotLink, DataFile, Medium, add_files, medium_of
from dcp_plugin.core.media.disk import posix
from dcp_plugin.core.media.disk.local_files import LocalFiles, identity_of
from dcp_plugin.core.paths import Where, as_path, on_file_system, resolved, with_options
from dcp_plugin.core.storage.part_writer import PartWriter
from dcp_plugin.core.storage.published import comparisons_below
from dcp_plugin.core.storage.reuse import Reuse
from dcp_plugin.core.storage.stream_copy import FileCheck, PipelinedCopy, SourceError
from dcp_plugin.tiers import plain
from dcp_plugin.tiers.journal import Journal
from dcp_plugin.tiers.journal_records import End, Part, RankJob
from dcp_plugin.tiers.local_checkpoints import LocalCheckpoint, LocalCheckpoints, Record, has_file, is_inside, put_file
from dcp_plugin.tiers.wire import Address, Channel, connect

_SEND_SECONDS = 60.0
"""Seconds that a neighbour may take to accept further bytes of a file, or to answer for it."""


FileIdentity = tuple[int, int, int, int]


class RateLimiter:
    """Limit of the rate in bytes per second; None for no limit."""

    def __init__(self, rate: float | None) -> None:
        self._rate, self._free = rate, time.monotonic()

    def passed(self, count: int) -> None:
        """Wait until the bytes that have just passed are within the limit."""
        if self._rate is not None:
            # Time that was not used counts for at most a second, so that a pause allows no long burst.
            self._free = max(self._free, time.monotonic() - 1.0) + count / self._rate
            if (ahead := self._free - time.monotonic()) > 0:
                time.sleep(ahead)


@dataclass
class Node:
    """Work of one keeper for its node."""

    journal: Journal
    _reuse: dict[tuple[int, bool], Reuse] = field(default_factory=dict)
    """Rank, and True for the local tier or False for the durable path -> knowledge of the rank's last checkpoint
    there."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _locks: dict[tuple[str, str], threading.Lock] = field(default_factory=dict)
    """Save and request -> its lock. A request may be repeated while it is still running."""
    _drained: dict[FileIdentity, DataFile] = field(default_factory=dict)
    """Local data file -> the file in the last durable checkpoint with the same contents."""
    _sent: dict[tuple[Address, FileIdentity], tuple[str, str]] = field(default_factory=dict)
    """Neighbour and local data file -> the save and the name under which the neighbour has the file."""
    _tiers: dict[Path, LocalCheckpoints] = field(default_factory=dict)
    """Folder -> a local tier with saves of this keeper that are also copied to the durable storage."""

    def _lock_of(self, token: str, what: str) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault((token, what), threading.Lock())

    # Requests of the coordinator

    def write(self, token: str, ranks: Sequence[int], directory: Where | None) -> dict[int, Part]:
        """Write the parts that these ranks of the node have handed over.

        Args:
            directory: The directory to write to; None: ``keeper.dir``.

        Raises:
            SaveFailed, OSError: A part could not be written.
        """
        threads = ThreadPoolExecutor(max(1, len(ranks)), thread_name_prefix="keeper-write")
        with self._lock_of(token, "write"), threads as pool:
            written = pool.map(lambda rank: self._write(token, rank, directory), ranks)
            return dict(zip(ranks, written, strict=True))

    def free(self, token: str) -> None:
        """Release the host copies of a save after all nodes have written their parts. Later saves reuse the memory."""
        self.journal.change(token, written=True)

    def _write(self, token: str, rank: int, directory: Where | None) -> Part:
        if (written_before := self.journal.part(token, rank, directory)) is not None:
            return written_before
        self.journal.refuse_revoked(token)
        job, began = self.journal.job(token, rank), time.monotonic()
        if self.journal.state(token).written:
            raise SaveFailed(f"{job.path} cannot be written again: another save uses its host copy")
        to: Where
        if directory is None:
            to = folder = self.local_checkpoints(job).make(token)
            for partial in folder.glob(f"__{rank}_*"):  # from a keeper that died during a write
                partial.unlink()
        else:
            to = with_options(directory, job.options or {})
        medium = medium_of(to, job.config.io.direct)
        reuse = self._reuse_of(job, local=directory is None)
        writer = PartWriter(job.where, medium, job.config.io.threads, reuse)
        try:
            items = list(plain.decode(job.items).decoded(self.journal.spool))
        except OSError as error:
            raise SaveFailed(f"the host copy of rank {rank} for {job.path} is gone ({error})") from error
        written = writer.write(items, rank, to, job.frozen)
        spent = replace(job.spent, write_seconds=time.monotonic() - began)
        extra_files = self.journal.files_of(token, rank)
        comparisons: dict[str, str] = {}
        if extra_files.is_dir():
            add_files(medium, to, lambda target: copy_tree(extra_files, target))
            comparisons = comparisons_below(medium_of(extra_files), extra_files)
        sizes = {name: (extra_files / name).stat().st_size for name in comparisons}
        written_here = folder.glob(f"__{rank}_*{DATA_SUFFIX}") if directory is None else ()
        files = {file.name: file.stat().st_size for file in written_here}
        part = Part(replace(written, spent=spent), files, comparisons, sizes, str(directory or ""))
        self.journal.add_part(token, rank, part)
        return part

    def _reuse_of(self, job: RankJob, local: bool) -> Reuse | None:
        if not job.config.reuse:
            return None
        reuse = self._reuse.get((job.rank, local))
        if reuse is None:
            reuse = self._reuse[job.rank, local] = Reuse()
            checkpoints = self.local_checkpoints(job).all() if local else []
            # A new keeper, or the successor of a dead one, links from the newest complete save in the local tier.
            if complete := [checkpoint for checkpoint in checkpoints if checkpoint.record.complete]:
                reuse.note_loaded(complete[-1].folder)
        if not local and job.loaded is not None:
            reuse.note_loaded(as_path(job.loaded, job.options))
        return reuse

    @staticmethod
    def local_checkpoints(job: RankJob) -> LocalCheckpoints:
        """Return the parts in this node's ``keeper.dir`` of the saves to the folder of a save."""
        assert job.keeper.dir is not None
        return LocalCheckpoints(Path(job.keeper.dir), resolved(job.path.parent))

    def take(self, token: str, ranks: Sequence[int], files: dict[str, bytes], record: Record) -> None:
        """Store the index and the record next to this node's part, which can be recovered afterwards.

        Raises:
            OSError: The disk failed.
        """
        self.journal.refuse_revoked(token)
        job = self.journal.job(token, ranks[0])
        checkpoints = self.local_checkpoints(job)
        folder = checkpoints.make(token)
        if job.keeper.durable_every is not None:
            self._tiers[checkpoints.folder] = checkpoints
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            put_file(folder, name, data)
        # The record is written last, since a folder with a record counts as a save. Data files are synced already.
        posix.sync_tree(folder, but=DATA_SUFFIX)
        LocalCheckpoint(folder, record).write()
        for rank in ranks:
            if (reuse := self._reuse.get((rank, True))) is not None:
                reuse.published(folder)

    def replicate(self, token: str, rank: int, names: Sequence[str], to: Sequence[Address], key: bytes) -> None:
        """Copy files of this node's part to other nodes.

        Raises:
            OSError: A node cannot be reached, or has no room.
        """
        folder = self.local_checkpoints(self.journal.job(token, rank)).folder_of(token)
        with self._lock_of(token, "replicate"):
            for address in to:
                with closing(connect(address, key)) as neighbour:
                    for name in names:
                        self._send(neighbour, address, folder, token, name)

    def _send(self, neighbour: Channel, address: Address, folder: Path, token: str, name: str) -> None:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            identity = address, identity_of(status)
            same_as = self._sent.get(identity)
            # The neighbour links its own copy of an earlier save's file, if that is the same file here.
            is_needed = neighbour.ask(_SEND_SECONDS, "put", token, name, status.st_size, same_as).get()
            if is_needed:
                neighbour.send_file(descriptor, 0, status.st_size)
                neighbour.reply().get()
            if name.endswith(DATA_SUFFIX):
                self._sent[identity] = token, name
        finally:
            os.close(descriptor)

    def put(self, channel: Channel, token: str, name: str, size: int, same_as: tuple[str, str] | None) -> None:
        """Take a file of another node's part. The channel sends the bytes, unless this node has them already.

        Args:
            same_as: Save and name of a file of this node that has the same bytes; None if there is none.
        """
        ranks = self.journal.ranks_of(token)
        checkpoints = self.local_checkpoints(self.journal.job(token, ranks[0])) if ranks else None
        # Another host has sent the names: they must not lead out of the folder of the save.
        outside = not is_inside(name) or not is_inside("/".join(same_as or (token, name)))
        try:
            if checkpoints is None or not checkpoints.folder_of(token).is_dir() or outside:
                raise SaveFailed(f"this node does not take part in the save {token}")
            target = checkpoints.folder_of(token) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if has_file(target, size) or (
                same_as is not None and _linked(checkpoints.folder_of(same_as[0]) / same_as[1], target, size)
            ):
                channel.send(("ok", False))
                return
            half = target.with_name(f".{uuid.uuid4().hex}.half")  # a repeated request may send the same file
            _make_room(half, size)
        except (OSError, SaveFailed) as error:
            channel.send(("error", error))
            return
        channel.send(("ok", True))
        try:
            _receive_file(channel, half, size)
            os.replace(half, target)
        except BaseException as error:
            half.unlink(missing_ok=True)
            if isinstance(error, OSError):
                channel.send(("error", error))
            raise
        channel.send(("ok", False))

    def complete(self, token: str, ranks: Sequence[int], needed: Collection[str], run: str, copies: int) -> None:
        """Mark a save complete, after all nodes have their parts and copies. Delete all saves but the newest
        ``keeper.keep`` and the needed ones.

        Args:
            copies: The number of other nodes that have a copy of each node's part.
            run: As in :class:`~dcp_plugin.tiers.local_checkpoints.Record`, if it is known.
        """
        job = self.journal.job(token, ranks[0])
        checkpoints = self.local_checkpoints(job)
        if (checkpoint := checkpoints.find(token)) is None:
            raise SaveFailed(f"the part of {job.path} on this node is gone")
        checkpoint.mark_complete(run)
        deleted = checkpoints.keep(job.keeper.keep, {*needed, token})
        self._sent = {key: sent for key, sent in self._sent.items() if sent[0] not in deleted}
        checkpoints.collect_garbage(lambda: {*needed, *self.journal.in_flight()})
        self.journal.forget_before(token, needed)
        self.journal.change(token, written=True, local=True, copies=copies)

    def drain(self, token: str, rank: int, names: Sequence[str], directory: Where, renamed: str) -> None:
        """Copy files of this node's part to the durable storage. Link files that the storage has already.

        Args:
            directory: The reserved directory in the storage.
            renamed: Text that takes the place of the token in the names of data files in the storage.

        Raises:
            OSError, SaveFailed: The storage failed.
        """
        with self._lock_of(token, "drain"):
            self._drain(self.journal.job(token, rank), names, directory, renamed)

    def _drain(self, job: RankJob, names: Sequence[str], directory: Where, renamed: str) -> None:
        token, directory = job.token, with_options(directory, job.options or {})
        folder = self.local_checkpoints(job).folder_of(token)
        medium = medium_of(directory, job.config.io.direct)
        medium.join(directory, job.path)
        pace = RateLimiter(job.keeper.bandwidth)
        data = [name for name in names if name.endswith(DATA_SUFFIX) and "/" not in name]
        copies: dict[FileIdentity, tuple[DataFile, str]] = {}

        def copy(name: str) -> None:
            new_name = name.replace(f"-{token}", f"-{renamed}")
            identity = identity_of(os.stat(folder / name))
            if (drained := self._drained.get(identity)) is not None:
                with suppress(CannotLink):
                    copies[identity] = medium.link_file(drained, directory / new_name), new_name
                    return
            if (
                local := on_file_system(directory)
            ) is not None:  # a node that is gone may have written half of the file
                (local / new_name).unlink(missing_ok=True)
            _copy_file(folder / name, medium, directory, new_name, pace, job.config.io.threads)
            copies[identity] = DataFile.written(medium.open(directory), directory / new_name), new_name

        with ThreadPoolExecutor(max(1, job.config.io.threads), thread_name_prefix="keeper-drain") as pool:
            list(pool.map(copy, data))
        if rest := [name for name in names if name not in data]:
            add_files(medium, directory, lambda target: _copy_files(folder, rest, target))
        medium.flush(directory)
        with self._lock:
            self._drained = {key: file.published(job.where / name) for key, (file, name) in copies.items()}

    def end(self, token: str, ranks: Sequence[int], end: End, path: Where | None = None) -> None:
        """Record the end of a save to a path, and free its memory."""
        if end.published and path is not None:
            for rank in ranks:
                if (reuse := self._reuse.get((rank, False))) is not None:
                    reuse.published(path)
        self.journal.end(token, end)
        with self._lock:
            for what in [what for what in self._locks if what[0] == token]:
                del self._locks[what]

    def reopen(self, token: str) -> None:
        """Take back the end of a save that has ended locally, so that it can be copied to its path."""
        self.journal.change(token, end=None)

    def free_memory(self) -> None:
        """Delete the saves in memory after a normal end of the training, if the newest save is durable. They would
        occupy memory after the job."""
        for tier in self._tiers.values():
            with suppress(OSError):
                parts = tier.all() if tier.is_in_memory() else []
                end = self.journal.state(parts[-1].record.token).end if parts else None
                if end is not None and end.published:
                    for part in parts:
                        tier.remove(part.record.token)


def _linked(known: Path, target: Path, size: int) -> bool:
    if not has_file(known, size):
        return False
    with suppress(OSError):
        os.link(known, target)
        return True
    return False


def _make_room(path: Path, size: int) -> None:
    """Make an empty file with reserved space for its bytes. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise OSError(error.errno or errno.ENOSPC, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def _receive_file(channel: Channel, path: Path, size: int) -> None:
    memory = memoryview(bytearray(min(size, 1 << 20)))
    with open(path, "r+b", buffering=0) as file:
        left = size
        while left:
            piece = memory[: min(left, len(memory))]
            channel.receive_into([piece])
            file.write(piece)
            left -= len(piece)
        os.fsync(file.fileno())


def _copy_file(source: Path, medium: Medium, directory: Where, name: str, pace: RateLimiter, at_once: int) -> None:
    size = source.stat().st_size
    with (
        PipelinedCopy(1) as stream,
        LocalFiles(source.parent).open(source.name) as file,
        medium.create(directory, name, size, at_once=at_once) as to,
    ):
        try:
            stream.copy(source.name, file, size, to, FileCheck(), pace.passed)
        except SourceError as error:
            raise error.error from None


def copy_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True, symlinks=True)


def _copy_files(folder: Path, names: Sequence[str], target: Path) -> None:
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, target / name)
