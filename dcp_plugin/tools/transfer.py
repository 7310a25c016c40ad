"""Copy one checkpoint to another path, by the commit rule of the target's medium.

On a disk a copy has the files of the source under their names. In a bucket, data files of a checkpoint of this package
get a token into their names (:mod:`dcp_plugin.core.format.packed`), so its tables of contents are rewritten. The token
and every byte of the tables depend on the save alone. A repeated copy therefore finds the files of an interrupted one:
in a bucket by their names. On a disk a file has another name until it is complete and durable; a repeated copy compares
its bytes with their checksums, or its time with that of the source if the source has no checksums.
"""

from __future__ import annotations

import collections
import errno
import os
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from dcp_plugin.core.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointUnreadable,
    SaveFailed,
    damage_in,
)
from dcp_plugin.core.format import INDEX, METADATA, SUMMARY, index_file, json_object, packed, read
from dcp_plugin.core.format.index import CheckpointIndex
from dcp_plugin.core.format.metadata import with_renamed_files
from dcp_plugin.core.format.summary import Summary, fingerprint, with_hash
from dcp_plugin.core.media import CannotLink, DataFile, Medium, RangedFile, Readable, locate, medium_of, tree
from dcp_plugin.core.media.copies import copy_target
from dcp_plugin.core.media.packed_view import PackedFiles
from dcp_plugin.core.paths import Where, on_file_system
from dcp_plugin.core.records import OpenCheckpoint
from dcp_plugin.core.storage.open import check_files, open_checkpoint
from dcp_plugin.core.storage.published import BYTES, gone_or_damaged, hash_of
from dcp_plugin.core.storage.stream_copy import PIECE, FileCheck, ItemsCheck, PipelinedCopy, SourceError, check_of
from dcp_plugin.tools.stream import Counter

_PASSES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
"""Lasting errors of the target: no file is kept for another attempt."""
_PART_OF_FLIGHT = 2
"""Divisor of the bytes in flight: a copy uses half of those that a rank of a save may have on the way to a store."""
FileIdentity = tuple[int, int, int, int]


@dataclass(frozen=True)
class Source:
    """A checkpoint to be copied. The caller of :func:`open_source` closes it."""

    path: Where
    files: Readable
    sizes: dict[str, int]
    """Usual names of the files -> their bytes."""
    token: str
    """The token of the save. All copies of a save have the same token."""
    opened: OpenCheckpoint | None = None
    """None for a format that this package cannot open."""
    is_file: bool = False
    left_out: tuple[str, ...] = ()
    """Files that are not copied, with the reasons."""

    @property
    def summary(self) -> Summary | None:
        """None for a checkpoint of another tool."""
        return None if self.opened is None else self.opened.summary

    @property
    def index(self) -> CheckpointIndex:
        assert self.opened is not None, "only checkpoints of this package are asked for their index"
        return self.opened.index

    def stored(self, name: str) -> Where:
        """Return the path of a file."""
        return self.path if self.is_file else self.path / name

    def stamp(self, name: str) -> FileIdentity | None:
        """Return the identity of a file on the disk, which its hard links share; None if it cannot have any."""
        path = on_file_system(self.stored(name))
        if path is not None:
            with suppress(OSError):
                stat = os.stat(path)
                return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) if stat.st_nlink > 1 else None
        return None

    def open(self, name: str) -> RangedFile:
        """Open a file.

        Raises:
            SourceError: The file cannot be opened, or has become a link out of the checkpoint since it was listed.
        """
        may_be_outside = self.is_file or (self.opened is not None and name in self.opened.index.files)
        try:
            file = self.files.open(name)
            if file.is_outside and not may_be_outside:
                file.close()
                raise OSError(errno.ELOOP, "it is a link out of the checkpoint")
        except OSError as error:
            raise SourceError(name, error) from error
        return file

    def check(self, name: str) -> FileCheck | None:
        """Return the check of a file by its checksums; None if the checkpoint has none of it."""
        return None if self.summary is None else check_of(self.index, name, self.files.where)

    def close(self) -> None:
        self.files.close()


