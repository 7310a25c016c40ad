"""Item table of a checkpoint: the file, place and hashes of every key.

The table is a set of numpy columns, the same in memory and on disk (:mod:`~dcp_plugin.core.format.index_file` describes
them). Opening a million items makes a few arrays. An entry becomes a Python object only when a caller asks for its key.

The rule: :meth:`CheckpointIndex.validate` runs before a byte of the files is used. It refuses a range outside a file,
and items that overlap. Two items may be the same bytes (tied weights, equal values) if all their columns agree. The
checks run over full columns, so a million items take a fraction of a second.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_plugin.core.errors import CheckpointCorrupt, CheckpointMismatch, UnsafeCheckpoint, some
from dcp_plugin.core.format.columns import (
    ITEM_COLUMNS,
    MAPPING_CLASSES,
    NO_TENSOR,
    ROWS_IN_CACHE,
    Column,
    KeyColumns,
    KeyPath,
    Location,
    Places,
    default_path,
    in_all,
    in_any,
    in_cache,
    order_of,
    partitioned,
    product,
    totals,
    unusual_paths,
)

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import StorageMeta

    from dcp_plugin.core.format.foreign.scales import Scaled

__all__ = [
    "MAPPING_CLASSES",
    "NO_TENSOR",
    "CheckpointIndex",
    "Column",
    "Entry",
    "KeyColumns",
    "KeyPath",
    "Location",
    "Places",
    "StoredChunk",
    "StoredTensor",
    "StoredValue",
    "default_path",
    "places_of",
    "unusual_paths",
]


@dataclass(frozen=True)
class StoredChunk:
    """Box of a stored tensor, and the item that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    location: Location


class _Chunks(Sequence[StoredChunk]):
    """Chunks of a key. A chunk becomes an object when the caller asks for it."""

    def __init__(self, index: CheckpointIndex, slot: int) -> None:
        self.parent, self._slot = index, slot

    @functools.cached_property
    def _boxes(self) -> tuple[Column, Column]:
        return self.parent.table.boxes_of(self._slot)

    def __len__(self) -> int:
        return len(self._boxes[0])

    def __getitem__(self, number: Any) -> Any:
        at, (offsets, sizes) = range(len(self))[number], self._boxes
        location = self.parent.places.location(int(self.parent.table.chunk_starts[self._slot]) + at)
        return StoredChunk(tuple(offsets[at].tolist()), tuple(sizes[at].tolist()), location)


