"""A node's part of the newest checkpoints of each run, in its ``keeper.dir``, and copies of other nodes' parts.

``<keeper.dir>/.dcp_plugin/<key>/<token>/``: the key is a hash of the folder of checkpoints, as the user named it, and
the token names one save. The folder of a save has the data files of the node's ranks, the complete index, summary and
``.metadata`` (so the folders of all nodes, put into one, are a standard checkpoint), extra files, and, written last,
``dcp_plugin.node``: the :class:`Record` of the save. A copy of another node's part is just more files.

A folder without a record is an incomplete save. No load reads it, and the next save deletes it. A folder whose record
cannot be read stays: another version of this package may read it.

Other users may write to ``keeper.dir``, and replace a directory by a link at any time. So ``<key>`` is opened once
without following links, its owner is checked (:class:`~dcp_plugin.core.media.disk.posix.OwnFolder`), and everything
below is reached through its descriptor.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import socket
import stat
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from json import JSONDecodeError
from pathlib import Path, PurePosixPath

from dcp_plugin.core.format import json_object
from dcp_plugin.core.format.summary import with_hash
from dcp_plugin.core.media import WORKSPACE, medium_of, workspace_in, workspaces_in
from dcp_plugin.core.media.disk import posix
from dcp_plugin.core.paths import Where, as_path, resolved

NODE = "dcp_plugin.node"
"""The record of a save, in its folder."""
RUN = "run"
"""The file in the workspace of a folder of checkpoints that names the run. A user who empties the folder deletes it."""
FORMAT_VERSION = 1
_MOST_RECORD = 64 << 20
_DAMAGED = "dcp_plugin.node-damaged"
_GARBAGE = ".left"
"""Suffix of a folder that is being deleted, and of a file that is being written."""
_opened: dict[tuple[Path, int, int], posix.OwnFolder] = {}
"""Each directory ``<key>`` that this process has opened, by name, device and inode. None is closed or replaced, since
threads use paths through the descriptors."""


@dataclass(frozen=True)
class Record:
    """Description of a save that all ranks have written. The same on all nodes, except for ``complete``."""

    path: str
    """The path of the checkpoint, whether it is there yet or not."""
    token: str
    save_id: str
    index_sha256: str
    time: float
    """The recorded time in the summary, in seconds since the epoch."""
    step: int | None
    run: str
    """The run in the folder of checkpoints; empty if it is unknown, or without durable storage."""
    files: dict[str, int]
    """All files of the checkpoint, with ``/`` between folders, and their sizes in bytes."""
    nodes: int
    number: int = 0
    """Number of the save in its run, from 1 on."""
    complete: bool = False
    """True if all nodes have their part, the index, and the copies that ``keeper.replicas`` asks for."""
    format: int = FORMAT_VERSION

    def encode(self) -> bytes:
        return with_hash(asdict(self))

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """Return the record in a file. Raises ValueError, with the reason, for other data or another version."""
        try:
            fields = json_object(data, _MOST_RECORD)
            version = fields["format"]
            if version != FORMAT_VERSION:
                raise ValueError(f"another version of dcp_plugin has written it (format {version})")
            del fields["sha256"]
            record = cls(**fields)
            texts = (record.path, record.token, record.save_id, record.index_sha256, record.run)
            has_types = (
                *(type(number) is int for number in (record.number, *record.files.values())),
                *(isinstance(text, str) for text in texts),
                type(record.time) is float,
            )
            if with_hash(fields) != data or not all(has_types):
                raise TypeError("a field has been changed")
        except (LookupError, TypeError, AttributeError, JSONDecodeError) as error:
            raise ValueError("its record is damaged") from error
        if not all(is_inside(name) for name in record.files):
            raise ValueError("its record names files that are not below it")
        return record


def is_inside(name: str) -> bool:
    """Return whether a name is that of an entry below a folder."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and ".." not in parts and "\0" not in name and "\\" not in name


@dataclass(frozen=True)
class LocalCheckpoint:
    """A node's part of a save."""

    folder: Path
    record: Record

    def present_files(self) -> set[str]:
        """Return the files of the save that this node has in their recorded sizes."""
        return {name for name, size in self.record.files.items() if has_file(self.folder / name, size)}

    def mark_complete(self, run: str) -> None:
        """Record that all nodes have their parts and copies.

        Args:
            run: See :class:`Record`; empty if it is not known yet.
        """
        replace(self, record=replace(self.record, complete=True, run=run or self.record.run)).write()

    def quarantine(self) -> None:
        """Exclude the save from all later loads; the next save deletes it."""
        with suppress(FileNotFoundError):
            os.rename(self.folder / NODE, self.folder / _DAMAGED)

    def write(self) -> None:
        """Write the record, durably, in one step."""
        put_file(self.folder, NODE, self.record.encode())
        posix.sync_directory(self.folder)


def has_file(path: Path, size: int) -> bool:
    """Return whether a path is a regular file of this size."""
    with suppress(OSError):
        status = os.lstat(path)
        return stat.S_ISREG(status.st_mode) and status.st_size == size
    return False


