"""The global plan: the boxes of the checkpoint, made from the inventories of all ranks, and the writer of each box.

Ranks may hold different entries under a key. The rule: the entries with the best
:class:`~dcp_plugin.core.types.Standing` count, and no rank writes the others. For example, a value counts where other
ranks have None. The keys below a mapping count where the mapping is empty on other ranks.

A row stands for one chunk on one rank. Rows are sorted by key, position in the tensor and rank. Rows for the same box
are therefore neighbours, and every later step is one pass of numpy over that order.

Most keys of a mesh have the same boxes on the same ranks. Only the first of such keys has rows. The plan of the others
differs from its plan in the chunks' numbers, and in the writers of boxes that several ranks may write.
"""

from __future__ import annotations

import bisect
import functools
import pickle
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from dcp_plugin.core.errors import CheckpointMismatch
from dcp_plugin.core.format.columns import (
    NO_TENSOR,
    Column,
    KeyColumns,
    KeyPath,
    flat_start,
    grid_begins,
    in_all,
    in_any,
    numbered,
    order_of,
    partitioned,
    product,
    ragged,
    ranges,
    starts_of,
    totals,
)
from dcp_plugin.core.format.payload import MAX_PAYLOAD
from dcp_plugin.core.planning.local_inventory import Description, LocalInventory
from dcp_plugin.core.ranks.collectives import pack, unpack
from dcp_plugin.core.types import Standing


@dataclass(frozen=True)
class Share:
    """One rank's share of the writing.

    ``chunk`` has the numbers of chunks in the rank's inventory, in the order of writing. ``part``, ``offsets`` and
    ``sizes`` are about the chunks that the rank writes in part.
    """

    chunk: Column
    part: Column
    """Positions in ``chunk``."""
    offsets: Column
    sizes: Column
    replica: Column
    """Chunks of the inventory that other ranks hold as well."""
    weight: Column
    """Factor of each of these chunks (:func:`~dcp_plugin.core.planning.replicas.weights_of`)."""

    def encode(self) -> bytes:
        # A rank mostly writes consecutive chunks, so the differences are mostly 1 and compress to almost nothing. The
        # ranks of a mesh mostly get the same share, which is compressed once.
        columns = self.part, self.offsets, self.sizes, self.weight
        return _packed(_steps(self.chunk), _steps(self.replica), pickle.dumps(columns))

    @classmethod
    def decode(cls, data: bytes) -> Share:
        steps, replica, columns = unpack(data)
        part, offsets, sizes, weight = pickle.loads(columns)
        return cls(_from_steps(steps), part, offsets, sizes, _from_steps(replica), weight)

    def boxes(self, inventory: LocalInventory) -> tuple[Column, Column]:
        """Return the offsets and sizes of all boxes that this rank writes."""
        offsets, sizes = inventory.offsets[self.chunk], inventory.description.sizes[self.chunk]
        width = offsets.shape[1]
        offsets[self.part], sizes[self.part] = self.offsets[:, :width], self.sizes[:, :width]
        return offsets, sizes


@dataclass(frozen=True)
class GlobalPlan:
    """The table of the checkpoint, and the writer of each chunk.

    ``rank`` and ``chunk`` have a row per chunk of the table: its writer, and the number of its source in the writer's
    inventory. ``offsets`` and ``sizes`` are the boxes of the chunks ``cut``, whose sources are written in part.
    """

    table: KeyColumns
    rank: Column
    chunk: Column
    cut: Column
    offsets: Column
    sizes: Column
    empty: list[str]
    """Keys of empty mappings."""
    objects: dict[str, tuple[str, str]]
    """Name -> kind (module or optimizer), and the classes of an optimizer on all ranks, separated by ``", "``."""
    replicas: Sequence[tuple[Column, Column]]
    """:attr:`Share.replica` and :attr:`Share.weight` of each rank."""

    @functools.cached_property
    def order(self) -> Column:
        """The numbers of the table's chunks, sorted by writer and by number of the source chunk."""
        return order_of(self.rank, self.chunk)

    def shares(self, world_size: int) -> list[Share]:
        starts = starts_of(np.bincount(self.rank, minlength=world_size))[:-1]
        is_cut = np.zeros(len(self.rank), bool)
        is_cut[self.cut] = True
        at = np.flatnonzero(is_cut[self.order])
        parts, bounds = np.searchsorted(self.cut, self.order[at]), np.searchsorted(at, starts[1:])
        of_parts = (np.split(column, bounds) for column in (at, self.offsets[parts], self.sizes[parts]))
        columns = np.split(self.chunk[self.order], starts[1:]), starts, *of_parts, self.replicas
        return [
            Share(chunk, part - start, offsets, sizes, *replicas)
            for chunk, start, part, offsets, sizes, replicas in zip(*columns, strict=True)
        ]


