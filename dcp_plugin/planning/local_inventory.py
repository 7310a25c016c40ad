"""What one rank holds, and which of it belongs to that rank alone.

:class:`LocalInventory` has it as columns. Under FSDP, TP or HSDP thousands of ranks hold the same keys, with chunks of
the same sizes, at other offsets. So the :class:`Description` travels once for all that share it, and each rank sends
the offsets alone, counted in chunks: for a regular mesh that is the same number again and again, which compresses to a
few bytes. Nothing here knows meshes or placements; irregular ranks have descriptions of their own.

:class:`RankLocal` finds optimizer state that each rank has for itself, beside a parameter that is sharded. Such state
is mostly sharded like the parameter, or the same on all ranks (``step``). Plain tensors and values may be neither: an
8-bit optimizer keeps the codes and scales of its own shard. Under one key, all ranks would get what rank 0 had. So what
differs between ranks is stored by rank, and the key says for which part of the parameter:

    optim.state.layer.weight.codes.rank1(8,0:16,32)         # rank 1 had rows 8 to 15, all 32 columns

Only a rank with the same part may load it. It is never cut for another layout, since only the optimizer knows what the
numbers mean. Equal bytes are taken for the same state, except in a tensor that has the shape of the shard on any rank:
that is the rank's own, also while it is all zeros. At a first save it compares what all ranks should share, too
(:mod:`~dcp_plugin.planning.shared_values`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from dcp_plugin.format.columns import NO_TENSOR, Column, default_path, filled_rows
from dcp_plugin.format.keys import LocalSlot
from dcp_plugin.format.payload import hashes_of
from dcp_plugin.planning.shared_values import about_different, shared_hashes
from dcp_plugin.ranks import Ranks
from dcp_plugin.records import Box, Shards
from dcp_plugin.tensors.kinds import EXACTLY_TENSORS, memory_of
from dcp_plugin.types import EncodedValue, Flat, KeyPath, LocalChunk, Shape, ShardedValue

_Item = tuple[torch.dtype | None, Shape, bool, bool, Sequence[Sequence[Any]]]
"""What a rank holds under a key: dtype (None: it is no tensor), shape, whether any rank that holds it may write it, and
whether its chunks must not be cut; of each chunk the offsets, the sizes and maybe more. There are thousands."""

_VALUE: _Item = (None, (), False, False, (((), ()),))


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
        names = [self.keys, self.paths, list(map(str, self.dtypes))]
        digest = hashlib.blake2b(json.dumps(names).encode(), digest_size=16)
        for column in (getattr(self, field.name) for field in fields(self)[3:]):
            digest.update(str(column.shape).encode() + column.tobytes())
        return digest.digest()


@dataclass(frozen=True, eq=False)
class LocalInventory:
    """What one rank holds: a description, and the offset of every chunk."""

    description: Description
    offsets: Column

    @functools.cached_property
    def digest(self) -> bytes:
        return hashlib.blake2b(self.description.digest + self.offsets.tobytes(), digest_size=16).digest()

    def pack_offsets(self) -> bytes:
        """The offsets as multiples of the sizes, and what is left over: nothing, on a regular mesh."""
        return zlib.compress(np.stack(np.divmod(self.offsets, np.maximum(self.description.sizes, 1))).tobytes())

    @classmethod
    def unpack(cls, description: Description, packed: bytes) -> LocalInventory:
        sizes = description.sizes
        times, rest = np.frombuffer(zlib.decompress(packed), np.int64).reshape(2, *sizes.shape)
        return cls(description, times * np.maximum(sizes, 1) + rest)

    @classmethod
    def of_state(cls, state: Flat, paths: dict[str, KeyPath]) -> LocalInventory:
        items: list[_Item] = [
            (value.dtype, value.shape, value.any_rank, value.stored_whole, value.chunks)
            if isinstance(value, ShardedValue)
            else _VALUE
            for value in state.values()
        ]
        return cls._of(list(state), items, paths, ties_of(state))

    @classmethod
    def of_plan(
        cls, plan: SavePlan, paths: dict[str, KeyPath], ties: dict[str, str], stored_whole: Collection[str] = ()
    ) -> LocalInventory:
        """The inventory that a plan of DCP's own write items describes."""
        items: dict[str, _Item] = {}
        boxes: dict[str, list[tuple[Shape, Shape]]] = defaultdict(list)
        for item in plan.items:
            key, data = item.index.fqn, item.tensor_data
            if data is None:
                items[key] = _VALUE
                continue
            boxes[key].append((tuple(data.chunk.offsets), tuple(data.chunk.sizes)))
            any_rank = item.type == WriteItemType.SHARD
            dtype, shape = data.properties.dtype, tuple(data.size)
            items.setdefault(key, (dtype, shape, any_rank, key in stored_whole, boxes[key]))
        return cls._of(list(items), list(items.values()), paths, ties)

    @classmethod
    def _of(
        cls, keys: list[str], items: list[_Item], paths: dict[str, KeyPath], ties: dict[str, str]
    ) -> LocalInventory:
        item_dtypes, shapes, any_rank, stored_whole, boxes = zip(*items, strict=True) if items else ((),) * 5
        numbers = dict(zip(keys, range(len(keys)), strict=True))
        dtypes = [dtype for dtype in dict.fromkeys(item_dtypes) if dtype is not None]
        number_of = {None: NO_TENSOR} | {dtype: number for number, dtype in enumerate(dtypes)}
        width = max(map(len, shapes), default=0)
        chunks = [
            (number, box[0], box[1])
            for number, (mine, shape) in enumerate(zip(boxes, shapes, strict=True))
            for box in mine
            if 0 not in box[1] or 0 in shape  # a chunk without elements, of a tensor that has some, is none
        ]
        chunk_keys, offsets, sizes = zip(*chunks, strict=True) if chunks else ((),) * 3
        tie = np.full(len(keys), -1, np.int64)
        for key, first in ties.items():
            if key in numbers:
                tie[numbers[key]] = numbers.get(first, -1)
        description = Description(
            keys,
            {key: path for key, path in paths.items() if key in numbers and path != default_path(key)},
            dtypes,
            np.array([number_of[dtype] for dtype in item_dtypes], np.uint8),
            np.array(list(map(len, shapes)), np.uint8),
            filled_rows(shapes, width, 1),
            np.array(any_rank, bool),
            np.array(stored_whole, bool),
            tie,
            np.array(chunk_keys, np.int64),
            filled_rows(sizes, width, 1),
        )
        return cls(description, filled_rows(offsets, width, 0))


