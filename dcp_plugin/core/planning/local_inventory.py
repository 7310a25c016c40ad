"""The chunks that one rank holds, in columns.

The rule: nothing here depends on meshes or placements. Under FSDP, TP or HSDP thousands of ranks hold the same keys,
with chunks of the same sizes at different offsets. One rank of these sends the common :class:`Description`, and each
rank sends its offsets, counted in chunks. On a regular mesh these are many equal numbers, which compress to a few
bytes. A rank with an irregular layout sends a description of its own.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from dcp_plugin.core.format.columns import NO_TENSOR, Column, KeyPath, filled_rows, numbered, unusual_paths
from dcp_plugin.core.format.keys import as_stored
from dcp_plugin.core.ranks.collectives import pack, unpack
from dcp_plugin.core.tensors.kinds import EXACTLY_TENSORS, memory_of
from dcp_plugin.core.types import EncodedValue, Flat, LocalChunk, ShardedValue, Standing

OfKey = tuple[torch.dtype | None, tuple[int, ...], bool, bool, Sequence[Sequence[Any]]]
"""A rank's entry under a key, a tuple because a state has thousands of entries. Its elements: the dtype (None for a
value that is no tensor), the shape, ``any_rank`` (every holder may write it), ``stored_whole`` (its chunks must not be
cut), and the chunks. A chunk starts with offsets and sizes."""

VALUE: OfKey = (None, (), False, False, (((), ()),))


@dataclass(frozen=True)
class Holdings:
    """Properties of a rank's keys that matter where ranks hold different things."""

    objects: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    per_rank: Collection[str] = ()
    standing: Mapping[str, Standing] = field(default_factory=dict)
    """Key -> the standing of this rank's value, for values that the rank has only because a load gave them to it."""
    replicas: Collection[str] = ()
    """Keys whose bytes should be equal on all ranks that hold them: parameters, and the state of optimizers."""
    have_drifted: bool = False
    """True if replicas have differed. The lowest rank that holds a box then writes all of it.

    Otherwise the holders of a box divide it, and the checkpoint would mix the weights and moments of different ranks.
    """


@dataclass(frozen=True, eq=False)
class Description:
    """A rank's inventory without the offsets.

    Columns with a row per key:

    - ``dtype``, ``ndim``, ``shape`` (padded with 1), ``any_rank``, ``stored_whole``
    - ``tie``: the number of an earlier key with the same memory, or -1
    - ``standing``: the :class:`~dcp_plugin.core.types.Standing`
    - ``is_replica``: true if ranks with the same chunk should hold the same bytes

    Columns with a row per chunk: ``key`` (the key's number) and ``sizes``.
    """

    keys: list[str]
    paths: dict[str, KeyPath]
    dtypes: list[torch.dtype]
    objects: dict[str, tuple[str, str]]
    """Name -> kind of the module or optimizer, and class of the optimizer."""
    per_rank: list[str]
    """Names below which each rank has its own value, under its number."""
    dtype: Column
    ndim: Column
    shape: Column
    any_rank: Column
    stored_whole: Column
    tie: Column
    standing: Column
    is_replica: Column
    key: Column
    sizes: Column

    @functools.cached_property
    def digest(self) -> bytes:
        names = [self.keys, self.paths, list(map(str, self.dtypes)), self.objects, self.per_rank]
        digest = hashlib.blake2b(json.dumps(names).encode(), digest_size=16)
        for column in (getattr(self, of.name) for of in fields(self)[5:]):  # the fields from ``dtype`` on are columns
            digest.update(str(column.shape).encode() + column.tobytes())
        return digest.digest()


