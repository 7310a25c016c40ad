"""One checkpoint, from one place to another, by the commit rule of the place that it comes to.

On a disk a copy has the files of the source under their names. In a bucket the data files of one of ours get the token
of the copy into their names (:mod:`dcp_plugin.format.packed`), so its tables of contents are made anew; the token comes
from the save alone, and so does every byte of the tables. The same copy, tried again, therefore finds what an earlier
try has left: in a bucket by the names, on a disk by a note of what was copied completely.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from dcp_plugin.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointUnreadable,
    SaveFailed,
    damage_in,
)
from dcp_plugin.format import DATA_SUFFIX, INDEX, METADATA, PACKED, SUMMARY, index_file, packed, read
from dcp_plugin.format.metadata import with_renamed_files
from dcp_plugin.format.summary import Summary, fingerprint, with_hash
from dcp_plugin.media import CannotLink, DataFile, Medium, RangedFile, Readable, Reservation, locate, medium_of, tree
from dcp_plugin.media.packed import PackedFiles
from dcp_plugin.paths import ObjectPath, Where, relative_to
from dcp_plugin.records import OpenCheckpoint
from dcp_plugin.storage.extra_files import hash_of
from dcp_plugin.storage.open import check_files, completed, open_alone
from dcp_plugin.storage.passing import (
    PIECE,
    Look,
    LookAtHash,
    LookAtItems,
    Memory,
    SourceError,
    Way,
    check_between,
    look_at,
)
from dcp_plugin.storage.published import gone_or_damaged

_WORTH_NOTING = 1 << 20
"""Bytes of a file from which on it is noted that it is complete; a smaller one is copied again as fast."""
_LAST = (f"/{METADATA}", ".index.json")
"""How names of files end that name other files: they come last where files come one by one."""
_MOST_LAST = 64 << 20
_PASSES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
"""What does not pass by itself: nothing is kept for another try."""
_AHEAD_OF_STREAMS = 16
"""Pieces that are asked for at a time, of all files together, where each is a request."""
_PART_OF_FLIGHT = 2
"""A copy has the half of what a rank of a save may have on the way to a store: nobody else needs these bytes."""
FileIdentity = tuple[int, int, int, int]


@dataclass(frozen=True)
class Source:
    """A checkpoint to be copied. Whoever has opened it closes it."""

    path: Where
    files: Readable
    sizes: dict[str, int]
    """Bytes of each file, by its usual name."""
    token: str
    """Of the save: equal for the same one, wherever it is."""
    opened: OpenCheckpoint | None = None
    """None for what has no form that we can open."""
    is_file: bool = False
    left_out: tuple[str, ...] = ()
    """Files that are not copied, and why."""

    @property
    def ours(self) -> OpenCheckpoint | None:
        return self.opened if self.opened is not None and self.opened.summary is not None else None

    @property
    def summary(self) -> Summary:
        assert self.opened is not None and self.opened.summary is not None, "only asked of ours"
        return self.opened.summary

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())

    def stamp(self, name: str) -> FileIdentity | None:
        """What tells a file from others that have no byte in common with it on the disk; None if it is no link."""
        if not isinstance(self.path, Path):
            return None
        with suppress(OSError):
            found = os.stat(self.path if self.is_file else self.path / name)
            if found.st_nlink > 1:
                return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        return None

    def open(self, name: str) -> RangedFile:
        """Open a file.

        Raises:
            SourceError: It cannot be opened, or has become a link out of the checkpoint since the files were listed.
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

    def read(self, name: str) -> bytes:
        """Return the bytes of a file. Raises SourceError as :meth:`open`."""
        with self.open(name) as file:
            return file.read()

    def close(self) -> None:
        self.files.close()


