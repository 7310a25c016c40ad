"""The file-system operations of a commit: directories opened without following links, syncs, exchanges of names, and
locks that the kernel drops when their process ends.

The rule: nothing of another user is renamed, moved or deleted unless the caller names it. All garbage is changed
through :class:`OwnFolder`, for which :func:`refuse_other_user` checks the owner.

A new file or directory is durable when it is synced and the directory that has its name is synced. A rename is durable
when both directories are synced. :func:`make_directories` and :func:`sync_tree` do that; otherwise the caller does.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from dcp_plugin.core.interrupts import interrupts_held

_RENAME_EXCHANGE = 2
_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_IN_MEMORY = {0x01021994, 0x858458F6}  # TMPFS_MAGIC and RAMFS_MAGIC of linux/magic.h
_AT_FDCWD = -100
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}
_RENAMED = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR}
"""Errors of a rename, but not of an exchange: some FUSE file systems perform a rename instead."""


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. File systems that cannot sync a directory need not."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _sync(fd)
    finally:
        os.close(fd)


def _sync(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def make_directories(path: Path) -> None:
    """``mkdir -p``, with every new name made durable."""
    missing = [candidate for candidate in (path, *path.parents) if not candidate.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for created in reversed(missing):
        sync_directory(created.parent)


def close_when_dropped(owner: object, close: Callable[..., None], *opened: Any) -> Callable[[], None]:
    """Call ``close(*opened)`` when the owner is deleted, as Ctrl-C may come before its ``close``.

    This replaces a ``__del__``, which runs after ``close``, too. Python discards an exception that is raised in it, and
    with the exception a Ctrl-C.

    Returns:
        The function that closes at once. It closes once.
    """
    finalizer = weakref.finalize(owner, close, *opened)
    finalizer.atexit = False  # a thread may use the owner to the end of the program
    return finalizer


# Windows lacks these flags. Programs that only read from a store import this module there, too.
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_OWN = getattr(os, "O_NONBLOCK", 0) | NOFOLLOW | getattr(os, "O_CLOEXEC", 0)


def open_regular(path: Path | str, directory: int | None = None, further_flags: int = 0) -> io.FileIO:
    """Open a regular file, unbuffered. Anything else raises OSError: opening a named pipe would wait for ever.

    Args:
        directory: The descriptor of the directory that a relative path is relative to.
        further_flags: Of ``os.open``.
    """
    further_flags |= os.O_NONBLOCK | os.O_NOCTTY
    file = io.FileIO(str(path), opener=lambda name, flags: os.open(name, flags | further_flags, dir_fd=directory))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


class Folder:
    """An open directory of this package. Its entries are opened through the descriptor without following links, since
    another program may replace the directory or an entry by a link at any time.

    Args:
        path: The directory; an entry of ``within``, if that is given.

    Raises:
        NotADirectoryError: It is a link, or no directory.
    """

    def __init__(self, path: Path, within: Folder | None = None) -> None:
        self.path, self.descriptor = path, -1
        flags = os.O_RDONLY | os.O_DIRECTORY | _OWN
        try:
            self.descriptor = (
                os.open(path, flags) if within is None else os.open(path.name, flags, dir_fd=within.descriptor)
            )
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise OSError(error.errno, error.strerror, str(path)) from None
            raise NotADirectoryError(errno.ENOTDIR, "it is a link, or no directory", str(path)) from None
        self._close = close_when_dropped(self, os.close, self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        with interrupts_held():
            self.descriptor = -1
            self._close()

    def names(self) -> list[str]:
        return sorted(os.listdir(self.descriptor))

    def folder(self, name: str) -> Folder:
        """Open a directory in this one."""
        return Folder(self.path / name, self)

    def open(self, name: str, flags: int) -> int:
        """Open a regular file and return its descriptor."""
        try:
            fd = os.open(name, flags | _OWN, 0o644, dir_fd=self.descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path / name)) from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "it is no regular file", str(self.path / name))
        return fd

    def has(self, name: str) -> bool:
        """Return whether an entry exists, of any kind."""
        try:
            os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def sync(self) -> None:
        """Make the names durable."""
        _sync(self.descriptor)


class NamedFolder(Folder):
    """An open directory whose entries may be renamed, moved and deleted: the user has named it, or it is in an
    :class:`OwnFolder`. No other class changes the entries of a directory."""

    def folder(self, name: str) -> NamedFolder:
        return NamedFolder(self.path / name, self)

    def rename(self, name: str, to: str) -> None:
        """Rename an entry within the directory."""
        os.rename(name, to, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def take(self, path: Path | str, name: str, of: Folder | None = None) -> None:
        """Move a path, relative to the folder ``of``, into the directory."""
        os.rename(path, name, src_dir_fd=of.descriptor if of else None, dst_dir_fd=self.descriptor)

    def give(self, name: str, path: Path | str, to: Folder | None = None) -> None:
        """Move an entry to a path, relative to the folder ``to``. A file, a link or an empty directory there is
        replaced."""
        os.rename(name, path, src_dir_fd=self.descriptor, dst_dir_fd=to.descriptor if to else None)

    def remove(self) -> None:
        """Delete the directory itself. Raises OSError if it has entries."""
        self.path.rmdir()

    def delete(self, name: str) -> bool:
        """Delete a file, a link or a directory tree. Return whether it is gone."""
        with suppress(OSError):
            if stat.S_ISDIR(os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode):
                shutil.rmtree(name, ignore_errors=True, dir_fd=self.descriptor)
            else:
                os.unlink(name, dir_fd=self.descriptor)
        return not self.has(name)


class OwnFolder(NamedFolder):
    """An open directory of this user, in which no other user can make, rename or delete entries.

    Raises:
        PermissionError: It belongs to another user.
    """

    def __init__(self, path: Path, within: Folder | None = None) -> None:
        super().__init__(path, within)
        try:
            mode = stat.S_IMODE(refuse_other_user(self.descriptor, path).st_mode)
            if mode & _OTHERS_WRITE:
                with suppress(OSError):  # a file system without modes
                    os.fchmod(self.descriptor, mode & ~_OTHERS_WRITE)
        except BaseException:
            self.close()
            raise


_users: dict[tuple[int, int], int] = {}
"""Results of :func:`user_in`, by the device of the folder and the user of this process."""


def user_in(folder: Path) -> int:
    """Return the user to whom a new entry of a folder belongs, as the file system shows it.

    This is not always the user of the process: root squash, ID maps and CIFS show another number. Raises OSError.
    """
    key = os.stat(folder).st_dev, os.geteuid()
    if key not in _users:
        try:
            with tempfile.TemporaryFile(dir=folder) as file:  # without a name, but on NFS and CIFS
                _users[key] = os.fstat(file.fileno()).st_uid
        except OSError:  # this process can make no entry there
            return key[1]
    return _users[key]


def refuse_other_user(descriptor: int, path: Path) -> os.stat_result:
    """Return the status of an open file or directory, which belongs to this user.

    Raises:
        PermissionError: It belongs to another user.
    """
    status = os.fstat(descriptor)
    if reason := why_not_own(status, path):
        raise PermissionError(errno.EPERM, reason, str(path))
    return status


def why_not_own(status: os.stat_result, path: Path) -> str:
    """Return why a path with this status is not changed; empty if it belongs to this user."""
    is_own = status.st_uid == user_in(path.parent)
    return "" if is_own else f"it belongs to another user (uid {status.st_uid}), and stays as it is"


def sync_tree(directory: Path, but: str) -> None:
    """Sync the files and directories below a directory, but for the files with the suffix ``but``."""
    for parent, _, names in os.walk(directory):
        for path in (Path(parent, name) for name in names if not name.endswith(but)):
            kind = os.lstat(path).st_mode  # other entries, such as a pipe or a dangling link, need no sync
            if stat.S_ISREG(kind) or (stat.S_ISLNK(kind) and path.is_file()):
                with open_regular(path) as file:
                    os.fsync(file.fileno())
        sync_directory(Path(parent))


def preallocate(fd: int, size: int) -> None:
    """Reserve space for a new file, so that a full disk is found before it is written.

    ``os`` has ``posix_fallocate`` of the C library, which writes to every block of a file system that cannot do this.
    NFS 3 is such a file system.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if size:
        arguments = (ctypes.c_int(fd), ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(size))
        if libc.fallocate(*arguments) != 0 and ctypes.get_errno() not in _UNSUPPORTED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def available_memory() -> int:
    """Return the bytes that programs and the page cache may take without swapping; 0 if they are unknown."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10
        with suppress(OSError, ValueError):  # "max"; or there is no limit for this group of processes
            folder = Path("/sys/fs/cgroup")
            limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
            available = min(available, limit - used)
        return available
    return 0


def is_in_memory(fd: int) -> bool:
    """Return whether a file is on a file system in memory (tmpfs), without a device (``statfs(2)``)."""
    status = (ctypes.c_long * 64)()
    return ctypes.CDLL(None).fstatfs(ctypes.c_int(fd), status) == 0 and status[0] in _IN_MEMORY


def start_writeback(fd: int, offset: int, count: int) -> None:
    """Start to write a range of a file from the page cache to the device (``sync_file_range(2)``), so that a later sync
    is faster."""
    arguments = (ctypes.c_int(fd), ctypes.c_int64(offset), ctypes.c_int64(count), ctypes.c_uint(_WRITE))
    ctypes.CDLL(None).sync_file_range(*arguments)


def exchange(folder: OwnFolder, name: str, other: Path) -> bool:
    """Swap an entry and a path, both of which exist, in one step; False where kernel or file system cannot
    (``renameat2(2)``)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(folder.descriptor, os.fsencode(name), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED | _RENAMED:
        return False
    raise OSError(code, os.strerror(code), str(folder.path / name), None, str(other))


def machine() -> str:
    """Return the identity of the boot and the process namespace, within which a number names one process. It is empty
    if the system does not report it."""
    return _boot_and_namespace("pid")


def mount_of(fd: int) -> str:
    """Return the identity of the boot, the mount namespace and the device of an open file. Processes with the same
    identity share its locks. It is empty if the system does not report it."""
    here = _boot_and_namespace("mnt")
    return here and f"{here} {os.fstat(fd).st_dev}"


def _boot_and_namespace(kind: str) -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def has_ended(on_machine: object, pid: object) -> bool:
    """Return whether a process has ended; False if that is unknown on this machine."""
    if not on_machine or on_machine != machine() or not isinstance(pid, int) or not 0 < pid < 1 << 31:
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.ESRCH  # otherwise it is of another user
    return False


def lock(folder: Folder, name: str, create: bool) -> int | None:
    """Create or open a file and lock it for this process; its descriptor, or None while another process holds it.

    The kernel drops the lock when the process dies, however it dies. The lock is one of POSIX: a forked data loader
    worker does not inherit it, and it works over NFS. It does not exclude its own process.

    Raises:
        OSError: The file system has no locks, or the file cannot be made.
    """
    import fcntl  # Windows lacks it, where programs that only read import this module

    fd = folder.open(name, os.O_RDWR | (os.O_CREAT if create else 0))
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return None
        raise
    return fd
