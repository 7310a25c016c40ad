"""Keys judged on the union over ranks, because ranks may hold different objects: pipeline stages, experts.

Each rank asks about the stored keys that it does not take. Usually no rank asks, and one small collective is all.
Otherwise the questions of all ranks go to all ranks, and each rank answers which of the keys it takes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass

from dcp_plugin.ranks import Ranks, pack, unpack


@dataclass(frozen=True)
class Answer:
    """One rank's answer to the questions of all ranks."""

    taken: bytes
    """The places among the questions of the keys that a target of this rank takes, packed."""
    owned: bytes
    """Those that it takes for a shard, or for a module or an optimizer of its own; packed."""
    idle: frozenset[str]
    """The globs and renames that match nothing on this rank."""
    digest: int
    """Equal on ranks that take the same keys."""

    @classmethod
    def of(cls, asked: list[str], mine: Collection[str], owned: Collection[str], idle: frozenset[str]) -> Answer:
        taken = [at for at, key in enumerate(asked) if key in mine]
        digest = zlib.crc32("\n".join(sorted(mine)).encode())
        return cls(pack(taken), pack([at for at in taken if asked[at] in owned]), idle, digest)


@dataclass(frozen=True)
class Union:
    """The answers of all ranks; by default those of ranks of which none asks, or of a rank alone."""

    taken: frozenset[str] = frozenset()
    """The keys among the questions that some rank takes."""
    owned: frozenset[str] = frozenset()
    """Those that some rank takes for a shard, or for a module or an optimizer of its own."""
    idle: frozenset[str] | None = None
    """The globs and renames that match nothing on any rank; None if they are this rank's."""
    ranks_differ: bool = False
    """Whether ranks take different keys."""

    @classmethod
    def of(cls, asked: list[str], answers: list[Answer]) -> Union:
        return cls(
            frozenset(asked[at] for answer in answers for at in unpack(answer.taken)),
            frozenset(asked[at] for answer in answers for at in unpack(answer.owned)),
            frozenset.intersection(*(answer.idle for answer in answers)),
            len({answer.digest for answer in answers}) > 1,
        )


def ask_all(
    ranks: Ranks, step: str, work: Callable[[], list[str] | None], answer: Callable[[list[str]], Answer]
) -> Union | None:
    """Run ``work`` on every rank, and have its questions answered. Collective.

    Args:
        work: Returns the keys that this rank asks about, which may be none; None if it need not know the union.
        answer: Answers the questions of all ranks.

    Returns:
        The same on every rank: None if no rank needs to know.
    """
    if ranks.size == 1:
        questions = work()
        return None if questions is None else Union.of(questions, [answer(questions)])
    packed = ranks.combine(step, lambda: _packed(work()), _joined)
    if packed is None:
        return None
    asked = unpack(packed)
    return ranks.combine(step, lambda: answer(asked), lambda answers: Union.of(asked, answers))


def _packed(asked: list[str] | None) -> bytes | None:
    return None if asked is None else pack(asked)


def _joined(questions: list[bytes | None]) -> bytes | None:
    """The questions of all ranks, each once."""
    different = {packed for packed in questions if packed is not None}
    if not different:
        return None
    return pack(sorted({key for packed in different for key in unpack(packed)}))
