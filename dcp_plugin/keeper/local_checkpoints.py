"""What a node keeps in its ``local_dir``: its part of the newest checkpoints of each run, and copies of others' parts.

``local_dir/.dcp_plugin/<key>/<token>/``: the key stands for the directory that the checkpoints of the run are in, as
the user named it, and the token for one save. There lie the data files of the node's ranks, the whole index, summary
and ``.metadata`` (so that the folders of all nodes, put into one, are a standard checkpoint), what a framework has put
beside, and, last, ``dcp_plugin.node``: the record of the save, see :class:`Record`. A copy of another node's part is
just more files.

A folder without a record is a save that was not completed. No load reads it, and the next save deletes it. A folder
whose record cannot be read stays: another version of this package may read it.

Other users may write to ``local_dir``, and replace a directory by a link at any time. So ``<key>`` is opened once
without following links, its owner and mode are checked, and everything below is reached through its descriptor.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath

from dcp_plugin.format.summary import with_hash
from dcp_plugin.media import WORKSPACE
from dcp_plugin.media.disk import posix
from dcp_plugin.paths import Where, as_path

NODE = "dcp_plugin.node"
"""The record of a save, in its folder."""
FORMAT_VERSION = 1
_MOST_RECORD = 64 << 20
_DAMAGED = "dcp_plugin.node-damaged"
_LEFT = ".left"
"""Behind the name of a folder that is being deleted."""
_opened: dict[Path, posix.Folder] = {}
"""By its name, each directory ``<key>`` that this process has opened. None is closed, since threads use its path."""


@dataclass(frozen=True)
class Record:
    """What a node knows of a save that all ranks have written. The same on all nodes, but for ``complete``."""

    path: str
    """Where the checkpoint is, or would be, in the durable storage."""
    token: str
    save_id: str
    index_sha256: str
    time: float
    """As in the summary, in seconds since the epoch."""
    step: int | None
    run: str
    """Of the folder of checkpoints as it was then; empty if nobody knew, or there is no durable storage."""
    files: dict[str, int]
    """All files of the checkpoint, with ``/`` between folders, and their sizes in bytes."""
    nodes: int
    number: int = 0
    """Which save of the run it is, from 1 on."""
    complete: bool = False
    """Whether all nodes have said that they have their part, the index, and the copies that they are to have."""
    format: int = FORMAT_VERSION

    def encode(self) -> bytes:
        return with_hash(asdict(self))

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """Raises ValueError, in words, for what is not a record, or of another version."""
        try:
            said = json.loads(data)
            version = said["format"]
            if version != FORMAT_VERSION:
                raise ValueError(f"another version of dcp_plugin has written it (format {version})")
            found = said.pop("sha256")
            if with_hash(said) != data or not isinstance(found, str):
                raise ValueError("its record is damaged")
            record = cls(**said)
        except (LookupError, TypeError, AttributeError, RecursionError, json.JSONDecodeError) as error:
            raise ValueError("its record is damaged") from error
        texts = (record.path, record.token, record.save_id, record.index_sha256, record.run)
        sizes = record.files.values() if isinstance(record.files, dict) else [None]
        if not all(isinstance(text, str) for text in texts) or not all(type(size) is int for size in sizes):
            raise ValueError("its record is damaged")
        if type(record.number) is not int or type(record.time) is not float:
            raise ValueError("its record is damaged")
        if any(not is_inside(name) for name in record.files):
            raise ValueError("its record names files that are not below it")
        return record


def is_inside(name: str) -> bool:
    """Whether this names something below a folder, and nothing else."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and ".." not in parts and "\0" not in name and "\\" not in name


@dataclass(frozen=True)
class LocalStep:
    """A save that a node has something of."""

    folder: Path
    record: Record

    def there(self) -> set[str]:
        """The files of the save that this node has, of the sizes that they are to have."""
        return {name for name, size in self.record.files.items() if _size(self.folder / name) == size}

    def mark_complete(self, run: str) -> None:
        """All nodes have what they are to have.

        Args:
            run: See :class:`Record`; empty if it is not known yet.
        """
        replace(self, record=replace(self.record, complete=True, run=run or self.record.run)).write()

    def set_aside(self) -> None:
        """Believe it no more; the next save deletes it."""
        with suppress(FileNotFoundError):
            os.rename(self.folder / NODE, self.folder / _DAMAGED)

    def write(self) -> None:
        """Write the record, durably, in one step."""
        put_file(self.folder, NODE, self.record.encode())
        posix.sync_directory(self.folder)


