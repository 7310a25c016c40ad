"""The global plan: from what all ranks hold, which boxes the checkpoint has and which rank writes each.

One row stands for one chunk on one rank. Rows are sorted by key, position in the tensor and rank, so the ranks that
hold the same box are neighbours, and every later step is one pass of numpy over that order. The cost is the sort.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.format.columns import (
    NO_TENSOR,
    Column,
    KeyColumns,
    flat_start,
    in_all,
    in_cache,
    order_of,
    partitioned,
    product,
    ragged,
    ranges,
    totals,
)
from dcp_plugin.format.payload import MAX_PAYLOAD
from dcp_plugin.planning.load_balance import BoxParts, HeldBoxes, balance_load
from dcp_plugin.planning.local_inventory import Description, LocalInventory
from dcp_plugin.ranks import pack, unpack
from dcp_plugin.types import KeyPath


@dataclass(frozen=True)
class Share:
    """What one rank writes, in this order: which chunks of its inventory, and the boxes of those it writes in part."""

    chunk: Column
    part: Column
    """Positions in ``chunk``."""
    offsets: Column
    sizes: Column

    def encode(self) -> bytes:
        steps = np.diff(self.chunk.astype(np.int32), prepend=np.int32(0)).tobytes()  # mostly ones
        return pack((steps, self.part, self.offsets, self.sizes), level=6)

    @classmethod
    def decode(cls, data: bytes) -> Share:
        steps, part, offsets, sizes = unpack(data)
        return cls(np.cumsum(np.frombuffer(steps, np.int32)), part, offsets, sizes)

    def boxes(self, inventory: LocalInventory) -> tuple[Column, Column]:
        """Offsets and sizes of everything this rank writes."""
        offsets, sizes = inventory.offsets[self.chunk], inventory.description.sizes[self.chunk]
        width = offsets.shape[1]
        offsets[self.part], sizes[self.part] = self.offsets[:, :width], self.sizes[:, :width]
        return offsets, sizes


@dataclass(frozen=True)
class GlobalPlan:
    """The table of the checkpoint, and for each chunk in it the rank that writes it, from which of its own chunks."""

    table: KeyColumns
    rank: Column
    chunk: Column
    uncut: Column
    """Whether that chunk is written as one."""
    offsets: Column
    sizes: Column

    @functools.cached_property
    def order(self) -> Column:
        """The numbers of the table's chunks in the order of ranks and of their shares."""
        return order_of(self.rank, self.chunk)

    def shares(self, world_size: int) -> list[Share]:
        order = self.order
        shares = []
        for mine in np.split(order, np.searchsorted(self.rank[order], np.arange(1, world_size))):
            part = np.flatnonzero(~self.uncut[mine])
            shares.append(Share(self.chunk[mine], part, self.offsets[mine[part]], self.sizes[mine[part]]))
        return shares


def make_global_plan(inventories: Sequence[LocalInventory]) -> GlobalPlan:
    """Distribute what all ranks hold so that each box is written once.

    Raises:
        CheckpointMismatch: Ranks disagree on a shape or dtype, or together do not hold all of a tensor.
    """
    keys = _Keys(inventories)
    everything = _Rows.of(inventories, keys)
    everything.check(keys)
    may_write = everything.new | everything.any_rank  # without those that hold what only an earlier rank may write
    rows = everything.take(may_write, everything.new[may_write])
    ties = _common_ties(everything, rows)
    held = rows.held(keys)
    parts = _balance_without(held, np.isin(rows.key[held.first], list(ties)), len(inventories))
    parts = _with_ties(parts, rows, ties)
    row = held.first[parts.box] + parts.holder
    written = rows.take(row, rows.new)
    offsets = written.offsets + parts.offsets
    uncut = in_all(parts.sizes == written.sizes)
    table = keys.table(written.key, offsets, parts.sizes)
    return GlobalPlan(table, written.rank, written.chunk, uncut, offsets, parts.sizes)


