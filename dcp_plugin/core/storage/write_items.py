"""Writer of the items of one rank into its data files: one thread per file, each from front to back.

The layout of a file follows from the sizes of its items, before any byte is written. A payload goes from tensor memory
to the file piece by piece, and each piece is hashed while it is in the processor's cache. A stored hash is always that
of the written bytes. An earlier hash, of memory that may change since, only decides which items are written.

The system call for a piece comes before its hash. The call brings the piece into the cache without the interpreter's
lock, while a hash of a small block holds the lock. A training loop then waits for the lock a fifth less.

A large payload begins at a page of the file. If its memory also begins at a page, as in the copy of an asynchronous
save, the device reads directly from that memory. Small items are collected in memory first, since a system call for
each would take most of their time.

Items that are expected not to change are written to separate files, so that the next checkpoint can link these. These
files are cut in the order of the items. Neighbours often start to change together, and then share a file.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from dcp_plugin.core import events
from dcp_plugin.core.errors import SaveFailed
from dcp_plugin.core.format import DATA_SUFFIX
from dcp_plugin.core.format.columns import Places
from dcp_plugin.core.format.payload import NO_FRAME, SMALLEST_BLOCK, BlockHashes, Frame, block_size, frame, padded
from dcp_plugin.core.format.values import WholeItem
from dcp_plugin.core.media import IN_PLACE, PAGE, Medium, NewFile, stretches
from dcp_plugin.core.paths import Where
from dcp_plugin.core.tensors.host_memory import PIECE, Rings, device_of_thread, finish_device_work, is_plain_memory


@dataclass(frozen=True)
class Streamed:
    """Tensor whose bytes are produced while they are written: it need not be in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[memoryview]]
    """Function that yields its bytes in row-major order. Each piece is used before the next is requested."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Data = torch.Tensor | WholeItem | bytes


_WORTH_A_FILE = 1 << 20  # total size of the items; below, one file has all of them
_WORTH_A_THREAD = 64 << 10  # average size of an item; below, threads wait for the interpreter's lock
_STABLE_FILE = 256 << 20  # one changed tensor causes its file to be written again; every file costs a sync
_MOST_STABLE_FILES = 32
_TOGETHER = 512 << 10  # size of the memory in which small items are collected
_IN_PLACE_PIECE = 8 << 20  # large, because a system call is the only work per piece


@dataclass(frozen=True)
class Destination:
    """Directory and options with which this rank writes."""

    medium: Medium
    directory: Where
    """Directory of the reservation."""
    rank: int
    io_threads: int

    def free_name(self, taken: Collection[str]) -> str:
        """Return the first name for a data file of this rank that is not taken.

        Each name has the token of the reservation, which is unique to the save and the same on all ranks. Without it,
        stock would write in place to a file of the same name, ``__{rank}_{n}.distcp``, which other checkpoints may
        link.
        """
        number = 0
        while (name := f"__{self.rank}_{number}-{self.directory.stem}{DATA_SUFFIX}") in taken:
            number += 1
        return name


def write(
    items: Sequence[Data | Streamed],
    to: Destination,
    checkpoint: Where,
    stable: Collection[int] = (),
    taken: Collection[str] = (),
) -> Places:
    """Write and sync the items; return the place of each. Tensors must have memory, see
    :mod:`dcp_plugin.core.tensors.kinds`.

    Args:
        checkpoint: Path of the checkpoint, for progress events.
        stable: The positions of the items to be written to separate files, which later saves are meant to link.
        taken: Names of files that already exist.

    Raises:
        OSError, SaveFailed: The files could not be written.
    """
    finish_device_work(data for data in items if isinstance(data, torch.Tensor))
    wrapped = [_Item.of(data) for data in items]
    buckets = _files_of([item.length for item in wrapped], frozenset(stable), to.io_threads)
    names: list[str] = []
    for _ in buckets:
        names.append(to.free_name({*taken, *names}))
    contents = [[wrapped[slot] for slot in bucket] for bucket in buckets]
    layouts = [_layout(content) for content in contents]
    meter = _Meter(checkpoint, sum(size for _, size in layouts))

    def write_one(name: str, bucket: list[int], content: list[_Item], layout: _Layout) -> Places:
        # All items of a file are stable, or none is.
        return _write_file(to, name, content, layout, meter, linkable=bucket[0] in stable)

    if len(buckets) <= 1:
        written = list(map(write_one, names, buckets, contents, layouts))
    else:
        with ThreadPoolExecutor(min(len(buckets), to.io_threads), "dcp-write", device_of_thread()) as pool:
            written = list(pool.map(write_one, names, buckets, contents, layouts))
    # The places are in the order of the files. The inverse permutation brings them into the order of the items.
    order = np.empty(len(items), np.int64)
    order[[slot for bucket in buckets for slot in bucket]] = np.arange(len(items))
    return Places.joined(written).take(order) if len(written) > 1 else (*written, Places.of([]))[0]


def _files_of(lengths: list[int], stable: frozenset[int], threads: int) -> list[list[int]]:
    """Return the items of each file, the largest files first. Stable items are in separate files."""
    files = []
    changing = [slot for slot in range(len(lengths)) if slot not in stable]
    for slots, share in ((changing, _buckets), (sorted(stable), _runs)):
        files += [[slots[at] for at in bucket] for bucket in share([lengths[slot] for slot in slots], threads)]
    if stable:  # there may be more files than threads, and a large file that starts last would keep one thread alone
        files.sort(key=lambda bucket: sum(lengths[slot] for slot in bucket), reverse=True)
    return files


def _runs(lengths: list[int], threads: int) -> list[list[int]]:
    """Return the items in their order, cut into files of about the same size."""
    total = sum(lengths)
    if total < _WORTH_A_FILE or not lengths:
        return [list(range(len(lengths)))] if lengths else []
    count = min(max(threads, total // _STABLE_FILE), _MOST_STABLE_FILES)
    return [file for file in stretches(lengths, count) if file]


def _buckets(lengths: list[int], count: int) -> list[list[int]]:
    """Return the items spread over files of similar size. In each file the items keep their order, so that neighbours
    stay together."""
    total = sum(lengths)
    if count == 1 or total < _WORTH_A_FILE or total < _WORTH_A_THREAD * len(lengths):
        return [list(range(len(lengths)))] if lengths else []
    buckets: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for slot in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        lightest = loads.index(min(loads))
        buckets[lightest].append(slot)
        loads[lightest] += lengths[slot]
    return [sorted(bucket) for bucket in buckets if bucket]


_Layout = tuple[list[int], int]
"""Position of each item in a file, and the size of the file."""


class _Item(NamedTuple):
    data: Data | Streamed
    around: Frame | None
    """Bytes of a ``torch.save`` file around the payload of a tensor; None for data that is written without them."""
    length: int
    """Length of the data with its frame."""
    payload_offset: int
    """-1 for an opaque item: torch.save puts the payloads at unknown places inside."""
    payload_length: int

    @property
    def frame_hash(self) -> int:
        return self.around.hash if self.around is not None else NO_FRAME

    @classmethod
    def of(cls, data: Data | Streamed) -> _Item:
        if isinstance(data, bytes):
            return cls(data, None, len(data), 0, len(data))
        if isinstance(data, WholeItem):
            return cls(data, None, data.length, -1, data.length)
        around = frame(data.dtype, tuple(data.shape))
        return cls(data, around, around.length, around.payload_offset, around.payload_length)


def _layout(items: list[_Item]) -> _Layout:
    starts, end = [], 0
    for item in items:
        if item.around is not None and item.payload_length >= IN_PLACE:
            end += -(end + item.payload_offset) % PAGE  # the payload, not the frame, begins at a page
        starts.append(end)
        end += padded(item.length)
    return starts, end


def _write_file(
    to: Destination, name: str, items: list[_Item], layout: _Layout, meter: _Meter, linkable: bool
) -> Places:
    starts, size = layout
    rings, rows = Rings(), list[list[int]]()
    with to.medium.create(to.directory, name, size, meter.add, to.io_threads) as file:
        small = _SmallItems(file)
        for item, start in zip(items, starts, strict=True):
            # A small item has at most one hash.
            if item.length <= SMALLEST_BLOCK and (row := small.add(item, start)) is not None:
                rows.append(row)
                continue
            small.flush()
            file.write(bytes(start - file.tell()))  # zeros between the items
            rows.append(_write_item(file, item, rings))
        small.flush()
        file.write(bytes(size - file.tell()))
    place = [
        (start, item.length, item.payload_offset, item.payload_length)
        for start, item in zip(starts, items, strict=True)
    ]
    return Places.of_items(
        [name],
        np.zeros(len(items), np.int32),
        np.array(place, np.int64).reshape(-1, 4),
        np.array([item.frame_hash for item in items], np.uint32),
        np.array([block for row in rows for block in row], np.uint64),
        {name} if linkable else (),
    )


class _SmallItems:
    """Collector of small items, with their frames and the gaps between them, to be written by one call."""

    def __init__(self, file: NewFile) -> None:
        self._file = file
        self._memory = bytearray(_TOGETHER)
        self._view = memoryview(self._memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._begin = self._end = 0
        """Range of the collected bytes in the file."""

    def add(self, item: _Item, start: int) -> list[int] | None:
        """Append an item that begins at ``start`` of the file, and return its hashes.

        Return None if the item is not plain bytes in memory, and so cannot be collected.
        """
        data, around, length, payload_offset, payload_length = item
        if not (isinstance(data, bytes) or (isinstance(data, torch.Tensor) and is_plain_memory(data))):
            return None
        if start + length - self._begin > _TOGETHER:
            self.flush()
        if self._begin == self._end:
            self._begin = self._end = self._file.tell()
        memory, at = self._memory, start - self._begin
        memory[self._end - self._begin : at] = bytes(start - self._end)
        self._end = start + length
        first, behind = at + payload_offset, at + payload_offset + payload_length
        if isinstance(data, bytes):
            memory[first:behind] = data
        else:
            assert around is not None, "a tensor has a frame"
            memory[at:first] = around.head
            ctypes.memmove(self._address + first, data.data_ptr(), payload_length)
            memory[behind : at + length] = around.tail
        # The hash of the collected bytes, not of the tensor, whose memory may change meanwhile.
        return [xxh3_64_intdigest(self._view[first:behind])] if payload_length else []

    def flush(self) -> None:
        """Write the collected items."""
        if self._end > self._begin:
            self._file.write(self._view[: self._end - self._begin])
        self._begin = self._end


def _write_item(file: NewFile, item: _Item, rings: Rings) -> list[int]:
    """Write one item and return its hashes. Each piece is hashed while it is in the processor's cache."""
    data, around = item.data, item.around
    if isinstance(data, WholeItem):
        data = data.encode()
        if len(data) != item.length:
            raise SaveFailed(
                "a tensor changed while torch.save wrote it. Do not change the state until the save is complete."
            )
    if isinstance(data, bytes):
        kept, pieces = True, iter([memoryview(data)])
    elif isinstance(data, Streamed):
        kept, pieces = False, data.pieces()
    else:
        kept = is_plain_memory(data)
        pieces = rings.pieces(data, _IN_PLACE_PIECE if file.takes_in_place(data.data_ptr()) else PIECE)
    hashes = BlockHashes(block_size(item.payload_length))
    file.write(around.head if around is not None else b"")
    for piece in pieces:
        file.write(piece, kept)
        hashes.add(piece)
    file.write(around.tail if around is not None else b"")
    return hashes.row


class _Meter:
    """Counter of the bytes that all threads of one save have written; it emits their progress as events."""

    def __init__(self, path: Where, total: int) -> None:
        self._path, self._total, self._written = path, total, 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._written += count
            event = events.BytesWritten(self._path, self._written, self._total)
        events.emit(event)
