"""Copies of a checkpoint's files whose bytes are verified while they are copied.

The bytes arrive in order and in pieces. Several pieces are read ahead while one is written, so memory is bounded, and
neither side waits for the other. The checks are those of :mod:`~dcp_plugin.storage.check_rest` and of a load.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import numpy as np
from isal.isal_zlib import crc32
from xxhash import xxh3_128

from dcp_plugin.errors import CheckpointCorrupt
from dcp_plugin.format.index import CheckpointIndex, Location
from dcp_plugin.format.payload import RunningCrc, block_size
from dcp_plugin.media import NewFile, RangedFile
from dcp_plugin.storage import check_rest

PIECE = 4 << 20
"""Bytes per piece to read, check and write."""


class Look:
    """Base class of checks of a file's bytes, from its first to its last, while they are copied."""

    def add(self, piece: memoryview) -> None:
        """Check the next bytes. Raises CheckpointCorrupt, naming file and key, if they are not the saved bytes."""

    def finish(self) -> None:
        """End the check after the last bytes. Raises as :meth:`add`."""


class LookAtItems(Look):
    """Check of a data file of ours by the checksums of its items.

    Args:
        number: Number of the file in the index.
        where: Name of the checkpoint in messages.
    """

    def __init__(self, index: CheckpointIndex, number: int, where: str) -> None:
        self._index, self._name, self._where = index, index.file_names[number], where
        chunks = np.flatnonzero(index.columns["file"] == number)
        begins, first = np.unique(index.columns["place"][chunks, 0], return_index=True)
        self._chunks, self._begins = chunks[first].tolist(), begins.tolist()
        self._next, self._at = 0, 0
        self._item: _Item | None = None
        self.has_more = False
        """True if the file has bytes outside of items that are not zero."""
        self.unverified: list[str] = []
        """Keys without checksums."""

    def add(self, piece: memoryview) -> None:
        while len(piece):
            if self._item is None and self._next < len(self._begins) and self._begins[self._next] <= self._at:
                self._item = self._begun(self._chunks[self._next])
                self._next += 1
                continue
            end = self._end_of_stretch(len(piece))
            part, piece = piece[: end - self._at], piece[end - self._at :]
            if self._item is None:
                self.has_more = self.has_more or any(part.tobytes().lstrip(b"\0")[:1])
            else:
                self._item.add(part)
            self._at = end
            if self._item is not None and end == self._item.end:
                self._item = None

    def _end_of_stretch(self, count: int) -> int:
        if self._item is not None:
            return min(self._at + count, self._item.end)
        following = self._begins[self._next] if self._next < len(self._begins) else self._at + count
        return min(self._at + count, following)

    def _begun(self, chunk: int) -> _Item | None:
        key = self._index.table.keys[int(np.searchsorted(self._index.columns["chunk_ends"], chunk, side="right"))]
        location = self._index.location(chunk)
        if location.checksums is None:
            self.unverified.append(key)
        if not location.length:
            return None
        label = f"{self._where}: {key} in {self._name}"
        return _Item(location, block_size(location.payload_length, self._index.smallest_block), label)

    def finish(self) -> None:
        if self._item is not None or self._next < len(self._begins):
            raise CheckpointCorrupt(f"{self._where}: {self._name} ends after {self._at} bytes")


class _Item:
    """Check of one item by its checksums."""

    def __init__(self, location: Location, block: int, where: str) -> None:
        self._location, self._where = location, where
        self.end = location.offset + location.length
        self._at, self._frame = 0, 0
        self._payload = location.payload_offset or 0
        self._behind = self._payload + location.payload_length
        self._running = RunningCrc(block)

    def add(self, part: memoryview) -> None:
        if self._location.checksums is not None:
            low, high = (min(max(edge - self._at, 0), len(part)) for edge in (self._payload, self._behind))
            self._frame = crc32(part[high:], crc32(part[:low], self._frame))
            if high > low:
                self._running.add(part[low:high])
        self._at += len(part)
        if self._at == self._location.length and self._location.checksums is not None:
            same = self._running.ends == self._location.checksums.tolist()
            if not same or self._frame != self._location.frame_crc:
                raise CheckpointCorrupt(f"{self._where}: a checksum differs; the bytes are not those that were saved")