def make_global_plan(inventories: Sequence[LocalInventory]) -> GlobalPlan:
    """Assign every box to one of the ranks that hold it.

    Raises:
        CheckpointMismatch: Ranks disagree on a shape or dtype, or the chunks of all ranks do not make up a tensor.
    """
    keys = _Keys(inventories)
    rows, chunks = _Rows.of(keys)
    rows.check(keys)
    # Any holder may write a box that is marked any_rank. For other boxes, the first holder writes.
    writers = rows.take(rows.new | rows.any_rank)
    boxes, holders, counts = writers.take(writers.new), _lengths(rows.new), _lengths(writers.new)
    # A box is shared if several ranks may write it, or if it is too large for one item.
    is_shared = (counts > 1) | (product(boxes.sizes) * keys.itemsize[boxes.key] > MAX_PAYLOAD)
    world_size, (at, key) = len(inventories), keys.spread(boxes.key)
    rank, chunk = boxes.rank[at], boxes.chunk[at]
    cut, offsets, sizes = np.empty(0, np.int64), boxes.offsets[:0], boxes.sizes[:0]
    if is_shared.any():
        from dcp_plugin.core.planning.load_balance import HeldBoxes, assign  # needed if a box has several writers

        of_all = is_shared[at]
        shared, alone, ties = np.flatnonzero(of_all), np.flatnonzero(~of_all), keys.ties(rows, writers)
        held = writers.take(np.repeat(is_shared, counts))
        # The rows of a box follow each other, and so do its possible writers: it needs only its first row and a count.
        box, first = (np.cumsum(is_shared) - 1)[at[shared]], np.flatnonzero(held.new)
        count, itemsize, first = _lengths(held.new)[box], keys.itemsize[key], first[box]
        to_share = HeldBoxes(boxes.sizes[at[shared]], itemsize[shared], first, count, held.rank)
        loaded = alone[~np.isin(key[alone], list(ties))]
        loads = np.bincount(rank[loaded], product(boxes.sizes)[at[loaded]] * itemsize[loaded], world_size)
        parts = assign(to_share, key[shared], ties, loads.astype(np.int64), MAX_PAYLOAD)
        written = first[parts.box] + parts.holder
        source = np.concatenate((alone, shared[parts.box]))
        order = np.argsort(source, kind="stable")
        at, key, rank, chunk = (
            column[order]
            for column in (
                at[source],
                key[source],
                np.concatenate((rank[alone], held.rank[written])),
                np.concatenate((chunk[alone], held.chunk[written])),
            )
        )
        cut = np.flatnonzero(
            np.append(np.zeros(len(alone), bool), in_any(parts.sizes != to_share.sizes[parts.box]))[order]
        )
        part = order[cut] - len(alone)
        offsets, sizes = boxes.offsets[at[cut]] + parts.offsets[part], parts.sizes[part]
    replicas = [(np.empty(0, np.int32), np.empty(0, np.uint64))] * world_size
    if (holders > 1).any():
        from dcp_plugin.core.planning.replicas import weights_of

        of_several = rows.take(np.repeat(holders > 1, holders))
        row, of = keys.spread(of_several.key)
        number = chunks[of_several.chunk[row] + keys.ordinal[of]]
        replicas = weights_of(of_several.rank[row], number, of_several.new[row], of_several.is_replica[row], world_size)
    table, chunk = keys.table(boxes, at, key, cut, offsets, sizes), chunks[chunk + keys.ordinal[key]]
    return GlobalPlan(table, rank, chunk, cut, offsets, sizes, keys.empty, keys.objects, replicas)


