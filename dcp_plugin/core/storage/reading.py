"""Reads of a load: neighbours in a file form a batch, which one system call reads and scatters to the memory of each.

There are two kinds of batches. A :class:`BatchOfFetches` takes any ranges of a plan. A :class:`BatchOfChunks` takes
small tensors that are read as they are stored: one chunk, complete, of the same dtype, into host memory. Most tensors
of most loads are. These batches are computed in columns, because a fetch, its ranges and its views are objects: for
4 000 tensors of 4 KiB they took a third of the load.

Several threads read the batches and share the work by bytes, so they may read one file together. Bytes are checked
before they are copied. Bytes that are read straight into the memory of a target are checked there.
"""

from __future__ import annotations

import errno
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_plugin.core.errors import CheckpointCorrupt
from dcp_plugin.core.format.columns import Column, ranges
from dcp_plugin.core.format.index import CheckpointIndex
from dcp_plugin.core.format.payload import BlockHashes, Frame, block_size, hashes_in
from dcp_plugin.core.media import RangedFile, Readable, ReadCost, bytes_behind, first_bytes, stretches
from dcp_plugin.core.records import BoxRead
from dcp_plugin.core.storage.published import gone_or_damaged
from dcp_plugin.core.tensors.host_memory import READ_PIECE, Rings, device_of_thread, equal_bytes, memory_view

if TYPE_CHECKING:
    from dcp_plugin.core.storage.fetch import Fetch, Part

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

    @abstractmethod
    def key_at(self, position: int) -> str:
        """Return the first key with bytes behind a position of the file."""

    def fill(self, file: RangedFile, views: list[memoryview], begin: int, end: int) -> int:
        """Read a range of the file into memory of its size. Return the size."""
        if (count := file.fill(views, begin)) < end - begin:
            raise CheckpointCorrupt(f"{self.file} ends within {self.key_at(begin + count)}")
        return count