def open_source(path: Where, of_others: bool = False) -> Source:
    """Open the checkpoint at a path for copying.

    Args:
        of_others: Accept a directory that this package cannot open: it is a checkpoint of another tool.

    Raises:
        CheckpointError: The path has no checkpoint, or it cannot be read.
    """
    medium = medium_of(path)
    with damage_in(path):
        if medium.kind(path) == "file":
            files = medium.open(path.parent)
            sizes = {path.name: files.size(path.name)}
            return Source(path, files, sizes, _token_of(files, sizes), is_file=True)
        try:
            opened: OpenCheckpoint | None = open_checkpoint(path)
        except CheckpointError:
            if not of_others:
                raise
            opened = None
        location = locate(path)
        if opened is not None and opened.path not in (path, location):
            opened.close()
            raise CheckpointMismatch(f"{path} is a part of {opened.path}: copy that.")
        files = medium.open(location, pin=True) if opened is None else opened.files
        return _of_folder(path, files, opened, tree(medium, location))


def _of_folder(path: Where, files: Readable, opened: OpenCheckpoint | None, stored: list[str]) -> Source:
    names = files.tree(stored) if isinstance(files, PackedFiles) else stored
    outside = {name for name in names if files.leads_elsewhere(name)}
    summary = None if opened is None else opened.summary
    if opened is not None and summary is not None:
        check_files(opened, opened.index.files)
        own_names = {*opened.index.files, INDEX, SUMMARY, METADATA, *opened.index.extra_files}
        if wrong := sorted(outside & own_names):
            raise CheckpointCorrupt(f"{path}: {wrong[0]} is a link that leaves the checkpoint")
    elif opened is not None:  # files with tensors of another tool may be links
        outside -= opened.index.files.keys()
    sizes = {name: files.size(name) for name in names if name not in outside}
    if opened is None or summary is None:
        token = _token_of(files, sizes)
    else:
        tokens = {packed.token_in(name) for name in opened.index.files}
        token = tokens.pop() if len(tokens) == 1 else ""
        token = token or packed.new_token(summary.time, summary.save_id.encode())
    left_out = [f"{path}/{name}: a link that leads elsewhere" for name in sorted(outside)]
    return Source(path, files, sizes, token, opened, left_out=tuple(left_out))


def _token_of(files: Readable, sizes: Mapping[str, int]) -> str:
    rows = [(name, size, files.modified(name)) for name, size in sorted(sizes.items())]
    return packed.new_token(max((row[2] for row in rows), default=0.0), repr(rows).encode())


def is_same(source: Source, target: Source) -> bool:
    """Return whether two checkpoints are of the same save. Those of other tools are compared file by file."""
    first, second = source.summary, target.summary
    if first is not None or second is not None:
        return first is not None and second is not None and first.save_id == second.save_id
    if source.sizes != target.sizes and not (source.is_file and target.is_file):
        return False
    pairs = zip(sorted(source.sizes), sorted(target.sizes), strict=True)
    return all(_same_bytes(source.files, name, target.files, target_name) for name, target_name in pairs)


def _same_bytes(files: Readable, name: str, other_files: Readable, other_name: str) -> bool:
    if files.size(name) != other_files.size(other_name):
        return False
    with files.open(name) as file, other_files.open(other_name) as other_file:
        while data := file.read(PIECE):
            if data != other_file.read(len(data)):
                return False
    return True


@dataclass
class CopyState:
    """State that the copies of all checkpoints of one call share."""

    io_threads: int
    count: Counter
    """The progress for the user. Several threads may count."""
    nbytes: collections.Counter[str] = field(default_factory=collections.Counter)
    """Bytes of the files by :attr:`Outcome.how`."""
    unverified: list[str] = field(default_factory=list)
    homes: dict[FileIdentity, tuple[Where, bool]] = field(default_factory=dict)
    """Files of the sources that have several names -> their paths at the target, and whether this process has compared
    the bytes with their checksums. Checkpoints that share a file share it at the target as well."""


@dataclass(frozen=True)
class Outcome:
    """The way of a file to the target."""

    how: Literal["copied", "linked", "reused"]
    unverified: tuple[str, ...] = ()
    """Keys or files whose bytes were not compared with a checksum."""


