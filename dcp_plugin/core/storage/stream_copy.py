"""Verification of every byte of a checkpoint, and of files while they are copied.

A stream yields the bytes of a file in order and in pieces. A fixed number of pieces is read ahead while one is checked
and written, so memory is bounded, and neither side waits for the other.

The bytes between the items of a data file are zero. The exception is a file that is meant to be linked: it may have
items that this checkpoint no longer has. No hash of this checkpoint covers them, and no load reads them.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue

import numpy as np
from xxhash import xxh3_64

from dcp_plugin.core.errors import CheckpointCorrupt
from dcp_plugin.core.format.index import CheckpointIndex, Location
from dcp_plugin.core.format.payload import BlockHashes, block_size, frame_hash
from dcp_plugin.core.media import NewFile, RangedFile
from dcp_plugin.core.records import OpenCheckpoint
from dcp_plugin.core.storage.published import BYTES, comparison_of
from dcp_plugin.core.tensors.host_memory import READ_PIECE

PIECE = 4 << 20
"""Bytes per piece of a copy: to read, check and write."""
_SMALLEST_ITEM = 1 << 10
"""Bytes that every tensor's item has at least, because of its frame. Shorter gaps have no items in them."""


class FileCheck:
    """Check of a file's bytes, from its first to its last, while they are read. This base class accepts all bytes."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        """Messages about bytes that are not the saved bytes. Each names the file, and the key if the bytes have one."""

    def add(self, piece: memoryview) -> None:
        """Check the next bytes."""

    def finish(self) -> None:
        """End the check after the last bytes."""

    def unread(self) -> str:
        """Return the position behind which the file is unread, for a message; empty if nothing has been read."""
        return ""

    def require_intact(self) -> None:
        """Raise CheckpointCorrupt if there is a fault so far."""
        if self.faults:
            raise CheckpointCorrupt(self.faults[0])


class ItemsCheck(FileCheck):
    """Check of a data file of ours by the hashes of its items.

    Args:
        name: Name of the file in the index.
        where: Name of the checkpoint in messages.
    """

    def __init__(self, index: CheckpointIndex, name: str, where: str) -> None:
        super().__init__()
        self._index, self._name, self._where = index, name, where
        chunks, rows = index.places.items_in(index.file_names.index(name))
        # Items with equal bytes share a place, which is checked once.
        begins, first = np.unique(index.columns["place"][rows, 0], return_index=True)
        self._coming = deque(zip(begins.tolist(), chunks[first].tolist(), strict=True))
        """Begin and chunk of each item that begins at the position or after it."""
        self._size = index.files[name]
        self._at = 0
        self._item: _ItemCheck | None = None
        self._gap_begin = 0
        """End of the item before the position."""
        self.unverified: list[str] = []
        """Keys without hashes."""

    def add(self, piece: memoryview) -> None:
        # A piece ends anywhere: each turn takes the part of it that belongs to one item or to the gap before the next.
        while len(piece):
            item = self._item = self._item or self._next_item()
            gap_end = self._coming[0][0] if self._coming else max(self._size, self._at + len(piece))
            end = min(item.end if item else gap_end, self._at + len(piece))
            part, piece, self._at = piece[: end - self._at], piece[end - self._at :], end
            if item is None:
                # A gap too short for an item must be zero in every file. In a linkable file, a longer one may have an
                # item of an older checkpoint.
                may_be_dead = self._name in self._index.linkable and gap_end - self._gap_begin >= _SMALLEST_ITEM
                if not may_be_dead and (used := part.tobytes().lstrip(b"\0")):
                    self.faults.append(
                        f"{self._where}: {self._name}: the bytes from {end - len(used)} on belong to no item and are "
                        f"not those that were saved"
                    )
                continue
            item.add(part)
            if item.end == end:
                if not item.is_intact():
                    self.faults.append(f"{item.label}: a checksum differs; the bytes are not those that were saved")
                self._item, self._gap_begin = None, end

    def _next_item(self) -> _ItemCheck | None:
        """Return the check of the item that begins at the position; None if there is none."""
        while self._coming and self._coming[0][0] <= self._at:
            begin, chunk = self._coming.popleft()
            key = self._key_of(chunk)
            location = self._index.places.location(chunk)
            if location.hashes is None:
                self.unverified.append(key)
            if location.length and begin == self._at:
                return _ItemCheck(location, key, f"{self._where}: {key} in {self._name}")
        return None

    def _key_of(self, chunk: int) -> str:
        return self._index.table.keys[int(self._index.table.slots_of(chunk))]

    def unread(self) -> str:
        if not self._at:
            return ""
        if self._item is not None:
            return f" behind byte {self._at}, in {self._item.key}"
        return f" behind byte {self._at}" + (f", before {self._key_of(self._coming[0][1])}" if self._coming else "")

    def finish(self) -> None:
        if self._at < self._size:
            self.faults.append(f"{self._where}: {self._name} is truncated after {self._at} bytes")


class _ItemCheck:
    """Check of one item by its hashes, while its bytes arrive in order."""

    def __init__(self, location: Location, key: str, label: str) -> None:
        self.key, self.label = key, label
        self.end = location.offset + location.length
        self._location = location
        self._at = 0
        self._frame, self._payload = xxh3_64(), BlockHashes(block_size(location.payload_length))

    def add(self, part: memoryview) -> None:
        # Positions within the part where the payload begins and ends. The bytes before and after it are the frame.
        begin = self._location.payload_offset or 0
        edges = (begin - self._at, begin + self._location.payload_length - self._at)
        low, high = (min(max(edge, 0), len(part)) for edge in edges)
        self._at += len(part)
        if self._location.hashes is not None:
            self._frame.update(part[:low])
            self._payload.add(part[low:high])
            self._frame.update(part[high:])

    def is_intact(self) -> bool:
        """Return whether the item has its hashes, if it has any. All its bytes have arrived."""
        saved = self._location
        if saved.hashes is None:
            return True
        return self._payload.row == saved.hashes.tolist() and frame_hash(self._frame) == saved.frame


class HashCheck(FileCheck):
    """Check of any other file by its hash.

    Args:
        expected: The hash in hexadecimal.
        where: Name of the file in messages.
    """

    def __init__(self, expected: str, where: str) -> None:
        super().__init__()
        self._expected, self._where = expected, where
        self._hash = xxh3_64()

    def add(self, piece: memoryview) -> None:
        self._hash.update(piece)

    def finish(self) -> None:
        if self._hash.hexdigest() != self._expected:
            self.faults.append(f"{self._where} is not what was saved with the checkpoint")


def check_of(index: CheckpointIndex, name: str, where: str) -> FileCheck | None:
    """Return the check of a file of a checkpoint of ours; None if only its size can be compared."""
    if name in index.files:
        return ItemsCheck(index, name, where)
    comparison = index.extra_files.get(name, BYTES)
    return None if comparison.endswith(BYTES) else HashCheck(comparison, f"{where}/{name}")


class PipelinedCopy:
    """Reader of several files at the same time. Its threads read ahead. Each file is used by one thread of the caller.

    Args:
        at_once: Files that are read at the same time.
        reads: Reads that are in flight at the same time, of all files.
        piece: Bytes of a piece.
    """

    def __init__(self, at_once: int, reads: int = 0, piece: int = PIECE) -> None:
        self._piece = piece
        self._ahead = max(2, reads // at_once)
        """Pieces of one file that are read ahead."""
        self._readers = ThreadPoolExecutor(at_once * self._ahead, thread_name_prefix="dcp-read-ahead")
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        """Page-aligned blocks of the size of a piece that are not in use."""

    def __enter__(self) -> PipelinedCopy:
        return self

    def __exit__(self, *error: object) -> None:
        self._readers.shutdown()

    def copy(
        self, name: str, file: RangedFile, size: int, to: NewFile, check: FileCheck, passed: Callable[[int], None]
    ) -> None:
        """Copy a complete file, and check it.

        Args:
            passed: Function called with the number of bytes of each written piece. An exception from it ends the copy.

        Raises:
            CheckpointCorrupt: The file differs from the saved one.
            SourceError: The file cannot be read.
        """
        for piece in self.pieces(name, file, size):
            check.add(piece)
            check.require_intact()
            to.write(piece)
            passed(len(piece))
        check.finish()
        check.require_intact()

    def pieces(self, name: str, file: RangedFile, size: int) -> Iterator[memoryview]:
        """Yield the bytes of a file, in order. A piece is valid until the next one is requested.

        Raises:
            SourceError: The file cannot be read.
        """
        coming: deque[tuple[Future[None], memoryview, int]] = deque()
        offsets = iter(range(0, size, self._piece))
        try:
            while True:
                for offset in itertools.islice(offsets, self._ahead - len(coming)):
                    block, count = self._block(), min(self._piece, size - offset)
                    coming.append((self._readers.submit(_fill, file, block[:count], offset), block, count))
                if not coming:
                    return
                future, block, count = coming.popleft()
                try:
                    future.result()
                except OSError as error:
                    raise SourceError(name, error) from error
                yield block[:count]
                self._free.put(block)
        finally:
            wait([future for future, _, _ in coming if not future.cancel()])  # the caller closes the file next

    def _block(self) -> memoryview:
        try:
            return self._free.get_nowait()
        except Empty:
            return memoryview(mmap.mmap(-1, self._piece))


class SourceError(Exception):
    """Error of a source that cannot be read, as opposed to the destination. It never reaches the user."""

    def __init__(self, name: str, error: OSError) -> None:
        super().__init__(name)
        self.error = error


def _fill(file: RangedFile, memory: memoryview, offset: int) -> None:
    if file.fill([memory], offset) < len(memory):
        raise OSError(errno.EIO, "it is shorter than it was")


def verify_files(opened: OpenCheckpoint, io_threads: int, passed: Callable[[int], None]) -> list[str]:
    """Read all data files of a checkpoint, and the extra files of the save. Return the faults.

    The files of other tools have no hashes, and are only read.

    Args:
        passed: Function called with the number of bytes of each piece of a data file.
    """
    files, index = opened.files, opened.index
    at_once = max(1, min(io_threads, len(index.files)))  # a pool needs a thread even for a checkpoint without files

    def verify(name: str) -> list[str]:
        check = FileCheck() if opened.summary is None else ItemsCheck(index, name, files.where)
        try:
            with files.open(name) as file:
                for piece in stream.pieces(name, file, index.files[name]):
                    check.add(piece)
                    passed(len(piece))
                    if stopped.is_set():
                        return check.faults
                check.finish()
        except (OSError, SourceError) as error:
            reason = error.error if isinstance(error, SourceError) else error
            check.faults.append(f"{files.where}: {name} cannot be read{check.unread()}: {reason.strerror}")
        return check.faults

    stopped = threading.Event()
    piece = READ_PIECE if files.cost.at_once == 1 else PIECE  # a request to a store costs more than the smaller memory
    with (
        PipelinedCopy(at_once, files.cost.at_once, piece) as stream,
        ThreadPoolExecutor(at_once, thread_name_prefix="dcp-verify") as pool,
    ):
        try:
            faults = list(itertools.chain.from_iterable(pool.map(verify, index.files)))
        finally:
            stopped.set()  # an interrupt does not wait for the ends of files
    return faults + [fault for name in index.extra_files if (fault := _fault_in_extra_file(opened, name))]


def _fault_in_extra_file(opened: OpenCheckpoint, name: str) -> str:
    files = opened.files
    try:
        is_saved_one = comparison_of(files, name) == opened.index.extra_files[name] and not files.leads_elsewhere(name)
    except OSError as error:
        return f"{files.where}/{name} cannot be read: {error.strerror}"
    return "" if is_saved_one else f"{files.where}/{name} is not what was saved with the checkpoint"