def put_file(folder: Path, name: str, data: bytes) -> None:
    """Write a small file durably; readers see all of it or nothing. Raises OSError."""
    path = folder / name
    half = path.with_name(f".{uuid.uuid4().hex}{_GARBAGE}")
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
    """Return the key of a folder of checkpoints, for its directories in ``keeper.dir`` and in shared memory."""
    return hashlib.blake2b(str(root).encode(errors="surrogateescape"), digest_size=8).hexdigest()


def path_of(path: Where) -> Where:
    """Return the path by which records name the checkpoint at ``path``, whichever name of its folder was used."""
    return resolved(path.parent) / path.name


def run_of(root: Where) -> str | None:
    """Return the run in a folder of checkpoints; None if no save has named it. Raises OSError."""
    for workspace in workspaces_in(root):
        with suppress(FileNotFoundError, NotADirectoryError), medium_of(root).open(workspace).open(RUN) as file:
            return file.read(64).decode("ascii", "replace")
    return None


def make_run(root: Where) -> str:
    """Return the run in a folder of checkpoints, and name it if no save has. Raises OSError."""
    run = run_of(root)
    if run is None:
        new = uuid.uuid4().hex
        medium_of(root).note(workspace_in(root) / RUN, new.encode(), only_new=True)
        run = run_of(root) or new
    return run


def node_of(local_dir: Path) -> str:
    """Return the identity of a node: a running system, a container on it, a host name, and a directory."""
    boot = container = "?"
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        container = str(os.stat("/dev/shm").st_dev)  # containers of one host may have the same names and paths
    return f"{boot}/{container}/{socket.gethostname()}/{local_dir}"


def new_token(time: float) -> str:
    """Return a name for a save with this recorded time. Names sort by it."""
    return f"{round(time * 1e9):016x}{uuid.uuid4().hex[:8]}"


def time_of(token: str) -> float:
    """Return the recorded time of a save, in seconds since the epoch."""
    return int(token[:16], 16) / 1e9


def saves_in(folder: Path) -> tuple[list[LocalCheckpoint], list[str]]:
    """Read a directory ``<key>``.

    Returns:
        Every save with a valid record, oldest first; and the excluded folders, with the reason.
    """
    entries: list[os.DirEntry[str]] = []
    problems: list[str] = []
    try:
        entries = [entry for entry in os.scandir(_reached(folder)) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"{folder}: {error.strerror}")
    checkpoints = []
    for entry in sorted(entries, key=lambda entry: entry.name):
        if entry.name.endswith(_GARBAGE):
            continue
        try:
            _refuse_unreliable(Path(entry.path))
            record = Record.decode(_read_bounded(Path(entry.path, NODE)))
            if record.token != entry.name:
                raise ValueError("its record is of another save")
            checkpoints.append(LocalCheckpoint(Path(entry.path), record))
        except FileNotFoundError:  # it has no record yet, or was deleted just now
            continue
        except (OSError, ValueError) as error:
            problems.append(shown(f"{entry.path}: {getattr(error, 'strerror', None) or error}"))
    return sorted(checkpoints, key=_order), problems


@dataclass(frozen=True)
class LocalCheckpoints:
    """A node's parts of the saves to one folder of checkpoints.

    Args:
        local_dir: As configured.
        root: The folder of checkpoints, :func:`~dcp_plugin.core.paths.resolved`.
    """

    local_dir: Path
    root: Where

    @property
    def folder(self) -> Path:
        """The directory ``<key>``."""
        return self.local_dir / WORKSPACE / key_of(self.root)

    def folder_of(self, token: str) -> Path:
        """Return the folder of a save, reached through the descriptor of its directory. Raises OSError."""
        return _reached(self.folder) / token

    def make(self, token: str) -> Path:
        """Return a new folder for a save, which only this user can enter. Raises OSError."""
        if not self.folder.parent.is_dir():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(PermissionError):  # another user's
                self.folder.parent.chmod(0o1777)  # others may use the same disk
        self.folder.mkdir(mode=0o700, exist_ok=True)
        folder = self.folder_of(token)
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def all(self) -> list[LocalCheckpoint]:
        """Return every save with a valid record, oldest first."""
        return saves_in(self.folder)[0]

    def find(self, token: str) -> LocalCheckpoint | None:
        return next((checkpoint for checkpoint in self.all() if checkpoint.record.token == token), None)

    def of_path(self, path: Where) -> list[LocalCheckpoint]:
        """Return the saves to one path, oldest first."""
        return [checkpoint for checkpoint in self.all() if checkpoint.record.path == str(path)]

    def keep(self, count: int, needed: Collection[str]) -> list[str]:
        """Delete the saves older than the newest ``count`` complete saves, except for the tokens in ``needed``.

        Returns:
            The tokens of the deleted saves.
        """
        records = [checkpoint.record for checkpoint in self.all()]
        newest = [record for record in records if record.complete][-count:]
        deleted = []
        for record in records:
            if newest and record.time < newest[0].time and record.token not in needed:
                self.remove(record.token)
                deleted.append(record.token)
        return deleted

    def collect_garbage(self, needed: Callable[[], Collection[str]]) -> None:
        """Delete the files of incomplete saves.

        Args:
            needed: Returns the tokens of saves under way. Called after the folders are listed, since one may begin.
        """
        with suppress(OSError):
            folder = _own(self.folder)
            names = folder.names()
            under_way = needed()
            for name in names:
                with suppress(OSError):
                    _refuse_unreliable(self.folder_of(name))
                    if name not in under_way and not os.path.lexists(self.folder_of(name) / NODE):
                        folder.delete(name)

    def remove(self, token: str) -> None:
        """Delete this node's part of a save. No load that begins after the call has begun reads it."""
        with suppress(FileNotFoundError):
            folder, garbage = _own(self.folder), f"{token}{_GARBAGE}"
            folder.rename(token, garbage)
            folder.delete(garbage)
        with suppress(OSError):
            _own(self.folder).remove()  # if it was the last

    def forget(self, path: Where) -> None:
        """Delete the node's parts of the saves to one path. The target of a link is another path."""
        for checkpoint in self.of_path(path):
            self.remove(checkpoint.record.token)

    def is_in_memory(self) -> bool:
        """Return whether the parts are in memory (tmpfs). Raises OSError if the node has none."""
        return posix.is_in_memory(_own(self.folder).descriptor)


