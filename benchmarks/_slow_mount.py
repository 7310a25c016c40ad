"""A directory, mounted read-only once for each host, through a file server of so many bytes per second for all of them.

What a network file system is to a load: each host has a page cache of its own, and behind all of them is one server,
whose rate they share and whose answers take their time. It is served over FUSE, by a process of its own which talks the
kernel's protocol: no library is needed, but root and ``/dev/fuse``. The mounts are gone when the ``with`` ends, and
when the process that asked for them does, in whatever way.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_THREADS = 4  # of a mount
_READ = 1 << 20  # the most bytes of a request
_KERNEL, _MINOR = 7, 31
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ_, _STATFS, _RELEASE, _FLUSH = 1, 2, 3, 14, 15, 17, 18, 25
_INIT, _OPENDIR, _READDIR, _RELEASEDIR, _ACCESS, _INTERRUPT, _FORGET_MANY = 26, 27, 28, 29, 34, 36, 42
_ASYNC_READ, _MAX_PAGES = 1 << 0, 1 << 22
_KEEP_CACHE = 1 << 1
_READ_ONLY = 1  # MS_RDONLY
_IN, _OUT = struct.Struct("=IIQQIII4x"), struct.Struct("=IiQ")
_ATTRIBUTES = struct.Struct("=6Q10I")
_LASTS = 1 << 20  # seconds that names and attributes are believed: nothing here changes


def why_not() -> str:
    """Why there can be no such mount here; empty if there can."""
    if os.geteuid() != 0:
        return "only root may mount"
    return "" if os.access("/dev/fuse", os.R_OK | os.W_OK) else "there is no /dev/fuse"


class Server:
    """What all mounts have in common: the rate, and how much was asked for.

    Args:
        rate: Bytes per second, of all mounts together.
        delay: Seconds from a request to its answer.
        served: A shared counter of bytes.
    """

    def __init__(self, rate: float, delay: float, served: Any) -> None:
        self._rate, self._delay, self.served = rate, delay, served
        self._lock, self._free = threading.Lock(), 0.0

    def take_time(self, count: int) -> None:
        with self._lock:
            self._free = max(self._free, time.monotonic()) + count / self._rate
            due = self._free + self._delay
        time.sleep(max(0.0, due - time.monotonic()))


class Mount:
    """One mount of a directory: what the kernel asks is answered by threads until it is unmounted."""

    def __init__(self, directory: Path, at: Path, server: Server) -> None:
        self._server, self._lock = server, threading.Lock()
        self._nodes, self._numbers = {1: directory}, {directory: 1}
        self._device = os.open("/dev/fuse", os.O_RDWR)
        told = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={_READ}"
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"slow", os.fsencode(at), b"fuse.slow", _READ_ONLY, told.encode()):
            raise OSError(ctypes.get_errno(), "cannot mount", str(at))
        for _ in range(_THREADS):
            threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while True:
            try:
                request = os.read(self._device, _READ + 4096)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT):  # ENOENT: it was interrupted before it was read
                    continue
                return  # unmounted
            _, code, unique, node, *_ = _IN.unpack_from(request)
            if code in (_FORGET, _FORGET_MANY, _INTERRUPT):
                continue
            try:
                answer, failed = self._of(code, node, request[_IN.size :]), 0
            except OSError as error:
                answer, failed = b"", error.errno or errno.EIO
            try:
                os.write(self._device, _OUT.pack(_OUT.size + len(answer), -failed, unique) + answer)
            except OSError:  # who asked is gone
                continue

    def _of(self, code: int, node: int, said: bytes) -> bytes:
        """The answer to a request."""
        path = self._nodes.get(node)
        if code == _INIT:
            _, _, ahead, _ = struct.unpack_from("=4I", said)
            sizes = struct.pack("=HHIIHH32x", 64, 48, 4096, 1, _READ // 4096, 0)
            return struct.pack("=4I", _KERNEL, _MINOR, ahead, _ASYNC_READ | _MAX_PAGES) + sizes
        if path is None:
            raise OSError(errno.ESTALE, "no such node")
        if code == _LOOKUP:
            return self._entry(path / os.fsdecode(said.rstrip(b"\0")))
        if code == _GETATTR:
            return struct.pack("=QII", _LASTS, 0, 0) + self._attributes(path)
        if code in (_OPEN, _OPENDIR):
            return struct.pack("=QII", node, _KEEP_CACHE, 0)
        if code == _READ_:
            return self._bytes(path, *struct.unpack_from("=8xQI", said))
        if code == _READDIR:
            return self._names(path, *struct.unpack_from("=8xQI", said))
        if code == _STATFS:
            return struct.pack("=5Q4I24x", 1 << 30, 0, 0, 1 << 20, 0, 4096, 255, 4096, 0)
        if code in (_RELEASE, _RELEASEDIR, _FLUSH, _ACCESS):
            return b""
        raise OSError(errno.ENOSYS, "not needed")

    def _entry(self, path: Path) -> bytes:
        attributes = self._attributes(path)
        return struct.pack("=4QII", self._number(path), 0, _LASTS, _LASTS, 0, 0) + attributes

    def _number(self, path: Path) -> int:
        with self._lock:
            number = self._numbers.setdefault(path, len(self._numbers) + 1)
            self._nodes[number] = path
        return number

    def _attributes(self, path: Path) -> bytes:
        it = os.lstat(path)
        times = (int(it.st_atime), int(it.st_mtime), int(it.st_ctime), 0, 0, 0)
        return _ATTRIBUTES.pack(
            self._number(path), it.st_size, it.st_blocks, *times, it.st_mode, 1, it.st_uid, it.st_gid, 0, 4096, 0
        )

    def _bytes(self, path: Path, offset: int, size: int) -> bytes:
        with open(path, "rb", buffering=0) as file:
            data = os.pread(file.fileno(), size, offset)
        self._server.take_time(len(data))
        with self._server.served.get_lock():
            self._server.served.value += len(data)
        return data

    def _names(self, path: Path, at: int, size: int) -> bytes:
        entries = b""
        for number, name in enumerate(sorted(os.listdir(path))[at:], start=at + 1):
            kind = stat.S_IFMT(os.lstat(path / name).st_mode) >> 12
            encoded = os.fsencode(name)
            entry = struct.pack("=QQII", self._number(path / name), number, len(encoded), kind) + encoded
            entry += b"\0" * (-len(entry) % 8)
            if len(entries) + len(entry) > size:
                break
            entries += entry
        return entries


def _serve(
    directory: Path, points: Sequence[Path], rate: float, delay: float, served: Any, ready: Any, until_closed: Any
) -> None:
    server = Server(rate, delay, served)
    try:
        for point in points:
            Mount(directory, point, server)
        ready.set()
        with suppress(EOFError):
            until_closed.recv()
    finally:
        for point in points:
            subprocess.run(["umount", "-l", str(point)], check=False, capture_output=True)


@contextmanager
def mounted(
    context: Any, directory: Path, points: Sequence[Path], mb_per_second: float, ms: float = 1.0
) -> Iterator[Any]:
    """Mount ``directory`` at each of ``points``, until the block ends or this process does.

    Args:
        context: Of :mod:`multiprocessing`; starts the server.
        mb_per_second: 10^6 bytes, of all mounts together.
        ms: From a request to its answer.

    Returns:
        The counter of bytes that were served (its ``value``).
    """
    served, ready = context.Value("q", 0), context.Event()
    until_closed, held_open = context.Pipe(duplex=False)
    for point in points:
        point.mkdir(parents=True, exist_ok=True)
    arguments = (directory, points, mb_per_second * 1e6, ms / 1e3, served, ready, until_closed)
    server = context.Process(target=_serve, args=arguments, daemon=True)
    server.start()
    until_closed.close()
    try:
        if not ready.wait(30):
            raise OSError("the file server did not start")
        for point in points:
            major, minor = os.major(os.stat(point).st_dev), os.minor(os.stat(point).st_dev)
            ahead = Path(f"/sys/class/bdi/{major}:{minor}/read_ahead_kb")
            ahead.write_text(str(_READ // 1024 * 4))  # as a network's clients have it; 128 KiB would be a request each
        yield served
    finally:
        held_open.close()
        server.join(10)
