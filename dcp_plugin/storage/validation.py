"""What an index must not say: items outside of files or over each other, boxes that do not make up their tensors.

Every check is over whole columns, so that a million items take a fraction of a second. The data files themselves are
looked at by :func:`check_files`: by one rank for all of them, and by each for those it reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import numpy as np

from dcp_plugin.errors import CheckpointCorrupt
from dcp_plugin.storage.checksums import block_counts
from dcp_plugin.storage.table import NO_TENSOR, Column, Table, dtype_named, partitioned


def validate(
    table: Table,
    columns: dict[str, Column],
    files: dict[str, int],
    smallest_block: int,
    directory: Path,
    shares_bytes: bool = False,
) -> None:
    """Check every item against its file's size, every other item (unless they may share bytes), and its box.

    Raises:
        CheckpointCorrupt: Naming file and key.
    """
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name:
            raise CheckpointCorrupt(f"{directory}: the index names {name!r}, which leaves the checkpoint")
    file = columns["file"]
    if len(file) == 0:
        return
    if file.min() < 0 or file.max() >= len(files):
        raise CheckpointCorrupt(f"{directory}: an item is in a file that the index does not list")
    sizes = np.array(list(files.values()), np.int64)[file]
    offset, length, payload_offset, payload_length = columns["place"].T
    outside = (offset < 0) | (length < 0) | (offset > sizes - length) | (payload_length < 0)
    outside |= np.maximum(payload_offset, 0) > length - payload_length
    blocks = np.diff(columns["block_ends"], prepend=0)
    for bad, what in (
        (outside, "lies outside its file or item"),
        (_overlapping(columns) & (not shares_bytes), "overlaps another item"),
        ((blocks > 0) & (blocks != block_counts(payload_length, smallest_block)), "has a wrong number of checksums"),
    ):
        if bad.any():
            chunk = int(np.argmax(bad))
            key = table.keys[int(np.searchsorted(columns["chunk_ends"], chunk, side="right"))]
            raise CheckpointCorrupt(f"{directory}: {key} in {list(files)[file[chunk]]} {what}")
    _check_boxes(table, columns["place"], directory)


def _overlapping(columns: dict[str, Column]) -> Column:
    """Which items begin before another one has ended, unless they are the same in everything: that is an alias."""
    items = np.concatenate((columns["file"][:, None], columns["place"]), axis=1)
    order = np.lexsort((items[:, 2], items[:, 1], items[:, 0]))
    before, after = items[order[:-1]], items[order[1:]]
    bad = (after[:, 0] == before[:, 0]) & (after[:, 1] < before[:, 1] + before[:, 2]) & (before != after).any(axis=1)
    overlapping = np.zeros(len(items), bool)
    overlapping[order[1:][bad]] = True
    return overlapping


def _check_boxes(table: Table, place: Column, directory: Path) -> None:
    no_tensor = table.columns["dtype"] == NO_TENSOR
    counts = np.diff(table.chunk_starts)
    for slot in np.flatnonzero(no_tensor & (counts != 1)).tolist():
        raise CheckpointCorrupt(f"{directory}: {table.keys[slot]} is a value with {counts[slot]} items")
    if (no_tensor & (table.columns["ndim"] > 0)).any():
        raise CheckpointCorrupt(f"{directory}: a value has dimensions")
    itemsizes = np.zeros(NO_TENSOR + 1, np.int64)
    itemsizes[: len(table.dtypes)] = [dtype_named(name).itemsize for name in table.dtypes]
    for slots, chunks, boxes in table.by_ndim():
        of = np.repeat(np.arange(len(slots)), counts[slots])
        ndim = boxes.shape[2]
        shape = table.columns["shape"][table.shape_starts[slots][:, None] + np.arange(ndim)]
        offsets, sizes = boxes[:, 0], boxes[:, 1]
        outside = ((offsets < 0) | (sizes < 0) | (sizes > shape[of] - offsets)).any(axis=1)
        absurd = (shape < 0).any(axis=1) | (shape.astype(float).prod(axis=1) > 1 << 60)
        for slot in np.unique(np.concatenate((of[outside], np.flatnonzero(absurd))))[:1].tolist():
            raise CheckpointCorrupt(
                f"{directory}: a chunk of {table.keys[slots[slot]]} lies outside its shape {tuple(shape[slot])}"
            )
        volumes = sizes.prod(axis=1)
        total = np.zeros(len(slots), np.int64)
        np.add.at(total, of, volumes)
        wrong = (total != shape.prod(axis=1)) | ~partitioned(offsets, sizes, shape, of, len(slots))
        for slot in np.flatnonzero(wrong & ~no_tensor[slots])[:1].tolist():
            raise CheckpointCorrupt(
                f"{directory}: the chunks of {table.keys[slots[slot]]} do not add up to its shape "
                f"{tuple(shape[slot])}: there are holes, or chunks overlap"
            )
        expected = volumes * itemsizes[table.columns["dtype"][slots]][of]
        misfit = (place[chunks, 2] >= 0) & (place[chunks, 3] != expected) & ~no_tensor[slots][of]
        for slot in of[misfit][:1].tolist():
            raise CheckpointCorrupt(
                f"{directory}: an item of {table.keys[slots[slot]]} has the wrong size for its shape"
            )


def check_files(directory: Path, files: dict[str, int], names: Iterable[str], links: bool = False) -> None:
    """Check that these data files are there, inside of the directory, and of the size that the index says.

    Args:
        links: They may be links that lead elsewhere.

    Raises:
        CheckpointCorrupt: Naming the file.
    """
    root = directory.resolve()
    for name in names:
        path = directory / name
        try:
            found = path.stat().st_size
        except OSError as error:
            raise CheckpointCorrupt(f"{directory}: data file {name} is missing ({error.strerror})") from error
        nested = len(PurePosixPath(name).parts) > 1
        if not links and (nested or path.is_symlink()) and path.resolve().parent != root / PurePosixPath(name).parent:
            raise CheckpointCorrupt(f"{directory}: {name} is a link that leaves the checkpoint")
        if found < files[name]:
            raise CheckpointCorrupt(f"{directory}: {name} is truncated: {found} of {files[name]} bytes")
        if found > files[name]:
            raise CheckpointCorrupt(
                f"{directory}: {name} has {found} bytes, and had {files[name]} when it was saved: something, perhaps "
                f"a save of another tool, has written to it since"
            )