def _lengths(new: Column) -> Column:
    """Return the number of rows of each box, whose first row is marked."""
    return np.diff(np.flatnonzero(new), append=len(new))


class _Keys:
    """All keys, in the order of the first rank that has them, with the dtype and shape that all ranks agree on."""

    def __init__(self, inventories: Sequence[LocalInventory]) -> None:
        self.ranks: dict[bytes, list[int]] = {}
        """Ranks by digest of their description; digests in the order of their lowest rank."""
        for rank, inventory in enumerate(inventories):
            self.ranks.setdefault(inventory.description.digest, []).append(rank)
        self.described = [inventories[ranks[0]].description for ranks in self.ranks.values()]
        self.numbers: dict[str, int] = {}
        self._dtypes: dict[object, int] = {}
        self._paths: dict[str, KeyPath] = {}
        self.width = max(description.shape.shape[1] for description in self.described)
        self.number_in = [self._add(description) for description in self.described]
        count = len(self.numbers)
        self.standing = self._best_standing(count)
        self.dtype, self.ndim = np.zeros(count, np.uint8), np.zeros(count, np.uint8)
        self.shape = np.ones((count, self.width), np.int64)
        stored_whole = np.zeros(count, bool)
        # In reverse: the lowest rank is the last to set a dtype and a shape, so that it decides.
        reversed_descriptions = list(zip(reversed(self.described), reversed(self.number_in), strict=True))
        for description, numbers in reversed_descriptions:
            stored_whole[numbers[description.stored_whole]] = True
            self._take(description, numbers, np.full(len(numbers), True))
        # A rank that has a part of a tensor overrides ranks without one, whose shape and dtype may be placeholders.
        for description, numbers in reversed_descriptions:
            self._take(description, numbers, self._counts(description, numbers))
        for description, numbers, ranks in zip(self.described, self.number_in, self.ranks.values(), strict=True):
            self._check(description, numbers, ranks[0])
        sizes = np.zeros(NO_TENSOR + 1, np.int64)
        sizes[: len(self._dtypes)] = [dtype.itemsize for dtype in self._dtypes]  # type: ignore[attr-defined]
        self.itemsize = np.where(stored_whole, 0, sizes[self.dtype])  # with size 0, balance_load never cuts the box
        self.empty = [key for key, number in self.numbers.items() if self.standing[number] == Standing.EMPTY_MAPPING]
        self.objects = self._objects()
        self.of_ranks = [[inventories[rank] for rank in ranks] for ranks in self.ranks.values()]
        """The inventories of the ranks of each description."""
        # On one rank, rows for all keys cost less than the comparison.
        self.like = self._first_alike() if len(inventories) > 1 else np.arange(count)
        """For each key, the first key with the same boxes on the same ranks."""
        self.is_first = self.like == np.arange(count)
        order, self.ordinal = np.argsort(self.like, kind="stable"), np.empty(count, np.int32)
        self.ordinal[order] = np.arange(count) - np.searchsorted(self.like[order], self.like[order])

    def _first_alike(self) -> Column:
        """Return for each key the first key that all ranks hold in the same boxes.

        A key with several chunks on a rank, and a tied key, has no other such key.
        """
        # Keys of one kind are alike in all that has been compared. Each pass divides the kinds of a description's keys
        # further, and those of other keys stay, since these have no rows on its ranks.
        _, kind = numbered(np.column_stack((self.shape, self.ndim, self.itemsize, self.dtype == NO_TENSOR)))
        alike, last, kind = np.bincount(kind)[kind], len(kind), kind.astype(np.int64)
        for description, numbers, inventories in zip(self.described, self.number_in, self.of_ranks, strict=True):
            chunks = np.bincount(description.key, minlength=len(numbers))
            # A key that is alone of its kind needs no further comparison.
            some = np.flatnonzero((alike[numbers] > 1) & (chunks > 0) & self.rows_of(description, numbers))
            if not len(some):
                continue
            chunk, alone = np.searchsorted(description.key, some), (chunks[some] > 1) | (description.tie[some] >= 0)
            of_key = np.where(alone, some, -1), description.any_rank[some], description.is_replica[some]
            steps = {inventory.like.tobytes(): inventory.like[chunk] for inventory in inventories}.values()
            _, number = numbered(np.column_stack((kind[numbers[some]], *of_key, description.sizes[chunk], *steps)))
            kind[numbers[some]], last = last + number, last + len(some)
            alike[numbers[some]] = np.bincount(number)[number]
        first, number = numbered(kind[:, None])
        return np.asarray(first[number])

    def spread(self, of: Column) -> tuple[Column, Column]:
        """Return the rows of all keys, each with its key. The rows of keys alike are those of their first.

        Args:
            of: The key of each row, ascending.
        """
        counts = np.bincount(of, minlength=len(self.like))
        starts, counts = starts_of(counts)[self.like], counts[self.like]
        return ranges(starts, counts), np.repeat(np.arange(len(counts), dtype=np.int32), counts)

    def ties(self, rows: _Rows, writers: _Rows) -> dict[int, int]:
        """Return a dict from each tied key to the first key with the same memory.

        A pair counts only if both keys are tied on every rank that has a part of either.

        Args:
            writers: Those of the rows whose ranks may write.
        """
        # Equal counts of rows, of all rows and of possible writers, show that no rank has a part of one key alone.
        counts = [np.bincount(some.key, minlength=len(self.like))[self.like] for some in (rows, writers)]
        ties = {}
        for key in np.unique(rows.key[rows.tie >= 0]).tolist():
            first, *others = set(rows.tie[slice(*np.searchsorted(rows.key, (key, key + 1)))].tolist())
            if not others and all(count[key] == count[first] for count in counts):
                ties[key] = first
        return ties

    def _best_standing(self, count: int) -> Column:
        """Return for each key the standing of the entries that count.

        It is :data:`_HIDDEN` for an empty entry if other ranks have keys below it.
        """
        standing = np.full(count, _HIDDEN, np.uint8)
        for description, numbers in zip(self.described, self.number_in, strict=True):
            of_parts = np.where(_has_chunks(description), description.standing, _PARTLESS)
            standing[numbers] = np.minimum(standing[numbers], of_parts)
        standing[standing == _PARTLESS] = Standing.HOLDS  # a misfit, which the check of boxes reports
        if len(self.described) > 1:  # on one rank, no key is below another
            held_by = sum(np.bincount(numbers, minlength=count) for numbers in self.number_in)
            doubtful = (standing >= Standing.EMPTY) & (held_by < len(self.described))
            keys = [key for key, number in self.numbers.items() if doubtful[number]]
            per_rank = {name for description in self.described for name in description.per_rank}
            standing[[self.numbers[key] for key in above_others(keys, self.numbers, per_rank)]] = _HIDDEN
        return standing

    def _counts(self, described: Description, numbers: Column) -> Column:
        """Return a mask of the keys of which a rank has a part that counts."""
        return _has_chunks(described) & self.rows_of(described, numbers)

    def rows_of(self, described: Description, numbers: Column) -> Column:
        """Return a mask of the keys whose entry on a rank counts."""
        return np.asarray(described.standing == self.standing[numbers])

    def _objects(self) -> dict[str, tuple[str, str]]:
        objects: dict[str, tuple[str, list[str]]] = {}
        for description in self.described:
            for name, (kind, kind_of_optimizer) in description.objects.items():
                classes = objects.setdefault(name, (kind, []))[1]
                if kind_of_optimizer and kind_of_optimizer not in classes:
                    classes.append(kind_of_optimizer)
        return {name: (kind, ", ".join(classes)) for name, (kind, classes) in objects.items()}

    def _take(self, described: Description, numbers: Column, chosen: Column) -> None:
        """Copy the dtypes and shapes of the chosen keys from a description."""
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
        differs &= self._counts(described, numbers)
        if differs.any():
            at = int(np.argmax(differs))
            key, number = described.keys[at], int(numbers[at])
            if NO_TENSOR in (self.dtype[number], described.dtype[at]):
                raise CheckpointMismatch(f"{key} is a tensor on some ranks and another value on others")
            shape_here = tuple(described.shape[at, : described.ndim[at]].tolist())
            raise CheckpointMismatch(
                f"rank {rank} holds {key} as {shape_here} {described.dtypes[described.dtype[at]]}, another rank as "
                f"{self.shape_of(number)} {list(self._dtypes)[self.dtype[number]]}"
            )

    def shape_of(self, number: int) -> tuple[int, ...]:
        return tuple(self.shape[number, : self.ndim[number]].tolist())

    def table(self, boxes: _Rows, box: Column, key: Column, cut: Column, offsets: Column, sizes: Column) -> KeyColumns:
        """Return the table of the checkpoint.

        Args:
            boxes: The boxes of the keys that are the first alike.
            box: The number of the box of each chunk.
            key: The key of each chunk, ascending.
            cut: The chunks with other ``offsets`` and ``sizes`` than their box.
        """
        keys, paths, stored = list(self.numbers), self._paths, self.standing < _HIDDEN
        if not stored.all():
            keys = [key for key, number in self.numbers.items() if stored[number]]
            paths = {key: path for key, path in paths.items() if stored[self.numbers[key]]}
        # A key with parts of boxes has boxes of its own, which follow those of all others.
        is_cut = np.zeros(len(self.like), bool)
        is_cut[key[cut]] = True
        own = np.flatnonzero(is_cut[key])
        of = np.where(is_cut, len(is_cut) - 1 + np.cumsum(is_cut), self.like)
        number = np.concatenate((boxes.key, of[key[own]]))
        offset, size = (np.concatenate((column, column[box[own]])) for column in (boxes.offsets, boxes.sizes))
        at = len(boxes.key) + np.searchsorted(own, cut)
        offset[at], size[at] = offsets, sizes
        row = grid_begins(number, offset, size, np.concatenate((self.shape, self.shape[is_cut])))
        counts = np.bincount(number[row], minlength=len(is_cut) + int(is_cut.sum()))
        of = of[stored]
        rows = ranges(starts_of(counts)[of], counts[of])
        columns = {
            "dtype": self.dtype[stored],
            "ndim": self.ndim[stored],
            "shape": ragged([self.shape[stored]], self.ndim[stored]),
            "box_ends": np.cumsum(counts[of]),
            "box_count": np.diff(row, append=len(number)).astype(np.int32)[rows],
            "box": ragged([offset[row[rows]], size[row[rows]]], np.repeat(self.ndim[stored], counts[of])),
        }
        dtypes = [str(dtype).removeprefix("torch.") for dtype in self._dtypes]
        return KeyColumns(keys, dtypes, paths, columns)


