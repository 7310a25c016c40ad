"""What one rank holds, as columns: a description that ranks of a regular mesh share, and where its chunks begin.

Under FSDP, TP or HSDP thousands of ranks hold the same keys, with chunks of the same sizes, at other offsets. So the
description travels once for all that share it, and each rank sends the offsets alone, counted in chunks: for a
regular mesh that is the same number again and again, which compresses to a few bytes. Nothing here knows meshes or
placements; irregular ranks have descriptions of their own.
"""

from __future__ import annotations

import functools
import hashlib
import json
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from dcp_plugin.format.columns import NO_TENSOR, Column, default_path, padded
from dcp_plugin.format.index_file import path_to_json
from dcp_plugin.types import Flat, KeyPath, Shape, ShardedValue, memory_of

Entry = tuple[str, "torch.dtype | None", Shape, bool, bool, list[tuple[Shape, Shape]]]
"""Key, dtype (None: no tensor), shape, whether any holder may write it, whether its chunks must not be cut, and offsets
and sizes of each chunk."""


@dataclass(frozen=True, eq=False)
class Description:
    """All that a rank holds but the offsets. Columns of keys: ``dtype``, ``ndim``, ``shape`` (1 behind the last
    dimension), ``any_rank``, ``stored_whole``, ``tie`` (the number of the earlier key that is the same memory, or -1);
    of chunks: ``key`` (its number) and ``sizes``."""

    keys: list[str]
    paths: dict[str, KeyPath]
    dtypes: list[torch.dtype]
    dtype: Column
    ndim: Column
    shape: Column
    any_rank: Column
    stored_whole: Column
    tie: Column
    key: Column
    sizes: Column

    @functools.cached_property
    def digest(self) -> bytes:
        names = [self.keys, {key: path_to_json(path) for key, path in self.paths.items()}, list(map(str, self.dtypes))]
        digest = hashlib.blake2b(json.dumps(names).encode(), digest_size=16)
        columns = (self.dtype, self.ndim, self.shape, self.any_rank, self.stored_whole, self.tie, self.key, self.sizes)
        for column in columns:
            digest.update(str(column.shape).encode() + column.tobytes())
        return digest.digest()


@dataclass(frozen=True, eq=False)
class Holding:
    """What one rank holds."""

    description: Description
    offsets: Column

    @functools.cached_property
    def digest(self) -> bytes:
        return hashlib.blake2b(self.description.digest + self.offsets.tobytes(), digest_size=16).digest()

    def pack_offsets(self) -> bytes:
        """The offsets as multiples of the sizes, and what is left over: nothing, on a regular mesh."""
        return zlib.compress(np.stack(np.divmod(self.offsets, np.maximum(self.description.sizes, 1))).tobytes())

    @classmethod
    def unpack(cls, description: Description, packed: bytes) -> Holding:
        sizes = description.sizes
        times, rest = np.frombuffer(zlib.decompress(packed), np.int64).reshape(2, *sizes.shape)
        return cls(description, times * np.maximum(sizes, 1) + rest)

    @classmethod
    def of_state(cls, state: Flat, paths: dict[str, KeyPath]) -> Holding:
        entries: list[Entry] = []
        for key, value in state.items():
            if isinstance(value, ShardedValue):
                boxes = [(chunk.offsets, chunk.sizes) for chunk in value.chunks]
                entries.append((key, value.dtype, value.shape, value.any_rank, value.stored_whole, boxes))
            else:
                entries.append((key, None, (), False, False, [((), ())]))
        return cls._of(entries, paths, ties_of(state))

    @classmethod
    def of_plan(
        cls, plan: SavePlan, paths: dict[str, KeyPath], ties: dict[str, str], stored_whole: Collection[str] = ()
    ) -> Holding:
        """What a plan of DCP's own write items says."""
        entries: dict[str, Entry] = {}
        for item in plan.items:
            key, data = item.index.fqn, item.tensor_data
            if data is None:
                entries[key] = (key, None, (), False, False, [((), ())])
                continue
            any_rank = item.type == WriteItemType.SHARD
            whole = key in stored_whole
            entry = entries.setdefault(key, (key, data.properties.dtype, tuple(data.size), any_rank, whole, []))
            entry[5].append((tuple(data.chunk.offsets), tuple(data.chunk.sizes)))
        return cls._of(list(entries.values()), paths, ties)

    @classmethod
    def _of(cls, entries: list[Entry], paths: dict[str, KeyPath], ties: dict[str, str]) -> Holding:
        numbers = {entry[0]: number for number, entry in enumerate(entries)}
        dtypes = list(dict.fromkeys(dtype for _, dtype, _, _, _, _ in entries if dtype is not None))
        number_of: dict[torch.dtype | None, int] = {dtype: number for number, dtype in enumerate(dtypes)}
        number_of[None] = NO_TENSOR
        width = max((len(shape) for _, _, shape, _, _, _ in entries), default=0)
        chunks = [
            (numbers[key], offsets, sizes)
            for key, _, shape, _, _, boxes in entries
            for offsets, sizes in boxes
            if 0 not in sizes or 0 in shape  # nothing of a tensor that has something
        ]
        description = Description(
            [entry[0] for entry in entries],
            {key: paths[key] for key in numbers if key in paths and paths[key] != default_path(key)},
            dtypes,
            np.array([number_of[entry[1]] for entry in entries], np.uint8),
            np.array([len(entry[2]) for entry in entries], np.uint8),
            padded([entry[2] for entry in entries], width, 1),
            np.array([entry[3] for entry in entries], bool),
            np.array([entry[4] for entry in entries], bool),
            np.array([numbers.get(ties.get(key, ""), -1) for key in numbers], np.int64),
            np.array([number for number, _, _ in chunks], np.int64),
            padded([sizes for _, _, sizes in chunks], width, 1),
        )
        return cls(description, padded([offsets for _, offsets, _ in chunks], width, 0))


def ties_of(state: Flat) -> dict[str, str]:
    """Keys whose tensor is the same memory as an earlier key's, and that key."""
    seen: dict[object, str] = {}
    ties = {}
    for key, value in state.items():
        if isinstance(value, ShardedValue) and any(chunk.tensor.numel() for chunk in value.chunks):
            chunks = ((chunk.offsets, memory_of(chunk.tensor)) for chunk in value.chunks)
            first = seen.setdefault((value.shape, *chunks), key)
            if first != key:
                ties[key] = first
    return ties


def descriptions_of(holdings: Iterable[Holding]) -> dict[bytes, list[int]]:
    """The ranks of each description, in the order of the first of them."""
    ranks: dict[bytes, list[int]] = {}
    for rank, holding in enumerate(holdings):
        ranks.setdefault(holding.description.digest, []).append(rank)
    return ranks