def ties_of(state: Flat) -> dict[str, str]:
    """Key -> the earlier key whose tensor is the same memory."""
    tensors = [(key, value, value.chunks) for key, value in state.items() if isinstance(value, ShardedValue)]
    begins = [_begin_of(chunks) for _, _, chunks in tensors]
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
    """The address of the first chunk: where no other tensor begins there, none is the same memory. 0 if unknown."""
    return chunks[0].tensor.data_ptr() if chunks and type(chunks[0].tensor) in EXACTLY_TENSORS else 0


_OWN = b""
"""In place of the hash of a tensor that has the shape of the shard, and so is the rank's own."""


class RankLocal:
    """Finds the state that ranks have for themselves, and remembers which it was at the last save."""

    def __init__(self) -> None:
        self._apart: frozenset[str] = frozenset()
        self._doubtful: dict[str, tuple[str, bytes]] = {}
        self._shared: dict[str, bytes] = {}

    def with_rank_keys(
        self, state: Flat, paths: dict[str, KeyPath], shards: Shards, rank: int, shared: Collection[str] = ()
    ) -> Flat:
        """Return the state with keys of its own for what is known to be this rank's alone; change ``paths`` likewise.

        Args:
            shared: Keys of values that all ranks are expected to share, to be compared.
        """
        self._shared = shared_hashes(state, shared)
        found = _slots_of_sharded(state, shards)
        mine = {key: one for key, one in found.items() if key in self._apart}
        evident = {key for key, (_, box) in found.items() if key not in mine and _has_shape_of(state[key], box)}
        hashes = _hashes({key: state[key] for key in found if key not in mine and key not in evident})
        hashes |= dict.fromkeys(evident, _OWN)
        self._doubtful = {key: (found[key][0], each) for key, each in hashes.items()}
        renamed: dict[str, str] = {}
        for key, (slot, box) in mine.items():
            own = str(LocalSlot(slot, rank, box))
            renamed[key] = key.removesuffix(slot) + own
            if key in paths:
                *above, last = paths.pop(key)
                paths[renamed[key]] = (*above, str(last).removesuffix(slot) + own)
        return {renamed.get(key, key): value for key, value in state.items()}

    def digest(self, rank: int) -> bytes:
        """Return a digest of what may differ between ranks; empty where there is nothing of that kind. A tensor of the
        shape of the shard makes it unlike that of any other rank.

        If a slot is the same for all parameters (``step`` mostly is), the parameters do not count: ranks that have
        state for other parameters, but nothing that differs, need not compare at every save.
        """
        if not self._doubtful and not self._shared:
            return b""
        slots = set(self._doubtful.values())
        told = sorted(slots)
        if any(each == _OWN for _, each in slots):
            told = [(f"rank {rank}", b"")]
        elif len({slot for slot, _ in slots}) < len(slots):
            told = sorted((key, each) for key, (_, each) in self._doubtful.items())
        told += sorted(self._shared.items())
        text = b"".join(name.encode() + each for name, each in told)
        return hashlib.blake2b(text, digest_size=16).digest()

    def compare(self, step: str, ranks: Ranks) -> bool:
        """Remember what differs between ranks, and warn on rank 0 of shared values that do. Collective.

        Returns:
            Whether optimizer state differs that did not before.
        """

        def differing(of_ranks: list[tuple[dict[str, bytes], dict[str, bytes]]]) -> frozenset[str]:
            if message := about_different([shared for _, shared in of_ranks]):
                warnings.warn(message, stacklevel=2)  # here, so that all ranks raise if a warning is an error
            first: dict[str, bytes] = {}
            return frozenset(
                key
                for hashes, _ in of_ranks
                for key, each in hashes.items()
                if first.setdefault(key, each) != each or each == _OWN
            )

        mine = {key: each for key, (_, each) in self._doubtful.items()}
        found = ranks.combine(step, lambda: (mine, self._shared), differing)
        self._apart |= found
        return bool(found)