class _Keys:
    """All keys, in the order of the first rank that has them, with the dtype and shape that all ranks agree on."""

    def __init__(self, inventories: Sequence[LocalInventory]) -> None:
        self.ranks: dict[bytes, list[int]] = {}
        """The ranks of each description, in the order of the first of them."""
        for rank, inventory in enumerate(inventories):
            self.ranks.setdefault(inventory.description.digest, []).append(rank)
        self._described = [inventories[ranks[0]].description for ranks in self.ranks.values()]
        self.numbers: dict[str, int] = {}
        self._dtypes: dict[object, int] = {}
        self._paths: dict[str, KeyPath] = {}
        self.width = max(one.shape.shape[1] for one in self._described)
        self.number_in = [self._add(one) for one in self._described]
        count = len(self.numbers)
        self.dtype, self.ndim = np.zeros(count, np.uint8), np.zeros(count, np.uint8)
        self.shape = np.ones((count, self.width), np.int64)
        stored_whole = np.zeros(count, bool)
        told = list(zip(reversed(self._described), reversed(self.number_in), strict=True))
        for one, numbers in told:
            stored_whole[numbers[one.stored_whole]] = True
            self._take(one, numbers, np.full(len(numbers), True))
        for one, numbers in told:  # a rank that has a part of a tensor decides
            self._take(one, numbers, _has_chunks(one))
        for one, numbers, ranks in zip(self._described, self.number_in, self.ranks.values(), strict=True):
            self._check(one, numbers, ranks[0])
        sizes = np.zeros(NO_TENSOR + 1, np.int64)
        sizes[: len(self._dtypes)] = [dtype.itemsize for dtype in self._dtypes]  # type: ignore[attr-defined]
        self.itemsize = np.where(stored_whole, 0, sizes[self.dtype])  # what has no bytes is not cut

    def _take(self, described: Description, numbers: Column, chosen: Column) -> None:
        """Take dtypes and shapes of some keys from a description."""
        numbers = numbers[chosen]
        self.dtype[numbers], self.ndim[numbers] = self._dtypes_of(described)[chosen], described.ndim[chosen]
        self.shape[numbers] = _widened(described.shape, self.width, 1)[chosen]

    def _add(self, described: Description) -> Column:
        for dtype in described.dtypes:
            self._dtypes.setdefault(dtype, len(self._dtypes))
        self._paths = {**described.paths, **self._paths}
        return np.array([self.numbers.setdefault(key, len(self.numbers)) for key in described.keys], np.int64)

    def _dtypes_of(self, described: Description) -> Column:
        renumbered = np.full(NO_TENSOR + 1, NO_TENSOR, np.uint8)
        renumbered[: len(described.dtypes)] = [self._dtypes[dtype] for dtype in described.dtypes]
        return renumbered[described.dtype]

    def _check(self, described: Description, numbers: Column, rank: int) -> None:
        differs = (self.dtype[numbers] != self._dtypes_of(described)) | (self.ndim[numbers] != described.ndim)
        differs |= (self.shape[numbers] != _widened(described.shape, self.width, 1)).any(axis=1)
        differs &= _has_chunks(described)
        if differs.any():
            at = int(np.argmax(differs))
            key, number = described.keys[at], int(numbers[at])
            if NO_TENSOR in (self.dtype[number], described.dtype[at]):
                raise CheckpointMismatch(f"{key} is a tensor on some ranks and another value on others")
            mine = tuple(described.shape[at, : described.ndim[at]].tolist())
            raise CheckpointMismatch(
                f"rank {rank} holds {key} as {mine} {described.dtypes[described.dtype[at]]}, another rank as "
                f"{self.shape_of(number)} {list(self._dtypes)[self.dtype[number]]}"
            )

    def shape_of(self, number: int) -> tuple[int, ...]:
        return tuple(self.shape[number, : self.ndim[number]].tolist())

    def table(self, key: Column, offsets: Column, sizes: Column) -> KeyColumns:
        """The table with these boxes, which are in the order of keys."""
        columns = {
            "dtype": self.dtype,
            "ndim": self.ndim,
            "shape": ragged([self.shape], self.ndim),
            "chunk_ends": np.cumsum(np.bincount(key, minlength=len(self.numbers))),
            "box": ragged([offsets, sizes], self.ndim[key]),
        }
        dtypes = [str(dtype).removeprefix("torch.") for dtype in self._dtypes]
        return KeyColumns(list(self.numbers), dtypes, self._paths, columns)


