"""The common plan of all ranks, for a few bytes per rank, and for one digest per rank when nothing has changed.

1. Each rank sends digests: of the plan it remembers, of the description of what it holds, of all it holds, and of what
   should be equal on all ranks (:class:`~dcp_plugin.planning.local_inventory.RankLocal`). If that differs, they compare
   it key by key and begin again. A plan follows from the digests of all ranks. If every rank remembers the plan that
   follows now, that is all.
2. Otherwise rank 0 names one rank for each description, these send it, and all ranks send their offsets. Each gets
   back what it has to write.

A digest covers everything that the metadata depends on: keys and their paths, dtypes, shapes, boxes, kinds, ties. It
does not cover the bytes of values, whose lengths may change from save to save.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from torch.distributed.checkpoint.planner import WriteItem

from dcp_plugin.planning.global_plan import GlobalPlan, Share, make_global_plan
from dcp_plugin.planning.local_inventory import LocalInventory, RankLocal
from dcp_plugin.planning.save import items_of
from dcp_plugin.ranks import Ranks, pack, unpack

T = TypeVar("T")
_DIGEST = 16


class _Digests(NamedTuple):
    """The digests that a rank sends first."""

    plan: bytes
    description: bytes
    inventory: bytes
    doubtful: bytes
    """Of what should be the same on all ranks that have it; empty where there is nothing of that."""

    @classmethod
    def decode(cls, data: bytes) -> _Digests:
        return cls(*(data[at : at + _DIGEST] for at in range(0, 4 * _DIGEST, _DIGEST)))


@dataclass(frozen=True)
class RankPlan:
    """A plan as one rank knows it; ``global_plan`` is on rank 0 alone."""

    digest: bytes
    inventory: LocalInventory
    share: Share
    global_plan: GlobalPlan | None

    @functools.cached_property
    def items(self) -> list[WriteItem]:
        """What this rank writes, for DCP's interfaces."""
        return items_of(self.share, self.inventory)


@dataclass(frozen=True)
class _Reply(Generic[T]):
    """The answer of rank 0: the plan that all remember, or the ranks that have to send their description."""

    digest: bytes
    describers: list[int] | None
    differ: bool
    prepared: T


class PlanExchange:
    """Plans the saves of a group of ranks, and remembers the last plan."""

    def __init__(self) -> None:
        self._last: RankPlan | None = None
        self.repeated = False
        """Whether the last call found the plan remembered."""

    def plan(
        self,
        step: str,
        ranks: Ranks,
        hold: Callable[[], LocalInventory],
        prepare: Callable[[], T],
        local: RankLocal | None = None,
    ) -> tuple[RankPlan, T]:
        """The plan for what ``hold`` returns on all ranks, and what ``prepare`` returned on rank 0. Collective.

        Args:
            local: Knows, when ``hold`` has returned, what should be the same on all ranks. If it is not, ``hold`` and
                ``prepare`` are called once more.
        """
        mine: list[LocalInventory] = []

        def claim() -> bytes:
            mine[:] = [hold()]
            last = self._last.digest if self._last else bytes(_DIGEST)
            doubtful = local.digest(ranks.rank) if local else b""
            return b"".join(_Digests(last, mine[0].description.digest, mine[0].digest, doubtful))

        def answer(claims: list[bytes]) -> _Reply[T]:
            decoded = list(map(_Digests.decode, claims))
            differ = ranks.size > 1 and len({claim.doubtful for claim in decoded if claim.doubtful}) > 1
            return _Reply(*self._answer(decoded), differ, prepare())

        reply = ranks.combine(step, claim, answer)
        if reply.differ and local is not None and local.compare(step, ranks):
            reply = ranks.combine(step, claim, answer)
        describers = reply.describers
        self.repeated = describers is None
        if describers is not None:
            made: list[GlobalPlan] = []

            def tell() -> tuple[bytes, bytes]:
                return (pack(mine[0].description) if ranks.rank in describers else b"", mine[0].pack_offsets())

            def deal(told: list[tuple[bytes, bytes]]) -> list[bytes]:
                made.append(make_global_plan(self._inventories(told)))
                return [share.encode() for share in made[0].shares(ranks.size)]

            share = Share.decode(ranks.scatter(step, tell, deal))
            self._last = RankPlan(reply.digest, mine[0], share, made[0] if made else None)
        assert self._last is not None
        return self._last, reply.prepared

    def _answer(self, claims: list[_Digests]) -> tuple[bytes, list[int] | None]:
        """The digest of the plan that follows, and the ranks that have to send their description; None if all ranks
        remember that plan."""
        digest = hashlib.blake2b(b"".join(claim.inventory for claim in claims), digest_size=_DIGEST).digest()
        if self._last is not None and all(claim.plan == digest for claim in claims):
            return digest, None
        first: dict[bytes, int] = {}
        self._described_by = [first.setdefault(claim.description, rank) for rank, claim in enumerate(claims)]
        return digest, list(first.values())

    def _inventories(self, told: list[tuple[bytes, bytes]]) -> list[LocalInventory]:
        """What all ranks hold, from the descriptions that some have sent, and the offsets of all."""
        descriptions = {rank: unpack(told[rank][0]) for rank in dict.fromkeys(self._described_by)}
        pairs = zip(self._described_by, told, strict=True)
        return [LocalInventory.unpack(descriptions[rank], offsets) for rank, (_, offsets) in pairs]


def in_table_order(global_plan: GlobalPlan) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """For each chunk of the table, the position of its result among the results of all ranks, end to end."""
    order = global_plan.order
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    return position
