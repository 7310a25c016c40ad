"""Files of a checkpoint in a directory, read while other processes publish, replace and delete checkpoints; and hard
links to its data files.

:class:`PinnedFiles` opens the directory once and reads through its descriptor. An overwrite exchanges names, a removal
renames first, and the descriptor stays with its directory. So all bytes are of the same save. A file that a removal
deletes before it is open is missing; :meth:`PinnedFiles.moved` distinguishes that from damage.

:func:`link_file` gives a data file a further name, in a later checkpoint. It compares the identity of the file before
and after that, because another file may take its name at any time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path, PurePosixPath
from stat import S_ISLNK, S_ISREG
from typing import Any, cast

from dcp_plugin.core.errors import warn_once
from dcp_plugin.core.media.disk import posix
from dcp_plugin.core.media.medium import GONE, CannotLink, DataFile, RangedFile, Readable

_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
_TO_HOLD = getattr(os, "O_PATH", 0) | _DIRECTORY  # Linux alone has O_PATH, for a directory not to be listed
_MET_A_LINK = {errno.ELOOP, errno.ENOTDIR}
_MOST_PINNED = 256
"""Files that are pinned at the same time. A process may often have no more than 1024."""
_FICLONE = 0x40049409  # of linux/fs.h: share the blocks of another file, where the file system can


class LocalFile(RangedFile):
    """A file that several threads read at the same time."""

    def __init__(self, file: FileIO, is_outside: bool = False) -> None:
        super().__init__(cast(Any, file), identity_of(os.fstat(file.fileno())))
        self.is_outside = is_outside

    def read_into(self, memory: Sequence[memoryview], offset: int) -> int:
        return os.preadv(self.fileno(), memory, offset)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Do nothing: the system reads ahead."""


def identity_of(status: os.stat_result) -> tuple[int, int, int, int]:
    """Return the device, inode, size and modification time of a file. A link changes none of them, but its ctime."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class LocalFiles(Readable):
    """Files of a directory, opened by their paths at each call. Nothing is pinned."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def where(self) -> str:
        return str(self.directory)

    def _at(self, name: str) -> tuple[Path | str, int | None]:
        """Return a path, and the descriptor of the directory that it is relative to."""
        return self.directory / name, None

    def names(self) -> list[str]:
        return _names_in(self.directory, self.directory)

    def _stat(self, name: str, follow_symlinks: bool = True) -> os.stat_result:
        path, relative_to = self._at(name)
        return os.stat(path, dir_fd=relative_to, follow_symlinks=follow_symlinks)

    def size(self, name: str) -> int:
        return self._stat(name).st_size

    def modified(self, name: str) -> float:
        return self._stat(name).st_mtime

    def open(self, name: str) -> LocalFile:
        """Open a regular file. Raise OSError for a named pipe, which would block for ever.

        The call that opens the file also checks it: another process may put a link in place of the file at any time.
        """
        parts = PurePosixPath(name).parts
        file = None
        if parts and parts[0] != "/" and ".." not in parts:
            file = self._open_below(parts)
            if file is None and (target := self._link_target(parts)):
                file = self._open_below(target)
        if file is None:
            return LocalFile(posix.open_regular(*self._at(name)), is_outside=True)
        return LocalFile(file)

    def _open_below(self, parts: Sequence[str]) -> FileIO | None:
        """Open a file without following a link below the directory. Return None if a link is in the way."""
        try:
            with ExitStack() as stack:
                path, relative_to = self._at(parts[0])
                for part in parts[1:]:
                    relative_to = os.open(path, _TO_HOLD | posix.NOFOLLOW, dir_fd=relative_to)
                    stack.callback(os.close, relative_to)
                    path = part
                return posix.open_regular(path, relative_to, posix.NOFOLLOW)
        except OSError as error:
            if error.errno in _MET_A_LINK:
                return None
            raise

    def _link_target(self, parts: Sequence[str]) -> Sequence[str]:
        """Return the target of a link, relative to the directory; empty if the target is not of the checkpoint."""
        directory = Path(os.path.realpath(self.directory))  # resolve() raises RuntimeError for a loop of links
        link = directory.joinpath(*parts)
        target = Path(os.path.realpath(link))
        if target.parent == link.parent:
            return (*parts[:-1], target.name)
        is_cached = directory.parent.name == "snapshots" and target.parent == directory.parent.parent / "blobs"
        return ("..", "..", "blobs", target.name) if is_cached else ()

    def leads_elsewhere(self, name: str) -> bool:
        parts = PurePosixPath(name).parts
        steps = ("/".join(parts[: count + 1]) for count in range(len(parts)))
        try:
            linked = any(S_ISLNK(self._stat(step, follow_symlinks=False).st_mode) for step in steps)
        except OSError:  # the caller that opens it raises
            return False
        return (linked or ".." in parts) and not self._link_target(parts)


