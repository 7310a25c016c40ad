"""Contents of a checkpoint as numpy columns: keys, the boxes of stored tensors, and the places of items.

The rule: no Python object per chunk. A large checkpoint has a chunk per rank and tensor, 10^5 to 10^7 in all. An object
for each costs seconds; a row of a column costs almost no time. The save plan, the results of writing, the index and the
stock metadata are therefore made from these columns. A key becomes an object only when a caller asks for it.

On a mesh a tensor's shards follow each other in a regular way, and a *row* describes all of them by the first and a
count. The next box is the next cell of the grid that boxes of this size make of the tensor. The next item is at the
same place of the file that is ``file_step`` further. Boxes and items are counted separately. Where nothing is regular,
a row has one box, or one item.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_plugin.core.errors import CheckpointMismatch
from dcp_plugin.core.format.payload import block_counts, padded

if TYPE_CHECKING:
    import torch

Column = np.ndarray[Any, np.dtype[Any]]
NO_TENSOR = 255
"""Number of the dtype of a value that is no tensor."""
FACTORIES: dict[str, type] = {f"builtins.{kind.__name__}": kind for kind in (int, float, bool, str, list, dict, set)}
FACTORIES |= {"builtins.tuple": tuple, "numpy.ndarray": np.ndarray}
"""Classes that a ``defaultdict`` may have as its factory, by name."""

MAPPING_CLASSES: dict[str, Callable[[], dict[Any, Any]]] = {
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "defaultdict": defaultdict,
    **{f"defaultdict of {name}": functools.partial(defaultdict, factory) for name, factory in FACTORIES.items()},
}
"""Classes of mappings, by name, that a load restores if a save stores the items of a mapping separately."""

KeyPath = tuple[Any, ...]
"""Path of a key in the nested state. A step is a ``str`` for a mapping key, an ``int`` for a list index, ``("t", i)``
for a tuple index, or ``("k", key)`` for a mapping key that is not text. A key of any type in a mapping class other than
``dict`` is ``(name, key)``, with the class's name in :data:`MAPPING_CLASSES`."""

ITEM_COLUMNS = ("file", "file_step", "item_count", "place", "frame", "hash")
"""Columns of :class:`Places`. Each is also a column of the index, under the same name."""


@dataclass(frozen=True)
class Location:
    """Place of an item: ``length`` bytes at ``offset`` of ``file``, with the payload inside them.

    ``frame`` is the hash of the bytes around the payload. ``hashes`` are the XXH3-64 of each block of the payload; None
    if the writer computed none, as in stock checkpoints.

    ``payload_offset`` is None if the layout of the item is unknown, so that ``torch.load`` has to read it. The items of
    stock checkpoints have such a layout, and so have tensors that are stored as one object. Hashes of such an item, if
    any, cover the complete item; ``payload_length`` is then the item's length.
    """

    file: str
    offset: int
    length: int
    payload_offset: int | None
    payload_length: int
    frame: int = 0
    hashes: np.ndarray[Any, np.dtype[np.uint64]] | None = None