class BatchOfFetches(Batch):
    """Fetches in the order of the file. If there are several, each has one range.

    Args:
        cost: The cost of reads. Checked ranges are read in pieces, so that a piece is still in the processor's cache
            when it is checked. If a read costs as much as a piece, as from a store, one call reads a range.
    """

    def __init__(self, fetches: list[Fetch], cost: ReadCost) -> None:
        first = fetches[0]
        self._fetches = fetches
        block = first.block if cost.gap < READ_PIECE else None
        self._piece = sys.maxsize if block is None else max(READ_PIECE, block)
        self.file, self.begin, self.key = first.location.file, first.begin, first.key
        self.nbytes = fetches[-1].end - self.begin

    def read(self, file: RangedFile, rings: Rings, count: Count) -> None:
        fetches = self._fetches
        block = rings.next(fetches[0].device)
        placed = [(fetch, fetch.parts(block)) for fetch in fetches]
        if len(fetches) == 1:
            # A call for each range or piece of it: a large fetch, or one with several ranges.
            ((fetch, parts),) = placed
            origin, fill, piece = self.begin - fetch.ranges[0][0], self.fill, self._piece
            for begin, end, memory in parts:
                if end - begin > piece:
                    pieces = self._filled_pieces(file, origin, (begin, end, memory), count)
                    count.unchecked += fetch.check(begin, end, pieces)
                    deque(pieces, 0)  # a piece without a checksum, which the check did not request, is read here
                else:
                    count.read += fill(file, memory, origin + begin, origin + end)
                    count.unchecked += fetch.check(begin, end, memory)
            fetch.finish(block)
            return
        # One call for all fetches, and for the bytes between them.
        apart = [(fetch.begin, fetch.end, views) for fetch, ((_, _, views),) in placed]
        count.read += self.fill(file, _with_gaps(apart), self.begin, self.begin + self.nbytes)
        for fetch, (part,) in placed:
            count.unchecked += fetch.check(*part)
            fetch.finish(block)

    def _filled_pieces(self, file: RangedFile, origin: int, part: Part, count: Count) -> Iterator[memoryview]:
        """Yield the memory of a part, cut at the multiples of the piece. Blocks of checksums end there as well.

        A piece is read when it is requested, and is then in the cache for its check.
        """
        begin, end, views = part
        while begin < end:
            stop = min((begin // self._piece + 1) * self._piece, end)
            memory = first_bytes(views, stop - begin)
            count.read += self.fill(file, memory, origin + begin, origin + stop)
            yield from memory
            views, begin = bytes_behind(views, stop - begin), stop

    def key_at(self, position: int) -> str:
        return next(fetch.key for fetch in self._fetches if fetch.end > position)


@dataclass
class BatchOfChunks(Batch):
    """Complete chunks in the order of the file, each read straight into its target.

    ``begins``, ``chunks`` and ``hashes`` are columns: the position of each payload in the file, its chunk, and its
    hashes. A chunk with an empty list of hashes is not checked.
    """

    index: CheckpointIndex
    file: str
    begins: list[int]
    chunks: list[BoxRead]
    hashes: list[list[int]]

    def __post_init__(self) -> None:
        self.begin, self.key = self.begins[0], self.chunks[0].key
        self.nbytes = self.begins[-1] + self.chunks[-1].target.nbytes - self.begin

    def read(self, file: RangedFile, rings: Rings, count: Count) -> None:
        views = [memory_view(chunk.target) for chunk in self.chunks]
        parts = [(begin, begin + len(view), [view]) for begin, view in zip(self.begins, views, strict=True)]
        count.read += self.fill(file, _with_gaps(parts), self.begin, self.begin + self.nbytes)
        for chunk, view, expected in zip(self.chunks, views, self.hashes, strict=True):
            if expected and hashes_in(view) != expected:
                from dcp_plugin.core.storage.fetch import IntoMemory  # its check raises the error that names the block

                location, span = self.index.places.location(chunk.number), (0, len(view))
                IntoMemory(chunk.key, location, [span], block_size(len(view)), 0, view).check(*span, [view])

    def key_at(self, position: int) -> str:
        rows = zip(self.begins, self.chunks, strict=True)
        return next(chunk.key for begin, chunk in rows if begin + chunk.target.nbytes > position)


def batches_of(fetches: list[Fetch], cost: ReadCost) -> Iterator[Batch]:
    """Yield fetches in the order of the files; each batch holds the fetches that one call reads."""

    def joins(batch: list[Fetch], fetch: Fetch) -> bool:
        # One call reads one stretch of a file, into one block of memory for one device. Bytes between two fetches are
        # read as well if that costs less than another call.
        last = batch[-1]
        return (
            fetch.location.file == last.location.file
            and 0 <= fetch.begin - last.end <= cost.gap
            and fetch.end - batch[0].begin <= cost.most
            and fetch.has_one_range
            and last.has_one_range
            and fetch.device == last.device
            and len(batch) < _MOST_PARTS
        )

    batch: list[Fetch] = []
    for fetch in sorted(fetches, key=lambda fetch: (fetch.location.file, fetch.begin)):
        if batch and not joins(batch, fetch):
            yield BatchOfFetches(batch, cost)
            batch = []
        batch.append(fetch)
    if batch:
        yield BatchOfFetches(batch, cost)


def batches_of_chunks(
    chunks: Sequence[BoxRead], index: CheckpointIndex, cost: ReadCost, verify: bool
) -> Iterator[Batch]:
    """Yield complete chunks in the order of the file; each batch holds the chunks that one call reads."""
    if not chunks:
        return
    # Sort by file and position, find the places where a batch must end, and take the hashes of all chunks at once.
    rows = np.array([chunk.number for chunk in chunks], np.int64)
    row, file = index.places.rows_of(rows)
    order = np.lexsort((index.columns["place"][row, 0], file))
    rows = rows[order]
    in_order = [chunks[at] for at in order.tolist()]
    number, place = file[order], index.columns["place"][row[order]]
    lengths, begins = lengths_in(place), place[:, 0] + np.maximum(place[:, 2], 0)
    ends = begins + lengths
    gaps = begins[1:] - ends[:-1]
    apart = [True, *((number[1:] != number[:-1]) | (gaps < 0) | (gaps > cost.gap)).tolist()]
    starts, counts = index.places.hashes_of(rows)
    counts = counts * verify
    hashes = index.columns["hash"][ranges(starts, counts)].tolist()
    stops = [0, *np.cumsum(counts).tolist()]
    begin_of, end_of = begins.tolist(), ends.tolist()
    first = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or apart[at] or at - first == _MOST_PARTS or end_of[at] - begin_of[first] > cost.most:
            part = slice(first, at)
            name = index.file_names[number[first]]
            of_chunks = [hashes[stops[row] : stops[row + 1]] for row in range(first, at)]
            yield BatchOfChunks(index, name, begin_of[part], in_order[part], of_chunks)
            first = at


def lengths_in(place: Column) -> Column:
    """Return the bytes to read of each item: the payload, or the complete item if its layout is unknown."""
    return np.where(place[:, 2] < 0, place[:, 1], place[:, 3])


def _with_gaps(parts: Sequence[Part]) -> list[memoryview]:
    """Return the memory of parts of a file in order, with spare memory for the gaps between them."""
    scattered: list[memoryview] = []
    spare, position = memoryview(b""), parts[0][0]
    for begin, end, views in parts:
        if begin > position:
            if begin - position > len(spare):
                spare = memoryview(bytearray(begin - position))
            scattered.append(spare[: begin - position])
        scattered += views
        position = end
    return scattered


def read(files: Readable, batches: Iterable[Batch], io_threads: int) -> Count:
    """Execute all batches.

    Raises:
        CheckpointCorrupt: The message names file and key. Targets may be partly filled.
        CheckpointNotFound: A file is missing because the checkpoint was deleted meanwhile. Targets may be partly
            filled.
        CheckpointUnreadable: The file system failed. Targets may be partly filled.
    """
    in_order = sorted(batches, key=lambda batch: (batch.file, batch.begin))
    # A store is fast only with many requests at once, however few threads the user wants for a disk.
    threads = max(1, min(max(io_threads, files.cost.at_once), len(in_order)))
    work = [
        deque(in_order[at] for at in stretch) for stretch in stretches([batch.nbytes for batch in in_order], threads)
    ]

    def read_some(first: int) -> Count:
        try:
            return _read_batches(files, _taken(work, first))
        except BaseException:
            for queue in work:
                queue.clear()  # so that the other threads stop reading
            raise

    if threads == 1:
        return read_some(0)
    with ThreadPoolExecutor(threads, "dcp-read", device_of_thread()) as pool:
        counts = [job.result() for job in [pool.submit(read_some, first) for first in range(threads)]]
    return Count(sum(count.read for count in counts), sum(count.unchecked for count in counts))


def _taken(work: list[deque[Batch]], number: int) -> Iterator[Batch]:
    """Yield the batches of a thread: its own stretch from the front, then the last ones of the longest other stretch.

    The threads need no lock, because the methods of a deque are atomic. IndexError means that the deque is empty.
    """
    with suppress(IndexError):
        while True:
            yield work[number].popleft()
    with suppress(IndexError):
        while True:
            yield max(work, key=len).pop()


def _read_batches(files: Readable, work: Iterator[Batch]) -> Count:
    """Read batches in one thread until none are left. The last file stays open for the next batch."""
    rings, count = Rings(), Count()
    name, file = "", None
    try:
        for batch in work:
            if file is None or batch.file != name:
                if file is not None:
                    file.close()
                name = batch.file
                file = files.open(name)
            while True:
                try:
                    batch.read(file, rings, count)
                    break
                except CheckpointCorrupt:
                    # A damaged copy on a node is excluded; the next open() gives another copy or the path.
                    if not files.mark_unreliable(file):
                        raise
                    file.close()
                    file = files.open(name)
    except OSError as error:
        raise gone_or_damaged(files, f"cannot read {batch.key} in {batch.file}", error) from error
    except CheckpointCorrupt as error:
        corrupt = CheckpointCorrupt(f"{files.where}: {error}")
        corrupt.key = error.key
        raise corrupt from None
    finally:
        rings.wait()
        if file is not None:
            file.close()
    return count


def equal_item(
    file: RangedFile, begin: int, around: Frame, pieces: Iterable[memoryview], memory: memoryview
) -> np.ndarray[Any, np.dtype[np.uint64]] | None:
    """Compare an item of a file with a tensor, and return the hashes of the payload in the file. Return None if any
    byte differs. Raises OSError.

    Args:
        begin: Position of the item in the file.
        pieces: The bytes of the tensor.
        memory: Memory for the largest piece.
    """
    head, tail = bytearray(len(around.head)), bytearray(len(around.tail))
    hashes, before, at = BlockHashes(block_size(around.payload_length)), [memoryview(head)], begin
    for expected in pieces:
        piece = memory[: len(expected)]
        # The head is read with the first piece. A thread may wait for the interpreter's lock after each call.
        at += _filled(file, [*before, piece], at)
        before = []
        hashes.add(piece)  # while the processor's cache holds what was read: the tensor may displace it
        if not equal_bytes(piece, expected):
            return None
    _filled(file, [*before, memoryview(tail)], at)
    return np.array(hashes.row, np.uint64) if bytes(head + tail) == around.head + around.tail else None


def _filled(file: RangedFile, memory: list[memoryview], at: int) -> int:
    """Fill the memory from a position of a file. Return the number of bytes. Raises OSError."""
    if (count := file.fill(memory, at)) < sum(map(len, memory)):
        raise OSError(errno.EIO, "it became shorter while it was read")
    return count
