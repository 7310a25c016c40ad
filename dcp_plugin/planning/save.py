"""The plan of a save: from the inventories of all ranks, the items that each rank writes.

:class:`ShardedSavePlanner` is a real DCP ``SavePlanner``;
``torch.distributed.checkpoint.save(sd, planner=ShardedSavePlanner())`` works with any writer.

Saves of this package make the same plan with :class:`PlanExchange`. It exchanges a few digests per rank if the plan has
not changed, and little more otherwise:

1. Each rank sends four digests: of the plan that it remembers, of its description, of its inventory, and of the values
   that should be equal on all ranks (:class:`~dcp_plugin.planning.local_inventory.RankLocal`). If the last digests
   differ, the ranks compare the values key by key and start again. The digest of the new plan follows from the
   inventories of all ranks. If every rank remembers that plan, the exchange ends here.
2. Otherwise rank 0 chooses one rank for each description. The chosen ranks send their description, and all ranks send
   their offsets. Rank 0 returns to each rank its share of the writing.

The digests cover everything that the metadata depends on: keys and their paths, dtypes, shapes, boxes, kinds, ties.
They do not cover the bytes of values, whose lengths may change from save to save.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from dcp_plugin.errors import CheckpointMismatch, UnsafeCheckpoint, some
from dcp_plugin.format import values
from dcp_plugin.format.columns import NO_TENSOR, default_path
from dcp_plugin.format.keys import flatten, holds_sharded, is_empty_mapping, walked_by_stock
from dcp_plugin.format.metadata import state_metadata
from dcp_plugin.format.whole_tensors import WholeItem
from dcp_plugin.planning.global_plan import GlobalPlan, Share, make_global_plan
from dcp_plugin.planning.local_inventory import LocalInventory, ties_of
from dcp_plugin.ranks import Ranks, pack, unpack
from dcp_plugin.records import NewItem
from dcp_plugin.tensors._torch import is_tensor, sharded_value
from dcp_plugin.tensors.kinds import EXACTLY_TENSORS, is_stored_whole, narrowed
from dcp_plugin.types import EncodedValue, Flat, KeyPath, LocalChunk, ShardedValue


@dataclass(frozen=True)
class LocalFacts:
    """Facts that a rank's plan carries to the coordinator when DCP drives the planner."""

    paths: dict[str, KeyPath]
    ties: dict[str, str]
    stored_whole: frozenset[str]


_NO_FACTS = LocalFacts({}, {}, frozenset())