def _size(path: Path) -> int | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_size if os.path.isfile(path) and not os.path.islink(path) else None


def put_file(folder: Path, name: str, data: bytes) -> None:
    """Write a small file durably; readers see it whole or not at all."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{uuid.uuid4().hex}{_LEFT}")
    try:
        with open(half, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(half, path)
    except BaseException:
        with suppress(OSError):
            half.unlink()
        raise


def key_of(root: Where | str) -> str:
    """What stands for a directory of checkpoints in ``local_dir`` and in names of sockets."""
    return hashlib.blake2b(str(root).encode(errors="surrogateescape"), digest_size=8).hexdigest()


def new_token(time: float) -> str:
    """Return a name for a save with this recorded time. Names sort by it."""
    return f"{round(time * 1e9):016x}{uuid.uuid4().hex[:8]}"


def time_of(token: str) -> float:
    """Return the recorded time of a save, in seconds since the epoch."""
    return int(token[:16], 16) / 1e9


@dataclass
class LocalSteps:
    """The saves of one directory of checkpoints that a node has something of.

    Args:
        local_dir: As configured.
        root: The directory of checkpoints, :func:`~dcp_plugin.paths.resolved`.
    """

    local_dir: Path
    root: Where
    problems: list[str] = field(default_factory=list)
    """What the last :meth:`all` passed over, and why."""
    key: str = ""
    """The name of its folder, if the root is not known."""

    @property
    def folder(self) -> Path:
        return self.local_dir / WORKSPACE / (self.key or key_of(self.root))

    def folder_of(self, token: str) -> Path:
        """Return the folder of a save, reached through the descriptor of its directory. Raises OSError."""
        return _reached(self.folder) / token

    def make(self, token: str) -> Path:
        """A folder for a save, for this user alone. Raises OSError."""
        if not self.folder.parent.is_dir():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(PermissionError):  # another user's
                self.folder.parent.chmod(0o1777)  # others may use the same disk
        self.folder.mkdir(mode=0o700, exist_ok=True)
        folder = self.folder_of(token)
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def all(self) -> list[LocalStep]:
        """Every save with a record, oldest first. What cannot be believed is noted in :attr:`problems`."""
        self.problems = []
        found = []
        for folder in self._folders():
            try:
                data = _read_bounded(folder / NODE)
                if data is None:
                    continue
                record = Record.decode(data)
                if record.token != folder.name:
                    raise ValueError("its record is of another save")
            except (OSError, ValueError) as error:
                self.problems.append(shown(f"{folder}: {error}"))
                continue
            found.append(LocalStep(folder, record))
        return sorted(found, key=lambda step: (step.record.time, step.record.token))

    def find(self, token: str) -> LocalStep | None:
        return next((step for step in self.all() if step.record.token == token), None)

    def of_path(self, path: Where) -> list[LocalStep]:
        """The saves to one path, oldest first."""
        return [step for step in self.all() if step.record.path == str(path)]

    def _folders(self) -> Iterator[Path]:
        try:
            entries = sorted(os.scandir(_reached(self.folder)), key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        except OSError as error:
            self.problems.append(f"{self.folder}: {error.strerror}")
            return
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and not entry.name.endswith(_LEFT):
                if reason := _distrust(entry.stat(follow_symlinks=False)):
                    self.problems.append(shown(f"{entry.path} {reason}"))
                else:
                    yield Path(entry.path)

    def keep(self, count: int, needed: Collection[str]) -> list[str]:
        """Delete all but the newest ``count`` complete saves, what is newer than these, and ``needed``.

        Returns:
            The tokens of what was deleted.
        """
        steps = self.all()
        complete = [step.record.token for step in steps if step.record.complete]
        newest = set(complete[-count:])
        oldest_kept = min((step.record.time for step in steps if step.record.token in newest), default=0.0)
        gone = []
        for step in steps:
            token = step.record.token
            if token not in newest and token not in needed and step.record.time < oldest_kept:
                self.remove(token)
                gone.append(token)
        return gone

    def collect_garbage(self, needed: Callable[[], Collection[str]]) -> None:
        """Delete the files of saves that were not completed.

        Args:
            needed: Returns the tokens of saves under way. Called after the folders are listed, since one may begin.
        """
        with suppress(OSError):
            entries = list(os.scandir(_reached(self.folder)))
            under_way = needed()
            for entry in entries:
                is_garbage = entry.name not in under_way and not os.path.lexists(Path(entry.path, NODE))
                if is_garbage and not _distrust(entry.stat(follow_symlinks=False)):
                    shutil.rmtree(entry.path, ignore_errors=True)

    def remove(self, token: str) -> None:
        """Delete this node's part of a save. From the first moment on, no load reads it."""
        with suppress(FileNotFoundError):
            folder = self.folder_of(token)
            garbage = folder.with_name(f"{token}{_LEFT}")
            os.rename(folder, garbage)
            shutil.rmtree(garbage, ignore_errors=True)
        with suppress(OSError):
            self.folder.rmdir()  # if it was the last

    def forget(self, path: Where) -> None:
        """Delete what the node has of the saves to one path. What links to it leads to is another path."""
        for step in self.of_path(path):
            self.remove(step.record.token)