def checkpoints_below(local_dir: Path, root: Where) -> tuple[list[LocalCheckpoint], list[str]]:
    """Return a node's parts of the saves to any folder at or below ``root`` (:func:`~dcp_plugin.core.paths.resolved`).

    Returns:
        The saves, oldest first; and the excluded folders, with the reason.
    """
    checkpoints: list[LocalCheckpoint] = []
    problems: list[str] = []
    keys: list[str] = []
    with suppress(FileNotFoundError, NotADirectoryError):
        entries = os.scandir(local_dir / WORKSPACE)
        keys = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    below = f"{str(root).rstrip('/')}/"
    for key in keys:
        saves, excluded = saves_in(local_dir / WORKSPACE / key)
        parts = [part for part in saves if part.record.path.startswith(below) and _has_key(part, key)]
        checkpoints += parts
        if parts or key == key_of(root):
            problems += excluded
    return sorted(checkpoints, key=_order), problems


def parts_of(local_dir: Path, path: Where) -> list[LocalCheckpoint]:
    """Return the node's parts of the saves to one path, oldest first."""
    parts, _ = checkpoints_below(local_dir, resolved(path.parent))
    return [part for part in parts if is_at(part.record, path)]


def is_at(record: Record, path: Where) -> bool:
    """Return whether a record is of a save to ``path``, or to the target of the link at ``path``."""
    return record.path in (str(path_of(path)), str(resolved(path)))


def _order(checkpoint: LocalCheckpoint) -> tuple[float, str]:
    return checkpoint.record.time, checkpoint.record.token


def _has_key(checkpoint: LocalCheckpoint, key: str) -> bool:
    """Return whether ``key`` is that of the folder of the checkpoint."""
    parent = checkpoint.record.path.rstrip("/").rpartition("/")[0]
    return key_of(as_path(parent or "/")) == key


def _refuse_unreliable(path: Path) -> None:
    """Raise OSError for a folder of a save that another user has made or could have changed."""
    with posix.Folder(path) as folder:
        if posix.refuse_other_user(folder.descriptor, path).st_mode & stat.S_IWOTH:
            raise PermissionError(errno.EPERM, "it can be written by other users", str(path))


def _own(folder: Path) -> posix.OwnFolder:
    """Return a directory that stays open as long as this process.

    Raises:
        OSError: The directory is a link, belongs to another user, or does not exist.
    """
    found = os.lstat(folder)
    opened = _opened.get((folder, found.st_dev, found.st_ino))
    if opened is None:
        opened = posix.OwnFolder(folder)
        here = os.fstat(opened.descriptor)
        # Another thread may have opened it meanwhile, and already use a path through that descriptor.
        opened = _opened.setdefault((folder, here.st_dev, here.st_ino), opened)
    return opened


def _reached(folder: Path) -> Path:
    """Return a path to a directory that leads through its descriptor. Raises the errors of :func:`_own`."""
    return Path(f"/proc/self/fd/{_own(folder).descriptor}")


def shown(text: str) -> str:
    """Return a message with the names of directories in place of paths through their descriptors."""
    names = {str(folder.descriptor): str(name) for (name, *_), folder in _opened.items()}
    return re.sub(r"/proc/self/fd/(\d+)", lambda match: names.get(match[1], match[0]), text)


def _read_bounded(path: Path) -> bytes:
    """Return the bytes of the record of a save, and not many more if it is too large. Raises OSError."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC)) as file:
        return file.read(_MOST_RECORD + 1)
