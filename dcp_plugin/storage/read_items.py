"""Execution of the batches of a load (:mod:`~dcp_plugin.storage.batches`) by several threads, also on one file.

The threads share the work by bytes. Bytes are checked before they are copied; bytes that are read straight into the
memory of a target are checked there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

import torch
from isal.isal_zlib import crc32

from dcp_plugin.errors import CheckpointCorrupt
from dcp_plugin.format.index import Location, StoredChunk
from dcp_plugin.format.payload import RunningCrc, block_size, frame_if_possible
from dcp_plugin.media import Readable, stretches
from dcp_plugin.storage.batches import Batch, Count
from dcp_plugin.storage.published import gone_or_damaged
from dcp_plugin.tensors.host_memory import BLOCK, Rings

_WINDOW = 4 << 20
"""Bytes of items that a check reads together: in a store each read is a request."""
_HEADS_GAP, _HEADS_TOGETHER = 64 << 10, 1 << 20


def read(files: Readable, batches: Iterable[Batch], io_threads: int) -> Count:
    """Execute all batches.

    Raises:
        CheckpointCorrupt: The message names file and key. Targets may be partly filled.
        CheckpointNotFound: A file is missing because the checkpoint was deleted meanwhile. Targets may be partly
            filled.
        CheckpointUnreadable: The file system failed. Targets may be partly filled.
    """
    in_order = sorted(batches, key=lambda batch: (batch.file, batch.begin))
    threads = max(1, min(max(io_threads, files.streams), len(in_order)))
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
    with ThreadPoolExecutor(threads, thread_name_prefix="dcp-read") as pool:
        counts = [job.result() for job in [pool.submit(read_some, first) for first in range(threads)]]
    return Count(sum(count.read for count in counts), sum(count.unchecked for count in counts))


def _taken(work: list[deque[Batch]], number: int) -> Iterator[Batch]:
    """Yield the batches of a thread: its stretch from the front, and then the last ones of the longest other
    stretches."""
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
                    if not files.distrust(file):
                        raise
                    file.close()
                    file = files.open(name)
    except OSError as error:
        raise gone_or_damaged(files, f"cannot read {batch.key} in {batch.file}", error) from error
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(f"{files.where}: {error}") from None
    finally:
        rings.wait()
        if file is not None:
            file.close()
    return count


_Named = tuple[str, Location]
"""Key and location of an item."""


def in_windows(items: Iterable[_Named]) -> Iterator[list[_Named]]:
    """Yield groups of items of one file that one read fetches, in the order of the file."""
    group: list[_Named] = []
    for key, location in sorted(items, key=lambda item: (item[1].file, item[1].offset)):
        first = group[0][1] if group else location
        if group and (location.file != first.file or location.offset + location.length - first.offset > _WINDOW):
            yield group
            group = []
        group.append((key, location))
    if group:
        yield group


def check_items(files: Readable, items: list[_Named], smallest_block: int) -> list[str]:
    """Check items of one file that are near each other. Return a message for each damaged item."""
    begin, end = items[0][1].offset, max(location.offset + location.length for _, location in items)
    window: memoryview | None = None
    if len(items) > 1 and end - begin <= _WINDOW:
        with suppress(OSError, CheckpointCorrupt):  # the check of the item reports the error
            span = Location(items[0][1].file, begin, end - begin, None, 0)
            window = memoryview(b"".join(bytes(piece) for _, piece in _pieces(files, items[0][0], span)))
    errors = []
    for key, location in items:
        at = location.offset - begin
        pieces = None if window is None else [(0, window[at : at + location.length])] if location.length else []
        try:
            check_item(files, key, location, smallest_block, pieces)
        except Exception as error:
            errors.append(str(error))
    return errors


def check_item(
    files: Readable,
    key: str,
    location: Location,
    smallest_block: int,
    pieces: Iterable[tuple[int, memoryview]] | None = None,
) -> None:
    """Read one item completely, including its frame, and compare the bytes that have a checksum.

    Args:
        pieces: The bytes, and their positions in the item; read from the file if None.

    Raises:
        CheckpointCorrupt: A checksum differs; the message names file and key.
    """
    pieces = _pieces(files, key, location) if pieces is None else pieces
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
    """Yield the bytes of an item, with their positions in the item."""
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
    """Find the payloads in items of a stock checkpoint, and record them in ``known`` by file and offset.

    The beginning of an item holds the pickle with dtype, shape and strides. If it equals the one that this package
    writes, the payload is at the same place too. Items of other versions of torch stay unknown.

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
        with suppress(OSError), files.open(groups[0][0][0]) as file:  # the read of the payload reports the error
            for group in groups:
                (name, begin, _), (_, last, length) = group[0], group[-1]
                memory = memoryview(bytearray(last + length - begin))
                count += file.read_into([memory], begin)
                for _, offset, length in group:
                    chunk, around = frames[name, offset]
                    if memory[offset - begin : offset - begin + length] == around.head:
                        size = around.payload_length
                        location = replace(chunk.location, payload_offset=length, payload_length=size)
                        known[name, offset] = replace(chunk, location=location)
        return count

    if len(work) < 2 or not files.streams:
        return sum(map(look, work))
    with ThreadPoolExecutor(min(files.streams, len(work)), thread_name_prefix="dcp-look") as pool:
        return sum(pool.map(look, work))


_Head = tuple[str, int, int]
"""Beginning of an item: file, offset, and number of bytes."""


def _near_each_other(heads: list[_Head]) -> Iterator[list[list[_Head]]]:
    """Yield groups of heads that one request reads."""
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
