"""Data files that are in several checkpoints: a file is found again by its identity, and given one more name.

Only the very file that was written is linked, as its name may belong to another one by now. A file that cannot be
linked is no error: the caller has the bytes in memory and writes them.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from dcp_plugin.format import DATA_SUFFIX
from dcp_plugin.media.disk import posix

_HOMES = 4
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

    def published(self, home: Path) -> LinkableFile:
        """The same file when its newest name has become ``home``."""
        others = [path for path in self.homes[1:] if path != home]
        return replace(self, homes=(home, *others)[:_HOMES])

    @contextmanager
    def open(self) -> Iterator[tuple[int, LinkableFile]]:
        """A descriptor of the file, and this object with the identity of what was opened.

        Raises:
            CannotLink: It is not there.
        """
        for home in filter(self._is_at, self.homes):
            try:
                fd = os.open(home, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                yield fd, replace(self, identity=_Identity.of(os.fstat(fd)))
            finally:
                os.close(fd)
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
                posix.delete(target)
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


class CannotLink(Exception):
    """A file cannot be linked; the message says why. Never reaches the user."""


def free_name(rank: int, taken: Collection[str], token: str, wanted: str = "") -> str:
    """A name for a data file of this rank: the wanted one if it may be linked under it, else the first that is free.

    Args:
        token: The save's, for the name of a file that may be linked into other checkpoints: stock writes
            ``__{rank}_{n}.distcp`` in place, which would change these too, and new names are to be no other save's.
            Empty for a name like stock's.
        wanted: The name in the last checkpoint. A file keeps its name where it can, so that tools which copy a run see
            what is the same. Not if it is another rank's, which may link a file of that name itself, or as stock's.
    """
    if re.fullmatch(rf"__{rank}_\d+-[0-9a-f]+{DATA_SUFFIX}", wanted) and wanted not in taken:
        return wanted
    suffix = f"-{token}{DATA_SUFFIX}" if token else DATA_SUFFIX
    number = 0
    while (name := f"__{rank}_{number}{suffix}") in taken:
        number += 1
    return name


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
        posix.delete(target)
        return False
    return True
