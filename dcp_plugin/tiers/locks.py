"""Locks by which processes of a node see which others are alive.

They are POSIX record locks, which a process forked from the holder does not inherit. The kernel names the holder. This
module imports no torch, so that a keeper that finds another one alive ends at once.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path

from dcp_plugin.core.errors import NoSharedMemory

KEEPER = "keeper.lock"
"""The file in the folder of a spool that its keeper locks."""
_PAUSE = 0.02
"""Seconds between two attempts to lock."""
_LOCK_SECONDS = 10.0
"""Seconds in which the holder of the lock of the folders has to give it up: it has a few files to make."""
_FLOCK = struct.Struct("hhqqi4x")
"""The kernel's ``struct flock``: type, whence, start, length, pid."""
_locking = threading.Lock()
"""POSIX locks do not exclude the threads of one process."""


def _renew_lock() -> None:
    global _locking
    _locking = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # the holder may be a thread of the parent


def lock(descriptor: int) -> bool:
    """Lock an open file, if no other process has; return whether this process has it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX lets a system answer either way
        return False
    return True


def holder(descriptor: int) -> int | None:
    """Return the process that has locked an open file; None if none has, or if it is this process."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else int(pid)


def locked_by(path: Path) -> int | None:
    """Return the process that has locked a file; None if none has, or if it is this process.

    The file is not locked to find out: that would keep the lock from a process that wants it at this moment, and a
    process forked meanwhile would hold it.
    """
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return holder(descriptor)
        finally:
            os.close(descriptor)
    return None


def become_keeper(folder: Path) -> int | None:
    """Return the descriptor of the keeper's lock, which this process holds until it ends; None if a keeper is alive.

    The descriptor stays open in both cases: to close any of a file gives up the lock of its process.
    """
    try:
        descriptor = os.open(folder / KEEPER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not lock(descriptor) or not is_keeper(folder, descriptor):
            return None
    except OSError:
        return None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def is_keeper(folder: Path, descriptor: int) -> bool:
    """Return whether others find the lock that this process holds: not if its folder was removed or deleted."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), os.stat(folder / KEEPER))
    return False


@contextmanager
def exclusive(base: Path) -> Iterator[None]:
    """Serialise creation and removal of journals.

    Raises:
        NoSharedMemory: The lock is not free within :data:`_LOCK_SECONDS`; names the process that holds it.
        OSError: The file system failed.
    """
    path = base / ".door" / "lock"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    # The interpreter handles Ctrl-C between bytecodes. `with` takes a lock or file of a C type in one bytecode, and
    # releases it on every way out.
    with _locking, FileIO(path, "a", opener=partial(os.open, mode=0o600)) as file:
        deadline = time.monotonic() + _LOCK_SECONDS
        while not lock(file.fileno()):
            if time.monotonic() > deadline:
                process = described(holder(file.fileno()))
                raise NoSharedMemory(f"{path} is held by {process} for {_LOCK_SECONDS:.0f} s")
            time.sleep(_PAUSE)
        yield


def described(pid: int | None) -> str:
    """Return a process and its state, in words."""
    if not pid:
        return "a process that cannot be seen from here"
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return f"process {pid}, which has ended"
    state = next((line.partition(":")[2].strip() for line in status.splitlines() if line.startswith("State:")), "?")
    return f"process {pid}, whose state is {state}"