@dataclass(frozen=True)
class _Rows:
    """Sorted rows, one per chunk and rank; ``new`` marks the first row of each box.

    ``chunk`` is a position in the second result of :meth:`of`.
    """

    key: Column
    rank: Column
    chunk: Column
    offsets: Column
    sizes: Column
    any_rank: Column
    is_replica: Column
    tie: Column
    new: Column

    @classmethod
    def of(cls, keys: _Keys) -> tuple[_Rows, Column]:
        """Return the rows of the keys that are the first alike, and numbers of chunks.

        The number at a row's ``chunk`` is that of its chunk in the inventory of its rank. Behind it are the numbers for
        the other keys alike, in the order of keys.
        """
        columns: list[list[Column]] = []
        chunks, count = [np.empty(0, np.int32)], 0
        of_descriptions = zip(keys.ranks.values(), keys.described, keys.number_in, keys.of_ranks, strict=True)
        for ranks, description, numbers, inventories in of_descriptions:
            chunk = np.flatnonzero(keys.rows_of(description, numbers)[description.key]).astype(np.int32)
            key = numbers[description.key[chunk]].astype(np.int32)
            order = np.lexsort((key, keys.like[key]))
            chunks.append(chunk[order])
            at = np.flatnonzero(keys.is_first[key[order]])
            key, chunk, position = key[order[at]], chunk[order[at]], (count + at).astype(np.int32)
            # A tie of -1 (no tie) selects the -1 that is appended at the end.
            tie = np.append(numbers.astype(np.int32), np.int32(-1))[description.tie]
            of_key = (column[description.key[chunk]] for column in (description.any_rank, description.is_replica, tie))
            described = (_widened(description.sizes, keys.width, 1)[chunk], key, position, *of_key)
            repeated = [np.repeat(column, len(ranks), axis=0) for column in described]
            of_ranks = [_widened(inventory.offsets_of(chunk), keys.width, 0) for inventory in inventories]
            # Chunk by chunk, as the repeated columns.
            offsets = np.stack(of_ranks, axis=1).reshape(len(ranks) * len(chunk), keys.width)
            columns.append([np.tile(np.array(ranks, np.int32), len(chunk)), offsets, *repeated])
            count += len(order)
        rank, offsets, sizes, key, position, any_rank, is_replica, tie = map(np.concatenate, zip(*columns, strict=True))
        start = flat_start(offsets, keys.shape, key)
        order = order_of(key, start, rank)
        new = (np.diff(np.stack((key, start))[:, order], prepend=-1) != 0).any(axis=0)
        of_rows = (key, rank, position, offsets, sizes, any_rank, is_replica, tie)
        return cls(*[*(column[order] for column in of_rows), new]), np.concatenate(chunks)

    def take(self, rows: Column) -> _Rows:
        """Return the selected rows."""
        if rows.dtype == bool:
            if rows.all():  # no column is copied
                return self
            rows = np.flatnonzero(rows)
        return _Rows(*(getattr(self, field.name)[rows] for field in fields(self)))

    def check(self, keys: _Keys) -> None:
        """Check that the ranks' boxes cover every tensor, and that different boxes do not overlap."""
        count, first = len(keys.like), np.flatnonzero(self.new)
        key, sizes = self.key[first], self.sizes[first]
        volumes = totals(product(sizes), key, count)
        same = in_all(self.sizes == sizes[np.cumsum(self.new) - 1])  # as in the first row of the same box
        wrong = np.bincount(self.key[~same], minlength=count) > 0
        wrong |= volumes != product(keys.shape)
        # Volumes alone would accept a hole that an overlap makes up for.
        wrong |= ~partitioned(self.offsets[first], sizes, keys.shape, key, count)
        wrong &= (keys.dtype != NO_TENSOR) & keys.is_first
        if wrong.any():
            number = int(np.argmax(wrong))
            held, needed = (volume * keys.itemsize[number] for volume in (volumes[number], keys.shape[number].prod()))
            raise CheckpointMismatch(
                f"the ranks hold {held} bytes of {list(keys.numbers)[number]}, but its shape {keys.shape_of(number)} "
                f"needs {needed}: a part is missing, or parts overlap. Is every rank of the mesh saving?"
            )