def _slots_of_sharded(state: Flat, shards: Shards) -> dict[str, tuple[str, Box]]:
    """The keys of plain optimizer state beside a sharded parameter; the slot, and the part that this rank has."""
    found: dict[str, tuple[str, Box]] = {}
    prefixes = {f"{name}.state.": boxes for name, boxes in shards.items() if boxes}
    for key, value in state.items() if prefixes else ():
        if isinstance(value, ShardedValue) and (value.any_rank or value.stored_whole):
            continue
        for prefix, boxes in prefixes.items():
            if key.startswith(prefix):
                fqn, slot = _known_first(key[len(prefix) :], boxes)
                if fqn is not None:
                    found[key] = slot, boxes[fqn]
    return found


def _known_first(rest: str, known: Mapping[str, Box]) -> tuple[str | None, str]:
    """The longest known name in front of a dot, and what is behind it."""
    at = rest.rfind(".")
    while at > 0 and rest[:at] not in known:
        at = rest.rfind(".", 0, at)
    return (rest[:at], rest[at + 1 :]) if at > 0 else (None, rest)


def _has_shape_of(value: ShardedValue | EncodedValue, box: Box) -> bool:
    """Whether a tensor has the shape of a part of more than one element."""
    shape = tuple(end - begin for begin, end in zip(*box, strict=True))
    return isinstance(value, ShardedValue) and value.shape == shape and prod(shape) > 1


def _hashes(state: Flat) -> dict[str, bytes]:
    """A hash of each tensor or value, with dtype and shape."""
    tensors = {key: value for key, value in state.items() if isinstance(value, ShardedValue)}
    bytes_of = dict(zip(tensors, hashes_of([value.chunks[0].tensor for value in tensors.values()], 1), strict=True))
    return {
        key: bytes_of[key] + f"{value.dtype}{value.shape}".encode()
        if isinstance(value, ShardedValue)
        else hashlib.blake2b(value.data, digest_size=16).digest()
        for key, value in state.items()
    }