def open_source(path: Where, of_others: bool = False) -> Source:
    """What is at a path.

    Args:
        of_others: It is known to be a checkpoint of another tool, whatever is in it.

    Raises:
        CheckpointError: There is no checkpoint, or it cannot be read.
    """
    medium = medium_of(path)
    with damage_in(path):
        if medium.kind(path) == "file":
            files = medium.open(path.parent)
            sizes = {path.name: files.size(path.name)}
            return Source(path, files, sizes, _token_of(files, sizes), is_file=True)
        try:
            opened: OpenCheckpoint | None = open_alone(path)
        except CheckpointError:
            if not of_others:
                raise
            opened = None
        there = locate(path)
        if opened is not None and opened.path not in (path, there):
            opened.close()
            raise CheckpointMismatch(f"{path} is a part of {opened.path}: copy that.")
        files = medium.open(there, pin=True) if opened is None else opened.files
        return _of_folder(path, files, opened, tree(there, medium))


def _of_folder(path: Where, files: Readable, opened: OpenCheckpoint | None, stored: list[str]) -> Source:
    names = files.tree(stored) if isinstance(files, PackedFiles) else stored
    elsewhere = {name for name in names if files.leads_elsewhere(name)}
    if opened is not None and opened.summary is not None:
        check_files(opened, opened.index.files)
        known = {*opened.index.files, INDEX, SUMMARY, METADATA, *opened.index.beside}
        if wrong := sorted(elsewhere & known):
            raise CheckpointCorrupt(f"{path}: {wrong[0]} is a link that leaves the checkpoint")
    elif opened is not None:  # whose tensors may be anywhere
        elsewhere -= opened.index.files.keys()
    left_out = [f"{path}/{name}: a link that leads elsewhere" for name in sorted(elsewhere)]
    names = [name for name in names if name not in elsewhere]
    sizes = {name: files.size(name) for name in names}
    if opened is None or opened.summary is None:
        token = _token_of(files, sizes)
    else:
        tokens = {packed.token_in(name) for name in opened.index.files}
        summary = opened.summary
        token = tokens.pop() if len(tokens) == 1 else ""
        identity = summary.save_id or summary.index_sha256
        token = token or packed.new_token(summary.time, identity.encode())
    return Source(path, files, sizes, token, opened, left_out=tuple(left_out))


def _token_of(files: Readable, sizes: Mapping[str, int]) -> str:
    said = [(name, size, files.modified(name)) for name, size in sorted(sizes.items())]
    return packed.new_token(max((one[2] for one in said), default=0.0), repr(said).encode())


def is_same(source: Source, there: Source) -> bool:
    """Whether two checkpoints are of the same save, and have the same files. What has no identity is compared."""
    if source.ours is not None or there.ours is not None:
        if source.ours is None or there.ours is None:
            return False
        mine, other = source.summary, there.summary
        return (mine.save_id or mine.index_sha256) == (other.save_id or other.index_sha256)
    if source.sizes != there.sizes and not (source.is_file and there.is_file):
        return False
    pairs = zip(sorted(source.sizes), sorted(there.sizes), strict=True)
    return all(_same_bytes(source.files, mine, there.files, other) for mine, other in pairs)


def _same_bytes(one: Readable, name: str, other: Readable, other_name: str) -> bool:
    if one.size(name) != other.size(other_name):
        return False
    with one.open(name) as here, other.open(other_name) as there:
        while data := here.read(PIECE):
            if data != there.read(len(data)):
                return False
    return True


@dataclass
class Counts:
    """What a copy has done so far. Threads add to it."""

    copied: int = 0
    linked: int = 0
    reused: int = 0
    unverified: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, copied: int = 0, linked: int = 0, reused: int = 0, unverified: tuple[str, ...] = ()) -> None:
        with self._lock:
            self.copied += copied
            self.linked += linked
            self.reused += reused
            self.unverified += unverified

    @property
    def done(self) -> int:
        return self.copied + self.linked + self.reused