@dataclass(frozen=True)
class _Rows:
    """A row per chunk and rank, sorted; ``new`` marks the first of those that are the same box."""

    key: Column
    rank: Column
    chunk: Column
    offsets: Column
    sizes: Column
    any_rank: Column
    tie: Column
    new: Column

    @classmethod
    def of(cls, inventories: Sequence[LocalInventory], keys: _Keys) -> _Rows:
        columns: list[list[Column]] = []
        for ranks, numbers in zip(keys.ranks.values(), keys.number_in, strict=True):
            one = inventories[ranks[0]].description
            numbers = numbers.astype(np.int32)
            tie = np.append(numbers, np.int32(-1))[one.tie]
            described = (_widened(one.sizes, keys.width, 1), numbers[one.key], np.arange(len(one.key), dtype=np.int32))
            repeated = [np.repeat(column, len(ranks), axis=0) for column in (*described, one.any_rank[one.key])]
            repeated.append(np.repeat(tie[one.key], len(ranks)))
            # Chunk by chunk, as they are sorted in the end where all ranks hold the same keys in the same order.
            offsets = np.stack([_widened(inventories[rank].offsets, keys.width, 0) for rank in ranks], axis=1)
            of_rank = np.tile(np.array(ranks, np.int32), len(one.key))
            columns.append([of_rank, offsets.reshape(len(of_rank), keys.width), *repeated])
        joined = columns[0] if len(columns) == 1 else map(np.concatenate, zip(*columns, strict=True))
        rank, offsets, sizes, key, chunk, any_rank, tie = joined
        start = flat_start(offsets, keys.shape, key)
        rows = cls(key, rank, chunk, offsets, sizes, any_rank, tie, np.empty(0))
        if not _sorted(key, start, rank):
            order = order_of(key, start, rank)
            rows, start = rows.take(order, rows.new), start[order]
        new = (np.diff(rows.key, prepend=-1) != 0) | (np.diff(start, prepend=-1) != 0)
        return replace(rows, new=new)

    def take(self, rows: Column, new: Column) -> _Rows:
        """A selection of the rows, with other marks."""
        if rows.all() if rows.dtype == bool else _is_all(rows, len(self.key)):
            return replace(self, new=new)
        return replace(self, **{field.name: getattr(self, field.name)[rows] for field in fields(self)[:-1]}, new=new)

    def check(self, keys: _Keys) -> None:
        """Check that ranks hold all of every tensor, and no part of it twice in different boxes."""
        numbers = np.arange(len(keys.numbers))
        starts = np.searchsorted(self.key, numbers)
        ends = np.append(starts[1:], len(self.key))
        for some in in_cache(numbers, ends - starts):
            self._check(keys, slice(some[0], some[-1] + 1), slice(starts[some[0]], ends[some[-1]]))

    def _check(self, keys: _Keys, some: slice, rows: slice) -> None:
        """Check some keys, which have these rows."""
        count, shape = some.stop - some.start, keys.shape[some]
        key, new, sizes = self.key[rows] - some.start, self.new[rows], self.sizes[rows]
        first = np.flatnonzero(new)
        volumes = totals(product(sizes[first]), key[first], count)
        same = in_all(sizes == sizes[first][np.cumsum(new) - 1])
        wrong = np.bincount(key[~same], minlength=count) > 0
        wrong |= volumes != product(shape)
        wrong |= ~partitioned(self.offsets[rows][first], sizes[first], shape, key[first], count)
        wrong &= keys.dtype[some] != NO_TENSOR
        if wrong.any():
            at = int(np.argmax(wrong))
            number = some.start + at
            held, needed = volumes[at] * keys.itemsize[number], shape[at].prod() * keys.itemsize[number]
            raise CheckpointMismatch(
                f"the ranks hold {held} bytes of {list(keys.numbers)[number]}, {keys.shape_of(number)} needs {needed}: "
                f"a part is missing, or parts overlap. Is every rank of the mesh saving?"
            )

    def held(self, keys: _Keys) -> HeldBoxes:
        first = np.flatnonzero(self.new)
        count = np.diff(first, append=len(self.new))
        nothing_shared = len(first) == len(self.new)
        sizes, key = (self.sizes, self.key) if nothing_shared else (self.sizes[first], self.key[first])
        return HeldBoxes(sizes, keys.itemsize[key], first, count, self.rank)


