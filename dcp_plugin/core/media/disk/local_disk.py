"""Medium of a file system that all ranks share: :class:`LocalDisk`, and its new files: :class:`BlockFile`.

A data file is written front to back in large aligned blocks, through the page cache or past it.
A file in the page cache can be loaded again without the device, as after a restart on the same host. The kernel is
asked to write the pages back while the file is written, so the sync at the end is short.

``O_DIRECT`` saves the copy and the CPU time of the page cache. It also evicts no page that the training uses. So it is
used for files that are large for the available memory. Some file systems refuse it when it is switched on, others at
the first write. Where it fails, the file is written through the page cache. The name of a file system shows nothing,
except that tmpfs has no device.

The size is known beforehand, so the space on a device is reserved at once. A full disk is found before the first write.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, cast

import numpy as np

from dcp_plugin.core.errors import SaveFailed
from dcp_plugin.core.format import DATA_SUFFIX, Pieces
from dcp_plugin.core.media import lease
from dcp_plugin.core.media.disk import commit, posix
from dcp_plugin.core.media.disk.local_files import LocalFiles, PinnedFiles, link_file
from dcp_plugin.core.media.medium import (
    IN_PLACE,
    PAGE,
    FileStatus,
    InFlight,
    Leftover,
    Listed,
    Medium,
    Reservation,
    ignore,
)

_VISIBLE_SECONDS = 10.0
"""Time limit for the appearance of a directory made by another rank: NFS clients cache missing names."""
BUFFER = 2 << 20
_LARGE = 1 << 16  # from here on numpy copies faster, and without holding the interpreter's lock
_START_WRITEBACK = 8 << 20
_FILES_IN_CACHE = 32
"""The number of files of one size that must fit into the available memory for the page cache to be used. A host may
have eight ranks that write two files each. Their files must not displace the pages that the training has read."""
_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.EFAULT}  # the last: memory that cannot be read past it


@dataclass(frozen=True)
class LocalDisk:
    """A file system. Files are written with ``O_DIRECT``, and a save becomes visible by a rename or an exchange of
    names (:mod:`~dcp_plugin.core.media.disk.commit`).

    Args:
        direct_io: Write past the page cache; ``"auto"``: do so for files that are large for the available memory.
    """

    direct_io: bool | Literal["auto"] = "auto"

    advice = "Is the file system full, read-only or gone?"

    reserve = staticmethod(commit.reserve)
    discard = staticmethod(commit.discard)
    revoke = staticmethod(commit.revoke)
    link = staticmethod(commit.link)
    note = staticmethod(commit.note)
    remove = staticmethod(commit.remove)
    link_file = staticmethod(link_file)
    flush = staticmethod(posix.sync_directory)

    def join(self, directory: Path, path: Path) -> None:
        deadline = time.monotonic() + _VISIBLE_SECONDS
        while not directory.is_dir():
            if time.monotonic() > deadline:
                raise SaveFailed(
                    f"cannot save {path}: this rank does not see {directory}, which rank 0 has made. The "
                    f"checkpoint directory must be on a file system that all ranks share."
                )
            with suppress(OSError):
                os.listdir(directory.parent)  # makes an NFS client look again
            time.sleep(0.1)

    def create(
        self, directory: Path, name: str, size: int, wrote: Callable[[int], None] = ignore, at_once: int = 1
    ) -> BlockFile:
        return BlockFile(directory / name, size, self.direct_io, wrote)

    def publish(self, reservation: Reservation[Path], files: Mapping[str, bytes | Pieces] | None) -> None:
        if files is None:
            commit.publish_file(reservation)
            return
        for name, data in files.items():
            path = reservation.directory / name
            path.parent.mkdir(exist_ok=True)
            with open(path, "xb") as file:
                file.writelines([data] if isinstance(data, bytes) else data)
        posix.sync_tree(reservation.directory, but=DATA_SUFFIX)  # with what others have added
        commit.publish(reservation)

    def collect_garbage(self, workspace: Path, dry_run: bool = False) -> list[Leftover[Path]]:
        from dcp_plugin.core.media.usage import usage  # needed by `dcp-plugin prune` alone

        return commit.collect_garbage(workspace, lambda path: usage(cast(Medium, self), path).own, dry_run)

    def open(self, path: Path, pin: bool = False) -> LocalFiles:
        return PinnedFiles(path) if pin else LocalFiles(path)

    def entries(self, root: Path) -> list[Listed[Path]]:
        with os.scandir(root) as entries:
            listed = [
                Listed(
                    root / entry.name,
                    entry.is_dir(follow_symlinks=False),
                    entry.is_file(follow_symlinks=False),
                    status=partial(_status, entry),
                    number=entry.inode(),
                    in_flight=partial(_in_flight, root / entry.name),
                )
                for entry in entries
            ]
        return sorted(listed, key=lambda entry: entry.path)

    def kind(self, path: Path) -> Literal["folder", "file", "other", ""]:
        try:
            mode = os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return ""
        except OSError as error:
            if error.errno != errno.ELOOP:  # a link that leads to itself, and so nowhere
                raise
            return ""
        return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"


def _status(entry: os.DirEntry[str]) -> FileStatus:
    status = entry.stat(follow_symlinks=False)
    return FileStatus(status.st_size, (status.st_dev, status.st_ino), status.st_nlink)


def _in_flight(path: Path) -> InFlight | None:
    """Return the save of an entry of a workspace. Garbage of another user, which stays, counts as a save."""
    if path.suffix not in (".saving", ".deleted", ".aside"):
        return None
    with suppress(OSError):
        status = path.stat()
        user = None if status.st_uid == posix.user_in(path.parent.parent) else status.st_uid
        if user is not None or path.suffix == ".saving":
            return lease.in_flight(commit.record_of(path), status.st_mtime)._replace(user=user)
    return None


class BlockFile(AbstractContextManager["BlockFile", None]):
    """A file under construction.

    While one thread computes checksums and fills a buffer, another thread writes the buffer before.

    Args:
        size: Its final size.
        direct: Use ``O_DIRECT``. ``"auto"``: use it if the file is large for the available memory. A file system in
            memory, or one that refuses it, gets the file without it.
        wrote: Called with every number of bytes that went to the file system, from one thread at a time.

    Raises:
        SaveFailed: From any method, with ``direct=True``: the file system refuses it.
        OSError: From any method: an earlier write failed.
    """

    def __init__(
        self, path: Path, size: int, direct: bool | Literal["auto"], wrote: Callable[[int], None] = ignore
    ) -> None:
        self._path, self._wrote, self._forced = path, wrote, direct is True
        # Page-aligned, for O_DIRECT. Shared, since a fork while the device reads would move private pages elsewhere.
        # Unused pages take no memory.
        self._buffer, self._other = (memoryview(mmap.mmap(-1, BUFFER)) for _ in range(2))
        self._filled = 0
        self._position = 0
        """The position in the file at which the buffer begins."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="dcp-write-behind")
        self._on_its_way: Future[None] | None = None
        self._written_back = 0
        self.direct = False
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            in_memory = posix.is_in_memory(self._fd)
            if not in_memory:  # there it takes as long as to write
                posix.preallocate(self._fd, size)
            self._writes_back = size >= _START_WRITEBACK and not in_memory
            large = size >= BUFFER and size > posix.available_memory() / _FILES_IN_CACHE
            if direct is True or (direct == "auto" and large and not in_memory):
                try:
                    self._switch(True)
                except OSError as error:
                    self._refused(error)
        except BaseException:
            os.close(self._fd)
            raise

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._writer.shutdown()  # if this is interrupted, the descriptor stays: the thread writes to it
            os.close(self._fd)

    def tell(self) -> int:
        return self._position + self._filled

    def takes_in_place(self, address: int) -> bool:
        """See :meth:`dcp_plugin.core.media.medium.NewFile.takes_in_place`."""
        return self.direct and address % PAGE == 0 and self.tell() % PAGE == 0

    def write(self, data: bytes | bytearray | memoryview, kept: bool = False) -> None:
        """See :meth:`dcp_plugin.core.media.medium.NewFile.write`."""
        if len(data) >= _LARGE and not self.direct:
            self._write_now(self._buffer[: self._filled])
            self._filled = 0
            self._write_now(memoryview(data))
            return
        if len(data) >= IN_PLACE and self.takes_in_place(np.frombuffer(data, np.uint8).ctypes.data):
            self._flush()
            aligned = len(data) - len(data) % PAGE
            self._write_behind(memoryview(data)[:aligned])
            if not kept:
                self._wait()
            data = memoryview(data)[aligned:]
        while len(data) > BUFFER - self._filled:
            free = BUFFER - self._filled
            self._take(memoryview(data)[:free])
            self._flush()
            data = memoryview(data)[free:]
        self._take(data)

    def _take(self, data: bytes | bytearray | memoryview) -> None:
        start, self._filled = self._filled, self._filled + len(data)
        if len(data) < _LARGE:
            self._buffer[start : self._filled] = data
        else:
            np.frombuffer(self._buffer, np.uint8)[start : self._filled] = np.frombuffer(data, np.uint8)

    def _flush(self) -> None:
        """Begin to write the buffer, and continue with the other buffer."""
        if self._filled:
            self._write_behind(self._buffer[: self._filled])
            self._buffer, self._other = self._other, self._buffer
            self._filled = 0

    def _write_behind(self, data: memoryview) -> None:
        """Begin to write bytes at the position, after the write in progress has ended."""
        self._wait()
        self._on_its_way = self._writer.submit(self._write_all, data, self._position)
        self._position += len(data)

    def _write_now(self, data: memoryview) -> None:
        self._wait()
        self._write_all(data, self._position)
        self._position += len(data)

    def _wait(self) -> None:
        if self._on_its_way is not None:
            self._on_its_way.result()
            self._on_its_way = None

    def _write_all(self, data: memoryview, position: int) -> None:
        while len(data):
            try:
                count = os.pwrite(self._fd, data, position)
            except OSError as error:
                if not self.direct or error.errno not in _REFUSED:
                    raise
                self._refused(error)
                self._switch(False)
                continue
            position += count
            data = data[count:]
            self._wrote(count)
        if self._writes_back and not self.direct and position - self._written_back >= _START_WRITEBACK:
            posix.start_writeback(self._fd, self._written_back, position - self._written_back)
            self._written_back = position

    def _finish(self) -> None:
        """Write the rest and make the file durable. An unaligned end goes through the page cache."""
        remainder = self._filled % PAGE if self.direct else self._filled
        aligned = self._filled - remainder
        self._write_now(self._buffer[:aligned])
        if self.direct:
            self._switch(False)
        self._write_now(self._buffer[aligned : aligned + remainder])
        os.fsync(self._fd)

    def _switch(self, direct: bool) -> None:
        import fcntl  # Windows lacks it, where programs that only read import this module

        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
        self.direct = direct

    def _refused(self, error: OSError) -> None:
        """Raise an error that does not refuse ``O_DIRECT``; and a refusal if the user requires ``O_DIRECT``."""
        if error.errno not in _REFUSED:
            raise error
        if self._forced:
            raise SaveFailed(
                f"cannot write {self._path} with io.direct=True: its file system refuses O_DIRECT ({error.strerror}). "
                f"io.direct='auto' writes through the page cache there."
            ) from error