@dataclass(frozen=True)
class KeyColumns:
    """Keys of a checkpoint and the boxes in which its tensors are stored.

    ``columns`` are ``dtype``, ``ndim``, ``shape``, ``box_ends``, ``box_count`` and ``box``, as the table in
    :mod:`~dcp_plugin.core.format.index_file` describes them. ``paths`` are the :func:`unusual_paths`. A *slot* is the
    number of a key in these columns.
    """

    keys: list[str]
    dtypes: list[str]
    paths: dict[str, KeyPath]
    columns: dict[str, Column]

    @functools.cached_property
    def slots(self) -> dict[str, int]:
        """Number of each key."""
        return dict(zip(self.keys, range(len(self.keys)), strict=True))

    @functools.cached_property
    def shape_starts(self) -> Column:
        """Position in ``shape`` at which each key begins, and the end of the last key.

        ``row_starts``, ``box_starts`` and ``chunk_starts`` are the same for the rows of ``box``, for the numbers in it,
        and for the chunks.
        """
        return starts_of(self.columns["ndim"])

    @functools.cached_property
    def row_starts(self) -> Column:
        return np.concatenate(([0], self.columns["box_ends"]))

    @functools.cached_property
    def box_starts(self) -> Column:
        return starts_of(2 * self.columns["ndim"].astype(np.int64) * np.diff(self.row_starts))

    @functools.cached_property
    def chunk_starts(self) -> Column:
        return starts_of(self.columns["box_count"])[self.row_starts]

    def slots_of(self, chunks: Column | int) -> Column:
        """Return the number of the key of each chunk."""
        return self.chunk_starts[1:].searchsorted(chunks, "right")

    def path_of(self, key: str) -> KeyPath:
        """Return the path of the key in the nested state: the stored path, or else the default path."""
        return self.paths.get(key) or default_path(key)

    def dtype_of(self, slot: int) -> torch.dtype | None:
        """Return the dtype of a tensor, or None for a value that is no tensor."""
        number = self.columns["dtype"].item(slot)
        return None if number == NO_TENSOR else self.torch_dtypes[number]

    @functools.cached_property
    def torch_dtypes(self) -> list[torch.dtype]:
        return [dtype_named(name) for name in self.dtypes]

    @functools.cached_property
    def itemsizes(self) -> Column:
        """Bytes of an element of each dtype, by its number; 0 for values that are no tensors."""
        itemsizes = np.zeros(NO_TENSOR + 1, np.int64)
        itemsizes[: len(self.dtypes)] = [itemsize_named(name) for name in self.dtypes]
        return itemsizes

    def shape_of(self, slot: int) -> tuple[int, ...]:
        begin, end = self.shape_starts[slot : slot + 2].tolist()
        return tuple(self.columns["shape"][begin:end].tolist())

    @functools.cached_property
    def nbytes(self) -> Column:
        """Bytes of each tensor in memory, 0 for a value; as floats, which do not overflow."""
        nbytes: Column = self.itemsizes[self.columns["dtype"]].astype(float)
        # Keys with equally many dimensions form a rectangle, of which one pass multiplies the rows. Reading a shape for
        # each key would be a Python loop over all keys.
        for ndim in range(1, 1 + int(self.columns["ndim"].max(initial=0))):
            slots = np.flatnonzero(self.columns["ndim"] == ndim)
            shape = self.columns["shape"][self.shape_starts[slots][:, None] + np.arange(ndim)]
            with np.errstate(over="ignore", invalid="ignore"):  # a hostile shape: inf, and 0 times inf
                nbytes[slots] *= np.nan_to_num(product(shape.astype(float)), posinf=np.inf)
        return nbytes

    def shapes_of(self, slots: Column) -> list[tuple[int, ...]]:
        """Return the shapes of many keys at once."""
        # One gather and one tolist() for all keys, then slices of a list: numpy calls for each key would cost more.
        ndim = self.columns["ndim"][slots].astype(np.int64)
        sizes, ends = self.columns["shape"][ranges(self.shape_starts[slots], ndim)].tolist(), np.cumsum(ndim)
        bounds = zip((ends - ndim).tolist(), ends.tolist(), strict=True)
        return [tuple(sizes[begin:end]) for begin, end in bounds]

    def boxes_of(self, slot: int) -> tuple[Column, Column]:
        """Return the offsets and the sizes of the chunks of a key, one row per chunk."""
        begin, end = self.box_starts[slot : slot + 2].tolist()
        first, last = self.row_starts[slot : slot + 2].tolist()
        shape, counts = self.shape_of(slot), self.columns["box_count"][first:last]
        boxes = self.columns["box"][begin:end].reshape(last - first, 2, len(shape))
        if counts.max(initial=1) > 1:
            # A load asks for every key, and most keys of one shape have the same boxes.
            layout = shape, boxes.tobytes(), counts.tobytes()
            if layout not in self._boxes_of_layout:
                shapes = np.array([shape], np.int64).repeat(len(counts), axis=0)
                self._boxes_of_layout[layout] = in_grid(boxes, counts, shapes)
            boxes = self._boxes_of_layout[layout]
        return boxes[:, 0], boxes[:, 1]

    @functools.cached_property
    def _boxes_of_layout(self) -> dict[tuple[Any, ...], Column]:
        return {}

    @property
    def by_chunk(self) -> KeyColumns:
        """The same columns with a row of ``box`` for each chunk."""
        counts, ndim = np.diff(self.chunk_starts), self.columns["ndim"].astype(np.int64)
        starts = starts_of(2 * ndim * counts)
        box = np.empty(starts[-1], np.int64)
        for slots, _, boxes in self.by_ndim(np.arange(len(self.keys))):
            box[ranges(starts[slots], 2 * ndim[slots] * counts[slots])] = boxes.reshape(-1)
        rows = {"box_ends": self.chunk_starts[1:], "box_count": np.ones(counts.sum(), np.int32), "box": box}
        return replace(self, columns=self.columns | rows)

    def stretches(self) -> list[Column]:
        """Return all keys in stretches, each with about :data:`ROWS_IN_CACHE` chunks."""
        return in_cache(np.arange(len(self.keys)), np.diff(self.chunk_starts))

    def by_ndim(self, stretch: Column) -> Iterator[tuple[Column, Column, Column]]:
        """Yield the keys of a stretch in groups with equally many dimensions, fewest dimensions first.

        A group is three arrays: the numbers of its keys, the numbers of all their chunks, and the boxes of these
        chunks. The boxes have three axes: the chunk, offsets or sizes, and the dimension.
        """
        # The column ``box`` is flat, since boxes differ in width. With equally many dimensions they form a rectangle.
        for ndim in np.flatnonzero(np.bincount(self.columns["ndim"][stretch])).tolist():  # np.unique imports numpy.ma
            slots = stretch[self.columns["ndim"][stretch] == ndim]
            counts, rows = (ends[slots + 1] - ends[slots] for ends in (self.chunk_starts, self.row_starts))
            boxes = self.columns["box"][ranges(self.box_starts[slots], 2 * ndim * rows)].reshape(rows.sum(), 2, ndim)
            shapes = self.columns["shape"][self.shape_starts[slots][:, None] + np.arange(ndim)]
            box_counts = self.columns["box_count"][ranges(self.row_starts[slots], rows)]
            yield (
                slots,
                ranges(self.chunk_starts[slots], counts),
                in_grid(boxes, box_counts, shapes.repeat(rows, axis=0)),
            )


