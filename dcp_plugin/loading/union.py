"""Keys that any rank takes, collected because ranks may hold different objects: pipeline stages, experts.

Each rank asks about the stored keys that it does not take. Usually no rank has a question, and the only exchange is one
small collective. Otherwise all ranks get the questions of all ranks, and each rank answers with the keys that it takes.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from dataclasses import dataclass

from dcp_plugin.ranks import pack, unpack


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
    """The combined answers of all ranks."""

    taken: frozenset[str]
    """Keys of the questions that at least one rank takes."""
    owned: frozenset[str]
    """Keys of the questions that at least one rank takes for a shard, a module or an optimizer."""
    idle: frozenset[str]
    """Globs and renames that match no key on any rank."""
    ranks_differ: bool
    """True if ranks take different keys."""

    @classmethod
    def of(cls, asked: list[str], answers: list[Answer]) -> Union:
        return cls(
            frozenset(asked[at] for answer in answers for at in unpack(answer.taken)),
            frozenset(asked[at] for answer in answers for at in unpack(answer.owned)),
            frozenset.intersection(*(answer.idle for answer in answers)),
            len({answer.digest for answer in answers}) > 1,
        )
