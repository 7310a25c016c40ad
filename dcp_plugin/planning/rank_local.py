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

from dcp_plugin.ranks import Ranks
from dcp_plugin.storage.hashing import hashes_of
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


def box_of(value: ShardedValue) -> Box:
    """The part of a tensor that this rank has. A rank has one, or none."""
    if not value.chunks:
        return (), ()
    chunk = value.chunks[0]
    return chunk.offsets, tuple(at + size for at, size in zip(chunk.offsets, chunk.sizes, strict=True))


class RankLocal:
    """Tells the state that ranks have for themselves, and remembers which it was at the last save."""

    def __init__(self) -> None:
        self._apart: frozenset[str] = frozenset()
        self._doubtful: dict[str, bytes] = {}

    def sorted_out(self, state: Flat, paths: dict[str, KeyPath], kinds: Mapping[str, str], rank: int) -> Flat:
        """The state with what is known to be this rank's alone under keys of its own; ``paths`` follow."""
        found = _slots_of_sharded(state, kinds)
        mine = {key: box for key, box in found.items() if key in self._apart}
        evident = {key for key, box in found.items() if key not in mine and _has_shape_of(state[key], box)}
        self._doubtful = _hashes({key: state[key] for key in found if key not in mine and key not in evident})
        self._doubtful |= dict.fromkeys(evident, _OWN)
        renamed: dict[str, str] = {}
        for key, box in mine.items():
            slot = key.rpartition(".")[2]
            renamed[key] = key.removesuffix(slot) + str(LocalSlot(slot, rank, box))
            if key in paths:
                *above, last = paths.pop(key)
                paths[renamed[key]] = (*above, str(last).removesuffix(slot) + str(LocalSlot(slot, rank, box)))
        return {renamed.get(key, key): value for key, value in state.items()}

    def digest(self, rank: int) -> bytes:
        """Of what might differ between ranks; empty where there is nothing of that. With what evidently does, it is
        like that of no other rank."""
        if not self._doubtful:
            return b""
        if _OWN in self._doubtful.values():
            return hashlib.blake2b(f"rank {rank}".encode(), digest_size=16).digest()
        together = b"".join(key.encode() + each for key, each in sorted(self._doubtful.items()))
        return hashlib.blake2b(together, digest_size=16).digest()

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

        found = ranks.combine(step, lambda: self._doubtful, differing)
        self._apart |= found
        return bool(found)


def _slots_of_sharded(state: Flat, kinds: Mapping[str, str]) -> dict[str, Box]:
    """The keys of plain optimizer state beside a parameter of which this rank has a part; and that part."""
    modules = [f"{name}." for name, kind in kinds.items() if kind == "module"]
    optimizers = [f"{name}.state." for name, kind in kinds.items() if kind == "optimizer"]
    parts: dict[str, Box] = {}
    plain: dict[str, str] = {}
    for key, value in state.items():
        part = _part_of(value)
        for prefix in optimizers:
            if key.startswith(prefix):
                fqn = key[len(prefix) :].rpartition(".")[0]
                if part is not None:
                    parts.setdefault(fqn, part)
                elif isinstance(value, EncodedValue) or not value.any_rank:
                    plain[key] = fqn
        for prefix in modules if part is not None else ():
            if key.startswith(prefix) and part is not None:
                parts[key[len(prefix) :]] = part
                parts.setdefault(key, part)  # of an optimizer over several modules
    return {key: parts[fqn] for key, fqn in plain.items() if fqn in parts}


def _part_of(value: ShardedValue | EncodedValue) -> Box | None:
    """The part that this rank has of a sharded tensor; None for anything that is whole here."""
    if not isinstance(value, ShardedValue) or not value.any_rank:
        return None
    box = box_of(value)
    return None if box == ((0,) * len(value.shape), value.shape) else box


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
