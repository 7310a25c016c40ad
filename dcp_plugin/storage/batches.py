"""Batches: neighbours in a file that one system call reads, and scatters to the memory of each.

There are three kinds. A :class:`BatchOfFetches` takes any fetch of a plan. Most tensors of most loads are read as they
are stored: one chunk, complete, of the same dtype, into host memory. The small ones among these form a
:class:`BatchOfChunks`, which is computed in columns: a fetch, its ranges and its views are objects, and for 4 000
tensors of 4 KiB they took a third of the load. A :class:`BatchOfRuns` is columns of a tensor whose runs are longer than
a page: each run is a separate call, without any other work.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from isal.isal_zlib import crc32

from dcp_plugin.errors import CheckpointCorrupt
from dcp_plugin.format.columns import Column
from dcp_plugin.format.index import CheckpointIndex
from dcp_plugin.format.payload import RunningCrc, block_size
from dcp_plugin.media import RangedFile, Readable, first_bytes
from dcp_plugin.records import WholeChunk
from dcp_plugin.storage.fetch import Fetch, IntoMemory, RunsIntoMemory
from dcp_plugin.tensors.host_memory import BLOCK, READ_PIECE, Rings, memory_view

_MOST = BLOCK // 2
_MOST_OF_STREAM = 8 << 20  # for files whose calls are requests
_MOST_PARTS = 256  # each has up to four pieces of memory; the system takes 1024 in a call


@dataclass
class Count:
    """Bytes read from data files, and the number of them that no checksum covers although the item has one."""

    read: int = 0
    unchecked: int = 0


class Batch(ABC):
    """Bytes that one thread reads at a time."""

    file: str
    begin: int
    """Position of the first byte in the file."""
    nbytes: int
    """Bytes from ``begin`` to the end of the batch."""
    key: str
    """First key that is read, for messages."""

    @abstractmethod
    def read(self, file: RangedFile, rings: Rings, count: Count) -> None:
        """Read, check and copy the batch. Raises CheckpointCorrupt, naming file and key, and OSError."""


class BatchOfFetches(Batch):
    """Fetches in the order of the file. If there are several, each has one range.

    Args:
        in_cache: Read checked ranges in pieces that are still in the processor's cache when they are checked. Otherwise
            one call reads a range, since each call is a request.
    """

    def __init__(self, fetches: list[Fetch], in_cache: bool) -> None:
        first = fetches[0]
        self._fetches = fetches
        self._piece = READ_PIECE if in_cache and first.block is not None else sys.maxsize
        self.file, self.begin, self.key = first.location.file, first.begin, first.key
        self.nbytes = fetches[-1].end - self.begin

    def read(self, file: RangedFile, rings: Rings, count: Count) -> None:
        fetches = self._fetches
        block = rings.of(fetches[0].device).next()
        placed = [fetch.views(block) for fetch in fetches]
        if len(fetches) == 1:
            origin = self.begin - fetches[0].ranges[0][0]
            for (begin, end), views in zip(fetches[0].ranges, placed[0], strict=True):
                for start, stop, memory in _pieces(begin, end, views, self._piece):
                    count.read += self._scatter(file, memory, origin + start)
                    count.unchecked += check(fetches[0], start, stop, memory)
            fetches[0].finish(block)
            return
        apart = [(fetch.begin, views) for fetch, (views,) in zip(fetches, placed, strict=True)]
        count.read += self._scatter(file, _with_gaps(apart), self.begin)
        for fetch, (views,) in zip(fetches, placed, strict=True):
            count.unchecked += check(fetch, *fetch.ranges[0], views)
            fetch.finish(block)

    def _scatter(self, file: RangedFile, views: list[memoryview], offset: int) -> int:
        return _scatter(file, views, offset, self.file, ((fetch.end, fetch.key) for fetch in self._fetches))


class BatchOfRuns(Batch):
    """Runs of a box, each read by a separate call straight to its place."""

    def __init__(self, fetch: RunsIntoMemory) -> None:
        self._fetch = fetch
        self.file, self.begin, self.key = fetch.location.file, fetch.begin, fetch.key
        self.nbytes = fetch.end - fetch.begin

    def read(self, file: RangedFile, rings: Rings, count: Count) -> None:
        fetch, run, read_into = self._fetch, self._fetch.run, file.read_into
        origin, block, end = self.begin - fetch.ranges[0][0], fetch.block, fetch.location.payload_length
        starts, views = fetch.starts.tolist(), fetch.views(rings.of(fetch.device).next())
        for start, view in zip(starts, views, strict=True):
            if (done := read_into(view, origin + start)) < run:
                behind = origin + start + done
                _scatter(file, list(_behind(view, done)), behind, self.file, [(behind + run - done, self.key)])
        count.read += len(fetch.memory)
        for start, view in zip(starts, views, strict=True):
            if block is not None and run < block and start + run < end:  # no checksum block ends in the run
                count.unchecked += run
            else:
                count.unchecked += check(fetch, start, start + run, view)


@dataclass
class BatchOfChunks(Batch):
    """Complete chunks in the order of the file, each straight into its target. Corresponding rows are columns.

    ``begins`` are the bytes of the file where the payloads start, ``crcs`` the last checksum of each, or -1 to check
    nothing.
    """

    index: CheckpointIndex
    file: str
    begins: list[int]
    chunks: list[WholeChunk]
    crcs: list[int]

    def __post_init__(self) -> None:
        self.begin, self.key = self.begins[0], self.chunks[0].key
        self.nbytes = self.begins[-1] + self.chunks[-1].target.nbytes - self.begin

    def read(self, file: RangedFile, rings: Rings, count: Count) -> None:
        views = [memory_view(chunk.target) for chunk in self.chunks]
        scattered = _with_gaps((begin, [view]) for begin, view in zip(self.begins, views, strict=True))
        ends = (
            (begin + len(view), chunk.key) for begin, view, chunk in zip(self.begins, views, self.chunks, strict=True)
        )
        count.read += _scatter(file, scattered, self.begin, self.file, ends)
        for chunk, view, expected in zip(self.chunks, views, self.crcs, strict=True):
            if expected >= 0 and crc32(view) != expected:
                location, span = self.index.location(chunk.number), (0, len(view))
                block = block_size(len(view), self.index.smallest_block)
                check(IntoMemory(chunk.key, location, [span], block, 0, view, chunk.target), *span, [view])


def batches_of(fetches: list[Fetch], files: Readable) -> Iterator[Batch]:
    """Yield fetches in the order of the files; each batch holds the fetches that one call reads."""
    most = _MOST_OF_STREAM if files.streams else _MOST
    batch: list[Fetch] = []
    for fetch in sorted(fetches, key=lambda fetch: (fetch.location.file, fetch.begin)):
        if isinstance(fetch, RunsIntoMemory):
            yield BatchOfRuns(fetch)
            continue
        if batch and not _joins(fetch, batch, files.gap, most):
            yield BatchOfFetches(batch, not files.streams)
            batch = []
        batch.append(fetch)
    if batch:
        yield BatchOfFetches(batch, not files.streams)


def _joins(fetch: Fetch, batch: list[Fetch], gap: int, most: int) -> bool:
    last = batch[-1]
    return (
        fetch.location.file == last.location.file
        and 0 <= fetch.begin - last.end <= gap
        and fetch.end - batch[0].begin <= most
        and len(fetch.ranges) == len(last.ranges) == 1
        and fetch.device == last.device
        and len(batch) < _MOST_PARTS
    )


def batches_of_chunks(
    chunks: Sequence[WholeChunk], index: CheckpointIndex, files: Readable, verify: bool
) -> Iterator[Batch]:
    """Yield complete chunks in the order of the file; each batch holds the chunks that one call reads."""
    if not chunks:
        return
    rows = np.array([chunk.number for chunk in chunks], np.int64)
    columns = index.columns
    order = np.lexsort((columns["place"][rows, 0], columns["file"][rows]))
    rows = rows[order]
    in_order = [chunks[at] for at in order.tolist()]
    number, place = columns["file"][rows], columns["place"][rows]
    lengths, begins = place[:, 3], place[:, 0] + place[:, 2]
    ends = begins + lengths
    gaps = begins[1:] - ends[:-1]
    apart = [True, *((number[1:] != number[:-1]) | (gaps < 0) | (gaps > files.gap)).tolist()]
    crcs = _last_checksums(index, rows) if verify else [-1] * len(rows)
    begin_of, end_of = begins.tolist(), ends.tolist()
    first = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or apart[at] or at - first == _MOST_PARTS or end_of[at] - begin_of[first] > _MOST:
            part = slice(first, at)
            name = index.file_names[number[first]]
            yield BatchOfChunks(index, name, begin_of[part], in_order[part], crcs[part])
            first = at


def _last_checksums(index: CheckpointIndex, rows: Column) -> list[int]:
    """Return the last checksum of each of these chunks, -1 for a chunk without checksums."""
    starts, stops = index.block_starts[rows], index.block_starts[rows + 1]
    last = np.full(len(rows), -1, np.int64)
    checked = stops > starts
    last[checked] = index.columns["block_crc"][stops[checked] - 1]
    crcs: list[int] = last.tolist()
    return crcs


def _scatter(file: RangedFile, views: list[memoryview], offset: int, name: str, ends: Iterable[tuple[int, str]]) -> int:
    """Read from ``offset`` until all the memory is full. ``ends`` are the ends of the keys' bytes in the file."""
    total = sum(map(len, views))
    done = 0
    while done < total:
        count = file.read_into(views, offset + done)
        if count == 0:
            raise CheckpointCorrupt(f"{name} ends within {next(key for end, key in ends if end > offset + done)}")
        done += count
        if done < total:
            views = list(_behind(views, count))
    return total


