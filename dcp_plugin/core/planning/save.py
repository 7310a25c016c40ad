"""The plan of a save: from the inventories of all ranks, the items that each rank writes.

The rule: a save whose plan has not changed exchanges only digests. :class:`PlanExchange` has two steps:

1. Each rank sends its *claim*: four digests, and a number. The first digest is that of the plan that the rank
   remembers. The others are those of its description, of its inventory, and of the values that should be equal on all
   ranks (:class:`~dcp_plugin.core.state.across_ranks.RankLocal`). Rank 0 computes the digest of the new plan from the
   digests of all inventories. If every rank remembers that plan, the exchange ends here.
2. Otherwise rank 0 chooses one rank for each description. The chosen ranks send their description, and all ranks send
   their offsets. Rank 0 makes the plan and sends each rank its share of the writing.

Two comparisons use the claims. If the digests of values differ, the ranks compare the values key by key, and start
again. The number is a checksum of this rank's replicas under the remembered plan
(:mod:`~dcp_plugin.core.planning.replicas`). The numbers of all ranks add up to 0 if all replicas are equal. A claim
cannot have the number for a new plan, so the ranks send it once that plan is made.

The digests cover all inputs of the metadata: keys and their paths, dtypes, shapes, boxes, kinds, ties. The bytes of
values are not covered: their lengths may change from save to save.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch

from dcp_plugin.core.errors import CheckpointMismatch
from dcp_plugin.core.format.values import WholeItem
from dcp_plugin.core.paths import Where
from dcp_plugin.core.planning.global_plan import GlobalPlan, Share, make_global_plan
from dcp_plugin.core.planning.local_inventory import LocalInventory
from dcp_plugin.core.ranks.collectives import Ranks, pack, unpack
from dcp_plugin.core.records import NewItem, RankPlan
from dcp_plugin.core.tensors.kinds import is_stored_whole, part_of
from dcp_plugin.core.types import EncodedValue, Flat, LocalChunk, ShardedValue

if TYPE_CHECKING:
    from dcp_plugin.core.planning.replicas import Drift, Samples


DIGEST = 12  # bytes of a digest; a claim, pickled, stays below 96 bytes
_SUM = 8


class _Claim(NamedTuple):
    """The digests and the number that a rank sends first."""

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
    def decode(cls, data: bytes) -> _Claim:
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
    state_differs: bool
    """True if state that should be equal on all ranks differs."""
    have_drifted: bool
    """True if replicas of the remembered plan differ."""


def replicas_differ(sums: Sequence[int]) -> bool:
    """Return whether any replicas differ.

    Args:
        sums: The number of each rank, :meth:`~dcp_plugin.core.planning.replicas.LocalReplicas.sum`.
    """
    return sum(sums) % (1 << 8 * _SUM) != 0


class PlanExchange:
    """Planner for the saves of a group of ranks. It remembers the last plan.

    A save combines the claims of all ranks into the answer of rank 0. Then every rank calls :meth:`plan`, and
    :meth:`compare_replicas`. :meth:`dcp_plugin.core.saving.job.SavePipeline.plan` is the complete dialogue.

    Example:
        >>> import torch
        >>> from pathlib import Path
        >>> from dcp_plugin.core.format.keys import encode_state
        >>> from dcp_plugin.core.ranks.collectives import Ranks
        >>> state, path = encode_state({"w": torch.ones(2)}), Path("run/step-1")
        >>> exchange, ranks, inventory = PlanExchange(), Ranks(), LocalInventory.of_state(state, {})
        >>> answer = ranks.combine("plan", lambda: exchange.claim(path, ranks, state, inventory), exchange.answer)
        >>> [item.key for item in items_to_write(exchange.plan("plan", ranks, inventory, answer), state)]
        ['w']
    """

    def __init__(self) -> None:
        self._last: RankPlan | None = None
        # On rank 0, from the answer until the plan is made: for each rank, the first rank with the same description.
        self._described_by: list[int] = []
        self.repeated = False
        """True if the last call reused the remembered plan."""
        self.drift: Drift | None = None  # replicas that have differed at an earlier save

    def forget(self) -> None:
        """Forget the last plan, because the group of ranks that remembered it no longer exists."""
        self._last = None

    def claim(self, path: Where, ranks: Ranks, state: Flat, inventory: LocalInventory, doubtful: bytes = b"") -> bytes:
        """Return the digests and the number that this rank sends to rank 0.

        Args:
            doubtful: Digest of the values that should be equal on all ranks that have them.
        """
        last, total = self._last, 0
        # The remembered plan knows the chunks that other ranks hold as well, provided that this inventory is its own.
        if ranks.size > 1 and last is not None and last.inventory.digest == inventory.digest:
            total = last.replicas.sum(state, path)
        digest = last.digest if last else bytes(DIGEST)
        return _Claim(digest, inventory.description.digest, inventory.digest, doubtful, total).encode()

    def answer(self, encoded: list[bytes]) -> PlanAnswer:
        """Return the answer to the claims of all ranks. Called on rank 0."""
        claims = list(map(_Claim.decode, encoded))
        state_differs = len({claim.doubtful for claim in claims if claim.doubtful}) > 1
        digest = hashlib.blake2b(b"".join(claim.inventory for claim in claims), digest_size=DIGEST).digest()
        first: dict[bytes, int] = {}
        self._described_by = [first.setdefault(claim.description, rank) for rank, claim in enumerate(claims)]
        is_remembered = self._last is not None and all(claim.plan == digest for claim in claims)
        have_drifted = is_remembered and replicas_differ([claim.replicas for claim in claims])
        return PlanAnswer(digest, None if is_remembered else list(first.values()), state_differs, have_drifted)

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

    def compare_replicas(
        self, step: str, path: Where, ranks: Ranks, plan: RankPlan, state: Flat, answer: PlanAnswer
    ) -> Drift | None:
        """Return the replicas that differ; None if all are equal. Rank 0 warns of them.

        Collective, unless the ranks have remembered the plan and their replicas are equal. :attr:`drift` remembers the
        result, and replicas are not compared again.
        """
        from dcp_plugin.core.planning import replicas  # a process alone has nothing to compare

        def drift_of(of_ranks: list[Samples]) -> Drift:
            assert plan.global_plan is not None, "rank 0 has made it"
            return replicas.report(of_ranks, plan.global_plan.table.keys, plan.global_plan.objects)

        have_drifted = answer.have_drifted
        if answer.describers is not None:  # the ranks have made this plan just now
            have_drifted = ranks.combine(step, lambda: plan.replicas.sum(state, path), replicas_differ)
        if not have_drifted:
            return None
        self.drift = ranks.combine(step, lambda: plan.replicas.samples(state, path), drift_of)
        return self.drift


def in_table_order(global_plan: GlobalPlan) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return, for each chunk of the table, the position of its result in the concatenated results of all ranks."""
    order = global_plan.order
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))  # the inverse permutation of ``order``
    return position
