"""Carries out the fetches of a load: several threads, also on one file, and neighbours in one system call.

The work is shared out by bytes. Fetches that are close in a file are read by one call, which scatters the bytes to
where each of them wants its own. Bytes are checked before they are copied; those read straight into the memory of a
target are checked there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import itemgetter

import torch
from isal.isal_zlib import crc32

from dcp_plugin.errors import CheckpointCorrupt
from dcp_plugin.format.index import Location, StoredChunk
from dcp_plugin.format.payload import RunningCrc, block_size, frame_if_possible
from dcp_plugin.host_memory import BLOCK, Rings
from dcp_plugin.media import RangedFile, Readable
from dcp_plugin.storage.fetch import Fetch
from dcp_plugin.storage.open import gone_or_damaged

_BATCH = BLOCK // 2
_BATCH_OF_STREAM = 8 << 20  # where each call is a request
_HEADS_GAP, _HEADS_TOGETHER = 64 << 10, 1 << 20
_MOST_FETCHES = 256  # of up to four pieces of memory each; the system takes 1024 in a call


@dataclass
class Count:
    """Bytes of data files: all that were read, and those of them that no checksum covers although the item has one."""

    read: int = 0
    unchecked: int = 0


def read(files: Readable, fetches: Iterable[Fetch], io_threads: int) -> Count:
    """Carry out all fetches.

    Raises:
        CheckpointCorrupt: Naming file and key. Targets may be partly filled.
        CheckpointNotFound: The same, if a file is missing because the checkpoint was deleted meanwhile.
        CheckpointUnreadable: The same, if the file system failed.
    """
    in_order = sorted(fetches, key=lambda fetch: (fetch.location.file, fetch.begin))
    batches = list(_batches(in_order, files.gap, _BATCH_OF_STREAM if files.streams else _BATCH))
    work = iter(batches)

    def read_some() -> Count:
        try:
            return _read_batches(files, work)
        except BaseException:
            list(work)  # leaves nothing to read for the other threads
            raise

    threads = min(max(io_threads, files.streams), len(batches))
    if threads <= 1:
        return read_some()
    with ThreadPoolExecutor(threads, thread_name_prefix="dcp-read") as pool:
        counts = [job.result() for job in [pool.submit(read_some) for _ in range(threads)]]
    return Count(sum(count.read for count in counts), sum(count.unchecked for count in counts))


def _batches(fetches: list[Fetch], gap: int, most: int) -> Iterator[list[Fetch]]:
    """Fetches in the order of the files, those that one call reads together."""
    batch: list[Fetch] = []
    for fetch in fetches:
        if batch and not _joins(fetch, batch, gap, most):
            yield batch
            batch = []
        batch.append(fetch)
    if batch:
        yield batch


def _joins(fetch: Fetch, batch: list[Fetch], gap: int, most: int) -> bool:
    last = batch[-1]
    return (
        fetch.location.file == last.location.file
        and 0 <= fetch.begin - last.end <= gap
        and fetch.end - batch[0].begin <= most
        and len(fetch.ranges) == len(last.ranges) == 1
        and fetch.device == last.device
        and len(batch) < _MOST_FETCHES
    )


def _read_batches(files: Readable, work: Iterator[list[Fetch]]) -> Count:
    """What one thread does: it takes batches until there are none. It keeps the last file open for the next batch."""
    rings, count = Rings(), Count()
    name, file = "", None
    try:
        for batch in work:
            first = batch[0]
            if file is None or first.location.file != name:
                if file is not None:
                    file.close()
                name = first.location.file
                file = files.open(name)
            while True:
                try:
                    _read_batch(file, batch, rings, count)
                    break
                except CheckpointCorrupt:
                    if not files.distrust(file):
                        raise
                    file.close()
                    file = files.open(name)
    except OSError as error:
        raise gone_or_damaged(files, f"cannot read {first.key} in {first.location.file}", error) from error
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(f"{files.where}: {error}") from None
    finally:
        rings.wait()
        if file is not None:
            file.close()
    return count


def _read_batch(file: RangedFile, batch: list[Fetch], rings: Rings, count: Count) -> None:
    block = rings.of(batch[0].device).next()
    placed = [fetch.views(block) for fetch in batch]
    if len(batch) == 1:
        for (begin, _), views in zip(batch[0].ranges, placed[0], strict=True):
            count.read += _scatter(file, views, batch[0].begin - batch[0].ranges[0][0] + begin, batch)
    else:
        skipped = memoryview(bytearray(max(now.begin - last.end for last, now in pairwise(batch))))
        scattered = []
        position = batch[0].begin
        for fetch, (views,) in zip(batch, placed, strict=True):
            if fetch.begin > position:
                scattered.append(skipped[: fetch.begin - position])
            scattered += views
            position = fetch.end
        count.read += _scatter(file, scattered, batch[0].begin, batch)
    for fetch, views_of_ranges in zip(batch, placed, strict=True):
        for (begin, end), views in zip(fetch.ranges, views_of_ranges, strict=True):
            count.unchecked += _check(fetch, begin, end, views)
        fetch.finish(block)


def _scatter(file: RangedFile, views: list[memoryview], offset: int, batch: list[Fetch]) -> int:
    """Read from ``offset`` until all the memory is full."""
    total = sum(map(len, views))
    done = 0
    while done < total:
        count = file.read_into(views, offset + done)
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


def check_item(files: Readable, key: str, location: Location, smallest_block: int) -> None:
    """Read one item completely, frame included, and compare what has a checksum.

    Raises:
        CheckpointCorrupt: Naming file and key.
    """
    pieces = _pieces(files, key, location)
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
        raise CheckpointCorrupt(f"{files.where}: {key} in {location.file}: a checksum differs")
    if frame_crc != location.frame_crc:
        raise CheckpointCorrupt(f"{files.where}: {key} in {location.file}: the frame's checksum differs")


def _pieces(files: Readable, key: str, location: Location) -> Iterator[tuple[int, memoryview]]:
    """The bytes of an item, and where in the item they are."""
    memory = memoryview(bytearray(min(location.length, BLOCK)))
    with files.open(location.file) as file:
        done = 0
        while done < location.length:
            count = file.read_into([memory[: location.length - done]], location.offset + done)
            if not count:
                raise CheckpointCorrupt(f"{files.where}: {location.file} ends within {key}")
            yield done, memory[:count]
            done += count


def recognise(
    files: Readable, wanted: Iterable[tuple[StoredChunk, torch.dtype]], known: dict[tuple[str, int], StoredChunk]
) -> int:
    """Find the payloads in items of a stock checkpoint, and note them in ``known`` by file and offset.

    The beginning of an item holds the pickle that says dtype, shape and strides, so if it is the one that we would
    write, the payload is where we would put it. Items of other versions of torch stay unknown.

    Returns:
        The number of bytes that were read.
    """
    frames = {
        (chunk.location.file, chunk.location.offset): (chunk, around)
        for chunk, dtype in wanted
        if (around := frame_if_possible(dtype, chunk.sizes)) is not None and around.length == chunk.location.length
    }
    places = [(*place, len(frames[place][1].head)) for place in sorted(frames.keys() - known.keys())]
    if files.streams:
        work = list(_near_each_other(places))
    else:
        work = [[[place] for place in group] for _, group in groupby(places, key=itemgetter(0))]

    def look(groups: list[list[_Head]]) -> int:
        count = 0
        with suppress(OSError), files.open(groups[0][0][0]) as file:  # the read of the payload will say what is wrong
            for group in groups:
                (name, begin, _), (_, last, length) = group[0], group[-1]
                memory = memoryview(bytearray(last + length - begin))
                count += file.read_into([memory], begin)
                for _, offset, length in group:
                    chunk, around = frames[name, offset]
                    if memory[offset - begin : offset - begin + length] == around.head:
                        size = around.payload_length
                        where = replace(chunk.location, payload_offset=length, payload_length=size)
                        known[name, offset] = replace(chunk, location=where)
        return count

    if len(work) < 2 or not files.streams:
        return sum(map(look, work))
    with ThreadPoolExecutor(min(files.streams, len(work)), thread_name_prefix="dcp-look") as pool:
        return sum(pool.map(look, work))


_Head = tuple[str, int, int]
"""The beginning of an item: file, offset, and number of bytes."""


def _near_each_other(heads: list[_Head]) -> Iterator[list[list[_Head]]]:
    """Those that one request reads."""
    group: list[_Head] = []
    for head in heads:
        if group and not (
            head[0] == group[0][0]
            and head[1] - sum(group[-1][1:]) <= _HEADS_GAP
            and head[1] - group[0][1] <= _HEADS_TOGETHER
        ):
            yield [group]
            group = []
        group.append(head)
    if group:
        yield [group]
