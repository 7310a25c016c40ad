"""Verification of every byte of a checkpoint, of items, of complete files, and of files while they are copied.

A stream copy takes the bytes in order and in pieces. Several pieces are read ahead while one is written, so memory is
bounded, and neither side waits for the other.

The bytes between the items of a data file are zero. A file that was linked from an earlier checkpoint may have other
bytes: items that this checkpoint no longer has. These are complete, and have their own CRC, because each is a zip
archive. With the items, every byte of every file is checked.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import numpy as np
from isal.isal_zlib import crc32
from xxhash import xxh3_128

from dcp_plugin.errors import CheckpointCorrupt
from dcp_plugin.format.columns import Column
from dcp_plugin.format.index import CheckpointIndex, Location
from dcp_plugin.format.payload import ALIGNMENT, RunningCrc, block_size, frame_in
from dcp_plugin.format.torch_archive import END_BEGINS, END_LENGTH, directory_at
from dcp_plugin.media import NewFile, RangedFile, Readable, ReadCost
from dcp_plugin.records import OpenCheckpoint
from dcp_plugin.storage.published import BYTES, comparison_of
from dcp_plugin.storage.reading import grouped
from dcp_plugin.tensors.host_memory import BLOCK

PIECE = 4 << 20
"""Bytes per piece to read, check and write."""
_WINDOW = 4 << 20
"""Bytes of the largest window in which items or gaps near each other are read together."""
_MOST_HEAD = 64 << 10
"""Bytes that exceed the length of any head before a payload."""


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
            raise CheckpointCorrupt(f"{self._where}: {self._name} is truncated after {self._at} bytes")


class _Item:
    """Check of one item by its checksums, while its bytes arrive in order.

    Args:
        where: Name of the item in messages.
    """

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


_Named = tuple[str, Location]
"""Key and location of an item."""


def in_windows(items: Iterable[_Named], cost: ReadCost) -> Iterator[list[_Named]]:
    """Yield groups of items of one file that one read fetches, in the order of the file."""

    def joins(group: list[_Named], item: _Named) -> bool:
        (_, first), (_, last), (_, location) = group[0], group[-1], item
        is_near = location.file == first.file and location.offset - last.offset - last.length <= cost.gap
        return is_near and location.offset + location.length - first.offset <= _WINDOW

    return grouped(sorted(items, key=lambda item: (item[1].file, item[1].offset)), joins)


def check_items(files: Readable, items: list[_Named], smallest_block: int) -> list[str]:
    """Check items of one file that are near each other. Return a message for each damaged item."""
    name, begin, end = items[0][1].file, items[0][1].offset, max(at.offset + at.length for _, at in items)
    window: memoryview | None = None
    if len(items) > 1 and end - begin <= _WINDOW:
        with suppress(OSError, CheckpointCorrupt), files.open(name) as file:  # the check of the item reports the error
            window = memoryview(_read(file, begin, end))
    errors = []
    for key, location in items:
        at, block = location.offset - begin, block_size(location.payload_length, smallest_block)
        item = _Item(location, block, f"{files.where}: {key} in {name}")
        try:
            if window is not None:
                item.add(window[at : at + location.length])
                continue
            with files.open(name) as file:
                for _, piece in _pieces(file, location.offset, item.end, f"{files.where}: {name} ends within {key}"):
                    item.add(piece)
        except Exception as error:
            errors.append(str(error))
    return errors


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
    comparison = index.extra_files.get(name, BYTES)
    return None if comparison.endswith(BYTES) else LookAtHash(comparison, f"{where}/{name}")


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


def verify_unread(opened: OpenCheckpoint, pool: Executor) -> list[str]:
    """Return the faults in the bytes outside of items, and in extra files. The files of a base are not checked."""
    if opened.summary is None:
        return []
    elsewhere = f"{opened.base.files.where}/" if opened.base else "\0"
    own = [number for number, name in enumerate(opened.index.file_names) if not name.startswith(elsewhere)]
    between = pool.map(lambda number: check_between(opened.files, opened.index, number), own)
    return [*filter(None, between), *_verify_extra_files(opened.files, opened.index.extra_files)]


def _verify_extra_files(files: Readable, comparisons: Mapping[str, str]) -> Iterator[str]:
    """Yield the faults in the extra files."""
    for name, expected in comparisons.items():
        try:
            if comparison_of(files, name) != expected or files.leads_elsewhere(name):
                yield f"{files.where}/{name} is not what was saved with the checkpoint"
        except OSError as error:
            yield f"{files.where}/{name} cannot be read: {error.strerror}"


def check_between(files: Readable, index: CheckpointIndex, number: int) -> str:
    """Check the bytes between the items of a data file, by its number. Return the fault, or an empty string."""
    name = index.file_names[number]
    places = index.columns["place"][index.columns["file"] == number]
    try:
        with files.open(name) as file:
            gaps = _gaps(places, index.files[name])
            for begin, end in _used(file, gaps, files.cost):
                _check_gap(file, begin, end)
    except (OSError, CheckpointCorrupt) as error:
        return f"{files.where}: {name}: {error}"
    return ""


def _gaps(places: Column, size: int) -> list[tuple[int, int]]:
    """Return the ranges of a file of this size that belong to no item."""
    places = places[np.argsort(places[:, 0], kind="stable")]
    begins = np.concatenate(([0], np.maximum.accumulate(places[:, 0] + places[:, 1])))
    ends = np.concatenate((places[:, 0], [size]))
    is_gap = ends > begins
    return list(zip(begins[is_gap].tolist(), ends[is_gap].tolist(), strict=True))


def _used(file: RangedFile, gaps: list[tuple[int, int]], cost: ReadCost) -> Iterator[tuple[int, int]]:
    """Yield the gaps that may not be zeros. Gaps near each other are read together."""

    def joins(group: list[tuple[int, int]], gap: tuple[int, int]) -> bool:
        return gap[0] - group[-1][1] <= cost.gap and gap[1] - group[0][0] <= _WINDOW

    for near in grouped(gaps, joins):
        start = near[0][0]
        data = _read(file, start, near[-1][1]) if len(near) > 1 else None
        yield from (gap for gap in near if data is None or any(data[gap[0] - start : gap[1] - start]))


def _check_gap(file: RangedFile, begin: int, end: int) -> None:
    """Check that a range has only zeros and complete items. Raises CheckpointCorrupt."""
    while begin < end:
        for at, piece in _pieces(file, begin, end):
            used = np.frombuffer(piece, np.uint8) != 0
            if used.any():
                first = at + int(used.argmax())
                begin = first - first % ALIGNMENT
                behind = _end_of_item(file, begin, end)
                if behind is None or not _is_unchanged(file, begin, behind):
                    raise CheckpointCorrupt(
                        f"the bytes from {begin} on belong to no item and are not those that were saved"
                    )
                begin = behind
                break
        else:
            return


def _end_of_item(file: RangedFile, begin: int, end: int) -> int | None:
    """Return the end of the first item whose end record gives ``begin`` as its beginning."""
    before = b""
    for at, piece in _pieces(file, begin, end):
        data = before + bytes(piece)
        start, position = at - len(before), data.find(END_BEGINS)
        while position >= 0:
            end_at = start + position
            directory = directory_at(_read(file, end_at, min(end_at + END_LENGTH, end)))
            if directory is not None and begin + sum(directory) == end_at:
                return end_at + END_LENGTH
            position = data.find(END_BEGINS, position + 1)
        before = data[1 - len(END_BEGINS) :]
    return None


def _is_unchanged(file: RangedFile, begin: int, end: int) -> bool:
    directory = directory_at(_read(file, end - END_LENGTH, end))
    assert directory is not None, "it was just found"
    offset, size = (begin + directory[0], directory[1])
    around = frame_in(_read(file, begin, min(begin + _MOST_HEAD, offset)), _read(file, offset, offset + size))
    if around is None or around.length != end - begin:
        return False
    payload = begin + around.payload_offset
    crc = 0
    for _, piece in _pieces(file, payload, payload + around.payload_length):
        crc = crc32(piece, crc)
    tail = _read(file, payload + around.payload_length, end)
    framed = tail in (around.tail(crc), around.tail(0))  # 0 if it was saved without checksums
    return framed and _read(file, begin, payload) == around.head


def _pieces(
    file: RangedFile, begin: int, end: int, too_short: str = "the file became shorter while it was read"
) -> Iterator[tuple[int, memoryview]]:
    """Yield the bytes of a range in pieces, each with its position."""
    memory = memoryview(bytearray(min(end - begin, BLOCK)))
    while begin < end:
        count = file.read_into([memory[: end - begin]], begin)
        if not count:
            raise CheckpointCorrupt(too_short)
        yield begin, memory[:count]
        begin += count


def _read(file: RangedFile, begin: int, end: int) -> bytes:
    return b"".join(bytes(piece) for _, piece in _pieces(file, begin, end))
