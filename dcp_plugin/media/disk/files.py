"""Reading a checkpoint in a directory while others publish, replace and delete beside it.

:class:`HeldFiles` opens the directory once and reads through its descriptor: an overwrite exchanges names, a removal
renames first, and neither changes what the descriptor is of. So what is read is of one save. Once the files are deleted
one by one, those that are not open yet are missing; :meth:`HeldFiles.moved` tells that from damage.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path, PurePosixPath
from stat import S_ISLNK

from dcp_plugin.media import RangedFile
from dcp_plugin.media.disk import posix

_HAS_DESCRIPTORS = {os.open, os.stat} <= os.supports_dir_fd and hasattr(os, "O_DIRECTORY")
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
_TO_HOLD = getattr(os, "O_PATH", 0) | _DIRECTORY  # O_PATH: of a directory that may not be listed, too
_MOST_KEPT = 256
"""Files that are kept open at the same time. A process may often have no more than 1024."""


class LocalFile(RangedFile):
    """A file, read at given places, by several threads at the same time."""

    def __init__(self, file: FileIO) -> None:
        super().__init__(file)

    def read_into(self, memory: Sequence[memoryview], offset: int) -> int:
        return posix.read_at(self.fileno(), memory, offset)


class LocalFiles:
    """The files of a directory, found by their paths at each call. Nothing is held."""

    streams = 0
    gap = 8 << 10  # a system call costs as much

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def where(self) -> str:
        return str(self.directory)

    def _at(self, name: str) -> tuple[Path | str, int | None]:
        """A path, and the descriptor of what it is relative to."""
        return self.directory / name, None

    @contextmanager
    def _entries(self) -> Iterator[Iterator[os.DirEntry[str]]]:
        with os.scandir(self.directory) as entries:
            yield entries

    def names(self) -> list[str]:
        with self._entries() as entries:  # which tell folders from files without a system call for each
            return sorted(entry.name + "/" * entry.is_dir() for entry in entries)

    def _stat(self, name: str, follow_symlinks: bool = True) -> os.stat_result:
        path, relative_to = self._at(name)
        return os.stat(path, dir_fd=relative_to, follow_symlinks=follow_symlinks)

    def size(self, name: str) -> int:
        return self._stat(name).st_size

    def modified(self, name: str) -> float:
        return self._stat(name).st_mtime

    def open(self, name: str) -> LocalFile:
        """A named pipe, which would be waited for for ever, is refused."""
        return LocalFile(posix.open_regular(*self._at(name)))

    def leads_elsewhere(self, name: str) -> bool:
        parts = PurePosixPath(name).parts
        steps = ("/".join(parts[: count + 1]) for count in range(len(parts)))
        try:
            linked = any(S_ISLNK(self._stat(step, follow_symlinks=False).st_mode) for step in steps)
        except OSError:  # what opens it will say that it is not there
            return False
        if not linked and ".." not in parts:
            return False
        directory, target = self.directory.resolve(), (self.directory / name).resolve().parent
        is_cached = directory.parent.name == "snapshots" and target == directory.parent.parent / "blobs"
        return target != (directory / name).parent and not is_cached

    def keep(self, names: Iterable[str]) -> None:
        pass

    def distrust(self, file: RangedFile) -> bool:
        return False

    def moved(self) -> bool:
        return False

    def close(self) -> None:
        pass


class HeldFiles(LocalFiles):
    """The files of the directory that is at a path now, through its descriptor.

    As long as it is open, the kernel gives its number to no other directory, so :meth:`moved` can go by that.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._descriptor: int | None = None
        self._kept: dict[str, FileIO] = {}
        self._refused: OSError | None = None
        try:
            if _HAS_DESCRIPTORS:
                self._descriptor = os.open(directory, _TO_HOLD)
        except OSError as error:
            self._refused = error
        self._identity: tuple[int, int] | None = None
        with suppress(OSError):
            self._identity = _identity(directory if self._descriptor is None else self._descriptor)

    def _at(self, name: str) -> tuple[Path | str, int | None]:
        if self._refused is not None:
            raise type(self._refused)(*self._refused.args, str(self.directory))
        return super()._at(name) if self._descriptor is None else (name or ".", self._descriptor)

    @contextmanager
    def _entries(self) -> Iterator[Iterator[os.DirEntry[str]]]:
        path, relative_to = self._at("")
        if relative_to is None:
            with super()._entries() as entries:
                yield entries
            return
        listing = os.open(path, os.O_RDONLY | _DIRECTORY, dir_fd=relative_to)  # its position is that of nobody else
        try:
            with os.scandir(listing) as entries:
                yield entries
        finally:
            os.close(listing)

    def open(self, name: str) -> LocalFile:
        kept = self._kept.get(name)
        return super().open(name) if kept is None else LocalFile(FileIO(os.dup(kept.fileno())))

    def keep(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._kept and len(self._kept) < _MOST_KEPT:
                try:
                    self._kept[name] = posix.open_regular(*self._at(name))
                except OSError as error:
                    if error.errno in (errno.EMFILE, errno.ENFILE):
                        return
                    raise

    def moved(self) -> bool:
        try:
            return _identity(self.directory) != self._identity
        except OSError:  # the file system fails, which the caller's own error says
            return False

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        self._refused = OSError(errno.EBADF, "it was closed")
        for file in self._kept.values():
            file.close()
        self._kept = {}
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        """For a reader that somebody else's code drops: nothing tells it that a load is done."""
        self.close()


def _identity(place: Path | int) -> tuple[int, int] | None:
    """Tells what is at a path, or open, from everything else; None if nothing is there. Raises OSError if the file
    system fails."""
    try:
        there = os.stat(place)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return there.st_dev, there.st_ino
