"""Data files that are in several checkpoints: a file is recognised by its identity, and given one more name.

A file is linked only if its identity is unchanged: another file may have taken its name. A file that cannot be linked
is no error: the caller has the bytes in memory and writes them.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from dcp_plugin.media import GONE, CannotLink, DataFile
from dcp_plugin.media.disk.files import LocalFiles, identity_of

_FICLONE = 0x40049409  # of linux/fs.h: share the blocks of another file, where the file system can


def link_file(file: DataFile, target: Path) -> DataFile:
    """Make ``target`` this file, or one that shares its blocks. See :meth:`dcp_plugin.media.Medium.link_file`."""
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
    return is_same and stat.S_ISREG(status.st_mode)


def _reflink(source: Path, target: Path) -> bool:
    """Make a durable copy that shares the blocks of the source. Return False where the file system cannot.

    An ordinary copy, by the kernel too, saves nothing: it reads and writes bytes that are in memory already.
    """
    import fcntl  # not on every platform; a save without it has ended before

    try:
        with open(source, "rb") as original, open(target, "xb") as copy:
            fcntl.ioctl(copy.fileno(), _FICLONE, original.fileno())
            os.fsync(copy.fileno())
    except OSError:
        target.unlink(missing_ok=True)
        return False
    return True
