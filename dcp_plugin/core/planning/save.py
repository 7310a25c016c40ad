"""The plan of a save: from the inventories of all ranks, the items that each rank writes.

The rule: a save whose plan has not changed exchanges only digests. :class:`PlanExchange` has two steps:

1. Each rank sends its *claim*: four digests, and a number. The digests are those of the plan that it remembers, its
   description, its inventory, and the values that should be equal on all ranks
   (:class:`~dcp_plugin.core.state.across_ranks.RankLocal`). Rank 0 computes the digest of the new plan from the digests
   of all inventories. If every rank remembers that plan, the exchange ends here.
2. Otherwise rank 0 chooses one rank for each description. The chosen ranks send their description, and all ranks send
   their offsets. Rank 0 makes the plan and sends each rank its share of the writing.

Two comparisons use the claims. If the digests of values differ, the ranks compare the values key by key, and start
again. If the numbers do not add up to 0, replicas of the remembered plan differ
(:mod:`~dcp_plugin.core.planning.replicas`). For a new plan, the ranks send such numbers once it is made.

The digests cover all inputs of the metadata: keys and their paths, dtypes, shapes, boxes, kinds, ties. The bytes of
values are not covered: their lengths may change from save to save.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from dcp_plugin.core.errors import CheckpointMismatch, UnsafeCheckpoint, some, warn
from dcp_plugin.core.format import values
from dcp_plugin.core.format.keys import holds_sharded, is_empty_mapping
from dcp_plugin.core.format.values import WholeItem
from dcp_plugin.core.planning.global_plan import GlobalPlan, Share, make_global_plan
from dcp_plugin.core.planning.local_inventory import LocalInventory
from dcp_plugin.core.ranks.collectives import Ranks, pack, unpack
from dcp_plugin.core.records import NewItem, RankPlan
from dcp_plugin.core.tensors._torch import is_tensor, sharded_value
from dcp_plugin.core.tensors.kinds import EXACTLY_TENSORS, is_stored_whole, narrowed
from dcp_plugin.core.types import EncodedValue, Flat, LocalChunk, ShardedValue, Standing

if TYPE_CHECKING:
    from dcp_plugin.core.planning.replicas import LocalReplicas


def encode_state(leaves: Mapping[str, Any], allow_pickle: tuple[str, ...] = ()) -> Flat:
    """Describe leaves for the planner: tensors as the chunks on this rank, anything else as bytes.

    Raises:
        CheckpointMismatch: Some leaves cannot be stored, such as tensors without memory. The message names the first
            ten.
        UnsafeCheckpoint: Some values could be restored only by executing pickled code. The message names the first ten.
    """
    flat: Flat = {}
    unsafe: list[str] = []
    misfits: list[str] = []
    changed: list[str] = []
    # Results by the ``id`` of a leaf: the same objects repeat for every parameter of an optimizer's group.
    same: dict[int, EncodedValue] = {}
    for key, leaf in leaves.items():
        if id(leaf) in same:
            flat[key] = same[id(leaf)]
        elif type(leaf) in values.SIZED and (reason := values.why_too_large(leaf)):
            misfits.append(f"{key} is {reason}")
        elif type(leaf) not in EXACTLY_TENSORS and values.is_plain(leaf):  # a class is compared faster than a value
            try:
                flat[key] = same[id(leaf)] = EncodedValue(values.encode(leaf), _standing(leaf))
            except ValueError as error:
                raise CheckpointMismatch(
                    f"{key} cannot be saved: {error}. Save the number as text, hex(number)."
                ) from error
        elif is_tensor(leaf):
            try:
                flat[key] = sharded_value(leaf)
            except CheckpointMismatch as error:
                misfits.append(f"{key} is {error}")
        elif isinstance(leaf, (ShardedValue, EncodedValue)):
            flat[key] = leaf
        else:
            if holds_sharded(leaf):
                raise CheckpointMismatch(
                    f"{key} is a {type(leaf).__name__} with sharded tensors inside; only one rank's part of them would "
                    f"be stored. Keep sharded tensors in dicts, lists or tuples."
                )
            notes: list[str] = []
            try:
                encoded = values.encode(leaf, any(fnmatchcase(key, glob) for glob in allow_pickle), notes)
                flat[key] = EncodedValue(encoded, _standing(leaf))
                changed += [f"{key} ({note})" for note in notes]
            except UnsafeCheckpoint as error:
                unsafe.append(f"{key} is {error}")
    if misfits:
        count = f"{len(misfits)} entries cannot be saved: " if len(misfits) > 1 else ""
        raise CheckpointMismatch(count + some(misfits, 10, "; "))
    if unsafe:
        raise UnsafeCheckpoint(
            f"{len(unsafe)} value(s) cannot be saved: {some(unsafe, 10, '; ')}. Make them plain (numbers, text, "
            f"lists, dicts, tensors), or name them in allow_pickle if you trust everybody who can write to the "
            f"checkpoints."
        )
    if changed:
        warn(f"stored as another type: {some(changed, 10, '; ')}.")
    return flat


def _standing(leaf: Any) -> Standing:
    if is_empty_mapping(leaf):
        return Standing.EMPTY_MAPPING
    is_empty = leaf is None or (isinstance(leaf, (list, tuple, set, frozenset)) and not leaf)
    return Standing.EMPTY if is_empty else Standing.HOLDS


def part_of(
    key: str, chunk: LocalChunk, offsets: tuple[int, ...], sizes: tuple[int, ...], stored_whole: bool
) -> torch.Tensor:
    """Return the part of a chunk inside a box; for a complete chunk its tensor, because not every class can narrow.

    Args:
        offsets: Offsets of the box in the tensor.
        stored_whole: :attr:`~dcp_plugin.core.types.ShardedValue.stored_whole` of the tensor.

    Raises:
        CheckpointMismatch: The tensor's class cannot be narrowed.
    """

    def cut(view: torch.Tensor) -> torch.Tensor:
        for dim, (at, size, origin) in enumerate(zip(offsets, sizes, chunk.offsets, strict=True)):
            if size < view.shape[dim]:
                view = view.narrow(dim, at - origin, size)
        return view

    if sizes == chunk.sizes:
        return chunk.tensor
    try:
        return narrowed(chunk.tensor, cut) if stored_whole else cut(chunk.tensor)
    except CheckpointMismatch as error:
        raise CheckpointMismatch(f"{key} is {error}") from error


DIGEST = 12  # bytes of a digest; a claim, pickled, stays below 96 bytes
_SUM = 8


class _Digests(NamedTuple):
    """The digests that a rank sends first."""

    plan: bytes
    description: bytes
    inventory: bytes
    doubtful: bytes
    """Digest of the values that should be equal on all ranks that have them; empty if there are none."""
    replicas: int
    """The sum of :meth:`~dcp_plugin.core.planning.replicas.LocalReplicas.sum`."""

    def encode(self) -> bytes:
        return self.replicas.to_bytes(_SUM, "big") + b"".join(digest[:DIGEST] for digest in self[:4])

    @classmethod
    def decode(cls, data: bytes) -> _Digests:
        plan, description, inventory, doubtful = (
            data[at : at + DIGEST] for at in range(_SUM, _SUM + 4 * DIGEST, DIGEST)
        )
        return cls(plan, description, inventory, doubtful, int.from_bytes(data[:_SUM], "big"))


def items_to_write(plan: RankPlan, state: Flat) -> list[NewItem]:
    """Return the items that this rank writes by its plan.

    Args:
        state: The state that the inventory of the plan describes.
    """
    # No DCP objects are made for complete chunks: for small tensors, these would cost more time than the writing.
    held: list[NewItem] = []
    for key, value in state.items():
        if isinstance(value, EncodedValue):
            held.append(NewItem(key, value.data))
            continue
        for offsets, sizes, tensor in value.chunks:
            if 0 not in sizes or 0 in value.shape:  # the rule of LocalInventory, so that the numbers agree
                held.append(NewItem(key, tensor, offsets, sizes))
    share = plan.share
    items = [held[number] for number in share.chunk.tolist()]
    for at, offsets, sizes in zip(share.part.tolist(), share.offsets.tolist(), share.sizes.tolist(), strict=True):
        key, data, begin, extent = items[at]
        box = tuple(offsets[: len(extent)]), tuple(sizes[: len(extent)])
        part = part_of(key, LocalChunk(begin, extent, cast(torch.Tensor, data)), *box, stored_whole=False)
        items[at] = NewItem(key, part, *box)
    # A chunk that is stored whole becomes an item of torch.save, which counts its bytes. No such chunk is cut.
    stored_whole = {key for key, value in state.items() if isinstance(value, ShardedValue) and value.stored_whole}
    for at, (key, data, *box) in enumerate(items) if stored_whole else ():
        if key in stored_whole and is_stored_whole(data):
            try:
                items[at] = NewItem(key, WholeItem.of(data), *box)
            except CheckpointMismatch as error:
                raise CheckpointMismatch(f"{key} is {error}") from error
    return items


@dataclass(frozen=True)
class PlanAnswer:
    """The answer of rank 0 to the claims of all ranks. ``digest`` is that of the plan for these claims."""

    digest: bytes
    describers: list[int] | None
    """Ranks that have to send their description; None if every rank remembers the plan."""
    differ: bool
    """True if state that should be equal on all ranks differs."""
    drifted: bool
    """True if replicas of the remembered plan differ."""


def differ(sums: Sequence[int]) -> bool:
    """Return whether any replicas differ.

    Args:
        sums: The number of each rank, :meth:`~dcp_plugin.core.planning.replicas.LocalReplicas.sum`.
    """
    return sum(sums) % (1 << 8 * _SUM) != 0


class PlanExchange:
    """Planner for the saves of a group of ranks. It remembers the last plan.

    A save combines the claims of all ranks into the answer of rank 0. Then every rank calls :meth:`plan`.

    Example:
        >>> import torch
        >>> from dcp_plugin.core.ranks.collectives import Ranks
        >>> state = encode_state({"w": torch.ones(2)})
        >>> exchange, ranks, inventory = PlanExchange(), Ranks(), LocalInventory.of_state(state, {})
        >>> answer = ranks.combine("plan", lambda: exchange.claim(inventory), exchange.answer)
        >>> [item.key for item in items_to_write(exchange.plan("plan", ranks, inventory, answer), state)]
        ['w']
    """

    def __init__(self) -> None:
        self._last: RankPlan | None = None
        self.repeated = False
        """True if the last call reused the remembered plan."""

    def claim(
        self, inventory: LocalInventory, doubtful: bytes = b"", replicas: Callable[[LocalReplicas], int] | None = None
    ) -> bytes:
        """Return the digests that this rank sends to rank 0.

        Args:
            doubtful: Digest of the state that should be equal on all ranks that have it.
            replicas: Returns the sum of the replicas of the remembered plan.
        """
        # The remembered plan knows the chunks that other ranks hold as well, provided that this inventory is its own.
        last, total = self._last, 0
        if replicas is not None and last is not None and last.inventory.digest == inventory.digest:
            total = replicas(last.replicas)
        digest = last.digest if last else bytes(DIGEST)
        return _Digests(digest, inventory.description.digest, inventory.digest, doubtful, total).encode()

    def answer(self, claims: list[bytes]) -> PlanAnswer:
        """Return the answer to the claims of all ranks. Called on rank 0."""
        decoded = list(map(_Digests.decode, claims))
        have_doubts = len({claim.doubtful for claim in decoded if claim.doubtful}) > 1
        digest = hashlib.blake2b(b"".join(claim.inventory for claim in decoded), digest_size=DIGEST).digest()
        first: dict[bytes, int] = {}
        # For each rank, the first rank with the same description, which sends it.
        self._described_by = [first.setdefault(claim.description, rank) for rank, claim in enumerate(decoded)]
        is_remembered = self._last is not None and all(claim.plan == digest for claim in decoded)
        drifted = is_remembered and differ([claim.replicas for claim in decoded])
        return PlanAnswer(digest, None if is_remembered else list(first.values()), have_doubts, drifted)

    def plan(self, step: str, ranks: Ranks, inventory: LocalInventory, answer: PlanAnswer) -> RankPlan:
        """Return the plan that all ranks remember, or make a new plan. Collective if it makes one."""
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
            descriptions = {rank: unpack(packed[rank][0]) for rank in dict.fromkeys(self._described_by)}
            pairs = zip(self._described_by, packed, strict=True)
            inventories = [LocalInventory.unpack(descriptions[rank], offsets) for rank, (_, offsets) in pairs]
            global_plan = make_global_plan(inventories)
            return [share.encode() for share in global_plan.shares(ranks.size)]

        share = Share.decode(ranks.scatter(step, send, deal))
        return RankPlan(digest, inventory, share, global_plan)


def in_table_order(global_plan: GlobalPlan) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return, for each chunk of the table, the position of its result in the concatenated results of all ranks."""
    order = global_plan.order
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))  # the inverse permutation of ``order``
    return position
