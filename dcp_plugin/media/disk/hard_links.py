"""A data file that is to be in several checkpoints: found again, and given one more name.

Nothing is linked that is not certainly the file that was written: a name may have come to belong to another one. What
cannot be linked is no error. The caller has the bytes in memory and writes them.

A data file of another process is read once before it is linked: what its index says of it is only a claim.

The checksums of a loaded checkpoint protect a load, because they are compared with its bytes. A link reads nothing. So
a disk that forgot, or somebody who wrote other weights under the hash of those in memory, would put bytes into the next
checkpoint that nobody has seen. Nothing of the index is taken over but where things are.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from isal.isal_zlib import crc32

from dcp_plugin.format.checksums import RunningCrc, RunningHash, block_size
from dcp_plugin.format.columns import Location
from dcp_plugin.format.names import DATA_SUFFIX
from dcp_plugin.format.torch_zip import frame_if_possible
from dcp_plugin.host_memory import BLOCK
from dcp_plugin.media.disk import posix
from dcp_plugin.types import Shape

_HOMES = 4
_GONE = "its files are gone, or were written to since"
_FICLONE = 0x40049409  # of linux/fs.h: share the blocks of another file, where the file system can


@dataclass(frozen=True)
class _Identity:
    """Tells a file from any other that has its name, now or later. Not its ctime: links change that."""

    device: int
    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, found: os.stat_result) -> _Identity:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True)
class LinkableFile:
    """A data file of published checkpoints, under the names that we know, newest first: any may be deleted.

    ``identity`` is None for a file that another process has written: then it has to be read first, see
    :mod:`~dcp_plugin.media.disk.hard_links`.
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
    def opened(self) -> Iterator[tuple[int, LinkableFile]]:
        """The file, open for reading, and itself as the very file that was opened.

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
                linked = LinkableFile.written(target)
                return replace(linked, homes=(target, *self.homes))
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
    """A file cannot be linked. Never leaves this floor."""


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


Claim = tuple[torch.dtype, Shape, Location]
"""Dtype and shape of an item, and where it is said to be."""


def confirmed(file: LinkableFile, claims: Mapping[int, Claim]) -> tuple[LinkableFile, dict[int, Location]]:
    """The file, which is known from now on, and where its items are, with checksums of the bytes that are there.

    Raises:
        CannotLink: It has other bytes.
    """
    with file.opened() as (fd, known):
        memory = memoryview(bytearray(BLOCK))
        return known, {slot: _confirmed(fd, *claim, memory) for slot, claim in claims.items()}


def _confirmed(fd: int, dtype: torch.dtype, shape: Shape, at: Location, memory: memoryview) -> Location:
    around = frame_if_possible(dtype, shape)
    if around is None or (at.length, at.payload_offset) != (around.length, around.payload_offset):
        raise CannotLink("another version of torch or of dcp_plugin has saved it")
    head = os.pread(fd, len(around.head), at.offset)
    checksum, running_hash = RunningCrc(block_size(around.payload_length)), RunningHash()
    begin, end = at.offset + around.payload_offset, at.offset + around.payload_offset + around.payload_length
    while begin < end:
        count = os.preadv(fd, [memory[: end - begin]], begin)
        if not count:
            break
        checksum.add(memory[:count])
        running_hash.update(memory[:count])
        begin += count
    rest = around.length - around.payload_offset - around.payload_length
    tail = os.pread(fd, rest, end)
    framed = head == around.head and tail in (around.tail(checksum.crc), around.tail(0))  # saved without checksums: 0
    if not framed or running_hash.digest() != at.hash:
        raise CannotLink(f"what is in {at.file} are not the bytes that its index says; see dcp_plugin.verify")
    frame_crc = crc32(tail, around.head_crc)
    ends = np.array(checksum.ends, np.uint32)
    return replace(at, payload_length=around.payload_length, frame_crc=frame_crc, checksums=ends)