class ShardedSavePlanner(SavePlanner):
    """Planner for ``torch.distributed.checkpoint.save``; saves of this package do not use it.

    DCP drives this planner with plans of write items. At each save it sends every item of every rank to rank 0 and
    back, as about six Python objects per tensor. Saves of this package use :class:`PlanExchange` instead, which makes
    the same plan and sends only digests while the plan is unchanged. Loads need no exchange, since each rank plans
    alone; they use the planner and the reader that DCP would drive.

    Args:
        allow_pickle: Keys (globs) whose values may be stored although only unpickling code restores them.

    Example:
        >>> import tempfile, warnings, torch, torch.distributed.checkpoint as stock, dcp_plugin
        >>> warnings.simplefilter("ignore")  # stock warns where there is no process group
        >>> path, planner = tempfile.mkdtemp(), dcp_plugin.ShardedSavePlanner()
        >>> _ = stock.save({"w": torch.ones(2)}, checkpoint_id=path, planner=planner, no_dist=True)
        >>> dcp_plugin.inspect(path).tensors[0].key
        'w'
    """

    def __init__(self, allow_pickle: tuple[str, ...] = ()) -> None:
        self._allow_pickle = allow_pickle

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state, nested and of any content, under the keys that stock's planner gives it.

        An empty mapping gets no key. With one, stock's load planner would mistake the checkpoint for one of torch 2.3.
        """
        leaves, paths = flatten(state_dict, walked_by_stock)
        leaves = {key: leaf for key, leaf in leaves.items() if not is_empty_mapping(leaf)}
        self._paths = {key: paths[key] for key in leaves}
        self._state = encode_state(leaves, self._allow_pickle)

    def create_local_plan(self) -> SavePlan:
        items = [item for key, value in self._state.items() for item in _items(key, value)]
        tensors = {key: value for key, value in self._state.items() if isinstance(value, ShardedValue)}
        stored_whole = frozenset(key for key, value in tensors.items() if value.stored_whole)
        return SavePlan(items, planner_data=LocalFacts(self._paths, ties_of(self._state), stored_whole))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Distribute the items of all ranks so that each is written once.

        Raises:
            CheckpointMismatch: Ranks disagree on a shape or dtype, or together do not hold a complete tensor.
        """
        # A subclass may use planner_data for other data. The paths then follow from the keys.
        facts = [plan.planner_data if isinstance(plan.planner_data, LocalFacts) else _NO_FACTS for plan in all_plans]
        inventories = [
            LocalInventory.of_plan(plan, rank_facts.paths, rank_facts.ties, rank_facts.stored_whole)
            for plan, rank_facts in zip(all_plans, facts, strict=True)
        ]
        global_plan = make_global_plan(inventories)
        plans = [
            replace(plan, items=items_of(share, inventory), planner_data=None)
            for plan, share, inventory in zip(all_plans, global_plan.shares(len(all_plans)), inventories, strict=True)
        ]
        table = global_plan.table
        paths = {key: table.paths.get(key) or default_path(key) for key in table.keys}
        return plans, Metadata(state_metadata(table), planner_data=paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = data_of(write_item, self._state)
        return io.BytesIO(data) if isinstance(data, bytes) else data


def data_of(item: WriteItem, state: Flat) -> torch.Tensor | bytes:
    """Return the data to write for an item: the view of its box in this rank's memory, or the bytes of a value."""
    value = state[item.index.fqn]
    if isinstance(value, EncodedValue):
        return value.data
    assert item.tensor_data is not None
    return narrow(value, item.index.fqn, item.tensor_data.chunk)


def encode_state(leaves: Mapping[str, Any], allow_pickle: tuple[str, ...] = ()) -> Flat:
    """Describe leaves for the planner: tensors as the chunks on this rank, anything else as bytes.

    Raises:
        CheckpointMismatch: Tensors cannot be stored, because neither they nor their parts have memory. The message
            names the first ten.
        UnsafeCheckpoint: Only executing pickled code would restore some values. The message names the first ten.
    """
    flat: Flat = {}
    unsafe: list[str] = []
    misfits: list[str] = []
    changed: list[str] = []
    same: dict[int, EncodedValue] = {}  # the same objects repeat for every parameter of an optimizer's group
    for key, leaf in leaves.items():
        if type(leaf) in EXACTLY_TENSORS:
            try:
                flat[key] = sharded_value(leaf)
            except CheckpointMismatch as error:
                misfits.append(f"{key} is {error}")
        elif id(leaf) in same:
            flat[key] = same[id(leaf)]
        elif values.is_plain(leaf):
            flat[key] = same[id(leaf)] = EncodedValue(values.encode(leaf))
        elif isinstance(leaf, (ShardedValue, EncodedValue)):
            flat[key] = leaf
        elif is_tensor(leaf):
            try:
                flat[key] = sharded_value(leaf)
            except CheckpointMismatch as error:
                misfits.append(f"{key} is {error}")
        else:
            if holds_sharded(leaf):
                raise CheckpointMismatch(
                    f"{key} is a {type(leaf).__name__} with sharded tensors inside; only one rank's part of them would "
                    f"be stored. Keep sharded tensors in dicts, lists or tuples."
                )
            notes: list[str] = []
            try:
                encoded = values.encode(leaf, any(fnmatchcase(key, glob) for glob in allow_pickle), notes)
                flat[key] = EncodedValue(encoded, is_empty_mapping(leaf))
                changed += [f"{key} ({note})" for note in notes]
            except UnsafeCheckpoint as error:
                unsafe.append(f"{key} is {error}")
    if misfits:
        count = f"{len(misfits)} tensors cannot be saved: " if len(misfits) > 1 else ""
        raise CheckpointMismatch(count + some(misfits, 10, "; "))
    if unsafe:
        raise UnsafeCheckpoint(
            f"{len(unsafe)} value(s) cannot be saved: {some(unsafe, 10, '; ')}. Make them plain (numbers, text, "
            f"lists, dicts, tensors), or name them in allow_pickle if you trust everybody who can write to the "
            f"checkpoints."
        )
    if changed:
        warnings.warn(f"stored as another type: {some(changed, 10, '; ')}.", stacklevel=2)
    return flat


def narrow(value: ShardedValue, key: str, box: ChunkStorageMetadata) -> torch.Tensor:
    """Return the view of a box that is inside one of this rank's chunks."""
    if len(value.chunks) == 1 and value.chunks[0][:2] == (box.offsets, box.sizes):
        return value.chunks[0].tensor
    for chunk in value.chunks:
        edges = zip(box.offsets, box.sizes, chunk.offsets, chunk.sizes, strict=True)
        if all(origin <= at and at + size <= origin + extent for at, size, origin, extent in edges):
            try:
                return _part_of(chunk, box, value.stored_whole)
            except CheckpointMismatch as error:
                raise CheckpointMismatch(f"{key} is {error}") from error
    raise CheckpointMismatch(f"{key}: this rank holds no chunk of shape {tuple(box.sizes)} at {tuple(box.offsets)}")


def _new_items(share: Share, state: Flat) -> list[NewItem]:
    """Return the items of a rank's share. No DCP objects are made: for small tensors, these would cost more time than
    the writing."""
    held: list[NewItem] = []
    for key, value in state.items():
        if isinstance(value, EncodedValue):
            held.append(NewItem(key, value.data))
            continue
        for offsets, sizes, tensor in value.chunks:
            if 0 not in sizes or 0 in value.shape:  # the rule of LocalInventory, so that the numbers agree
                held.append(NewItem(key, tensor, offsets, sizes))
    items = [held[number] for number in share.chunk.tolist()]
    for at, offsets, sizes in zip(share.part.tolist(), share.offsets.tolist(), share.sizes.tolist(), strict=True):
        key, data, begin, extent = items[at]
        box = ChunkStorageMetadata(torch.Size(offsets[: len(extent)]), torch.Size(sizes[: len(extent)]))
        part = _part_of(LocalChunk(begin, extent, cast(torch.Tensor, data)), box, False)
        items[at] = NewItem(key, part, tuple(box.offsets), tuple(box.sizes))
    stored_whole = {key for key, value in state.items() if isinstance(value, ShardedValue) and value.stored_whole}
    for at, (key, data, *box) in enumerate(items) if stored_whole else ():
        if key in stored_whole and is_stored_whole(data):
            try:
                items[at] = NewItem(key, WholeItem.of(data), *box)
            except CheckpointMismatch as error:
                raise CheckpointMismatch(f"{key} is {error}") from error
    return items


def _part_of(chunk: LocalChunk, box: ChunkStorageMetadata, stored_whole: bool) -> torch.Tensor:
    """Return the part of a chunk inside a box. For the complete chunk this is its tensor, since not every class can
    narrow."""

    def narrow(view: torch.Tensor) -> torch.Tensor:
        for dim, (at, size, origin) in enumerate(zip(box.offsets, box.sizes, chunk.offsets, strict=True)):
            if size < view.shape[dim]:
                view = view.narrow(dim, at - origin, size)
        return view

    if tuple(box.sizes) == chunk.sizes:
        return chunk.tensor
    return narrowed(chunk.tensor, narrow) if stored_whole else narrow(chunk.tensor)


def _items(key: str, value: ShardedValue | EncodedValue) -> list[WriteItem]:
    if isinstance(value, EncodedValue):
        data = BytesIOWriteData(len(value.data))
        return [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, bytes_io_data=data)]
    properties = TensorProperties(dtype=value.dtype)
    kind = WriteItemType.SHARD if value.any_rank else WriteItemType.TENSOR
    items = []
    for number, chunk in enumerate(value.chunks):
        box = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        data_of = TensorWriteData(box, properties, torch.Size(value.shape))
        items.append(WriteItem(MetadataIndex(key, box.offsets, number), kind, tensor_data=data_of))
    return items


