"""Writes the items of one rank into its data files: one thread per file, each from front to back.

The layout of a file follows from the sizes of its items, before anything is written. A payload goes from tensor
memory to the file piece by piece, checksummed while it is in the processor's cache.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from isal.isal_zlib import crc32

from dcp_plugin import progress
from dcp_plugin.storage import commit
from dcp_plugin.storage.checksums import RunningCrc, block_size
from dcp_plugin.storage.direct import BlockFile
from dcp_plugin.storage.framing import ALIGNMENT, frame
from dcp_plugin.storage.hostmemory import Rings, finish_device_work
from dcp_plugin.storage.index import Location

Data = torch.Tensor | bytes
_WORTH_A_FILE = 1 << 20
_WORTH_A_THREAD = 64 << 10  # average size of an item; below, threads wait for the interpreter's lock


@dataclass(frozen=True)
class Files:
    """Where and how this rank writes."""

    directory: Path
    rank: int
    io_threads: int
    direct_io: bool | Literal["auto"]
    checksum: bool


def write(items: Sequence[Data], to: Files, checkpoint: Path) -> list[Location]:
    """Write and sync the items; where each of them is. ``checkpoint`` is the name for progress events.

    Raises:
        OSError, SaveFailed: The files could not be written.
    """
    finish_device_work(data for data in items if isinstance(data, torch.Tensor))
    lengths = [_item_length(data) for data in items]
    buckets = _buckets(lengths, to.io_threads)
    meter = _Meter(checkpoint, sum(map(padded, lengths)))
    locations: dict[int, Location] = {}

    def write_one(number: int, bucket: list[int]) -> None:
        name = f"__{to.rank}_{number}{commit.DATA_SUFFIX}"
        written = _write_file(to, name, [items[slot] for slot in bucket], [lengths[slot] for slot in bucket], meter)
        locations.update(zip(bucket, written, strict=True))

    if len(buckets) == 1:
        write_one(0, buckets[0])
    elif buckets:
        with ThreadPoolExecutor(len(buckets), thread_name_prefix="dcp-write") as pool:
            list(pool.map(write_one, range(len(buckets)), buckets))
    return [locations[slot] for slot in range(len(items))]


def _item_length(data: Data) -> int:
    return len(data) if isinstance(data, bytes) else frame(data.dtype, tuple(data.shape)).length


def padded(length: int) -> int:
    """What an item of this length takes in its file."""
    return length + -length % ALIGNMENT


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


def _write_file(to: Files, name: str, items: list[Data], lengths: list[int], meter: _Meter) -> list[Location]:
    size = sum(padded(length) for length in lengths)
    rings = Rings()
    locations = []
    with BlockFile(to.directory / name, size, to.direct_io, meter.add) as file:
        for data, length in zip(items, lengths, strict=True):
            locations.append(_write_item(file, name, data, to.checksum, rings))
            file.write(bytes(-length % ALIGNMENT))
    return locations


def _write_item(file: BlockFile, name: str, data: Data, checksum: bool, rings: Rings) -> Location:
    offset = file.tell()
    if isinstance(data, bytes):
        head, head_crc, length = b"", 0, len(data)
        pieces = iter([memoryview(data)])
    else:
        around = frame(data.dtype, tuple(data.shape))
        head, head_crc, length = around.head, around.head_crc, around.payload_length
        pieces = rings.pieces(data)
        file.write(head)
    running = RunningCrc(block_size(length))
    for piece in pieces:
        if checksum:
            running.add(piece)
        file.write(piece)
    checksums = np.array(running.ends, np.uint32) if checksum else None
    if isinstance(data, bytes):
        return Location(name, offset, length, 0, length, 0, checksums)
    tail = around.tail(running.crc)
    file.write(tail)
    frame_crc = crc32(tail, head_crc) if checksum else 0
    return Location(name, offset, around.length, len(head), length, frame_crc, checksums)


class _Meter:
    """Counts what all threads of one save have written, and tells the world."""

    def __init__(self, path: Path, total: int) -> None:
        self._path, self._total = path, total
        self._written = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._written += count
            event = progress.BytesWritten(self._path, self._written, self._total)
        progress.emit(event)