@dataclass(frozen=True, eq=False)
class LocalInventory:
    """The chunks that one rank holds: a description, and the offsets of every chunk.

    Offsets are multiples of the chunk's sizes, and remainders. On a mesh most chunks of a rank have the same ones. A
    row of ``steps`` has multiples, and behind them the remainders. ``like`` has the number of each chunk's row.
    """

    description: Description
    like: Column
    steps: Column

    @functools.cached_property
    def offsets(self) -> Column:
        return self.offsets_of(np.arange(len(self.like)))

    def offsets_of(self, chunks: Column) -> Column:
        """Return the offsets of some chunks."""
        times, remainders = np.split(self.steps[self.like[chunks]], 2, axis=1)
        return np.asarray(times * np.maximum(self.description.sizes[chunks], 1) + remainders)

    @functools.cached_property
    def digest(self) -> bytes:
        columns = self.like.tobytes() + self.steps.tobytes()
        return hashlib.blake2b(self.description.digest + columns, digest_size=16).digest()

    def pack_offsets(self) -> bytes:
        """Compress the offsets."""
        return pack((self.like, self.steps))

    @classmethod
    def unpack(cls, description: Description, packed: bytes) -> LocalInventory:
        return cls(description, *unpack(packed))

    @classmethod
    def of_state(cls, state: Flat, paths: dict[str, KeyPath], holds: Holdings | None = None) -> LocalInventory:
        items: list[OfKey] = [
            (value.dtype, value.shape, value.any_rank, value.stored_whole, value.chunks)
            if isinstance(value, ShardedValue)
            else VALUE
            for value in state.values()
        ]
        holds = holds or Holdings()
        values = ((key, value) for key, value in state.items() if isinstance(value, EncodedValue))
        empty = {key: value.standing for key, value in values if value.standing}
        holds = replace(holds, standing={**empty, **holds.standing})
        return cls.of_items(list(state), items, paths, ties_of(state), holds)

    @classmethod
    def of_items(
        cls,
        keys: list[str],
        items: list[OfKey],
        paths: dict[str, KeyPath],
        ties: dict[str, str],
        holds: Holdings | None = None,
    ) -> LocalInventory:
        holds = holds or Holdings()
        item_dtypes, shapes, any_rank, stored_whole, boxes = zip(*items, strict=True) if items else ((),) * 5
        numbers = dict(zip(keys, range(len(keys)), strict=True))
        dtypes = [dtype for dtype in dict.fromkeys(item_dtypes) if dtype is not None]
        number_of = {None: NO_TENSOR} | {dtype: number for number, dtype in enumerate(dtypes)}
        width = max(map(len, shapes), default=0)
        chunks = [
            (number, box[0], box[1])
            for number, (key_boxes, shape) in enumerate(zip(boxes, shapes, strict=True))
            for box in key_boxes
            if 0 not in box[1] or 0 in shape  # an empty chunk counts only if the tensor itself is empty
        ]
        chunk_keys, offsets, sizes = zip(*chunks, strict=True) if chunks else ((),) * 3
        tie = np.full(len(keys), -1, np.int64)
        for key, first in ties.items():
            if key in numbers:
                tie[numbers[key]] = numbers.get(first, -1)
        dtype = np.array([number_of[dtype] for dtype in item_dtypes], np.uint8)
        replicas = () if holds.have_drifted else holds.replicas
        description = Description(
            keys,
            unusual_paths({key: as_stored(key, path) for key, path in paths.items() if key in numbers}),
            dtypes,
            dict(holds.objects),
            sorted(holds.per_rank),
            dtype,
            np.array(list(map(len, shapes)), np.uint8),
            filled_rows(shapes, width, 1),
            np.array(any_rank, bool) & (not holds.have_drifted),
            np.array(stored_whole, bool),
            tie,
            np.array([holds.standing.get(key, Standing.HOLDS) for key in keys], np.uint8),
            np.array([key in replicas for key in keys], bool) & (dtype != NO_TENSOR),
            np.array(chunk_keys, np.int64),
            filled_rows(sizes, width, 1),
        )
        steps = np.hstack(np.divmod(filled_rows(offsets, width, 0), np.maximum(description.sizes, 1)))
        different, like = numbered(steps)
        return cls(description, like, steps[different])


def ties_of(state: Flat) -> dict[str, str]:
    """Return a dict from each tied key to the first key whose tensor has the same memory."""
    tensors = [(key, value, value.chunks) for key, value in state.items() if isinstance(value, ShardedValue)]
    begins = [_begin_of(chunks) for _, _, chunks in tensors]
    # Only tensors that begin at the same address can be tied. memory_of() is slow, so other tensors skip it.
    several = {begin for begin, count in Counter(begins).items() if count > 1} | {0}
    seen: dict[object, str] = {}
    ties = {}
    for (key, value, chunks), begin in zip(tensors, begins, strict=True):
        if begin in several and any(chunk.tensor.numel() for chunk in chunks):
            first = seen.setdefault((value.shape, *((each.offsets, memory_of(each.tensor)) for each in chunks)), key)
            if first != key:
                ties[key] = first
    return ties


def _begin_of(chunks: Sequence[LocalChunk]) -> int:
    """Return the address of the first chunk, or 0 if it is unknown. Tied tensors begin at the same address."""
    return chunks[0].tensor.data_ptr() if chunks and type(chunks[0].tensor) in EXACTLY_TENSORS else 0