def items_of(share: Share, inventory: LocalInventory) -> list[WriteItem]:
    """Return a rank's share as DCP's write items."""
    described = inventory.description
    properties = [TensorProperties(dtype=dtype) for dtype in described.dtypes]
    offsets, sizes = share.boxes(inventory)
    numbers = described.key[share.chunk]
    kinds = np.column_stack((described.dtype[numbers], described.ndim[numbers], described.shape[numbers]))
    same: dict[tuple[int, ...], TensorWriteData] = {}  # many tensors have equal boxes and share the object
    items = []
    width = offsets.shape[1]
    rows = np.hstack((kinds.astype(np.int64), offsets, sizes)).tolist()
    for number, row in zip(numbers.tolist(), map(tuple, rows), strict=True):
        name, dtype = described.keys[number], row[0]
        if dtype == NO_TENSOR:
            items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(0)))
            continue
        if row not in same:
            shape, at, size = (torch.Size(row[2 + n * width : 2 + n * width + row[1]]) for n in range(3))
            same[row] = TensorWriteData(ChunkStorageMetadata(at, size), properties[dtype], shape)
        data = same[row]
        items.append(WriteItem(MetadataIndex(name, data.chunk.offsets), WriteItemType.SHARD, tensor_data=data))
    return items


DIGEST = 12  # bytes: four of these, pickled, stay below 64


class _Digests(NamedTuple):
    """The digests that a rank sends first."""

    plan: bytes
    description: bytes
    inventory: bytes
    doubtful: bytes
    """Digest of the values that should be equal on all ranks that have them; empty if there are none."""

    @classmethod
    def decode(cls, data: bytes) -> _Digests:
        return cls(*(data[at : at + DIGEST] for at in range(0, 4 * DIGEST, DIGEST)))


