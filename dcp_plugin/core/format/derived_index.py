"""Indexes made from entries or from other indexes: some of the keys, other names, several indexes joined.

The rule: columns are taken and joined as arrays, with no object per key. A plain save and load need none of this.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from dcp_plugin.core.format.columns import (
    NO_TENSOR,
    Column,
    KeyColumns,
    KeyPath,
    Location,
    Places,
    ranges,
    unusual_paths,
)
from dcp_plugin.core.format.index import CheckpointIndex, Entry, StoredChunk, StoredTensor, StoredValue


def index_of(
    entries: Iterable[tuple[str, Entry]], files: dict[str, int], paths: Mapping[str, KeyPath] | None = None
) -> CheckpointIndex:
    """Return the index of these entries.

    Args:
        paths: Paths of any keys. Paths that follow the default are not stored.
    """
    keys, dtype_names, dtype, ndim, shape, chunk_ends, box = [], {}, [], [], [], [], []  # type: ignore[var-annotated]
    locations: list[Location] = []
    for key, entry in entries:
        keys.append(key)
        if isinstance(entry, StoredValue):
            dtype.append(NO_TENSOR)
            ndim.append(0)
        else:
            dtype.append(dtype_names.setdefault(str(entry.dtype).removeprefix("torch."), len(dtype_names)))
            ndim.append(len(entry.shape))
            shape.extend(entry.shape)
        for chunk in entry.chunks:
            box.extend((*chunk.offsets, *chunk.sizes))
            locations.append(chunk.location)
        chunk_ends.append(len(locations))
    columns: dict[str, Column] = {
        "dtype": np.array(dtype, np.uint8),
        "ndim": np.array(ndim, np.uint8),
        "shape": np.array(shape, np.int64),
        "box_ends": np.array(chunk_ends, np.int64),
        "box_count": np.ones(len(locations), np.int32),
        "box": np.array(box, np.int64),
    }
    table = KeyColumns(keys, list(dtype_names), unusual_paths(paths or {}), columns)
    return CheckpointIndex.of(table, Places.of(locations), files)


def selected(
    index: CheckpointIndex, names: Mapping[str, str], paths: Mapping[str, KeyPath], below: str = ""
) -> CheckpointIndex:
    """Return the index of some keys under other names.

    Args:
        names: The new name of each key, and its name in ``index``. A key may get several.
        paths: The paths of the new names that do not follow the default.
        below: Path of the files relative to the folder of the new index.
    """
    table = index.table
    # Shapes and boxes are ragged: ranges() lists the positions of all of them, so that one gather takes each column.
    slots = np.array([index.slots[key] for key in names.values()], np.int64)
    ndim, counts, rows = (
        column[slots]
        for column in (table.columns["ndim"].astype(np.int64), *map(np.diff, (table.chunk_starts, table.row_starts)))
    )
    columns = {
        **{name: table.columns[name][slots] for name in ("dtype", "ndim")},
        "shape": table.columns["shape"][ranges(table.shape_starts[slots], ndim)],
        "box_ends": np.cumsum(rows),
        "box_count": table.columns["box_count"][ranges(table.row_starts[slots], rows)],
        "box": table.columns["box"][ranges(table.box_starts[slots], 2 * ndim * rows)],
    }
    files = {posixpath.join(below, name): size for name, size in index.files.items()}
    places = replace(index.places, files=list(files), linkable=()).take(ranges(table.chunk_starts[slots], counts))
    made = CheckpointIndex.of(KeyColumns(list(names), table.dtypes, unusual_paths(paths), columns), places, files)
    made.transforms = {
        (posixpath.join(below, name), at): descriptors for (name, at), descriptors in index.transforms.items()
    }
    made.strides = {new: index.strides[key] for new, key in names.items() if key in index.strides}
    made.empty = [new for new, key in names.items() if key in index.empty] if index.empty else ()
    return made


def renamed(index: CheckpointIndex, names: Mapping[str, str], below: str = "") -> CheckpointIndex:
    """Return the index of the keys whose first segment is in ``names``, with another first segment.

    Args:
        names: The new name of each first segment.
        below: As in :func:`selected`.
    """
    keys: dict[str, str] = {}
    paths: dict[str, KeyPath] = {}
    for key in index:
        first, dot, remainder = key.partition(".")
        if first in names:
            new = names[first] + dot + remainder
            keys[new] = key
            paths[new] = (names[first], *index.path_of(key)[1:])
    return selected(index, keys, paths, below)


def joined(index: CheckpointIndex, other: CheckpointIndex) -> CheckpointIndex:
    """Return the index of the keys of both. No key and no file may be in both."""
    table = _joined_tables(index.table, other.table)
    both = CheckpointIndex.of(table, Places.joined((index.places, other.places)), {**index.files, **other.files})
    both.transforms, both.strides = {**index.transforms, **other.transforms}, {**index.strides, **other.strides}
    both.extra_files, both.label = index.extra_files, index.label
    both.empty = [*index.empty, *other.empty]
    return both


class _WithProducts(CheckpointIndex):
    """Index that also has the keys of a model for packed tensors, at the bytes of these. A load finds them by name and
    below a prefix. A tool, which lists the keys, finds the tensors as they are stored."""

    def __iter__(self) -> Iterator[str]:
        return (key for key in self.slots if not (key in self.scaled and self.scaled[key].packed))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def with_products(index: CheckpointIndex) -> CheckpointIndex:
    """Return the index with the keys of a model for the packed tensors in ``index.scaled`` that a load unpacks."""
    entries: list[tuple[str, Entry]] = []
    for key, scaled in index.scaled.items():
        if scaled.packed and isinstance(stored := index[scaled.packed], StoredTensor):
            chunk = StoredChunk((0,) * len(scaled.shape), scaled.shape, stored.chunks[0].location)
            entries.append((key, StoredTensor(stored.dtype, scaled.shape, [chunk])))
    if not entries:
        return index
    both = joined(index, index_of(entries, index.files))
    made = _WithProducts(both.table, both.columns, both.files)
    made.scaled, made.strides, made.values_here = index.scaled, index.strides, index.values_here
    made.label = index.label
    return made


def _joined_tables(first: KeyColumns, second: KeyColumns) -> KeyColumns:
    # The first table keeps the numbers of its dtypes. ``numbers`` maps those of the second, and NO_TENSOR to itself.
    dtypes = list(dict.fromkeys((*first.dtypes, *second.dtypes)))
    numbers = np.full(NO_TENSOR + 1, NO_TENSOR, np.uint8)
    numbers[: len(second.dtypes)] = [dtypes.index(name) for name in second.dtypes]
    same = ("ndim", "shape", "box", "box_count")
    columns = {name: np.concatenate((first.columns[name], second.columns[name])) for name in same}
    columns["dtype"] = np.concatenate((first.columns["dtype"], numbers[second.columns["dtype"]]))
    columns["box_ends"] = np.concatenate((first.columns["box_ends"], second.columns["box_ends"] + first.row_starts[-1]))
    return KeyColumns([*first.keys, *second.keys], dtypes, {**second.paths, **first.paths}, columns)
