"""State that differs between ranks: optimizer state that belongs to one rank, and values that all ranks should share.

:class:`RankLocal` finds optimizer state that belongs to one rank and to its shard of a parameter. Most state is sharded
like the parameter, or the same on all ranks (``step``). Plain tensors and values may be neither: an 8-bit optimizer
keeps the codes and scales of its own shard. Stored under one key, the state of rank 0 would replace that of all other
ranks. Such state is therefore stored once per rank, under a key that names the part of the parameter:

    optim.state.layer.weight.codes.rank1(8,0:16,32)         # rank 1 had rows 8 to 15, all 32 columns

Only a rank with the same part may load this state. It is never cut for another layout, since only the optimizer knows
what the numbers mean. Equal bytes count as shared state. The exception is a tensor that has the shape of the rank's
shard: it belongs to the rank even while it is all zeros.

At the first save, :class:`RankLocal` also compares the values that all ranks are expected to share. A plain tensor or
value is stored once, as the first rank has it, and a load gives all ranks that value: the random states or data
positions of the other ranks are lost. So the first save of several ranks warns of values that differ. Numbers are not
compared: the loss, and lists of losses, differ between ranks in every script.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from math import prod

from dcp_plugin.errors import some, warn
from dcp_plugin.format.keys import LocalSlot
from dcp_plugin.format.payload import hashes_of, sample_of
from dcp_plugin.ranks import Ranks
from dcp_plugin.records import Box, Shards
from dcp_plugin.types import EncodedValue, Flat, KeyPath, ShardedValue

_SAMPLED = 4 << 20
"""Size of a tensor in bytes above which only a few places of it are compared between ranks. That is enough to notice a
different random state or a different batch."""
_OWN = b""
"""Stand-in for the hash of a tensor that has the shape of the shard and so belongs to the rank."""


class RankLocal:
    """Detector of optimizer state that differs between ranks. It remembers the keys that differed at earlier saves."""

    def __init__(self) -> None:
        self._apart: frozenset[str] = frozenset()
        self._doubtful: dict[str, tuple[str, bytes]] = {}
        self._shared: dict[str, bytes] = {}

    def with_rank_keys(
        self, state: Flat, paths: dict[str, KeyPath], shards: Shards, rank: int, shared: Collection[str]
    ) -> Flat:
        """Return the state with rank-specific keys for the entries that differed at an earlier comparison. Change
        ``paths`` likewise.

        Args:
            shared: Keys of values that all ranks are expected to share; :meth:`compare` compares them.
        """
        self._shared = _hashes({key: state[key] for key in shared & state.keys()}, _SAMPLED)
        local_slots = _slots_of_sharded(state, shards)
        rank_local = {key: slot_and_box for key, slot_and_box in local_slots.items() if key in self._apart}
        evident = {
            key for key, (_, box) in local_slots.items() if key not in rank_local and _has_shape_of(state[key], box)
        }
        hashes = _hashes({key: state[key] for key in local_slots if key not in rank_local and key not in evident})
        hashes |= dict.fromkeys(evident, _OWN)
        self._doubtful = {key: (local_slots[key][0], each) for key, each in hashes.items()}
        renamed: dict[str, str] = {}
        for key, (slot, box) in rank_local.items():
            own = str(LocalSlot(slot, rank, box))
            renamed[key] = key.removesuffix(slot) + own
            if key in paths:
                *above, last = paths.pop(key)
                paths[renamed[key]] = (*above, str(last).removesuffix(slot) + own)
        return {renamed.get(key, key): value for key, value in state.items()}

    def digest(self, rank: int) -> bytes:
        """Return a digest of the entries that may differ between ranks; empty if there are none. A tensor with the
        shape of the shard makes the digest differ from that of every other rank.

        A slot with one value for all parameters, as ``step`` mostly has, is hashed without the names of the parameters.
        Ranks with state for different parameters then have equal digests, and do not compare at every save.
        """
        if not self._doubtful and not self._shared:
            return b""
        slots = set(self._doubtful.values())
        entries = sorted(slots)
        if any(each == _OWN for _, each in slots):
            entries = [(f"rank {rank}", b"")]
        elif len({slot for slot, _ in slots}) < len(slots):
            entries = sorted((key, each) for key, (_, each) in self._doubtful.items())
        entries += sorted(self._shared.items())
        text = b"".join(name.encode() + each for name, each in entries)
        return hashlib.blake2b(text, digest_size=16).digest()

    def compare(self, step: str, ranks: Ranks) -> bool:
        """Remember the optimizer state that differs between ranks. Warn of shared values that differ. Collective.

        Returns:
            True if optimizer state differs that did not differ before.
        """

        def differing(of_ranks: list[tuple[dict[str, bytes], dict[str, bytes]]]) -> frozenset[str]:
            if message := _about_different([shared for _, shared in of_ranks]):
                warn(message)  # inside combine(): if warnings are errors, all ranks raise
            first: dict[str, bytes] = {}
            return frozenset(
                key
                for hashes, _ in of_ranks
                for key, each in hashes.items()
                if first.setdefault(key, each) != each or each == _OWN
            )

        hashes_here = {key: each for key, (_, each) in self._doubtful.items()}
        newly_differing = ranks.combine(step, lambda: (hashes_here, self._shared), differing)
        self._apart |= newly_differing
        return bool(newly_differing)


def _slots_of_sharded(state: Flat, shards: Shards) -> dict[str, tuple[str, Box]]:
    """Return the keys of plain optimizer state that belongs to a sharded parameter. Each key has its slot, and the box
    of the parameter on this rank."""
    slots: dict[str, tuple[str, Box]] = {}
    prefixes = {f"{name}.state.": boxes for name, boxes in shards.items() if boxes}
    for key, value in state.items() if prefixes else ():
        if isinstance(value, ShardedValue) and (value.any_rank or value.stored_whole):
            continue
        for prefix, boxes in prefixes.items():
            if key.startswith(prefix):
                fqn, slot = _known_first(key[len(prefix) :], boxes)
                if fqn is not None:
                    slots[key] = slot, boxes[fqn]
    return slots


def _known_first(text: str, names: Mapping[str, Box]) -> tuple[str | None, str]:
    """Split ``text`` at a dot into the longest name in ``names`` and the text after the dot; the name is None if there
    is none."""
    at = text.rfind(".")
    while at > 0 and text[:at] not in names:
        at = text.rfind(".", 0, at)
    return (text[:at], text[at + 1 :]) if at > 0 else (None, text)


def _has_shape_of(value: ShardedValue | EncodedValue, box: Box) -> bool:
    """Return whether a value is a tensor with the shape of the box. A box of one element never counts."""
    shape = tuple(end - begin for begin, end in zip(*box, strict=True))
    return isinstance(value, ShardedValue) and value.shape == shape and prod(shape) > 1


def _hashes(state: Flat, most: float = float("inf")) -> dict[str, bytes]:
    """Return a hash of each value or tensor; the hash of a tensor includes dtype and shape. Tensors that are stored as
    one object have none.

    Args:
        most: Size in bytes of a tensor above which a sample of it is hashed.
    """
    hashes: dict[str, bytes] = {}
    tensors: dict[str, ShardedValue] = {}
    for key, value in state.items():
        if isinstance(value, EncodedValue):
            hashes[key] = hashlib.blake2b(value.data, digest_size=16).digest()
        elif value.stored_whole:
            continue
        elif value.chunks[0].tensor.nbytes > most:
            hashes[key] = sample_of(value.chunks[0].tensor) or b""
        else:
            tensors[key] = value
    digests = hashes_of([value.chunks[0].tensor for value in tensors.values()], 1)
    for (key, value), digest in zip(tensors.items(), digests, strict=True):
        hashes[key] = digest + f"{value.dtype}{value.shape}".encode()
    return hashes


def _about_different(hashes_of_ranks: list[Mapping[str, bytes]]) -> str:
    """Return a warning that names each key with different values, and two ranks that differ; empty if there is none.
    A key that only some ranks have is compared among those ranks."""
    first: dict[str, tuple[int, bytes]] = {}
    different: dict[str, tuple[int, int]] = {}
    for rank, hashes in enumerate(hashes_of_ranks):
        for key, value_hash in hashes.items():
            other, expected = first.setdefault(key, (rank, value_hash))
            if value_hash != expected:
                different.setdefault(key, (other, rank))
    if not different:
        return ""
    keys = [f"{key} (ranks {rank} and {other})" for key, (rank, other) in different.items()]
    return (
        f"ranks have different values under the same key: {some(keys)}. A checkpoint has one value for all ranks, that "
        f"of the first rank. Where each rank needs its own value back, write dcp_plugin.PerRank(value) into the state."
    )