class PinnedFiles(LocalFiles):
    """Files of the directory that has a path now, through its descriptor.

    While the descriptor is open, the kernel gives the inode number to no other directory, so :meth:`moved` compares it.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._descriptor: int | None = None
        self._pinned: dict[str, LocalFile] = {}
        self._opened = ExitStack()
        self._close = posix.close_when_dropped(self, self._opened.close)
        self._refused: OSError | None = None
        try:
            self._descriptor = os.open(directory, _TO_HOLD)
            self._opened.callback(os.close, self._descriptor)
        except OSError as error:
            self._refused = error
        self._identity: tuple[int, int] | None = None
        with suppress(OSError):
            self._identity = _identity(directory if self._descriptor is None else self._descriptor)

    def _at(self, name: str) -> tuple[Path | str, int | None]:
        if self._refused is not None:
            raise type(self._refused)(*self._refused.args, str(self.directory))
        return name or ".", self._descriptor

    def names(self) -> list[str]:
        path, relative_to = self._at("")
        listing = os.open(path, os.O_RDONLY | _DIRECTORY, dir_fd=relative_to)  # with a position of its own
        try:
            return _names_in(listing, self.directory)
        finally:
            os.close(listing)

    def open(self, name: str) -> LocalFile:
        pinned = self._pinned.get(name)
        return super().open(name) if pinned is None else LocalFile(FileIO(os.dup(pinned.fileno())))

    def pin(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._pinned and len(self._pinned) < _MOST_PINNED:
                try:
                    file = super().open(name)
                except OSError as error:
                    if error.errno in (errno.EMFILE, errno.ENFILE):
                        return
                    raise
                if file.is_outside:  # a removal of the checkpoint does not delete it
                    file.close()
                else:
                    self._pinned[name] = self._opened.enter_context(file)

    def moved(self) -> bool:
        try:
            return _identity(self.directory) != self._identity
        except OSError:  # the file system fails, and the caller has an error already
            return False

    def close(self) -> None:
        self._descriptor, self._pinned = None, {}
        self._refused = OSError(errno.EBADF, "the files are closed")
        self._close()


def _names_in(place: Path | int, directory: Path) -> list[str]:
    with os.scandir(place) as entries:  # whose kinds are known without a system call for each
        return sorted(entry.name + "/" * _is_folder(entry, directory) for entry in entries)


def _is_folder(entry: os.DirEntry[str], directory: Path) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:  # a link that leads to itself, for one
        warn_once(f"passing over {directory / entry.name}: {error.strerror}")
        return False


def _identity(place: Path | int) -> tuple[int, int] | None:
    """Return the device and inode of a path or a descriptor; None if the path does not exist. Raise OSError if the file
    system fails."""
    try:
        status = os.stat(place)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def link_file(file: DataFile, target: Path) -> DataFile:
    """Make ``target`` this file, or one that shares its blocks. See
    :meth:`dcp_plugin.core.media.medium.Medium.link_file`."""
    reason = GONE
    for home in file.homes:
        assert isinstance(home, Path)
        if not _is_at(file, home):
            continue
        try:
            os.link(home, target)
        except OSError as error:
            if _reflink(home, target) and _is_at(file, home):
                return DataFile.written(LocalFiles(target.parent), target)
            target.unlink(missing_ok=True)
            if error.errno != errno.ENOENT:  # not deleted just now
                reason = f"the file system makes no hard links there ({error.strerror})"
            continue
        if _is_at(file, target):
            return DataFile((target, *file.homes), file.size, identity_of(os.stat(target)))
        target.unlink()  # another file has taken its name just now
    raise CannotLink(reason)


def _is_at(file: DataFile, path: Path) -> bool:
    """Return whether a path is a name of the file. A link, which another program may have put there, is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    is_same = identity_of(status) == file.identity if file.identity else status.st_size == file.size
    return is_same and S_ISREG(status.st_mode)


def _reflink(source: Path, target: Path) -> bool:
    """Make a durable copy that shares the blocks of the source. Return False where the file system cannot.

    An ordinary copy, by the kernel too, saves nothing: it reads and writes bytes that are in memory already.
    """
    import fcntl  # Windows lacks it, where programs that only read import this module

    try:
        with open(source, "rb") as original, open(target, "xb") as copy:
            fcntl.ioctl(copy.fileno(), _FICLONE, original.fileno())
            os.fsync(copy.fileno())
    except OSError:
        target.unlink(missing_ok=True)
        return False
    return True
