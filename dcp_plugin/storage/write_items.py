"""Writes the items of one rank into its data files: one thread per file, each from front to back.

The layout of a file follows from the sizes of its items, before anything is written. A payload goes from tensor memory
to the file piece by piece, checksummed while it is in the processor's cache. A large payload begins at a page of the
file: if its memory does too, as in the copy of an asynchronous save, the device reads it from there.

Items that are expected not to change are hashed and lie in files of their own, so that the next checkpoint can link
these. They are cut in the order of the items, so that neighbours, which often start to change together, share a file.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from isal.isal_zlib import crc32

from dcp_plugin import events
from dcp_plugin.errors import SaveFailed
from dcp_plugin.format import DATA_SUFFIX
from dcp_plugin.format.index import Location
from dcp_plugin.format.payload import RunningCrc, RunningHash, block_size, frame, padded
from dcp_plugin.host_memory import PIECE, Rings, finish_device_work, is_plain_memory
from dcp_plugin.media import IN_PLACE, PAGE, Medium, NewFile
from dcp_plugin.paths import Where
from dcp_plugin.tensors import WholeItem
from dcp_plugin.types import Shape


@dataclass(frozen=True)
class Streamed:
    """A tensor whose bytes come while they are written: it need not be in memory."""

    dtype: torch.dtype
    shape: Shape
    pieces: Callable[[], Iterator[memoryview]]
    """Its bytes in row-major order. Each piece is used before the next is asked for."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Data = torch.Tensor | WholeItem | bytes
_WORTH_A_FILE = 1 << 20
_WORTH_A_THREAD = 64 << 10  # average size of an item; below, threads wait for the interpreter's lock
_STABLE_FILE = 256 << 20  # one changed tensor costs to write its file again; every file costs to be synced
_MOST_STABLE_FILES = 32
_IN_PLACE_PIECE = 8 << 20  # as a system call for each is all that is done with it


@dataclass(frozen=True)
class Destination:
    """Where and how this rank writes."""

    medium: Medium
    directory: Where
    """Of the reservation."""
    rank: int
    token: str
    """Part of the names of files that may be linked later, see :func:`free_name`."""
    io_threads: int
    checksum: bool


def write(
    items: Sequence[Data | Streamed],
    to: Destination,
    checkpoint: Where,
    stable: Collection[int] = (),
    taken: Collection[str] = (),
) -> list[Location]:
    """Write and sync the items; where each of them is.

    Args:
        checkpoint: The name for progress events.
        stable: The positions of those to be hashed and kept apart.
        taken: Names of files that are there already.

    Raises:
        OSError, SaveFailed: The files could not be written.
    """
    finish_device_work(data for data in items if isinstance(data, torch.Tensor))
    lengths = list(map(_item_length, items))
    buckets = _files_of(lengths, frozenset(stable), to.io_threads)
    names: list[str] = []
    for _ in buckets:
        names.append(free_name(to.rank, {*taken, *names}, to.token))
    layouts = [_layout([items[slot] for slot in bucket], [lengths[slot] for slot in bucket]) for bucket in buckets]
    meter = _Meter(checkpoint, sum(size for _, size in layouts))
    locations: dict[int, Location] = {}

    def write_one(name: str, bucket: list[int], layout: _Layout) -> None:
        hashed = bucket[0] in stable
        written = _write_file(to, name, [items[slot] for slot in bucket], layout, meter, hashed)
        locations.update(zip(bucket, written, strict=True))

    if len(buckets) == 1:
        write_one(names[0], buckets[0], layouts[0])
    elif buckets:
        with ThreadPoolExecutor(min(len(buckets), to.io_threads), thread_name_prefix="dcp-write") as pool:
            list(pool.map(write_one, names, buckets, layouts))
    return [locations[slot] for slot in range(len(items))]


def free_name(rank: int, taken: Collection[str], token: str, wanted: str = "") -> str:
    """A name for a data file of this rank: the wanted one if it may be linked under it, else the first that is free.

    Args:
        token: The save's, for the name of a file that may be linked into other checkpoints: stock writes
            ``__{rank}_{n}.distcp`` in place, which would change these too, and new names are to be no other save's.
            Empty for a name like stock's.
        wanted: The name in the last checkpoint. A file keeps its name where it can, so that tools which copy a run see
            what is the same. Not if it is another rank's, which may link a file of that name itself, or as stock's.
    """
    if re.fullmatch(rf"__{rank}_\d+-[0-9a-f]+{DATA_SUFFIX}", wanted) and wanted not in taken:
        return wanted
    suffix = f"-{token}{DATA_SUFFIX}" if token else DATA_SUFFIX
    number = 0
    while (name := f"__{rank}_{number}{suffix}") in taken:
        number += 1
    return name


