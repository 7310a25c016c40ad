"""Fetches: the reads of a plan with the targets of their bytes, cut into pieces that need little memory.

Bytes that are contiguous in the file and in the target go straight into the target's memory, and so do runs that are
consecutive there. All other bytes (another dtype, a device, a strided target) go in pieces through a block of host
memory, and are copied from the block.

The bytes of a box are runs of one length: one run for rows, one per row for columns. A checksum covers a block, so
checking a run requires reading all of each block that it touches. For a box of one run that is at most one more block
at either end. Narrow columns touch every block, and checking them would mean reading the columns of all other ranks
too. The rules:

- Complete blocks are read if they cost at most a quarter more.
- Otherwise only the runs are read, and only the blocks inside runs are checked.
- Runs with at most four pages between them are read together with the bytes between them, and checked. Separate calls
  would take longer than copying these bytes. A disk reads pages, and reads ahead, in any case.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from operator import mul
from typing import Any

import numpy as np
import torch

from dcp_plugin.core.errors import CheckpointCorrupt
from dcp_plugin.core.format.index import Location, StoredChunk
from dcp_plugin.core.format.payload import BlockHashes
from dcp_plugin.core.media import PAGE, bytes_behind, first_bytes
from dcp_plugin.core.tensors.host_memory import BLOCK, Block, is_plain_memory, memory_view

_DIRECT_PIECE = 8 << 20  # one thread's share of the work; a multiple of any checksum block
_COPIED_PIECE = BLOCK // 2  # the other half is for bytes that complete checksum blocks
_MOST_RUNS = 4096  # per fetch: each run is an object while it is read
_BETWEEN_RUNS = 4 * PAGE
_HOST = torch.device("cpu")

Positions = np.ndarray[Any, np.dtype[np.int64]]
Range = tuple[int, int]
Part = tuple[int, int, list[memoryview]]
"""A range of a payload, and the memory for its bytes."""


@dataclass
class Fetch(ABC):
    """Ranges of one payload. They are read into the memory of :meth:`parts`, then processed by :meth:`finish`."""

    key: str
    location: Location
    ranges: list[Range]
    """Ranges in bytes of the payload."""
    block: int | None
    """Bytes per checksum; None: no checksum is compared."""

    @property
    def device(self) -> torch.device:
        return _HOST

    @property
    def begin(self) -> int:
        """Position of the first range in the file."""
        return self.location.offset + (self.location.payload_offset or 0) + self.ranges[0][0]

    @property
    def end(self) -> int:
        return self.location.offset + (self.location.payload_offset or 0) + self.ranges[-1][1]

    @property
    def has_one_range(self) -> bool:
        """True if one call can read the fetch together with its neighbours."""
        return len(self.ranges) == 1

    @abstractmethod
    def parts(self, block: Block) -> list[Part]:
        """Return each range to read, and its memory."""

    def finish(self, block: Block) -> None:  # noqa: B027 - most subclasses have no work here
        """Process the bytes after they are read and checked."""

    def check(self, begin: int, end: int, views: Iterable[memoryview]) -> int:
        """Compare the hashes of the blocks inside a range, and return how many of its bytes are in no such block.

        Args:
            views: The bytes of the range, in order. An iterator may read each view when it is requested.

        Raises:
            CheckpointCorrupt: A checksum differs; the message names file and key.
        """
        location, block = self.location, self.block
        if block is None or location.hashes is None:
            return 0
        if end - begin < block and end < location.payload_length:  # narrow columns: the range has no complete block
            return end - begin
        # The blocks that are complete in the range. The last block of a payload may be shorter than the others.
        first = -(-begin // block)
        last = max(first, len(location.hashes) if end == location.payload_length else end // block)
        start, stop = (min(number * block, location.payload_length) for number in (first, last))
        if (start, stop) != (begin, end):  # runs that end within blocks
            views = first_bytes(bytes_behind([*views], start - begin), stop - start)
        hashes, expected = BlockHashes(block), location.hashes[first:last].tolist()
        for view in views:
            hashes.add(view)
        if hashes.row != expected:
            pairs = enumerate(zip(hashes.row, expected, strict=False), first)
            wrong = next((number for number, (computed, stored) in pairs if computed != stored), first)
            at = location.offset + (location.payload_offset or 0) + wrong * block
            corrupt = CheckpointCorrupt(
                f"the bytes of {self.key} in {location.file} are not those that were saved (checksum differs in block "
                f"{wrong}, at byte {at} of the file). Load an older checkpoint."
            )
            corrupt.key = self.key
            raise corrupt
        return (end - begin) - (stop - start)


@dataclass
class IntoMemory(Fetch):
    """Bytes from ``start`` on that go straight to ``memory``, whose owner the view keeps alive."""

    start: int
    memory: memoryview

    def parts(self, block: Block) -> list[Part]:
        ((begin, end),) = self.ranges
        stop = self.start + len(self.memory)
        views = [self.memory]
        # The rest of the first and the last checksum block is not wanted, but must be read to check the blocks.
        if begin < self.start:
            views.insert(0, memory_view(block.reserve(self.start - begin)))
        if stop < end:
            views.append(memory_view(block.reserve(end - stop)))
        return [(begin, end, views)]


@dataclass
class IntoTensor(Fetch):
    """Box that is copied to ``target``: elements of ``dtype`` from byte ``start`` on, with these strides in the
    file."""

    start: int
    target: torch.Tensor
    dtype: torch.dtype
    strides: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        return self.target.device

    def parts(self, block: Block) -> list[Part]:
        origin = self.ranges[0][0]
        self._bytes = block.reserve(self.ranges[-1][1] - origin)
        memory = memory_view(self._bytes)
        return [(begin, end, [memory[begin - origin : end - origin]]) for begin, end in self.ranges]

    def finish(self, block: Block) -> None:
        skipped = self.start - self.ranges[0][0]
        usable = len(self._bytes) - (len(self._bytes) - skipped) % self.dtype.itemsize
        elements = self._bytes[skipped:usable].view(self.dtype)
        block.copy(self.target, torch.as_strided(elements, self.target.shape, self.strides))
        del self._bytes


@dataclass
class RunsIntoMemory(Fetch):
    """Runs of one length that go straight to ``memory``, where they are consecutive.

    The only range of the fetch is the span from the first run to the last. The bytes between the runs are not read.
    """

    starts: Positions
    run: int
    memory: memoryview

    @property
    def has_one_range(self) -> bool:
        return False

    def parts(self, block: Block) -> list[Part]:
        run, memory = self.run, self.memory
        places = zip(self.starts.tolist(), range(0, len(memory), run), strict=True)
        return [(start, start + run, [memory[at : at + run]]) for start, at in places]


@dataclass
class OpaqueItem(Fetch):
    """Item of unknown layout, read completely and handed to ``take``."""

    take: Callable[[bytearray], None]

    def parts(self, block: Block) -> list[Part]:
        self._item = bytearray(self.ranges[0][1])
        return [(0, len(self._item), [memoryview(self._item)])]

    def finish(self, block: Block) -> None:
        self.take(self._item)
        del self._item


def of_item(key: str, location: Location, take: Callable[[bytearray], None], block: int | None) -> Fetch:
    """Return the fetch of a complete item, including its frame."""
    return OpaqueItem(key, replace(location, payload_offset=0), [(0, location.length)], block, take)


def of_box(
    key: str,
    chunk: StoredChunk,
    dtype: torch.dtype,
    box: tuple[tuple[int, ...], tuple[int, ...]],
    target: torch.Tensor,
    block: int | None,
    gap: int = 0,
) -> Iterator[Fetch]:
    """Yield the fetches of a box (offsets and lengths in the chunk) into ``target``, which has its shape.

    Args:
        gap: Bytes that cost less than a further read. With a small gap, as on a disk, only runs are read, unless all
            are near each other.
    """
    if target.numel() == 0:
        return
    location = chunk.location
    offsets, lengths = box
    straight = is_plain_memory(target) and target.dtype == dtype
    first, run, runs, near = 0, location.payload_length, 1, False
    if lengths != chunk.sizes:
        starts, run = runs_of(chunk.sizes, offsets, lengths, dtype.itemsize)
        first, runs = int(starts[0]), len(starts)
        if runs > 1 and gap <= _BETWEEN_RUNS:
            # The gaps between runs are small, but too large for covering() to read across them anyway.
            near = int((starts[1:] - starts[:-1]).max()) - run <= _BETWEEN_RUNS
            near &= int(starts[-1] - starts[0]) + run > (1 + MOST_WASTE) * run * len(starts)
            gap = _BETWEEN_RUNS if near else 0
            if straight and not near and run <= _DIRECT_PIECE:
                # Runs that are read alone go straight to the target. Ranges with other bytes need a block of memory.
                begins, ends = covering(starts, run, block, location.payload_length)
                if np.array_equal(begins, starts) and np.array_equal(ends, starts + run):
                    yield from _of_runs(key, location, starts, run, target, block)
                    return
    if runs > 1 or not target.is_contiguous():
        # Several runs, or a strided target: parts that fit into a block of host memory, copied from there.
        strides = strides_of(chunk.sizes)
        for part, corner in _parts(target, offsets, strides, _COPIED_PIECE // dtype.itemsize):
            starts, run = runs_of(chunk.sizes, corner, tuple(part.shape), dtype.itemsize)
            begins, ends = covering(starts, run, block, location.payload_length, gap)
            # If complete blocks cost over a quarter more than the span of the runs, the span alone is read.
            if near and (ends - begins).sum() > (1 + MOST_WASTE) * (int(starts[-1] - starts[0]) + run):
                begins, ends = covering(starts, run, None, location.payload_length, gap)
            ranges = list(zip(begins.tolist(), ends.tolist(), strict=True))
            yield IntoTensor(key, location, ranges, block, int(starts[0]), part, dtype, strides)
        return
    # One run and a contiguous target: pieces of the run, with the complete blocks at its ends.
    memory = memory_view(target) if straight else memoryview(b"")
    flat = target.view(-1)
    for start, stop in _cuts(first, first + run, _DIRECT_PIECE if straight else _COPIED_PIECE):
        ranges = [(start, stop)]
        if block is not None:
            ranges = [(start // block * block, min(-(-stop // block) * block, location.payload_length))]
        if straight:
            yield IntoMemory(key, location, ranges, block, start, memory[start - first : stop - first])
        else:
            part = flat[(start - first) // dtype.itemsize : (stop - first) // dtype.itemsize]
            yield IntoTensor(key, location, ranges, block, start, part, dtype, (1,))


def _of_runs(
    key: str, location: Location, starts: Positions, run: int, target: torch.Tensor, block: int | None
) -> Iterator[Fetch]:
    memory, count = memory_view(target), min(max(1, _DIRECT_PIECE // run), _MOST_RUNS)
    for at in range(0, len(starts), count):
        group = starts[at : at + count]
        span = int(group[0]), int(group[-1]) + run
        yield RunsIntoMemory(key, location, [span], block, group, run, memory[at * run : (at + len(group)) * run])


def of_view(
    key: str,
    location: Location,
    dtype: torch.dtype,
    strides: tuple[int, ...],
    offsets: tuple[int, ...],
    target: torch.Tensor,
) -> Iterator[Fetch]:
    """Yield the fetches of a box of a tensor that is not row-major: a covering range, viewed with its strides."""
    if target.numel() == 0:
        return
    for part, corner in _parts(target, offsets, strides, _COPIED_PIECE // dtype.itemsize):
        start = sum(map(mul, corner, strides)) * dtype.itemsize
        stop = start + _span(part, strides) * dtype.itemsize
        yield IntoTensor(key, location, [(start, stop)], None, start, part, dtype, strides)


def _cuts(start: int, stop: int, piece: int) -> Iterator[Range]:
    """Yield a range cut at the multiples of ``piece``."""
    while start < stop:
        end = min((start // piece + 1) * piece, stop)
        yield start, end
        start = end


def _parts(
    target: torch.Tensor, corner: tuple[int, ...], strides: tuple[int, ...], limit: int
) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Yield parts of a box that span at most ``limit`` elements of the stored chunk, and the corner of each."""
    wide = max((dim for dim, size in enumerate(target.shape) if size > 1), key=lambda dim: strides[dim], default=None)
    if wide is None or _span(target, strides) <= limit:
        yield target, corner
        return
    rows = max(1, limit // strides[wide])
    if rows >= target.shape[wide]:  # the other dimensions span more than the limit
        rows = target.shape[wide] // 2
    for at in range(0, target.shape[wide], rows):
        moved = (*corner[:wide], corner[wide] + at, *corner[wide + 1 :])
        yield from _parts(target.narrow(wide, at, min(rows, target.shape[wide] - at)), moved, strides, limit)


def _span(target: torch.Tensor, strides: tuple[int, ...]) -> int:
    """Return the number of elements from the first to the last of a box, in the stored tensor."""
    return 1 + sum((size - 1) * stride for size, stride in zip(target.shape, strides, strict=True))


MOST_WASTE = 0.25  # of the wanted bytes: as many others are read to check complete blocks or to save calls


def strides_of(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return row-major strides in elements."""
    return tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def runs_of(
    sizes: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...], itemsize: int
) -> tuple[Positions, int]:
    """Return where the runs of a box of a row-major tensor start, in bytes, and the length of each run."""
    cut = len(sizes)  # after the last dimension of which the box has only a part
    while cut and lengths[cut - 1] == sizes[cut - 1]:
        cut -= 1
    strides = strides_of(sizes)
    # The box has all of the dimensions from cut on, so a run covers them and a range of dimension cut - 1. One run
    # starts at each combination of the indices before.
    starts = np.zeros(1, np.int64)
    for dim in range(cut - 1):
        rows = (offsets[dim] + np.arange(lengths[dim], dtype=np.int64)) * strides[dim]
        starts = (starts[:, None] + rows).reshape(-1)
    if cut:
        starts = starts + offsets[cut - 1] * strides[cut - 1]
    return starts * itemsize, prod(lengths[max(cut - 1, 0) :]) * itemsize


def covering(starts: Positions, length: int, block: int | None, end: int, gap: int = 0) -> tuple[Positions, Positions]:
    """Return the begins and ends of the ranges to read for these runs of a payload.

    A range consists of complete blocks if these cost little more. It also contains gaps of at most ``gap`` bytes.

    Args:
        block: Bytes per checksum; None without checksums.
        end: Length of the payload.
    """
    stops = starts + length
    if block is not None:
        begins, ends = _merged(starts // block * block, np.minimum(-(-stops // block) * block, end), 0)
        if len(starts) == 1:
            return begins, ends
        if int((starts[1:] - stops[:-1]).max()) <= gap:
            return begins[:1], ends[-1:]
        if (ends - begins).sum() <= (1 + MOST_WASTE) * length * len(starts):
            return begins, ends
    return _merged(starts, stops, max(gap, int(MOST_WASTE * length)))


def _merged(starts: Positions, stops: Positions, gap: int) -> tuple[Positions, Positions]:
    """Return sorted ranges; ranges that overlap or have at most ``gap`` bytes between them become one."""
    apart = starts[1:] - stops[:-1] > gap
    return starts[np.concatenate(([True], apart))], stops[np.concatenate((apart, [True]))]
