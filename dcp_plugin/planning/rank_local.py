"""Optimizer state that each rank has for itself, beside a parameter that is sharded.

The state of a sharded parameter is mostly sharded like it, or the same on all ranks (``step``). Plain tensors and
values may be neither: an 8-bit optimizer keeps the codes and scales of its own shard. Stored under one key, all ranks
would get what rank 0 had. So what differs between ranks is stored by rank, and the key says for which part of the
parameter:

    optim.state.layer.weight.codes.rank1(8,0:16,32)         # rank 1 had rows 8 to 15, all 32 columns

Only a rank that has the same part may take it. Cutting it anew is left to nobody: what the numbers mean, only the
optimizer knows.

Equal bytes are taken for the same state, but for a tensor that has the shape of the shard on any rank: that is
evidently the rank's own, also while it is still all zeros.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from dcp_plugin.format.checksums import hashes_of
from dcp_plugin.ranks import Ranks
from dcp_plugin.types import EncodedValue, Flat, KeyPath, Shape, ShardedValue

Box = tuple[Shape, Shape]
"""Begin and end of a part of a tensor, in each dimension; no dimensions for no part at all."""

_OWN = b""
"""Stands for the hash of what is evidently a rank's own."""
_LOCAL = re.compile(r"(?P<slot>.+)\.rank(?P<rank>\d+)\((?P<begin>[\d,]*):(?P<end>[\d,]*)\)", re.DOTALL)


@dataclass(frozen=True)
class LocalSlot:
    """A slot of an optimizer as one rank had it."""

    slot: str
    rank: int
    box: Box

    def __str__(self) -> str:
        begin, end = (",".join(map(str, edge)) for edge in self.box)
        return f"{self.slot}.rank{self.rank}({begin}:{end})"

    @classmethod
    def parse(cls, name: str) -> LocalSlot | None:
        """None for a slot that is not of one rank alone."""
        found = _LOCAL.fullmatch(name)
        if found is None:
            return None
        begin, end = (tuple(int(each) for each in found[edge].split(",") if each) for edge in ("begin", "end"))
        return cls(found["slot"], int(found["rank"]), (begin, end))


def without_rank(key: str) -> str:
    """A key without the rank and the part that it may be for."""
    found = LocalSlot.parse(key)
    return found.slot if found else key


Shards = Mapping[str, Mapping[str, Box]]
"""The parts of sharded parameters that this rank has: by the name of their optimizer, and by FQN."""


class RankLocal:
    """Tells the state that ranks have for themselves, and remembers which it was at the last save."""

    def __init__(self) -> None:
        self._apart: frozenset[str] = frozenset()
        self._doubtful: dict[str, tuple[str, bytes]] = {}

    def sorted_out(self, state: Flat, paths: dict[str, KeyPath], shards: Shards, rank: int) -> Flat:
        """The state with what is known to be this rank's alone under keys of its own; ``paths`` follow."""
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
        """Of what might differ between ranks; empty where there is nothing of that. With what evidently does, it is
        like that of no other rank.

        Where a slot is the same for all parameters (``step`` mostly is), the parameters do not count: ranks that have
        state for other parameters, but nothing that differs, need not compare each time.
        """
        if not self._doubtful:
            return b""
        slots = {(slot, each) for slot, each in self._doubtful.values()}
        if any(each == _OWN for _, each in slots):
            told = f"rank {rank}".encode()
        elif len({slot for slot, _ in slots}) == len(slots):
            told = b"".join(slot.encode() + each for slot, each in sorted(slots))
        else:
            told = b"".join(key.encode() + each for key, (_, each) in sorted(self._doubtful.items()))
        return hashlib.blake2b(told, digest_size=16).digest()

    def compare(self, step: str, ranks: Ranks) -> bool:
        """Find out what differs between ranks; whether anything does. Collective."""

        def differing(all_hashes: list[dict[str, bytes]]) -> frozenset[str]:
            first: dict[str, bytes] = {}
            return frozenset(
                key
                for hashes in all_hashes
                for key, each in hashes.items()
                if first.setdefault(key, each) != each or each == _OWN
            )

        mine = {key: each for key, (_, each) in self._doubtful.items()}
        found = ranks.combine(step, lambda: mine, differing)
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
    """A known name in front of a dot, the longest, and what is behind it."""
    at = rest.rfind(".")
    while at > 0:
        if rest[:at] in known:
            return rest[:at], rest[at + 1 :]
        at = rest.rfind(".", 0, at)
    return None, rest


def _has_shape_of(value: ShardedValue | EncodedValue, box: Box) -> bool:
    """Whether a tensor has the shape of a part, and not of a single number."""
    shape = tuple(end - begin for begin, end in zip(*box, strict=True))
    return isinstance(value, ShardedValue) and value.shape == shape and prod(shape) > 1


def _hashes(state: Flat) -> dict[str, bytes]:
    """Of each tensor or value, with its dtype and shape."""
    tensors = {key: value for key, value in state.items() if isinstance(value, ShardedValue)}
    bytes_of = dict(zip(tensors, hashes_of([value.chunks[0].tensor for value in tensors.values()], 1), strict=True))
    hashes = {}
    for key, value in state.items():
        if isinstance(value, ShardedValue):
            hashes[key] = bytes_of[key] + f"{value.dtype}{value.shape}".encode()
        else:
            hashes[key] = hashlib.blake2b(value.data, digest_size=16).digest()
    return hashes