@dataclass
class Transfer:
    """The copy of one checkpoint to a path."""

    source: Source
    target: Where
    state: CopyState
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        is_ours = self.source.summary is not None
        self.place = copy_target(self.target, self.source.token, is_ours)
        self.medium: Medium = self.place.medium
        self._new_names = self.place.names_of(self.source.index.files) if is_ours else {}

    def name_there(self, name: str) -> str:
        """Return the name of a file at the target."""
        if self.source.is_file:
            return self.target.name
        if name in self._new_names:
            return self._new_names[name]
        summary = self.source.summary
        is_extra_file = summary is not None and name.partition("/")[0] in summary.attached
        return self.place.name_of_extra_file(name) if is_extra_file else name

    def learn_homes(self, verified: bool) -> None:
        """Record the files that are at the target.

        Args:
            verified: This process has compared their bytes with their checksums.
        """
        for name in self.source.sizes:
            if (stamp := self.source.stamp(name)) is not None:
                path = self.target if self.source.is_file else self.target / self.name_there(name)
                self.state.homes.setdefault(stamp, (path, verified))

    def run(self) -> None:
        """Copy the checkpoint. After an error the target path is as before.

        Raises:
            SaveFailed: The target cannot be written.
            CheckpointError: The source is damaged, was deleted, or cannot be read.
        """
        source = self.source
        directory, reservation = self.place.begin(source.is_file)
        try:
            tables, views = self.tables()
            self._copy_all(directory, [name for name in source.sizes if name not in tables and name not in views])
            for name, data in views.items():
                with self.place.create(directory, self.name_there(name), len(data)) as file:
                    file.write(data)
            if not source.is_file:
                self.medium.flush(directory)
                if source.summary is None:
                    self.place.set_time(directory, source.files.modified(""))
            if reservation is not None:
                self.medium.publish(reservation, None if source.is_file else tables)
            for name in (*tables, *views):
                self._add(name, Outcome("copied"))
                self.state.count.add(source.sizes[name])
        except BaseException as error:
            failure, keep = self._failure(error)
            if reservation is not None:  # the medium ignores a published reservation
                self.medium.discard(reservation, keep=keep)
            if failure is error:
                raise
            raise failure from error

    def _failure(self, error: BaseException) -> tuple[BaseException, bool]:
        """Return the error to raise, which names the copy, and whether another attempt may continue with the files."""
        message = f"cannot copy {self.source.path} to {self.target}"
        if isinstance(error, SourceError):
            failure = gone_or_damaged(self.source.files, f"{error} cannot be read", error.error)
            return type(failure)(f"{message}: {failure}"), isinstance(failure, CheckpointUnreadable)
        if isinstance(error, CheckpointCorrupt):
            keep = isinstance(error, CheckpointUnreadable)
            return type(error)(f"{message}: {str(error).rstrip('.')}. Nothing is there that was not before."), keep
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            keep = error.errno not in _PASSES
            again = " The same command goes on from here." if keep else ""
            return SaveFailed(f"{message}: {error}. {self.medium.advice}{again}"), keep
        return error, isinstance(error, KeyboardInterrupt)

    def tables(self) -> tuple[dict[str, bytes], dict[str, bytes]]:
        """Return the files that are published last, and the views with new names in them."""
        source, files, summary = self.source, self.source.files, self.source.summary
        if source.is_file:
            return {}, {}
        if summary is None:
            return {name: self._read(name) for name in self.place.published_last(source.sizes)}, {}
        index_bytes, metadata, summary_bytes = read(files, INDEX), read(files, METADATA), read(files, SUMMARY)
        hashes = fingerprint(index_bytes), fingerprint(metadata)
        if hashes != (summary.index_sha256, summary.metadata_sha256):
            raise CheckpointCorrupt(f"{files.where}: {INDEX} or {METADATA} is not the one that was saved")
        if all(old == new for old, new in self._new_names.items()):
            return {INDEX: index_bytes, SUMMARY: summary_bytes, METADATA: metadata}, {}
        views = self._renamed_views(summary)
        # This is a second index in memory: the source is still read by its own.
        index = index_file.decode(index_bytes, summary.index_sha256, f"{files.where}/{INDEX}")
        index.rename_files(self._new_names.__getitem__)
        index.extra_files |= {name: hash_of(data) for name, data in views.items() if name in index.extra_files}
        index_bytes = index_file.encode_alike(index)
        metadata = with_renamed_files(metadata, self._new_names)
        changed = json_object(summary_bytes)
        changed.pop("sha256", None)
        changed |= {"index_sha256": fingerprint(index_bytes), "metadata_sha256": fingerprint(metadata)}
        return {INDEX: index_bytes, SUMMARY: with_hash(changed), METADATA: metadata}, views

    def _read(self, name: str) -> bytes:
        with self.source.open(name) as file:
            return file.read()

    def _renamed_views(self, summary: Summary) -> dict[str, bytes]:
        """Return the tables of contents that name the data files for other readers, with the new names."""
        files, views = self.source.files, {}
        for name in (f"{folder}/{METADATA}" for folder in summary.attached):
            if name not in self.source.sizes:
                continue
            data = read(files, name)
            if self.source.index.extra_files.get(name, hash_of(data)) not in (hash_of(data), f"{len(data)}{BYTES}"):
                raise CheckpointCorrupt(f"{files.where}/{name} is not what was saved with the checkpoint")
            if summary.save_id.encode() in data:
                names = {
                    f"../{old}": f"../{new}" for old, new in self._new_names.items() if f"../{old}".encode() in data
                }
                views[name] = with_renamed_files(data, names)
        return views

    def _copy_all(self, directory: Where, names: list[str]) -> None:
        """Copy or link these files into the directory of the save."""
        source = self.source
        staged = self._staged(directory)
        with suppress(OSError):
            source.files.pin(names)
        self.place.prepare(directory, map(self.name_there, source.sizes))
        in_order = sorted(names, key=lambda name: source.sizes[name], reverse=True)
        at_once = max(1, min(self.state.io_threads, len(names)))
        with (
            PipelinedCopy(at_once, source.files.cost.at_once) as stream,
            ThreadPoolExecutor(at_once, thread_name_prefix="dcp-copy") as pool,
        ):
            jobs = {pool.submit(self._one, directory, name, name in staged, stream, at_once): name for name in in_order}
            try:
                for job in as_completed(jobs):
                    self._add(jobs[job], job.result())
            finally:
                self._stop.set()
                pool.shutdown(cancel_futures=True)

    def _passed(self, count: int) -> None:
        self.state.count.add(count)
        if self._stop.is_set():  # another file has failed
            raise CancelledError

    def _add(self, name: str, outcome: Outcome) -> None:
        self.state.nbytes[outcome.how] += self.source.sizes[name]
        self.state.unverified += outcome.unverified

    def _staged(self, directory: Where) -> set[str]:
        """Return the names of files that an interrupted copy has completed. Delete its other files on a disk."""
        files = self.medium.open(directory)
        staged = {name for name in self.source.sizes if self._is_staged(files, directory, name)}
        self.place.delete_others(directory, {self.name_there(name) for name in staged})
        return staged

    def _is_staged(self, files: Readable, directory: Where, name: str) -> bool:
        """Return whether an interrupted copy has completed a file, and the file is unchanged."""
        name_there, size = self.name_there(name), self.source.sizes[name]

        def is_unchanged() -> bool:
            check = self.source.check(name)
            if check is None:
                modified = self.source.files.modified(name)
                return files.modified(name_there) in (modified, int(modified))  # some file systems store seconds
            with files.open(name_there) as file:
                return _is_intact(file, check)

        with suppress(OSError):
            return self.place.is_complete(files, directory, name_there, name_there != name, size, is_unchanged)
        return False

    def _one(self, directory: Where, name: str, staged: bool, stream: PipelinedCopy, at_once: int) -> Outcome:
        outcome = Outcome("reused") if staged else self._linked(directory, name)
        if outcome is None:
            return self._copied(directory, name, stream, at_once)
        self.state.count.add(self.source.sizes[name])
        return outcome

    def _linked(self, directory: Where, name: str) -> Outcome | None:
        """Link a file that the target has already, or let the store copy it. Return None if neither is possible."""
        source, name_there, stamp = self.source, self.name_there(name), self.source.stamp(name)
        known = None if stamp is None else self.state.homes.get(stamp)
        home = self.place.source_of_link(source.stored(name), name_there, known)
        if home is None:
            return None
        path, verified = home
        shared, check = DataFile((path,), source.sizes[name]), source.check(name)
        with suppress(CannotLink):
            if not verified and check is not None:
                with shared.opened(self.medium) as (file, shared):
                    if not _is_intact(file, check):
                        return None
            self.medium.link_file(shared, directory / name_there)
            return Outcome("linked", self.place.unverified(source.stored(name)))
        return None

    def _copied(self, directory: Where, name: str, stream: PipelinedCopy, at_once: int) -> Outcome:
        source, size, check = self.source, self.source.sizes[name], self.source.check(name)
        modified = source.files.modified(name) if check is None else None
        parts = at_once * _PART_OF_FLIGHT
        with (
            source.open(name) as file,
            self.place.create(directory, self.name_there(name), size, parts, modified) as to,
        ):
            stream.copy(name, file, size, to, check or FileCheck(), self._passed)
        if check is None:
            return Outcome("copied", (str(source.stored(name)),))
        unverified = check.unverified if isinstance(check, ItemsCheck) else ()
        return Outcome("copied", tuple(f"{source.path}: {key}" for key in unverified))


def _is_intact(file: RangedFile, check: FileCheck) -> bool:
    """Return whether a file at the target has the bytes of the save."""
    try:
        while data := file.read(PIECE):
            check.add(memoryview(data))
        check.finish()
    except OSError:
        return False
    return not check.faults
