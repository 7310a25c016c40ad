"""Reads the fetches of a load: several threads, also on one file, and neighbours in one system call.

The work is shared out by bytes. Fetches that are close in a file are read by one ``preadv``, which scatters the bytes
to where each of them wants its own. Everything is checked before it is copied; what is read straight into the memory
of a target is checked there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from isal.isal_zlib import crc32

from dcp_plugin.errors import CheckpointCorrupt
from dcp_plugin.format.checksums import RunningCrc, block_size
from dcp_plugin.format.index import Location
from dcp_plugin.host_memory import BLOCK, Rings, memory_view
from dcp_plugin.storage.fetch import Fetch

_GAP = 8 << 10  # bytes that are cheaper to read than to skip by another system call
_BATCH = BLOCK // 2
_MOST_FETCHES = 256  # of up to four pieces of memory each; the system takes 1024 in a call


@dataclass
class Count:
    """Bytes of data files: all that were read, and those of them that no checksum covers although the item has one."""

    read: int = 0
    unchecked: int = 0


def read(directory: Path, fetches: Iterable[Fetch], io_threads: int) -> Count:
    """Carry out all fetches.

    Raises:
        CheckpointCorrupt: Naming file and key. Targets may be partly filled.
    """
    batches = list(_batches(sorted(fetches, key=lambda fetch: (fetch.location.file, fetch.begin))))
    work = iter(batches)
    failed = threading.Event()

    def read_some() -> Count:
        try:
            return _read_batches(directory, work, failed)
        except BaseException:
            failed.set()
            raise

    threads = min(io_threads, len(batches))
    if threads <= 1:
        return read_some()
    total = Count()
    with ThreadPoolExecutor(threads, thread_name_prefix="dcp-read") as pool:
        for job in [pool.submit(read_some) for _ in range(threads)]:
            done = job.result()
            total.read += done.read
            total.unchecked += done.unchecked
    return total


def _batches(fetches: list[Fetch]) -> Iterator[list[Fetch]]:
    """Fetches in the order of the files, those that one call reads together."""
    batch: list[Fetch] = []
    for fetch in fetches:
        if batch and not _joins(fetch, batch):
            yield batch
            batch = []
        batch.append(fetch)
    if batch:
        yield batch


def _joins(fetch: Fetch, batch: list[Fetch]) -> bool:
    last = batch[-1]
    return (
        fetch.location.file == last.location.file
        and 0 <= fetch.begin - last.end <= _GAP
        and fetch.end - batch[0].begin <= _BATCH
        and len(fetch.ranges) == len(last.ranges) == 1
        and fetch.device == last.device
        and len(batch) < _MOST_FETCHES
    )


def _read_batches(directory: Path, work: Iterator[list[Fetch]], failed: threading.Event) -> Count:
    count = Count()
    rings = Rings()
    name, fd = "", -1
    try:
        for batch in work:
            if failed.is_set():
                break
            first = batch[0]
            if first.location.file != name:
                if fd >= 0:
                    os.close(fd)
                fd = -1
                name, fd = first.location.file, os.open(directory / first.location.file, os.O_RDONLY | os.O_CLOEXEC)
            _read_batch(fd, batch, rings, count)
    except OSError as error:
        raise CheckpointCorrupt(f"{directory}: cannot read {first.key} in {first.location.file}: {error}") from error
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(f"{directory}: {error}") from None
    finally:
        rings.wait()
        if fd >= 0:
            os.close(fd)
    return count


def _read_batch(fd: int, batch: list[Fetch], rings: Rings, count: Count) -> None:
    block = rings.of(batch[0].device).next()
    placed = [fetch.views(block) for fetch in batch]
    if len(batch) == 1:
        for (begin, _), views in zip(batch[0].ranges, placed[0], strict=True):
            count.read += _scatter(fd, views, batch[0].begin - batch[0].ranges[0][0] + begin, batch)
    else:
        skipped = memory_view(block.take(_GAP))
        scattered = []
        position = batch[0].begin
        for fetch, (views,) in zip(batch, placed, strict=True):
            if fetch.begin > position:
                scattered.append(skipped[: fetch.begin - position])
            scattered += views
            position = fetch.end
        count.read += _scatter(fd, scattered, batch[0].begin, batch)
    for fetch, views_of_ranges in zip(batch, placed, strict=True):
        for (begin, end), views in zip(fetch.ranges, views_of_ranges, strict=True):
            count.unchecked += _check(fetch, begin, end, views)
        fetch.finish(block)


def _scatter(fd: int, views: list[memoryview], offset: int, batch: list[Fetch]) -> int:
    """Read from ``offset`` until all the memory is full."""
    total = sum(map(len, views))
    done = 0
    while done < total:
        count = os.preadv(fd, views, offset + done)
        if count == 0:
            cut = next(fetch for fetch in batch if fetch.end > offset + done)
            raise CheckpointCorrupt(f"{cut.location.file} ends within {cut.key}")
        done += count
        if done < total:
            views = list(_behind(views, count))
    return total


def _behind(views: list[memoryview], count: int) -> Iterator[memoryview]:
    for view in views:
        if count < len(view):
            yield view[count:]
        count = max(0, count - len(view))


def _check(fetch: Fetch, begin: int, end: int, views: list[memoryview]) -> int:
    """Compare the blocks that lie in a range with their checksums; how many bytes lie in no such block."""
    location, block = fetch.location, fetch.block
    if block is None or location.checksums is None:
        return 0
    first = -(-begin // block)
    last = len(location.checksums) if end == location.payload_length else end // block
    if first >= last:
        return end - begin
    start, stop = first * block, min(last * block, location.payload_length)
    running = RunningCrc(block, int(location.checksums[first - 1]) if first else 0)
    if (start, stop) != (begin, end):  # runs between blocks; those have one piece of memory
        views = [views[0][start - begin : stop - begin]]
    for view in views:
        running.add(view)
    expected = location.checksums[first:last].tolist()
    if running.ends != expected:
        wrong = first + next(n for n, pair in enumerate(zip(running.ends, expected, strict=True)) if pair[0] != pair[1])
        at = location.offset + (location.payload_offset or 0) + wrong * block
        raise CheckpointCorrupt(
            f"the bytes of {fetch.key} in {location.file} are not those that were saved (checksum differs in block "
            f"{wrong}, at byte {at} of the file). Load an older checkpoint."
        )
    return (end - begin) - (stop - start)


def check_item(directory: Path, key: str, location: Location, smallest_block: int) -> None:
    """Read one item completely, frame included, and compare what has a checksum.

    Raises:
        CheckpointCorrupt: Naming file and key.
    """
    pieces = _pieces(directory, key, location)
    if location.checksums is None:
        for _ in pieces:
            pass
        return
    running = RunningCrc(block_size(location.payload_length, smallest_block))
    frame_crc = 0
    payload = location.payload_offset or 0
    behind = payload + location.payload_length
    for at, piece in pieces:
        low, high = (min(max(edge - at, 0), len(piece)) for edge in (payload, behind))
        frame_crc = crc32(piece[high:], crc32(piece[:low], frame_crc))
        running.add(piece[low:high])
    if running.ends != location.checksums.tolist():
        raise CheckpointCorrupt(f"{directory}: {key} in {location.file}: a checksum differs")
    if frame_crc != location.frame_crc:
        raise CheckpointCorrupt(f"{directory}: {key} in {location.file}: the frame's checksum differs")


def _pieces(directory: Path, key: str, location: Location) -> Iterator[tuple[int, memoryview]]:
    """The bytes of an item, and where in the item they are."""
    memory = memoryview(bytearray(min(location.length, BLOCK)))
    with open(directory / location.file, "rb", buffering=0) as file:
        file.seek(location.offset)
        done = 0
        while done < location.length:
            count = file.readinto(memory[: location.length - done])
            if not count:
                raise CheckpointCorrupt(f"{directory}: {location.file} ends within {key}")
            yield done, memory[:count]
            done += count