_HIDDEN, _PARTLESS = 255, 254
"""Marks in place of a standing: no rank writes anything under the key; no rank has a part of the tensor."""


def _has_chunks(described: Description) -> Column:
    """Return a mask of the keys of which the rank has a part.

    The shape and dtype of other keys may be placeholders, as those of a LocalShardsWrapper without shards.
    """
    return np.bincount(described.key, minlength=len(described.keys)) > 0


def above_others(keys: Collection[str], others: Iterable[str], per_rank: Collection[str]) -> list[str]:
    """Return those of ``keys`` that have ``others`` below them.

    Below a name of ``per_rank``, each rank has an entry under its number. These entries do not count.
    """
    ordered = sorted(others) if keys else []
    return [key for key in keys if _has_below(f"{key}.", ordered, key in per_rank)]


def _has_below(front: str, ordered: list[str], is_per_rank: bool) -> bool:
    # All keys with a common start are neighbours in sorted order.
    at = bisect.bisect(ordered, front)
    while at < len(ordered) and ordered[at].startswith(front):
        if not (is_per_rank and ordered[at].removeprefix(front).partition(".")[0].isdecimal()):
            return True
        at += 1
    return False


@functools.lru_cache(maxsize=64)
def _packed(*pieces: bytes) -> bytes:
    return pack(pieces, level=6)


def _steps(numbers: Column) -> bytes:
    return np.diff(numbers.astype(np.int32), prepend=np.int32(0)).tobytes()


def _from_steps(steps: bytes) -> Column:
    return np.cumsum(np.frombuffer(steps, np.int32))


def _widened(rows: Column, width: int, fill: int) -> Column:
    """Return the rows padded with ``fill`` to ``width`` columns."""
    if rows.shape[1] == width:
        return rows
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=fill)