class LookAtHash(Look):
    """Check of any other file by its hash.

    Args:
        expected: The hash in hexadecimal.
        where: Name of the file in messages.
        kind: ``"xxh3"``, or ``"sha256"``.
    """

    def __init__(self, expected: str, where: str, kind: str = "xxh3") -> None:
        self._expected, self._where = expected, where
        self._hash = hashlib.sha256() if kind == "sha256" else xxh3_128()

    def add(self, piece: memoryview) -> None:
        self._hash.update(piece)

    def finish(self) -> None:
        if self._hash.hexdigest() != self._expected:
            raise CheckpointCorrupt(f"{self._where} is not what was saved with the checkpoint")


def look_at(index: CheckpointIndex, name: str, where: str) -> Look | None:
    """Return the check of a file of a checkpoint of ours; None if only its size can be compared."""
    if name in index.files:
        return LookAtItems(index, index.file_names.index(name), where)
    comparison = index.beside.get(name, check_rest.BYTES)
    return None if comparison.endswith(check_rest.BYTES) else LookAtHash(comparison, f"{where}/{name}")


@dataclass
class Memory:
    """Blocks of :data:`PIECE` bytes, page-aligned; reused if the writer no longer needs a block when it returns."""

    _free: SimpleQueue[memoryview] = field(default_factory=SimpleQueue)

    def take(self) -> memoryview:
        try:
            return self._free.get_nowait()
        except Empty:
            return memoryview(mmap.mmap(-1, PIECE))

    def give(self, block: memoryview) -> None:
        self._free.put(block)


@dataclass(frozen=True)
class Way:
    """Copier of files that reads ahead.

    Args:
        readers: Threads that read ahead.
        ahead: Pieces of one file that are read ahead.
        passed: Function called with the number of bytes of each written piece. An exception from it ends the copy.
    """

    readers: Executor
    ahead: int
    memory: Memory
    passed: Callable[[int], None]

    def copy(self, name: str, file: RangedFile, size: int, to: NewFile, looks: list[Look]) -> None:
        """Copy a complete file, and check it.

        Raises:
            CheckpointCorrupt: The file differs from the saved one.
            SourceError: The file cannot be read.
        """
        for piece in self.pieces(name, file, size):
            for look in looks:
                look.add(piece)
            to.write(piece)
            self.passed(len(piece))
        for look in looks:
            look.finish()

    def pieces(self, name: str, file: RangedFile, size: int) -> Iterator[memoryview]:
        """Yield the bytes of a file, in order. A piece is valid until the next one is requested."""
        coming: deque[tuple[Future[None], memoryview, int]] = deque()
        offsets = iter(range(0, size, PIECE))
        try:
            while True:
                while len(coming) < self.ahead and (offset := next(offsets, None)) is not None:
                    block, count = self.memory.take(), min(PIECE, size - offset)
                    coming.append((self.readers.submit(_fill, file, block[:count], offset), block, count))
                if not coming:
                    return
                future, block, count = coming.popleft()
                try:
                    future.result()
                except OSError as error:
                    raise SourceError(name, error) from error
                yield block[:count]
                self.memory.give(block)
        finally:
            for future, _, _ in coming:
                future.cancel()
            for future, _, _ in coming:  # wait: the caller closes the file next
                if not future.cancelled():
                    future.exception()


class SourceError(Exception):
    """Error of a source that cannot be read, as opposed to the destination. It never reaches the user."""

    def __init__(self, name: str, error: OSError) -> None:
        super().__init__(name)
        self.error = error


def _fill(file: RangedFile, memory: memoryview, offset: int) -> None:
    done = 0
    while done < len(memory):
        count = file.read_into([memory[done:]], offset + done)
        if not count:
            raise OSError(errno.EIO, "it is shorter than it was")
        done += count