@dataclass
class Homes:
    """Files of the sources that are at the target already, for those that share them."""

    _known: dict[FileIdentity, tuple[Where, bool]] = field(default_factory=dict)

    def learn(self, source: Source, target: Where, name_there: Callable[[str], str], verified: bool) -> None:
        """A checkpoint is at the target.

        Args:
            verified: This process has read its bytes.
        """
        for name in source.sizes:
            if (stamp := source.stamp(name)) is not None:
                self._known.setdefault(stamp, (target / name_there(name), verified))

    def of(self, stamp: FileIdentity | None) -> tuple[Where, bool] | None:
        return None if stamp is None else self._known.get(stamp)


class _Stopped(Exception):
    """Another thread has failed."""


@dataclass
class Transfer:
    """The copy of one checkpoint to a path.

    Args:
        base_there: Where the base of a checkpoint will be, by where it is now.
        tell: Called from time to time, on the thread that calls :meth:`run`.
    """

    source: Source
    target: Where
    io_threads: int
    counts: Counts
    homes: Homes
    base_there: Callable[[Where], Where | None]
    tell: Callable[[], None]
    _noted: dict[str, list[Any]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.medium: Medium = medium_of(self.target)
        self.keeps_names = isinstance(self.target, ObjectPath)
        self._new_names: dict[str, str] = {}
        if self.keeps_names and self.source.ours is not None:
            self._new_names = packed.renamed(list(self.source.ours.index.files), self.source.token)

    # Names

    def name_there(self, name: str) -> str:
        """What a file is called at the target, or in the directory of the save there."""
        if name in self._new_names or not self.keeps_names or self.source.ours is None:
            return self._new_names.get(name, name)
        attached = name.partition("/")[0] in self.source.summary.attached
        return f"{PACKED}{self.source.token}/{name}" if attached else name

    # The whole

    def run(self) -> None:
        """Copy it.

        Raises:
            SaveFailed: The target refuses. Nothing is there that was not before.
            CheckpointError: The source is not what was saved, is gone, or cannot be read. The same holds.
        """
        if self.source.is_file and self.keeps_names:
            with self._failures(None):
                self._copy_all(self.target.parent / f"{self.source.token}.saving", [self.source.path.name], set())
            return
        reservation = self.medium.reserve(self.target, copy_of=self.source.token)
        with self._failures(reservation):
            self._run(reservation)

    def _run(self, reservation: Reservation[Any]) -> None:
        directory, source = reservation.directory, self.source
        if source.is_file:
            self._copy_all(directory, [source.path.name], self._staged(directory))
            self.medium.publish(reservation, None)
            return
        tables, views = self._tables() if source.ours is not None else (self._tables_of_others(), {})
        names = [name for name in source.sizes if name not in tables and name not in views]
        self._copy_all(directory, names, self._staged(directory))
        for name, data in views.items():
            with self.medium.create(directory, self._made(directory, name), len(data), _ignore) as file:
                file.write(data)
        self.medium.flush(directory)
        if source.ours is None and isinstance(directory, Path):  # stock's checkpoints go by the times of their folders
            os.utime(directory, 2 * (source.files.modified(""),))
        self.medium.publish(reservation, tables)
        self.counts.add(copied=sum(source.sizes[name] for name in (*tables, *views)))

    @contextmanager
    def _failures(self, reservation: Reservation[Any] | None) -> Iterator[None]:
        """What goes wrong is one error; and what was written is kept for another try where that may help."""
        try:
            yield
        except BaseException as error:
            failure, keep = self._said(error)
            if reservation is not None:  # of one that is published nothing is known any more
                self.medium.discard(reservation, keep=keep)
            if failure is error:
                raise
            raise failure from error

    def _said(self, error: BaseException) -> tuple[BaseException, bool]:
        """What to raise for it, and whether another try may go on with what was written."""
        what = f"cannot copy {self.source.path} to {self.target}"
        if isinstance(error, SourceError):
            failure = gone_or_damaged(self.source.files, f"{error} cannot be read", error.error)
            return type(failure)(f"{what}: {failure}"), isinstance(failure, CheckpointUnreadable)
        if isinstance(error, CheckpointCorrupt):
            keep = isinstance(error, CheckpointUnreadable)
            return type(error)(f"{what}: {str(error).rstrip('.')}. Nothing is there that was not before."), keep
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            keep = error.errno not in _PASSES
            again = " The same command goes on from here." if keep else ""
            return SaveFailed(f"{what}: {error}. {self.medium.advice}{again}"), keep
        return error, isinstance(error, KeyboardInterrupt)

    # Tables of contents

    def _tables(self) -> tuple[dict[str, bytes], dict[str, bytes]]:
        """The tables of one of ours as they will be, and those for other readers that other names change."""
        source, files = self.source, self.source.files
        assert source.ours is not None
        index_bytes, metadata = read(files, INDEX), read(files, METADATA)
        summary_bytes = read(files, SUMMARY)
        said = Summary.decode(summary_bytes, f"{files.where}/{SUMMARY}")
        if fingerprint(index_bytes) != said.index_sha256 or fingerprint(metadata) != (
            said.metadata_sha256 or fingerprint(metadata)
        ):
            raise CheckpointCorrupt(f"{files.where}: {INDEX} or {METADATA} is not the one that was saved")
        if not said.metadata_sha256:
            self.counts.add(unverified=(f"{source.path}/{METADATA}",))
        if not any(old != new for old, new in self._new_names.items()) and not (self.keeps_names and said.base):
            return {INDEX: index_bytes, SUMMARY: summary_bytes, METADATA: metadata}, {}
        views = self._renamed_views()
        index_bytes = self._renamed_index(views)
        metadata = with_renamed_files(metadata, self._new_names, f"{files.where}/{METADATA}")
        changed = json.loads(summary_bytes)
        changed.pop("sha256", None)
        changed |= {"index_sha256": fingerprint(index_bytes), "metadata_sha256": fingerprint(metadata)}
        if said.base:
            changed["base"] = self._base_there() or changed["base"]
        return {INDEX: index_bytes, SUMMARY: with_hash(changed), METADATA: metadata}, views

    def _renamed_views(self) -> dict[str, bytes]:
        summary, files, views = self.source.summary, self.source.files, {}
        names = {f"../{old}": f"../{new}" for old, new in self._new_names.items()}
        for folder in summary.attached:
            name = f"{folder}/{METADATA}"
            if name in self.source.sizes and summary.save_id:
                data = read(files, name)
                beside = self.source.opened.index.beside if self.source.opened else {}
                if beside.get(name, hash_of(data)) not in (hash_of(data), f"{len(data)} bytes"):
                    raise CheckpointCorrupt(f"{files.where}/{name} is not what was saved with the checkpoint")
                if summary.save_id.encode() in data:
                    there = {old: new for old, new in names.items() if old.encode() in data}
                    views[name] = with_renamed_files(data, there, f"{files.where}/{name}")
        return views

    def _renamed_index(self, views: Mapping[str, bytes]) -> bytes:
        """Made from a copy of the index: the source is read by it yet."""
        files, summary = self.source.files, self.source.summary
        index = index_file.decode(read(files, INDEX), summary.index_sha256, f"{files.where}/{INDEX}")
        index.rename_files(self._new_names.__getitem__)
        index.beside |= {name: hash_of(data) for name, data in views.items() if name in index.beside}
        return index_file.encode_alike(index)

    def _base_there(self) -> dict[str, str] | None:
        """What a checkpoint in a bucket says of its base, which has other names of files there, too."""
        assert self.source.ours is not None
        try:
            base = completed(self.source.ours, None).base
        except CheckpointError:
            return None
        if base is None:
            return None
        there = self.base_there(base.path)
        source = open_source(base.path)
        try:
            at = there or self.target / relative_to(base.path, self.source.path)
            summary = replace(self, source=source, target=at, counts=Counts())._tables()[0][SUMMARY]
        finally:
            source.close()
            base.close()
        said = json.loads(summary)
        return {"path": str(at), "relative": relative_to(at, self.target), "fingerprint": said["index_sha256"]}

    def _tables_of_others(self) -> dict[str, bytes]:
        """The files that name the others, in a bucket, where files come one by one."""
        if not self.keeps_names:
            return {}
        sizes = self.source.sizes
        small = (name for name in sizes if f"/{name}".endswith(_LAST) and sizes[name] <= _MOST_LAST)
        named = sorted({*small, *({METADATA} & sizes.keys())}, key=lambda name: (name == METADATA, name))
        return {name: self.source.read(name) for name in named}

    # Files

    def _staged(self, directory: Where) -> set[str]:
        """The names of files that an earlier try has copied completely."""
        if self.keeps_names:
            if self.source.ours is None:  # its files have the names of any others
                return set()
            files = self.medium.open(directory)
            there = set()
            for name, size in self.source.sizes.items():
                usual = self.name_there(name).removeprefix(f"{PACKED}{self.source.token}/")
                with suppress(OSError):
                    if self.name_there(name) != name and files.size(usual) == size:
                        there.add(name)
            return there
        assert isinstance(directory, Path)
        with suppress(OSError, ValueError):
            noted = json.loads(directory.with_suffix(".copied").read_bytes())
            self._noted = {str(name): list(told) for name, told in noted.items()}
        there = {name for name in self.source.sizes if self._has(directory, name)}
        mine = {self._made(directory, name) for name in there}
        for name in tree(directory, self.medium):
            if name not in mine:
                (directory / name).unlink()
        return there

    def _has(self, directory: Path, name: str) -> bool:
        """Whether an earlier try has copied a file completely, and it is unchanged."""
        there = directory / self._made(directory, name)
        noted = self._noted.get(name)
        with suppress(OSError):
            if noted and not there.is_symlink() and there.stat().st_size == self.source.sizes[name] == noted[0]:
                return bool(_hash_of(there) == noted[1])
        return False

    def _copy_all(self, directory: Where, names: list[str], staged: set[str]) -> None:
        """Copy, or link, these files into the directory of the save."""
        source = self.source
        with suppress(OSError):
            source.files.keep(names)
        in_order = sorted(names, key=lambda name: source.sizes[name], reverse=True)
        at_once = max(1, min(self.io_threads, len(names)))
        ahead = max(2, _AHEAD_OF_STREAMS // at_once) if source.files.streams else 2
        with (
            ThreadPoolExecutor(at_once * ahead, thread_name_prefix="dcp-copy-read") as readers,
            ThreadPoolExecutor(at_once, thread_name_prefix="dcp-copy") as pool,
        ):
            way = Way(readers, ahead, Memory(), self._passed)
            jobs = {pool.submit(self._one, directory, name, name in staged, way, at_once) for name in in_order}
            left = set(jobs)
            try:
                while left:
                    done, left = wait(left, timeout=0.2, return_when=FIRST_EXCEPTION)
                    self.tell()
                    if any(job.exception() for job in done):
                        break
            finally:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                self._stop.clear()
        failures = [error for job in jobs if not job.cancelled() and (error := job.exception())]
        for error in sorted(failures, key=lambda error: isinstance(error, _Stopped)):
            raise error

    def _passed(self, count: int) -> None:
        self.counts.add(copied=count)
        if self._stop.is_set():
            raise _Stopped

    def _one(self, directory: Where, name: str, staged: bool, way: Way, at_once: int) -> None:
        if self._stop.is_set():
            raise _Stopped
        size = self.source.sizes[name]
        if staged:
            self.counts.add(reused=size)
        elif not self._linked(directory, name, way):
            self._copied(directory, name, way, at_once)

    def _linked(self, directory: Where, name: str, way: Way) -> bool:
        """Whether the target has the file in another checkpoint, or the store has it and copies it."""
        size, there = self.source.sizes[name], directory / self._made(directory, name)
        home = self.homes.of(self.source.stamp(name))
        stored = self._stored(name)
        if home is None and isinstance(stored, ObjectPath) and isinstance(directory, ObjectPath):
            within = stored.store == directory.store and (self.source.ours is None or name.endswith(DATA_SUFFIX))
            home = (stored, True) if within else None
        if home is None or (self.keeps_names and "/" in self.name_there(name)):
            return False
        path, verified = home
        shared = DataFile((path,), size)
        try:
            if not verified and not self.keeps_names:
                with shared.opened(self.medium) as (file, found):
                    looks = self._looks(name)
                    for piece in way.pieces(name, file, size):
                        for one in looks:
                            one.add(piece)
                    for one in looks:
                        one.finish()
                    shared = found
            self.medium.link_file(shared, there)
        except (CannotLink, CheckpointCorrupt, SourceError):
            return False
        told = (f"{stored}: copied by the store",) if self.keeps_names else ()
        self.counts.add(linked=size, unverified=told)
        return True

    def _stored(self, name: str) -> Where:
        return self.source.path if self.source.is_file else self.source.path / name

    def _looks(self, name: str) -> list[Look]:
        if self.source.ours is None:
            return []
        look = look_at(self.source.ours.index, name, self.source.files.where)
        return [] if look is None else [look]

    def _copied(self, directory: Where, name: str, way: Way, at_once: int) -> None:
        source, size, looks = self.source, self.source.sizes[name], self._looks(name)
        noting = not self.keeps_names and size >= _WORTH_NOTING
        seen = xxh3_128()
        if noting:
            looks.append(_Hash(seen))
        with (
            source.open(name) as file,
            self.medium.create(directory, self._made(directory, name), size, _ignore, at_once * _PART_OF_FLIGHT) as to,
        ):
            way.copy(name, file, size, to, looks)
        for look in looks:
            if isinstance(look, LookAtItems) and source.ours is not None:
                number = source.ours.index.file_names.index(name)
                wrong = check_between(source.files, source.ours.index, number) if look.has_more else ""
                if wrong:
                    raise CheckpointCorrupt(wrong)
                self.counts.add(unverified=tuple(f"{source.path}: {key}" for key in look.unverified))
        if not any(isinstance(look, (LookAtItems, LookAtHash)) for look in looks):
            self.counts.add(unverified=(str(self._stored(name)),))
        if isinstance(directory, Path):
            if source.ours is None:  # a run of another tool goes by the times of its files
                modified = source.files.modified(name)
                os.utime(directory / self._made(directory, name), (modified, modified))
            if noting:
                self._note(directory, name, size, seen.hexdigest())

    def _made(self, directory: Where, name: str) -> str:
        """The name at the target, with the folders above it where there are folders."""
        there = self.name_there(name) if not self.source.is_file else self.target.name
        if isinstance(directory, Path) and "/" in there:
            (directory / there).parent.mkdir(parents=True, exist_ok=True)
        return there

    def _note(self, directory: Path, name: str, size: int, told: str) -> None:
        with self._lock:
            self._noted[name] = [size, told]
            self.medium.note(directory.with_suffix(".copied"), json.dumps(self._noted).encode())


@dataclass(frozen=True)
class _Hash(Look):
    """The hash of all that passes."""

    hash: Any

    def add(self, piece: memoryview) -> None:
        self.hash.update(piece)


def _ignore(count: int) -> None:
    """Nobody waits to be told how many bytes went to the medium."""


def _hash_of(path: Path) -> str:
    found = xxh3_128()
    with open(path, "rb") as file:
        while data := file.read(PIECE):
            found.update(data)
    return str(found.hexdigest())
