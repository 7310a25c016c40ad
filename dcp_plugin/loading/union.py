"""Keys that any rank takes, collected because ranks may hold different objects: pipeline stages, experts.

Each rank asks about the stored keys that it does not take. Usually no rank has a question, and the only exchange is one
small collective. Otherwise all ranks get the questions of all ranks, and each rank answers with the keys that it takes.
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
    """Indices of the questions whose key a target of this rank takes, packed."""
    owned: bytes
    """Indices of the questions whose key this rank takes for a shard, a module or an optimizer, packed."""
    idle: frozenset[str]
    """Globs and renames that match no key on this rank."""
    digest: int
    """Checksum of the taken keys, equal on ranks that take the same keys."""

    @classmethod
    def of(cls, asked: list[str], taken_keys: Collection[str], owned: Collection[str], idle: frozenset[str]) -> Answer:
        taken = [at for at, key in enumerate(asked) if key in taken_keys]
        digest = zlib.crc32("\n".join(sorted(taken_keys)).encode())
        return cls(pack(taken), pack([at for at in taken if asked[at] in owned]), idle, digest)


@dataclass(frozen=True)
class Union:
    """The combined answers of all ranks. The defaults apply if no rank has a question, or if there is only one rank."""

    taken: frozenset[str] = frozenset()
    """Keys of the questions that at least one rank takes."""
    owned: frozenset[str] = frozenset()
    """Keys of the questions that at least one rank takes for a shard, a module or an optimizer."""
    idle: frozenset[str] | None = None
    """Globs and renames that match no key on any rank; None if this rank's own are to be used."""
    ranks_differ: bool = False
    """True if ranks take different keys."""

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
    """Run ``work`` on each of several ranks, and have all ranks answer its questions. Collective.

    Args:
        work: Returns the keys that this rank asks about, possibly none; None if the rank does not need the union.
        answer: Answers the questions of all ranks.

    Returns:
        The union, equal on every rank; None if no rank needs it.
    """
    packed = ranks.combine(step, lambda: _packed(work()), _joined)
    if packed is None:
        return None
    asked = unpack(packed)
    return ranks.combine(step, lambda: answer(asked), lambda answers: Union.of(asked, answers))


def _packed(asked: list[str] | None) -> bytes | None:
    return None if asked is None else pack(asked)


def _joined(questions: list[bytes | None]) -> bytes | None:
    """Return the questions of all ranks without duplicates; None if no rank needs the union."""
    different = {packed for packed in questions if packed is not None}
    if not different:
        return None
    return pack(sorted({key for packed in different for key in unpack(packed)}))
