"""Checks of the bytes of our checkpoints that belong to no item. With the items, every byte of every file is checked.

The bytes between the items of a data file are zero. A file that was linked from an earlier checkpoint may have other
bytes: items that this checkpoint no longer has. These are complete, and have their own CRC, because each is a zip
archive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor

import numpy as np
from isal.isal_zlib import crc32
from xxhash import xxh3_128

from dcp_plugin.errors import CheckpointCorrupt
from dcp_plugin.format import DATA_SUFFIX, Files
from dcp_plugin.format.columns import Column
from dcp_plugin.format.index import CheckpointIndex
from dcp_plugin.format.payload import ALIGNMENT, END_BEGINS, END_LENGTH, directory_at, frame_in
from dcp_plugin.media import Medium, RangedFile, Readable
from dcp_plugin.paths import Where
from dcp_plugin.records import OpenCheckpoint
from dcp_plugin.tensors.host_memory import BLOCK

MOST_HASHED = 64 << 20
"""Largest extra file, in bytes, that a save hashes: the save waits for the hash."""
BYTES = " bytes"
_WINDOW = 4 << 20
"""Bytes of a window in which gaps are read together."""
_MOST_HEAD = 64 << 10
"""Bytes that exceed the length of any head before a payload."""


def told_beside(medium: Medium, directory: Where, below: str = "") -> dict[str, str]:
    """Return a comparison for each extra file of a save in flight, by name. Raises OSError.

    The comparison is the file's XXH3-128, or the size of a file that would take long to hash. Links and entries that
    are no files are left out.
    """
    comparisons: dict[str, str] = {}
    for entry in medium.entries(directory):
        name = below + entry.path.name
        if entry.is_folder:
            comparisons |= told_beside(medium, entry.path, f"{name}/")
        elif entry.is_file and (below or not name.endswith(DATA_SUFFIX)):
            comparisons[name] = told_of(medium.open(directory), entry.path.name)
    return comparisons


def hash_of(data: bytes) -> str:
    return xxh3_128(data).hexdigest()


def sizes_only(beside: Mapping[str, str]) -> list[str]:
    """Return the files of which only the size is compared."""
    return [name for name, comparison in beside.items() if comparison.endswith(BYTES)]


def check(opened: OpenCheckpoint, pool: Executor) -> list[str]:
    """Return the faults in the bytes that belong to no item. In the files of a base, only items are checked."""
    if opened.summary is None:
        return []
    elsewhere = f"{opened.base.files.where}/" if opened.base else "\0"
    own = [number for number, name in enumerate(opened.index.file_names) if not name.startswith(elsewhere)]
    between = pool.map(lambda number: check_between(opened.files, opened.index, number), own)
    return [*filter(None, between), *_check_beside(opened.files, opened.index.beside)]


def _check_beside(files: Readable, beside: Mapping[str, str]) -> Iterator[str]:
    """Yield the faults in the extra files."""
    for name, expected in beside.items():
        try:
            if told_of(files, name) != expected or files.leads_elsewhere(name):
                yield f"{files.where}/{name} is not what was saved with the checkpoint"
        except OSError as error:
            yield f"{files.where}/{name} cannot be read: {error.strerror}"


def told_of(files: Files, name: str) -> str:
    """Return the comparison of one file, as in :func:`told_beside`."""
    with files.open(name) as file:
        size = files.size(name)
        return hash_of(file.read()) if size <= MOST_HASHED else f"{size}{BYTES}"


def check_between(files: Readable, index: CheckpointIndex, number: int) -> str:
    """Check the bytes between the items of a data file, by its number. Return the fault, or an empty string."""
    name = index.file_names[number]
    places = index.columns["place"][index.columns["file"] == number]
    try:
        with files.open(name) as file:
            gaps = _gaps(places, index.files[name])
            for begin, end in _used(file, gaps) if files.streams else gaps:
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


def _used(file: RangedFile, gaps: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the gaps that may not be zeros. Gaps near each other are read together: in a store each read is a
    request."""
    first = 0
    while first < len(gaps):
        last = first
        while last + 1 < len(gaps) and gaps[last + 1][1] - gaps[first][0] <= _WINDOW:
            last += 1
        near, first = gaps[first : last + 1], last + 1
        start = near[0][0]
        data = _read(file, start, near[-1][1]) if len(near) > 1 else None
        yield from (gap for gap in near if data is None or any(data[gap[0] - start : gap[1] - start]))


def _check_gap(file: RangedFile, begin: int, end: int) -> None:
    while begin < end:
        for at, piece in _pieces(file, begin, end):
            used = np.frombuffer(piece, np.uint8) != 0
            if used.any():
                first = at + int(used.argmax())
                begin = _end_of_item(file, first - first % ALIGNMENT, end)
                break
        else:
            return


def _end_of_item(file: RangedFile, begin: int, end: int) -> int:
    """Return the end of the item that begins at ``begin``. Raises CheckpointCorrupt if it is missing or changed."""
    behind = _found_end(file, begin, end)
    if behind is not None and _is_unchanged(file, begin, behind):
        return behind
    raise CheckpointCorrupt(f"the bytes from {begin} on are of no item, and not what was saved")


def _found_end(file: RangedFile, begin: int, end: int) -> int | None:
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


def _pieces(file: RangedFile, begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
    """Yield the bytes of a range in pieces, each with its position."""
    memory = memoryview(bytearray(min(end - begin, BLOCK)))
    while begin < end:
        count = file.read_into([memory[: end - begin]], begin)
        if not count:
            raise CheckpointCorrupt("it has been cut meanwhile")
        yield begin, memory[:count]
        begin += count


def _read(file: RangedFile, begin: int, end: int) -> bytes:
    return b"".join(bytes(piece) for _, piece in _pieces(file, begin, end))