@dataclass(frozen=True)
class StoredTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Sequence[StoredChunk]

    @property
    def stored_whole(self) -> bool:
        """True if the tensor is stored as one item of its own class (:mod:`dcp_plugin.core.tensors.kinds`).

        False for every tensor of a stock checkpoint. Its index does not record this: only reading the item shows it.
        """
        location = self.chunks[0].location if self.chunks else None
        return location is not None and location.payload_offset is None and location.payload_length > 0

    def empty(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate a tensor of this shape, by default on the host and of the stored dtype.

        Raises:
            UnsafeCheckpoint: :meth:`CheckpointIndex.require_bounded` refuses the checkpoint.
        """
        if isinstance(self.chunks, _Chunks):
            self.chunks.parent.require_bounded()
        import torch

        return torch.empty(self.shape, dtype=dtype or self.dtype, device=device)


@dataclass(frozen=True)
class StoredValue:
    """Value that is no tensor, stored as ``torch.save`` bytes."""

    chunks: Sequence[StoredChunk]
    """One, without dimensions."""


Entry = StoredTensor | StoredValue


def places_of(entry: Entry) -> tuple[tuple[str, int], ...]:
    """Return file and offset of each item of an entry. Tied weights have the same."""
    return tuple((chunk.location.file, chunk.location.offset) for chunk in entry.chunks)


class CheckpointIndex(Mapping[str, Entry]):
    """All entries of a checkpoint by key, in the order of the save."""

    def __init__(self, table: KeyColumns, columns: dict[str, Column], files: dict[str, int]) -> None:
        self.table = table
        self.columns = columns
        """All columns: those of the table, and those of the items."""
        self.files = files
        """Data files and their sizes in bytes."""
        self.linkable: Collection[str] = ()
        """Data files that later saves link, see :class:`~dcp_plugin.core.format.columns.Places`."""
        self.transforms: dict[tuple[str, int], tuple[str, ...]] = {}
        """Stream transforms, such as zstd, that torch must undo to read an item, by file and offset.

        Only stock checkpoints have such items.
        """
        self.strides: dict[str, dict[tuple[str, int], tuple[int, ...]]] = {}
        """Strides of the chunks by key, file and offset, for tensors with a chunk that is not row-major. Only
        ``torch.save`` files have such tensors."""
        self.scaled: Mapping[str, Scaled] = {}
        """Quantized tensors by key. Only folders of other tools have such tensors."""
        self.values_here: dict[str, Any] = {}
        """Values that were read with the index, by key. Only ``torch.save`` files have such values."""
        self.left_out: dict[str, str] = {}
        """Keys that are not stored because the base, another checkpoint, has their bytes -> their keys in the base."""
        self.rounded: dict[str, str] = {}
        """Keys in :attr:`left_out` that the base has with more exact numbers -> their dtype."""
        self.empty: Collection[str] = ()
        """Keys of empty mappings. ``.metadata`` leaves them out.

        Stock stores no such keys. It takes a checkpoint with such a key for one of torch 2.3, and looks for other keys.
        """
        self.extra_files: dict[str, str] = {}
        """Extra files next to the data files -> the text that :mod:`~dcp_plugin.core.storage.published` compares."""
        self.planner_data: tuple[Any, ...] = ()
        """The ``planner_data`` of another tool's planner, as a tuple of one. Empty if it is the paths of keys."""
        self.storage_meta: StorageMeta | None = None
        """Note of stock's writer about its save."""
        self.label = ""
        """Name of the checkpoint in messages."""
        self.file_names = list(files)
        self._entries: dict[str, Entry] = {}
        self.slots = table.slots
        """Number of each key."""

    @functools.cached_property
    def version(self) -> str | None:
        """Version of DCP's layout that the ``.metadata`` names; None before torch 2.9."""
        from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION

        return CURRENT_DCP_VERSION

    def __getitem__(self, key: str) -> Entry:
        if (entry := self._entries.get(key)) is None:
            slot = self.slots[key]
            if (dtype := self.table.dtype_of(slot)) is None:
                entry = StoredValue(_Chunks(self, slot))
            else:
                entry = StoredTensor(dtype, self.table.shape_of(slot), _Chunks(self, slot))
            self._entries[key] = entry
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    def under(self, prefix: str) -> list[str]:
        """Return the keys that start with ``prefix``, in the order of the index."""
        first = bisect_left(self._sorted, prefix)
        # The prefix with its last character increased sorts right after all keys that start with the prefix.
        last = bisect_left(self._sorted, prefix[:-1] + chr(ord(prefix[-1]) + 1), lo=first)
        return sorted(self._sorted[first:last], key=self.slots.__getitem__)

    @functools.cached_property
    def _sorted(self) -> list[str]:
        return sorted(self.slots)

    def path_of(self, key: str) -> KeyPath:
        """Return the path of the key in the nested state."""
        return self.table.path_of(key)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all payloads; a payload that several keys share counts once."""
        places, order, same_files = _by_place(self.places)
        # Sorted by place, items that share their bytes are neighbours, and the first of them counts.
        shared = same_files & (np.diff(places.place[order, 0]) == 0)
        counts = np.concatenate(([True], ~shared))[: len(order)]
        return int((places.place[order, 3] * places.item_count[order])[counts].sum())

    def rows_of(self, key: str) -> range:
        """Return the numbers of the chunks of a key among those of all keys. A value has one."""
        slot = self.slots[key]
        first, end = self.table.chunk_starts[slot : slot + 2].tolist()
        return range(first, end)

    def rename_files(self, name_of: Callable[[str], str]) -> None:
        """Give the data files other names; their bytes stay the same."""
        self.files = {name_of(name): size for name, size in self.files.items()}
        self.file_names[:] = self.files
        self.linkable = set(map(name_of, self.linkable))

    @classmethod
    def of(cls, table: KeyColumns, places: Places, files: dict[str, int]) -> CheckpointIndex:
        """Return the index of a table whose chunks are at these places, in the same order."""
        try:
            keys = list(map(str.encode, table.keys))
        except UnicodeEncodeError as error:
            raise CheckpointMismatch(
                f"the key {error.object!r} has half of a surrogate pair, which no file holds as text. Rename the key."
            ) from error
        files = {name: files[name] for name in places.files} | files  # the columns number them in this order
        if len(names := dict.fromkeys(places.files)) < len(places.files):  # joined parts have a file in common
            numbers = {name: number for number, name in enumerate(names)}
            renumbered, places = np.array([numbers[name] for name in places.files], np.int32), places.by_item
            places = replace(places, files=[*names], file=renumbered[places.file])
        columns = {
            **table.columns,
            "keys": np.frombuffer(b"".join(keys), np.uint8),
            "key_ends": np.cumsum(np.fromiter(map(len, keys), np.int64, len(keys))),
            **{name: getattr(places, name) for name in ITEM_COLUMNS},
        }
        index = cls(table, columns, files)
        index.linkable = places.linkable
        return index

    @functools.cached_property
    def places(self) -> Places:
        """Places of the items."""
        items = {name: self.columns[name] for name in ITEM_COLUMNS}
        return Places(self.file_names, linkable=self.linkable, **items)

    def require_bounded(self, keys: Iterable[str] | None = None) -> None:
        """Check that the tensors take about as much memory as the files hold.

        A file of a kilobyte can ask for any amount of memory: its tensor has a stride of 0, or a million keys name it.

        Args:
            keys: The tensors that will get memory; all if None.

        Raises:
            UnsafeCheckpoint: The tensors take more than :func:`dcp_plugin.core.format.pickles.walk.allowance`.
        """
        nbytes = self.table.nbytes
        if keys is not None:
            nbytes = nbytes[[self.slots[key] for key in keys]]
        held = sum(self.files.values())
        from dcp_plugin.core.format.pickles.walk import allowance  # late, since it imports torch

        if nbytes.sum() > allowance(held):
            largest = self.table.keys[int(np.argmax(self.table.nbytes))]
            raise UnsafeCheckpoint(
                f"{self.label}: the tensors take {nbytes.sum() / 2**30:.1f} GiB of memory, and "
                f"{some(list(self.files))} hold {held} bytes; the largest tensor is {largest}. If you trust the "
                f"checkpoint, load it into tensors that you allocate (dcp_plugin.load), or select fewer keys."
            )

    def validate(self, label: str, shares_bytes: bool = False) -> None:
        """Check every item against the sizes of the files that the index lists, and every box against its tensor.

        Args:
            label: Name of the checkpoint in messages.
            shares_bytes: Accept items that overlap: in a ``torch.save`` file, they are views of the same storages.

        Raises:
            CheckpointCorrupt: A check failed; the message names file and key.
        """
        columns, self.label = self.columns, label
        for name in (*self.files, *self.extra_files):
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name:
                raise CheckpointCorrupt(f"{label}: the index names {name!r}, which is outside the checkpoint")
        file, places = columns["file"], self.places
        last = file + columns["file_step"].astype(np.int64) * (columns["item_count"] - 1)
        if min(file.min(initial=0), columns["file_step"].min(initial=0)) < 0 or last.max(initial=-1) >= len(self.files):
            raise CheckpointCorrupt(f"{label}: an item is in a file that the index does not list")
        sizes = np.array(list(self.files.values()), np.int64)
        for fault, bad_items in (
            ("lies outside its file or item", _outside(places, sizes)),
            ("overlaps another item", () if shares_bytes else _overlapping(places)),
        ):
            for item in bad_items:
                key, file_name = self.table.keys[self.table.slots_of(item)], places.location(item).file
                raise CheckpointCorrupt(f"{label}: {key} in {file_name} {fault}")
        _check_boxes(self.table, places, label)


def _stretches(places: Places) -> Iterator[tuple[Column, Column, Column, Column]]:
    """Yield some items at a time, so that passes over them stay in the processor's cache: their numbers, files and
    places, and the rows that have them."""
    for first in range(0, int(places.starts[-1]), ROWS_IN_CACHE):
        items = np.arange(first, min(first + ROWS_IN_CACHE, places.starts[-1]))
        row, file = places.rows_of(items)
        yield items, file, np.ascontiguousarray(places.place.take(row, axis=0).T), row


def _outside(places: Places, sizes: Column) -> list[int]:
    """Return the first item that is outside of its file, or whose payload is outside of it, if there is one."""
    for items, file, (offset, length, payload_offset, payload_length), _ in _stretches(places):
        # Bounds are compared by a difference, because the sum of two hostile numbers overflows.
        outside = (
            (offset < 0)
            | (length < 0)
            | (offset > sizes[file] - length)
            | (payload_length < 0)
            | (np.maximum(payload_offset, 0) > length - payload_length)
        )
        if outside.any():
            return [int(items[np.argmax(outside)])]
    return []


def _by_place(places: Places) -> tuple[Places, Column, Column]:
    """Return the places, an order of their rows by file and offset, and a mask of the rows with the files of the row
    before them in that order. No other rows have a file in common."""
    files = places.file, places.file_step, places.item_count
    # The items of a file are mostly in order, so a sort by files alone is tried first: an index of 10^7 rows opens in
    # two thirds of the time.
    for more in ((), (places.place[:, 0], places.place[:, 1])):
        order = order_of(*files, *more)
        first, step, count = (column[order].astype(np.int64) for column in files)
        same_files = (np.diff(first) == 0) & (np.diff(step) == 0) & (np.diff(count) == 0)
        further, longer = np.diff(places.place[:, :2].take(order, axis=0), axis=0).T
        if not (same_files & ((further < 0) | ((further == 0) & (longer < 0)))).any():
            break
    # Rows of several files are compared as one, unless rows of some other files have one of these: then item by item.
    reached = np.maximum.accumulate(first + step * (count - 1))
    if (~same_files & (first[1:] <= reached[:-1])).any():
        return _by_place(places.by_item)
    return places, order, same_files


def _overlapping(places: Places) -> list[int]:
    """Return the first item that begins before the previous item ends, if there is one. Aliases, which agree in their
    places, do not count."""
    # If any items overlap, two neighbours in the order of places do.
    places, order, same_files = _by_place(places)
    further, length = np.diff(places.place[order, 0]), places.place[order, 1]
    at = np.flatnonzero(same_files & (further < length[:-1]))
    overlapping = order[at + 1][(places.place[order[at]] != places.place[order[at + 1]]).any(axis=1)]
    return places.starts[overlapping[:1]].tolist()  # type: ignore[no-any-return]


def _complete_grids(table: KeyColumns) -> Column:
    """Return a mask of the keys whose boxes are all cells of one grid. These boxes cover the tensor, by their count."""
    complete = np.full(len(table.keys), False)
    alone = np.diff(table.row_starts) == 1
    for ndim in range(1 + int(table.columns["ndim"].max(initial=0))):
        slots = np.flatnonzero(alone & (table.columns["ndim"] == ndim))
        shape = table.columns["shape"][table.shape_starts[slots][:, None] + np.arange(ndim)]
        offsets, sizes = (
            table.columns["box"][table.box_starts[slots][:, None] + np.arange(2 * ndim)]
            .reshape(len(slots), 2, ndim)
            .transpose(1, 0, 2)
        )
        cells = product((shape // np.maximum(sizes, 1)).astype(float))
        is_cell = (offsets == 0) & (sizes > 0) & (sizes <= shape) & (shape % np.maximum(sizes, 1) == 0)
        complete[slots] = in_all(is_cell) & (cells == table.columns["box_count"][table.row_starts[slots]])
        complete[slots] &= table.nbytes[slots] < 1 << 53  # exact, as floats
    return complete


def _check_boxes(table: KeyColumns, places: Places, checkpoint: str) -> None:
    no_tensor = table.columns["dtype"] == NO_TENSOR
    counts = np.diff(table.chunk_starts)
    for slot in np.flatnonzero(no_tensor & (counts != 1)).tolist():
        raise CheckpointCorrupt(f"{checkpoint}: {table.keys[slot]} is a value with {counts[slot]} items instead of 1")
    if (no_tensor & (table.columns["ndim"] > 0)).any():
        raise CheckpointCorrupt(f"{checkpoint}: a value has dimensions")
    complete = _complete_grids(table)
    others = np.flatnonzero(~complete)
    volume = np.zeros(table.chunk_starts[-1] if len(others) else 0, np.int64)
    for slots, chunks, boxes in chain.from_iterable(map(table.by_ndim, in_cache(others, counts[others]))):
        of = np.repeat(np.arange(len(slots)), counts[slots])
        ndim = boxes.shape[2]
        shape = table.columns["shape"][table.shape_starts[slots][:, None] + np.arange(ndim)]
        offsets, sizes = boxes[:, 0], boxes[:, 1]
        outside = in_any((offsets < 0) | (sizes < 0) | (sizes > np.repeat(shape, counts[slots], axis=0) - offsets))
        # As floats: the product of a hostile shape overflows an int64, and the volumes below are int64.
        absurd = (shape < 0).any(axis=1) | (shape.astype(float).prod(axis=1) > 1 << 60)
        for slot in np.sort(np.concatenate((of[outside], np.flatnonzero(absurd))))[:1].tolist():
            raise CheckpointCorrupt(
                f"{checkpoint}: a chunk of {table.keys[slots[slot]]} lies outside its shape {tuple(shape[slot])}"
            )
        volumes = volume[chunks] = product(sizes)
        total = totals(volumes, of, len(slots))
        # Volumes alone would accept a hole that an overlap makes up for.
        wrong = (total != product(shape)) | ~partitioned(offsets, sizes, shape, of, len(slots))
        for slot in np.flatnonzero(wrong & ~no_tensor[slots])[:1].tolist():
            raise CheckpointCorrupt(
                f"{checkpoint}: the chunks of {table.keys[slots[slot]]} do not add up to its shape "
                f"{tuple(shape[slot])}: some are missing, or chunks overlap"
            )
    each = np.where(complete, table.nbytes / np.maximum(counts, 1), -1)  # bytes of a cell of a complete grid
    for items, _, (_, _, payload_offset, payload_length), _ in _stretches(places):
        slots = table.slots_of(items)
        expected = each[slots]
        if len(volume):
            irregular = np.flatnonzero(expected < 0)
            expected[irregular] = (volume[items] * table.itemsizes[table.columns["dtype"][slots]])[irregular]
        # A payload offset of -1 marks an item of unknown layout, whose payload has no size to compare.
        for slot in slots[(payload_offset >= 0) & (payload_length != expected) & ~no_tensor[slots]][:1].tolist():
            raise CheckpointCorrupt(f"{checkpoint}: an item of {table.keys[slot]} has the wrong size for its shape")