def _common_ties(rows: _Rows, writers: _Rows) -> dict[int, int]:
    """Key -> the key that is the same memory, on every rank that has a part of either."""
    counts = np.stack([np.bincount(some.key) for some in (rows, writers)])
    tied = np.flatnonzero(rows.tie >= 0)
    ties: dict[int, int] = {}
    for key in np.unique(rows.key[tied]).tolist():
        firsts = rows.tie[slice(*np.searchsorted(rows.key, (key, key + 1)))]
        if (firsts == firsts[0]).all() and (counts[:, key] == counts[:, firsts[0]]).all():
            ties[key] = int(firsts[0])
    return ties


def _balance_without(held: HeldBoxes, skipped: Column, world_size: int) -> BoxParts:
    """Balance all boxes but some."""
    if not skipped.any():
        return balance_load(held, world_size, MAX_PAYLOAD)
    kept = np.flatnonzero(~skipped)
    count = held.count[kept]
    ranks = held.ranks[ranges(held.first[kept], count)]
    fewer = HeldBoxes(held.sizes[kept], held.itemsize[kept], np.cumsum(count) - count, count, ranks)
    parts = balance_load(fewer, world_size, MAX_PAYLOAD)
    return BoxParts(kept[parts.box], parts.holder, parts.offsets, parts.sizes)


def _with_ties(parts: BoxParts, rows: _Rows, ties: dict[int, int]) -> BoxParts:
    """Cut a tied key like the other one, for the same ranks, so that the writer finds both and writes one."""
    if not ties:
        return parts
    key_of_box = rows.key[rows.new]
    copies = []
    for key, first in ties.items():
        mine = slice(*np.searchsorted(key_of_box[parts.box], (first, first + 1)))
        shift = np.searchsorted(key_of_box, key) - np.searchsorted(key_of_box, first)
        copies.append(BoxParts(parts.box[mine] + shift, parts.holder[mine], parts.offsets[mine], parts.sizes[mine]))
    return BoxParts.joined(parts, *copies)


def _is_all(rows: Column, count: int) -> bool:
    """Whether these are the numbers of all rows, in their order."""
    return len(rows) == count and bool((np.diff(rows, prepend=-1) == 1).all())


def _sorted(*columns: Column) -> bool:
    """Whether rows are in the order of the columns, the first of which counts most."""
    rising = np.ones(max(len(columns[0]) - 1, 0), bool)
    for column in reversed(columns):
        step = np.diff(column)
        rising = (step > 0) | ((step == 0) & rising)
    return bool(rising.all())


def _has_chunks(described: Description) -> Column:
    """For each key, whether a rank has a part of it. Without one, a LocalShardsWrapper does not know shape and
    dtype."""
    return np.bincount(described.key, minlength=len(described.keys)) > 0


def _widened(rows: Column, width: int, fill: int) -> Column:
    """The rows with further columns of one value, up to ``width``."""
    if rows.shape[1] == width:
        return rows
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=fill)