def steps_below(local_dir: Path, root: Where) -> tuple[list[LocalStep], list[str]]:
    """What a node has of the saves to any folder at or below ``root`` (:func:`~dcp_plugin.paths.resolved`).

    Returns:
        The saves, oldest first; and what was passed over, in words.
    """
    found: list[LocalStep] = []
    problems: list[str] = []
    keys: list[str] = []
    with suppress(FileNotFoundError, NotADirectoryError):
        entries = os.scandir(local_dir / WORKSPACE)
        keys = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    for key in keys:
        steps = LocalSteps(local_dir, root, key=key)
        mine = [step for step in steps.all() if _is_below(step.record.path, root) and _has_key(step, key)]
        found += mine
        if mine or key == key_of(root):
            problems += steps.problems
    return sorted(found, key=lambda step: (step.record.time, step.record.token)), problems


def _is_below(path: str, root: Where) -> bool:
    return path.startswith(f"{str(root).rstrip('/')}/")


def _has_key(step: LocalStep, key: str) -> bool:
    """Whether the folder that a save is in stands for the folder of its checkpoint."""
    parent = step.record.path.rstrip("/").rpartition("/")[0]
    return key_of(as_path(parent or "/")) == key


def _distrust(status: os.stat_result) -> str:
    """Return why a directory beside those of other users is not believed; empty if it is this user's alone."""
    if status.st_uid != os.geteuid():
        return f"belongs to another user (uid {status.st_uid})"
    if status.st_mode & stat.S_IWOTH:
        return "can be written by other users"
    return ""


def _reached(folder: Path) -> Path:
    """Return a path to a directory that leads through a descriptor, and stays valid as long as this process.

    Raises:
        OSError: It is a link, or another user's, or is not there.
    """
    opened = _opened.get(folder)
    if opened is None or not os.path.samestat(os.fstat(opened.descriptor), os.lstat(folder)):
        opened = posix.Folder(folder)
        if reason := _distrust(os.fstat(opened.descriptor)):
            opened.close()
            raise PermissionError(errno.EPERM, reason, str(folder))
        _opened[folder] = opened
    return Path(f"/proc/self/fd/{opened.descriptor}")


def shown(text: str) -> str:
    """Return a message with the names of directories in place of paths through their descriptors."""
    names = {str(folder.descriptor): str(name) for name, folder in _opened.items()}
    return re.sub(r"/proc/self/fd/(\d+)", lambda match: names.get(match[1], match[0]), text)


def _read_bounded(path: Path) -> bytes | None:
    """A file; None if there is none."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC)) as file:
            data = file.read(_MOST_RECORD + 1)
    except FileNotFoundError:
        return None
    if len(data) > _MOST_RECORD:
        raise ValueError("its record is too large")
    return data


def is_memory(path: Path) -> bool:
    """Whether what is in a directory lies in memory: a tmpfs."""
    with suppress(OSError):
        best = ""
        kind = ""
        real = os.path.realpath(path)
        for line in Path("/proc/mounts").read_text().splitlines():
            _, where, what, *_ = line.split(" ")
            where = where.replace("\\040", " ")
            if (real == where or real.startswith(where.rstrip("/") + "/")) and len(where) >= len(best):
                best, kind = where, what
        return kind in ("tmpfs", "ramfs")
    return False