def default_path(key: str) -> KeyPath:
    first, dot, remainder = key.partition(".")
    return (first, remainder) if dot else (first,)


def unusual_paths(paths: Mapping[str, KeyPath]) -> dict[str, KeyPath]:
    """Return the paths that do not follow :func:`default_path`."""
    return {key: path for key, path in paths.items() if path != default_path(key)}


def dtype_named(name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointMismatch(f"the checkpoint has the dtype {name}, which this torch lacks: install a newer torch")
    return dtype


_DTYPE = re.compile(r"bool|(?:b?float|complex|q?u?int|bits)(\d{1,3})(?:x\d|_\w+)?|float8_\w+")


def itemsize_named(name: str) -> int:
    """Return the bytes of an element of a dtype, read from the bits in its name: an inspection imports no torch.

    Raises:
        ValueError: No dtype of torch has such a name.
    """
    match = _DTYPE.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ValueError(f"unknown dtype {name!r}: the index is damaged")
    return max(1, int(match[1] or 8) // 8)


@dataclass(frozen=True)
class Places:
    """Places of items: the columns of :class:`Location`.

    ``files`` are names, and ``file`` has the number of the file of each row's first item. A row of ``place`` is offset,
    length, payload's offset (-1 for None) and payload's length. ``hash`` has a hash for each block of each payload. It
    is empty if another tool wrote the items.
    """

    files: list[str]
    file: Column
    file_step: Column
    item_count: Column
    place: Column
    frame: Column
    hash: Column
    linkable: Collection[str] = ()
    """Files that later saves are meant to link. Such a file may have items that this checkpoint does not have."""

    @classmethod
    def of(cls, locations: Sequence[Location]) -> Places:
        files = {name: number for number, name in enumerate(dict.fromkeys(location.file for location in locations))}
        hashes = [np.empty(0, np.uint64) if location.hashes is None else location.hashes for location in locations]
        starts = [-1 if location.payload_offset is None else location.payload_offset for location in locations]
        place = [(w.offset, w.length, start, w.payload_length) for w, start in zip(locations, starts, strict=True)]
        return cls.of_items(
            list(files),
            np.array([files[location.file] for location in locations], np.int32),
            np.array(place, np.int64).reshape(-1, 4),
            np.array([location.frame for location in locations], np.uint32),
            np.concatenate([*hashes, np.empty(0, np.uint64)]),
        )

    @classmethod
    def of_items(
        cls,
        files: list[str],
        file: Column,
        place: Column,
        frame: Column,
        hashes: Column,
        linkable: Collection[str] = (),
    ) -> Places:
        """Return places with a row for each item."""
        no_step, one = np.zeros(len(file), np.int32), np.ones(len(file), np.int32)
        return cls(files, file, no_step, one, place, frame, hashes, linkable)

    @classmethod
    def without_hashes(cls, files: list[str], file: Column, place: Column) -> Places:
        """Return the places of items without hashes, as another tool writes them."""
        return cls.of_items(files, file, place, np.zeros(len(file), np.uint32), np.empty(0, np.uint64))

    def __reduce__(self) -> Any:
        # The form in which a rank sends its places to rank 0. On a mesh most ranks send the same rows. They differ in
        # the hashes, which compression would not make smaller. Differences of neighbours compress to a few bytes.
        items = self.by_item
        rows = np.vstack((items.file, items.frame, *items.place.T)).astype(np.int64)
        return _received, (self.files, zlib.compress(np.diff(rows, prepend=0).tobytes(), 1), self.hash, self.linkable)

    @classmethod
    def joined(cls, parts: Sequence[Places]) -> Places:
        """Return all parts, one after the other. No two parts have a file in common."""
        first_file = np.cumsum([0, *(len(part.files) for part in parts)], dtype=np.int32)
        return cls(
            [name for part in parts for name in part.files],
            # ``first_file`` has one number more than parts: the count of all files.
            np.concatenate([part.file + first for part, first in zip(parts, first_file, strict=False)]),
            # The other columns of the class. Their rows have no numbers of files, which a part counts from 0.
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in ITEM_COLUMNS[1:]},
            linkable={name for part in parts for name in part.linkable},
        )

    @classmethod
    def merged(cls, parts: Sequence[Places], order: Column) -> Places:
        """Return the items of all parts in an order, which has their numbers in the :meth:`joined` parts."""
        # Received parts with equal rows share them. The rows of all kinds of parts fit into the processor's cache, and
        # the items of 10^4 ranks, a hundred times as many, are looked up there, a stretch at a time.
        _unpacked.cache_clear()  # all parts are here, and the training needs the memory
        parts = [part.by_item for part in parts]
        kinds = {id(part.place): part for part in parts}
        first_of_kind = dict(zip(kinds, starts_of([len(kind.file) for kind in kinds.values()]).tolist(), strict=False))
        rows = cls.joined([replace(kind, files=[]) for kind in kinds.values()])
        sizes = np.array([(len(part.file), len(part.files), len(part.hash)) for part in parts], np.int64).reshape(-1, 3)
        first_item, first_file, first_hash = (starts_of(column)[:-1] for column in sizes.T)
        first_row = np.array([first_of_kind[id(part.place)] for part in parts], np.int64)
        owner = np.repeat(np.arange(len(parts), dtype=np.int32), sizes[:, 0])
        in_part = np.concatenate([kind.block_starts[:-1] for kind in kinds.values()])
        blocks, hashes = np.diff(rows.block_starts), np.concatenate([part.hash for part in parts])
        alike, has_blocks = np.column_stack((rows.place, rows.frame)), blocks > 0

        def look_up(items: Column) -> tuple[Column, Column, Column]:
            """Return the part, the row and the file of each item."""
            part = owner[items]
            row = items + (first_row - first_item)[part]
            return part, row, rows.file[row] + first_file[part]

        begins, of_items = [np.empty(0, np.int64)], [hashes[:0]]
        for start in range(0, len(order), ROWS_IN_CACHE):
            before = min(start, 2)  # an item continues a row if it is like the two before it
            part, row, file = look_up(order[start - before : start + ROWS_IN_CACHE])
            begins.append(start + np.flatnonzero(_begins(file, row, alike, has_blocks)[before:]))
            first = (first_hash[part] + in_part[row])[before:]
            of_items.append(hashes[ranges(first, blocks[row[before:]])])
        begin = np.concatenate(begins)
        count = np.diff(begin, append=len(order))
        (_, row, file), several = look_up(order[begin]), count > 1
        step = np.zeros(len(begin), np.int32)
        step[several] = look_up(order[begin[several] + 1])[2] - file[several]
        names, linkable = [name for part in parts for name in part.files], {n for part in parts for n in part.linkable}
        columns = file.astype(np.int32), step, count.astype(np.int32), rows.place[row], rows.frame[row]
        return cls(names, *columns, np.concatenate(of_items), linkable)

    def take(self, order: Column) -> Places:
        """Return the items with these numbers, in this order."""
        return Places.merged([self], order)

    @property
    def nbytes(self) -> int:
        """Bytes of the files, provided that they have no other items."""
        items, ends = self.by_item, np.zeros(len(self.files), np.int64)
        np.maximum.at(ends, items.file, items.place[:, 0] + items.place[:, 1])
        return int(padded(ends).sum())

    @functools.cached_property
    def starts(self) -> Column:
        """Number of the first item of each row, and the count of all items."""
        return starts_of(self.item_count)

    @functools.cached_property
    def block_starts(self) -> Column:
        """Position at which the hashes of each row begin, and the end of the last."""
        return starts_of(self._blocks * self.item_count)

    @functools.cached_property
    def _blocks(self) -> Column:
        """Number of hashes of an item of each row."""
        return block_counts(self.place[:, 3]) if len(self.hash) else np.zeros(len(self.place), np.int64)

    @property
    def by_item(self) -> Places:
        """The same places with a row for each item."""
        if self.starts[-1] == len(self.file):
            return self
        row, file = self.rows_of(np.arange(self.starts[-1]))
        return self.of_items(self.files, file, self.place[row], self.frame[row], self.hash, self.linkable)

    def rows_of(self, items: Column | Sequence[int]) -> tuple[Column, Column]:
        """Return the row and the file of each item."""
        items = np.asarray(items, np.int64)
        if self.starts[-1] == len(self.file):  # a row for each item: nothing to search for
            return items, self.file[items]
        row = self.starts.searchsorted(items, "right") - 1
        return row, (self.file[row] + self.file_step[row] * (items - self.starts[row])).astype(np.int32)

    def items_in(self, file: int) -> tuple[Column, Column]:
        """Return the items in a file, and their rows."""
        further = file - self.file
        number = further // np.maximum(self.file_step, 1)
        has = (further >= 0) & (number * self.file_step == further) & (number < self.item_count)
        rows = np.flatnonzero(has)
        return self.starts[rows] + number[rows], rows

    def hashes_of(self, items: Column) -> tuple[Column, Column]:
        """Return the position of each item's hashes, and their number."""
        row, _ = self.rows_of(items)
        return self.block_starts[row] + self._blocks[row] * (items - self.starts[row]), self._blocks[row]

    def location(self, number: int) -> Location:
        """Return the location of an item."""
        # Python's integers serve for one item: numpy's would take four times as long, and a load asks for each value.
        row = int(self.starts.searchsorted(number, "right")) - 1
        offset, length, start, payload_length = self.place[row].tolist()
        at, blocks = number - int(self.starts[row]), int(self._blocks[row])
        first = int(self.block_starts[row]) + at * blocks
        hashes = self.hash[first : first + blocks]
        # An item without blocks has no hashes. An empty payload of known layout is the exception: it lacks none.
        has_hashes = len(hashes) > 0 or (payload_length == 0 and start >= 0)
        return Location(
            self.files[int(self.file[row]) + at * int(self.file_step[row])],
            offset,
            length,
            start if start >= 0 else None,
            payload_length,
            int(self.frame[row]),
            hashes if has_hashes else None,
        )


def _received(files: list[str], packed: bytes, hashes: Column, linkable: Collection[str]) -> Places:
    return Places.of_items(files, *_unpacked(packed), hashes, linkable)


@functools.lru_cache(maxsize=64)
def _unpacked(packed: bytes) -> tuple[Column, Column, Column]:
    """Return the files, places and frames of the items that a rank has sent. Ranks that send the same share them."""
    file, frame, *place = np.cumsum(np.frombuffer(zlib.decompress(packed), np.int64).reshape(6, -1), axis=1)
    return file.astype(np.int32), np.stack(place, axis=1), frame.astype(np.uint32)


def _begins(file: Column, row: Column, alike: Column, has_blocks: Column) -> Column:
    """Return a mask of the items that begin a row: they have not the place and frame (``alike``, by row) of the item
    before them, or are not as many files behind it as that one is behind its predecessor.

    An item without blocks, such as an empty shard, also begins one. The hashes bound the items that a reader accepts.
    """
    step = np.diff(file)
    continues = (step > 0) & has_blocks[row[1:]]
    differs = np.flatnonzero((np.diff(row) != 0) & continues)
    continues[differs] = in_all(alike[row[differs + 1]] == alike[row[differs]])
    begins = np.concatenate(([True], ~continues))
    begins[2:] |= continues[:-1] & (step[1:] != step[:-1])
    return begins


def in_grid(boxes: Column, counts: Column, shapes: Column) -> Column:
    """Return all boxes of some rows of boxes.

    Args:
        boxes: The first box of each row. The axes are the row, offsets or sizes, and the dimension.
        counts: The number of boxes of each row.
        shapes: The shape of the tensor of each row.
    """
    if (counts == 1).all():
        return boxes
    of, starts = np.repeat(np.arange(len(counts)), counts), starts_of(counts)
    made = boxes[of]
    # Rows of one box are left as they are: another tool, or a damaged file, may have them in no grid.
    chosen = np.flatnonzero(counts[of] > 1)
    of = of[chosen]
    number = chosen - starts[of]
    for dim in reversed(range(boxes.shape[2])):
        offset, size = boxes[:, 0, dim], np.maximum(boxes[:, 1, dim], 1)
        cells, first = np.maximum((shapes[:, dim] - offset % size) // size, 1), offset // size
        if dim and (cells == 1).all():  # a division for each box takes most of the time
            continue
        number, at = np.divmod(number + first[of], cells[of]) if dim else (number, number + first[of])
        made[chosen, 0, dim] = (offset % size)[of] + at * size[of]
    return made


def grid_begins(key: Column, offsets: Column, sizes: Column, shapes: Column) -> Column:
    """Return the numbers of the boxes that begin a row, as :func:`in_grid` continues it. ``shapes`` are of the keys."""
    begins = [np.empty(0, np.int64)]
    for start in range(0, len(key), ROWS_IN_CACHE):
        before = min(start, 1)
        some = slice(start - before, start + ROWS_IN_CACHE)
        offset, size = offsets[some], sizes[some]
        shape = shapes[key[some]]
        after, carry = offset.copy(), np.full(len(offset), True)
        for dim in reversed(range(offset.shape[1])):
            has_more = offset[:, dim] + 2 * size[:, dim] <= shape[:, dim]
            further = np.where(has_more, size[:, dim], offset[:, dim] % np.maximum(size[:, dim], 1) - offset[:, dim])
            after[:, dim] += further * carry
            carry &= ~has_more
        continues = in_all(np.concatenate((offset[1:] == after[:-1], size[1:] == size[:-1]), axis=1))
        continues &= (np.diff(key[some]) == 0) & ~carry[:-1]
        begins.append(start + np.flatnonzero(np.concatenate(([True], ~continues))[before:]))
    row = np.concatenate(begins)
    # A tensor with more rows than half its boxes gets a row for each box. A reader finds such rows without a grid.
    rows, boxes = (np.bincount(of, minlength=len(shapes)) for of in (key[row], key))
    is_begin = (2 * rows > boxes)[key]
    is_begin[row] = True
    return np.flatnonzero(is_begin)


def numbered(rows: Column) -> tuple[Column, Column]:
    """Return the positions of the different rows, and for each row its number among these."""
    # A dict of the rows' bytes: sorting the rows, as np.unique does, takes three times as long.
    width = rows.itemsize * rows.shape[1]  # numpy has no type of no bytes, as rows of scalars are
    each = np.ascontiguousarray(rows).view(f"V{width}").ravel().tolist() if width else [b""] * len(rows)
    numbers = {row: at for at, row in enumerate(dict.fromkeys(each))}
    number = np.fromiter(map(numbers.__getitem__, each), np.int32, len(rows))
    return np.flatnonzero(np.diff(np.maximum.accumulate(number), prepend=-1)), number


def starts_of(counts: Any) -> Column:
    """Return the number of things before each group of so many, and the number of all."""
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


ROWS_IN_CACHE = 1 << 15
"""Rows processed at a time: a few columns of this many rows fit into the processor's cache.

Processing in such parts takes half the time of all rows at once, and no memory for intermediate results.
"""


def in_cache(slots: Column, counts: Column, rows: int = ROWS_IN_CACHE) -> list[Column]:
    """Cut slots with ``counts`` rows each into stretches of about so many rows."""
    # A cut wherever the running count of rows passes a multiple of ``rows``. A slot is never divided.
    cuts = np.flatnonzero(np.diff(np.cumsum(counts) // rows)) + 1
    return np.split(slots, cuts) if len(slots) else []


def product(rows: Column) -> Column:
    """Return the product of each row.

    This function and the next two make one pass per column. numpy's own ``prod(axis=1)`` goes from row to row, which
    takes ten times as long for rows as short as those of boxes.
    """
    return functools.reduce(np.multiply, rows.T, np.ones(len(rows), rows.dtype))


def in_all(rows: Column) -> Column:
    """Return whether all elements of each row are true."""
    return functools.reduce(np.logical_and, rows.T, np.full(len(rows), True))


def in_any(rows: Column) -> Column:
    """Return whether any element of each row is true."""
    return functools.reduce(np.logical_or, rows.T, np.full(len(rows), False))


def ranges(starts: Column, counts: Column) -> Column:
    """Return ``starts[0], starts[0] + 1, …`` (``counts[0]`` numbers), then those from ``starts[1]``, and so on."""
    # One arange over all results, shifted for each range by its start minus the count of numbers before it. An arange
    # for each range would be a Python loop over all keys.
    ends = np.cumsum(counts)
    return np.asarray(np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts))


def ragged(filled: Sequence[Column], widths: Column) -> Column:
    """Return the first ``widths[i]`` numbers of row ``i`` of each array in turn, for all ``i``, end to end.

    This makes the columns ``shape`` and ``box`` of rows that are padded to the largest number of dimensions.
    """
    rows = np.stack(filled, axis=1)
    if (widths == rows.shape[2]).all():
        return rows.reshape(-1)
    kept = np.arange(rows.shape[2]) < widths[:, None, None]
    return rows[np.broadcast_to(kept, rows.shape)]


def partitioned(starts: Column, sizes: Column, shape: Column, of: Column, count: int) -> Column:
    """Return for each of ``count`` tensors whether its boxes cover every element exactly once.

    Box ``i`` belongs to tensor ``of[i]``, and these numbers do not decrease. ``starts``, ``sizes`` and (per tensor)
    ``shape`` have one number per dimension. The boxes are inside the shape.

    No box is compared with another. Every coordinate of every dimension has a random number, and every element the
    product of the numbers of its coordinates. The sum over a box is then a product of differences of running sums.
    Boxes that cover every element once have the same total as the tensor. If an element is covered twice or not at all,
    the totals agree with a chance of about 2^-60. The author of a file cannot aim at this chance: the random numbers
    are drawn at each call.
    """
    seeds = np.frombuffer(os.urandom(8 * shape.shape[1]), np.uint64)
    over_boxes = np.ones(len(starts), np.uint64)
    over_tensor = np.ones(count, np.uint64)
    for dim, seed in enumerate(seeds):
        # mixed(c + seed) is the running sum up to coordinate c. Products and sums wrap at 2^64, alike on both sides.
        begins, ends = starts[:, dim].astype(np.uint64), (starts[:, dim] + sizes[:, dim]).astype(np.uint64)
        over_boxes *= mixed(ends + seed) - mixed(begins + seed)
        over_tensor *= mixed(shape[:, dim].astype(np.uint64) + seed) - mixed(np.full(count, seed))
    return totals(over_boxes, of, count) == over_tensor  # type: ignore[no-any-return]


def totals(values: Column, of: Column, count: int) -> Column:
    """Return the sum of the values of each of ``count`` keys. Value ``i`` is of key ``of[i]``; ``of`` is ascending."""
    # Since ``of`` is sorted, each sum is a difference of running sums. Sums may wrap: differences stay exact.
    running = np.concatenate((np.zeros(1, values.dtype), np.cumsum(values)))
    edges = np.searchsorted(of, np.arange(count + 1))
    return np.asarray(running[edges[1:]] - running[edges[:-1]])


def mixed(numbers: Column) -> Column:
    """Return a hash of each of some 64-bit numbers (the finalizer of splitmix64)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(numbers ^ (numbers >> np.uint64(31)))


def flat_start(offsets: Column, shapes: Column, of: Column) -> Column:
    """Return the row-major position of each box's first element in its tensor. Box ``i`` is of tensor ``of[i]``."""
    extents = np.maximum(shapes, 1)
    # The stride of a dimension is the product of the sizes behind it: a running product from the last dimension back.
    ones = np.ones((len(shapes), 1), np.int64)
    strides = np.cumprod(np.concatenate((extents[:, 1:], ones), axis=1)[:, ::-1], axis=1)[:, ::-1]
    start = np.zeros(len(offsets), np.int64)
    for dim in range(offsets.shape[1]):
        start += offsets[:, dim] * strides[of, dim]
    return start


def order_of(*columns: Column) -> Column:
    """Return the order that sorts rows by columns; the first column counts most."""
    # Numbers below 65536, as ranks mostly are, become 16-bit integers: numpy sorts these by radix, in linear time.
    small = (column.astype(np.uint16) if len(column) and column.max() < 1 << 16 else column for column in columns)
    return np.lexsort(tuple(small)[::-1])


def filled_rows(rows: Sequence[tuple[int, ...]], width: int, fill: int) -> Column:
    """Return tuples of up to ``width`` numbers as one array, padded with ``fill``."""
    # A mask selects the places that have a number, and one assignment fills them in order: no loop over the tuples.
    array = np.full((len(rows), width), fill, np.int64)
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    array[np.arange(width) < lengths[:, None]] = np.fromiter(itertools.chain.from_iterable(rows), np.int64)
    return array