def _pieces(begin: int, end: int, views: list[memoryview], size: int) -> Iterator[tuple[int, int, list[memoryview]]]:
    """Yield a range and its memory, cut at the multiples of ``size``, where blocks of checksums also end."""
    while end - begin > size:
        stop = (begin // size + 1) * size
        yield begin, stop, first_bytes(views, stop - begin)
        views, begin = list(_behind(views, stop - begin)), stop
    yield begin, end, views


def _with_gaps(parts: Iterable[tuple[int, list[memoryview]]]) -> list[memoryview]:
    """Return the memory of parts of a file in order, given their positions, with spare memory for the gaps."""
    scattered: list[memoryview] = []
    spare = memoryview(b"")
    position = None
    for begin, views in parts:
        if position is not None and begin > position:
            if begin - position > len(spare):
                spare = memoryview(bytearray(begin - position))
            scattered.append(spare[: begin - position])
        scattered += views
        position = begin + sum(map(len, views))
    return scattered


def _behind(views: list[memoryview], count: int) -> Iterator[memoryview]:
    for view in views:
        if count < len(view):
            yield view[count:]
        count = max(0, count - len(view))


def check(fetch: Fetch, begin: int, end: int, views: list[memoryview]) -> int:
    """Compare the checksum blocks inside a range, and return how many of its bytes are in no such block.

    Checksums are running, so the last one covers all blocks; the others are compared only to locate the damage.
    """
    location, block = fetch.location, fetch.block
    if block is None or location.checksums is None:
        return 0
    first = -(-begin // block)
    last = len(location.checksums) if end == location.payload_length else end // block
    if first >= last:
        return end - begin
    start, stop = first * block, min(last * block, location.payload_length)
    if (start, stop) != (begin, end):  # runs between blocks; those have one piece of memory
        views = [views[0][start - begin : stop - begin]]
    before = crc = int(location.checksums[first - 1]) if first else 0
    for view in views:
        crc = crc32(view, crc)
    if crc != location.checksums[last - 1]:
        expected = location.checksums[first:last].tolist()
        running = RunningCrc(block, before)
        for view in views:
            running.add(view)
        pairs = enumerate(zip(running.ends, expected, strict=True), first)
        wrong = next((number for number, (computed, stored) in pairs if computed != stored), first)
        at = location.offset + (location.payload_offset or 0) + wrong * block
        raise CheckpointCorrupt(
            f"the bytes of {fetch.key} in {location.file} are not those that were saved (checksum differs in block "
            f"{wrong}, at byte {at} of the file). Load an older checkpoint."
        )
    return (end - begin) - (stop - start)
