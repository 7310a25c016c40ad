"""Runs a program as if on macOS or Windows: ``python -m tests.other_systems darwin|win32 CODE``.

What Python does not have there is taken away once torch is imported, which was built for Linux: modules, functions and
flags of ``os``, functions of the C library, and ``/proc``, ``/sys`` and ``/dev``. The file system stays that of Linux.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import tempfile
from typing import Any

LINUX_ALONE = {
    os: (
        *("O_DIRECT", "O_PATH", "O_TMPFILE", "O_NOATIME", "O_LARGEFILE", "O_RSYNC", "copy_file_range", "splice"),
        *("posix_fallocate", "posix_fadvise", "memfd_create", "eventfd", "pidfd_open", "getxattr", "setxattr"),
        *("sched_setscheduler", "sched_getaffinity", "sched_setaffinity", "sched_param", "SCHED_BATCH", "setns"),
        *("unshare", "getrandom", "preadv2", "RWF_NOWAIT", "fdatasync"),
    ),
    select: ("epoll",),
    socket: ("SO_PEERCRED", "AF_NETLINK", "SOCK_CLOEXEC", "SOCK_NONBLOCK"),
    signal: ("sigtimedwait", "sigwaitinfo", "SIGPWR", "SIGSTKFLT"),
}
NOT_ON_WINDOWS = {
    os: (
        *("fork", "forkpty", "getuid", "geteuid", "getgid", "getegid", "fchmod", "fchown", "chown", "lchown", "sync"),
        *("pread", "pwrite", "preadv", "pwritev", "readv", "writev", "sendfile", "mkfifo", "mknod", "statvfs", "nice"),
        *("fstatvfs", "uname", "getloadavg", "killpg", "getpgid", "setsid", "sysconf", "sched_yield", "WNOHANG"),
        *("O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_SYNC", "O_DSYNC", "O_ASYNC"),
    ),
    select: ("poll", "POLLIN", "POLLOUT", "POLLHUP", "POLLERR"),
    signal: ("pthread_kill", "SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGALRM", "setitimer", "sigwait"),
    socket: ("AF_UNIX", "SCM_RIGHTS", "send_fds", "recv_fds", "MSG_DONTWAIT"),
}
MODULES_NOT_ON_WINDOWS = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "_posixshmem")
LIBC_OF_LINUX = ("renameat2", "sync_file_range", "fallocate")


class _Libc:
    """The C library, without what is Linux's alone."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        if name in LIBC_OF_LINUX:
            raise AttributeError(name)
        return getattr(self._library, name)


def _refuse(event: str, given: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and str(given[0]).startswith(("/proc/", "/sys/", "/dev/shm")):
        raise FileNotFoundError(2, "No such file or directory", given[0])


def become(system: str) -> None:
    """Take away what ``system`` does not have."""
    absent = [LINUX_ALONE] if system == "darwin" else [LINUX_ALONE, NOT_ON_WINDOWS]
    for module, names in ((module, names) for one in absent for module, names in one.items()):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    tempfile._O_TMPFILE_WORKS = False  # type: ignore[attr-defined]  # it looked before
    library = ctypes.CDLL

    def open_library(name: str | None, *arguments: Any, **options: Any) -> Any:
        if name is None and system == "win32":
            raise TypeError("bad argument type for built-in operation")
        found = library(name, *arguments, **options)
        return found if name is not None else _Libc(found)

    ctypes.CDLL = open_library  # type: ignore[assignment,misc]
    if system == "win32":
        for module in MODULES_NOT_ON_WINDOWS:
            sys.modules[module] = None  # type: ignore[assignment]
        os.supports_dir_fd.clear()
        os.supports_fd.clear()
    sys.addaudithook(_refuse)
    sys.platform = system


if __name__ == "__main__":
    import torch.distributed.checkpoint
    import torch.distributed.fsdp  # noqa: F401

    become(sys.argv[1])
    exec(compile(sys.argv[2], "<program>", "exec"), {"__name__": "__main__"})