def _item_length(data: Data | Streamed) -> int:
    if isinstance(data, WholeItem):
        return data.length
    return len(data) if isinstance(data, bytes) else frame(data.dtype, tuple(data.shape)).length


def _files_of(lengths: list[int], stable: frozenset[int], threads: int) -> list[list[int]]:
    """Which items go to which file: the stable ones and the others apart, the largest files first."""
    files = []
    changing = [slot for slot in range(len(lengths)) if slot not in stable]
    for slots, share in ((changing, _buckets), (sorted(stable), _runs)):
        files += [[slots[at] for at in bucket] for bucket in share([lengths[slot] for slot in slots], threads)]
    if stable:  # more files than threads
        files.sort(key=lambda bucket: sum(lengths[slot] for slot in bucket), reverse=True)
    return files


def _runs(lengths: list[int], threads: int) -> list[list[int]]:
    """Items in their order, cut into files of about the same size."""
    total = sum(lengths)
    if total < _WORTH_A_FILE or not lengths:
        return [list(range(len(lengths)))] if lengths else []
    count = min(max(threads, total // _STABLE_FILE), _MOST_STABLE_FILES)
    files: list[list[int]] = [[] for _ in range(count)]
    before = 0
    for slot, length in enumerate(lengths):
        files[min(count - 1, (before + length // 2) * count // total)].append(slot)
        before += length
    return [file for file in files if file]


def _buckets(lengths: list[int], count: int) -> list[list[int]]:
    """Items spread over files by size; in each file they keep their order, so that neighbours are read together."""
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
"""Where each item of a file begins, and the size of the file."""


def _layout(items: list[Data | Streamed], lengths: list[int]) -> _Layout:
    starts, end = [], 0
    for data, length in zip(items, lengths, strict=True):
        if isinstance(data, (torch.Tensor, Streamed)) and data.nbytes >= IN_PLACE:
            end += -(end + frame(data.dtype, tuple(data.shape)).payload_offset) % PAGE
        starts.append(end)
        end += padded(length)
    return starts, end


def _write_file(
    to: Destination, name: str, items: list[Data | Streamed], layout: _Layout, meter: _Meter, hashed: bool
) -> list[Location]:
    starts, size = layout
    rings = Rings()
    locations = []
    with to.medium.create(to.directory, name, size, meter.add, to.io_threads) as file:
        for data, start in zip(items, starts, strict=True):
            file.write(bytes(start - file.tell()))
            running = RunningHash() if hashed and isinstance(data, torch.Tensor) else None
            location = _write_item(file, name, data, to.checksum, rings, running.update if running else None)
            locations.append(replace(location, hash=running.digest()) if running else location)
        file.write(bytes(size - file.tell()))
    return locations


def _write_item(
    file: NewFile,
    name: str,
    data: Data | Streamed,
    checksum: bool,
    rings: Rings,
    also: Callable[[memoryview], object] | None,
) -> Location:
    """Write one item. ``also`` is shown each piece of the payload while it is in the processor's cache."""
    offset = file.tell()
    opaque = isinstance(data, WholeItem)
    if isinstance(data, WholeItem):
        length, data = data.length, data.encode()
        if len(data) != length:
            raise SaveFailed(
                "a tensor that torch.save writes has changed while it was saved; do not change it meanwhile"
            )
    if isinstance(data, bytes):
        head, head_crc, length, kept = b"", 0, len(data), True
        pieces = iter([memoryview(data)])
    else:
        around = frame(data.dtype, tuple(data.shape))
        head, head_crc, length = around.head, around.head_crc, around.payload_length
        file.write(head)
        if isinstance(data, Streamed):
            pieces, kept = data.pieces(), False
        else:
            kept = is_plain_memory(data)
            pieces = rings.pieces(data, _IN_PLACE_PIECE if file.takes_in_place(data.data_ptr()) else PIECE)
    running = RunningCrc(block_size(length))
    for piece in pieces:
        if checksum:
            running.add(piece)
        if also is not None:
            also(piece)
        file.write(piece, kept)
    checksums = np.array(running.ends, np.uint32) if checksum else None
    if isinstance(data, bytes):  # torch.save puts the payloads of an opaque one somewhere inside
        return Location(name, offset, length, None if opaque else 0, length, 0, checksums)
    tail = around.tail(running.crc)
    file.write(tail)
    frame_crc = crc32(tail, head_crc) if checksum else 0
    return Location(name, offset, around.length, len(head), length, frame_crc, checksums)


class _Meter:
    """Counts what all threads of one save have written, and tells the world."""

    def __init__(self, path: Where, total: int) -> None:
        self._path, self._total, self._written = path, total, 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._written += count
            event = events.BytesWritten(self._path, self._written, self._total)
        events.emit(event)
