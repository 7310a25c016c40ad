"""Data files that are in several checkpoints: a file is found again by its identity, and given one more name.

Only the very file that was written is linked, as its name may belong to another one by now. A file that cannot be
linked is no error: the caller has the bytes in memory and writes them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

from dcp_plugin.media import CannotLink, Usage, with_newest
from dcp_plugin.media.disk.files import LocalFile

_GONE = "its files are gone, or were written to since"
_FICLONE = 0x40049409  # of linux/fs.h: share the blocks of another file, where the file system can


@dataclass(frozen=True)
class _Identity:
    """Identity of a file: device, inode, size and modification time. Not its ctime, which a link changes."""

    device: int
    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, found: os.stat_result) -> _Identity:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True)
class LinkableFile:
    """A data file of published checkpoints, under its known names, newest first. Any of them may be deleted.

    ``identity`` is None for a file that another process has written. Its bytes have to be verified before it is linked.
    """

    homes: tuple[Path, ...]
    size: int
    identity: _Identity | None = None

    @classmethod
    def written(cls, path: Path) -> LinkableFile:
        """A file that this process has just written."""
        found = os.stat(path)
        return cls((path,), found.st_size, _Identity.of(found))

    @property
    def verified(self) -> bool:
        return self.identity is not None

    def published(self, home: Path) -> LinkableFile:
        """The same file when its newest name has become ``home``."""
        return replace(self, homes=with_newest(self.homes, home))

    @contextmanager
    def opened(self) -> Iterator[tuple[LocalFile, LinkableFile]]:
        """The file, open to be verified, and this object with the identity of what was opened.

        Raises:
            CannotLink: It is not there.
        """
        for home in filter(self._is_at, self.homes):
            try:
                fd = os.open(home, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                continue
            with LocalFile(FileIO(fd)) as file:
                yield file, replace(self, identity=_Identity.of(os.fstat(fd)))
            return
        raise CannotLink(_GONE)

    def link_to(self, target: Path) -> LinkableFile:
        """Make ``target`` this file, or one that shares its blocks.

        Raises:
            CannotLink: In words: why that cannot be.
        """
        reason = _GONE
        for home in self.homes:
            if not self._is_at(home):
                continue
            try:
                os.link(home, target)
            except OSError as error:
                if _reflink(home, target) and self._is_at(home):
                    return LinkableFile.written(target)
                target.unlink(missing_ok=True)
                if error.errno != errno.ENOENT:  # not deleted just now
                    reason = f"the file system makes no hard links there ({error.strerror})"
                continue
            if self._is_at(target):
                return replace(LinkableFile.written(target), homes=(target, *self.homes))
            target.unlink()  # another file has taken its name just now
        raise CannotLink(reason)

    def _is_at(self, path: Path) -> bool:
        try:
            found = os.lstat(path)
        except OSError:
            return False
        same = _Identity.of(found) == self.identity if self.identity else found.st_size == self.size
        return same and stat.S_ISREG(found.st_mode)


def usage_of(path: Path) -> Usage:
    """The bytes of the files at a path. What is deleted meanwhile does not count."""
    files: dict[tuple[int, int], tuple[int, int, int]] = {}
    for found in _stats_below(path):
        identity = (found.st_dev, found.st_ino)
        _, here, _ = files.get(identity, (0, 0, 0))
        files[identity] = (found.st_size, here + 1, found.st_nlink)
    return Usage(files)


def _stats_below(path: Path) -> Iterator[os.stat_result]:
    folders: list[str | Path] = [path]
    while folders:
        with suppress(FileNotFoundError):
            try:
                entries = os.scandir(folders.pop())
            except NotADirectoryError:
                yield os.lstat(path)
                continue
            with entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        yield entry.stat(follow_symlinks=False)


def _reflink(source: Path, target: Path) -> bool:
    """A durable copy that shares the blocks of the source; False where the file system has no such thing.

    An ordinary copy, also one that the kernel makes, is no help: it reads and writes what is in memory already.
    """
    import fcntl  # not on every platform; a save without it has ended before

    try:
        with open(source, "rb") as there, open(target, "xb") as here:
            fcntl.ioctl(here.fileno(), _FICLONE, there.fileno())
            os.fsync(here.fileno())
    except OSError:
        target.unlink(missing_ok=True)
        return False
    return True