@dataclass(frozen=True)
class RankPlan:
    """One rank's view of a plan; ``global_plan`` is None except on rank 0."""

    digest: bytes
    inventory: LocalInventory
    share: Share
    global_plan: GlobalPlan | None

    def items(self, state: Flat) -> list[NewItem]:
        """Return the items that this rank writes.

        Args:
            state: The state that the inventory describes.
        """
        return _new_items(self.share, state)


@dataclass(frozen=True)
class PlanAnswer:
    """The answer of rank 0 to the claims of all ranks, with the digest of the plan that follows from these."""

    digest: bytes
    describers: list[int] | None
    """Ranks that have to send their description; None if every rank remembers the plan."""
    differ: bool
    """True if state that should be equal on all ranks differs."""


class PlanExchange:
    """Planner for the saves of a group of ranks; it remembers the last plan.

    A save combines the claims of all ranks into the answer of rank 0, and then asks every rank for its plan.

    Example:
        >>> import torch
        >>> from dcp_plugin.ranks import Ranks
        >>> state = encode_state({"w": torch.ones(2)})
        >>> exchange, ranks, inventory = PlanExchange(), Ranks(), LocalInventory.of_state(state, {})
        >>> answer = ranks.combine("plan", lambda: exchange.claim(inventory), exchange.answer)
        >>> [item.key for item in exchange.plan("plan", ranks, inventory, answer).items(state)]
        ['w']
    """

    def __init__(self) -> None:
        self._last: RankPlan | None = None
        self.repeated = False
        """True if the last call reused the remembered plan."""

    def claim(self, inventory: LocalInventory, doubtful: bytes = b"") -> bytes:
        """Return the digests that this rank sends to rank 0.

        Args:
            doubtful: Digest of the state that should be equal on all ranks that have it.
        """
        last = self._last.digest if self._last else bytes(DIGEST)
        digests = _Digests(last, inventory.description.digest, inventory.digest, doubtful)
        return b"".join(digest[:DIGEST] for digest in digests)

    def answer(self, claims: list[bytes]) -> PlanAnswer:
        """Return the answer to the claims of all ranks. Called on rank 0."""
        decoded = list(map(_Digests.decode, claims))
        differ = len({claim.doubtful for claim in decoded if claim.doubtful}) > 1
        digest = hashlib.blake2b(b"".join(claim.inventory for claim in decoded), digest_size=DIGEST).digest()
        first: dict[bytes, int] = {}
        self._described_by = [first.setdefault(claim.description, rank) for rank, claim in enumerate(decoded)]
        is_remembered = self._last is not None and all(claim.plan == digest for claim in decoded)
        return PlanAnswer(digest, None if is_remembered else list(first.values()), differ)

    def plan(self, step: str, ranks: Ranks, inventory: LocalInventory, answer: PlanAnswer) -> RankPlan:
        """Return the plan that all ranks remember, or make it. Collective in the latter case."""
        self.repeated = answer.describers is None
        if answer.describers is not None:
            self._last = self._make(step, ranks, inventory, answer.digest, answer.describers)
        assert self._last is not None
        return self._last

    def _make(
        self, step: str, ranks: Ranks, inventory: LocalInventory, digest: bytes, describers: list[int]
    ) -> RankPlan:
        """Make a plan on rank 0, and send each rank its share. Collective."""
        global_plan: GlobalPlan | None = None

        def send() -> tuple[bytes, bytes]:
            return (pack(inventory.description) if ranks.rank in describers else b"", inventory.pack_offsets())

        def deal(packed: list[tuple[bytes, bytes]]) -> list[bytes]:
            nonlocal global_plan
            global_plan = make_global_plan(self._inventories(packed))
            return [share.encode() for share in global_plan.shares(ranks.size)]

        share = Share.decode(ranks.scatter(step, send, deal))
        return RankPlan(digest, inventory, share, global_plan)

    def _inventories(self, messages: list[tuple[bytes, bytes]]) -> list[LocalInventory]:
        """Return the inventories of all ranks, made from the descriptions that some ranks sent and the offsets of
        all."""
        descriptions = {rank: unpack(messages[rank][0]) for rank in dict.fromkeys(self._described_by)}
        pairs = zip(self._described_by, messages, strict=True)
        return [LocalInventory.unpack(descriptions[rank], offsets) for rank, (_, offsets) in pairs]


def in_table_order(global_plan: GlobalPlan) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return, for each chunk of the table, the position of its result in the concatenated results of all ranks."""
    order = global_plan.order
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))  # the inverse permutation of ``order``
    return position
