"""Ranks that hold different things: the rule, for saves and for loads.

**A checkpoint has one value for each key. Ranks that hold a key hold the same value or shards of one. If they do not, a
warning names the ranks and the key.** Decisions for all ranks follow from the state of all, never from rank 0 alone:

==============================  =====================================================================================
names, kinds, optimizers        the union of all ranks (:class:`~dcp_plugin.core.planning.local_inventory.Description`)
empty here, filled there        what is filled counts (:class:`~dcp_plugin.core.types.Standing`)
received by a load              does not count where another rank holds the key itself (:func:`note_received`)
modules, optimizers             compared at every save (:mod:`~dcp_plugin.core.planning.replicas`)
optimizer state of one rank     stored once per rank (:class:`RankLocal`)
other tensors and text          compared at the first save; that of the first rank is stored (:class:`RankLocal`)
plain numbers                   those of the first rank, as with stock: the loss differs between ranks in every script
a value marked ``PerRank``      stored once per rank, and each rank gets its own (:class:`RankEntry`)
keys without a target           unexpected in a load only if no rank takes them (:class:`Union`)
==============================  =====================================================================================

Most optimizer state is sharded like its parameter, or the same on all ranks (``step``). Plain tensors and values may be
neither: an 8-bit optimizer keeps the codes and scales of its own shard. Stored under one key, the state of rank 0 would
replace that of all other ranks. Such state is stored under a key that names the part of the parameter:

    optim.state.layer.weight.codes.rank1(8,0:16,32)         # rank 1 had rows 8 to 15, all 32 columns

Only a rank with the same part may load this state. It is never cut for another layout, since only the optimizer knows
the meaning of the numbers. State with equal bytes on all ranks counts as shared. The exception is a tensor with the
shape of the rank's shard: it belongs to the rank even while it is all zeros.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple
from weakref import ref

from dcp_plugin.core.errors import some, warn
from dcp_plugin.core.format.index import CheckpointIndex, KeyPath
from dcp_plugin.core.format.keys import LocalSlot
from dcp_plugin.core.format.payload import hashes_of, sample_of
from dcp_plugin.core.format.values import encode, is_plain
from dcp_plugin.core.ranks.collectives import Ranks, pack, unpack
from dcp_plugin.core.records import Shards, StateDetails
from dcp_plugin.core.state.optimizer import BESIDE, GROUPS
from dcp_plugin.core.types import Box, EncodedValue, Flat, RankEntry, ShardedValue, Standing

_SAMPLED = 4 << 20
"""Size of a tensor in bytes above which only a few places of it are compared between ranks. That is enough to notice a
different random state or a different batch."""
_PLACES = 64 << 10
"""The same for the slots of an optimizer, all of which change in a step."""
_OWN = b""
"""Stand-in for the hash of a tensor that has the shape of the shard and so belongs to the rank."""


class RankLocal:
    """Detector of optimizer state that differs between ranks. It remembers the keys that differed at earlier saves."""

    def __init__(self) -> None:
        self._apart: frozenset[str] = frozenset()
        self._doubtful: dict[str, tuple[str, bytes]] = {}
        self._shared: dict[str, bytes] = {}

    def with_rank_keys(
        self, state: Flat, paths: dict[str, KeyPath], details: StateDetails, rank: int
    ) -> tuple[Flat, dict[str, Standing]]:
        """Return the state with rank-specific keys for the entries that differed at an earlier comparison, and the
        standing of the keys that this rank does not hold itself. Change ``paths`` likewise.

        The hashes of all other entries that may differ are remembered for :meth:`digest` and :meth:`compare`.
        """
        shards, hashes = details.shards, _hashes(_not_empty(state, received), _SAMPLED)
        standing = {
            key: Standing.RECEIVED if value_hash == received[key][0] else Standing.CHANGED
            for key, value_hash in hashes.items()
        }
        for name, slots in details.loaded.items():
            if not shards.get(name) and all(_hash_at(state, f"{name}.{slot}") == slots[slot] for slot in slots):
                below = tuple(f"{name}.{part}." for part in ("state", GROUPS, *BESIDE))
                keys = [key for key in state if key.startswith(below) and _is_complete(state[key])]
                standing |= dict.fromkeys(keys, Standing.RECEIVED)
        held = _not_empty(state, details.shared - {key for key in standing if standing[key] == Standing.RECEIVED})
        self._shared = _hashes(held, _SAMPLED)
        # Plain state of sharded parameters: entries that differed before get keys of their own. A tensor with the shape
        # of the shard evidently belongs to the rank. The others are hashed, to be compared between ranks.
        local_slots = _slots_of_sharded(state, shards)
        rank_local = {key: slot_and_box for key, slot_and_box in local_slots.items() if key in self._apart}
        evident = {
            key
            for key, (_, box) in local_slots.items()
            if key not in rank_local and getattr(state[key], "shape", None) == box.sizes and prod(box.sizes) > 1
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
        return {renamed.get(key, key): value for key, value in state.items()}, standing

    @staticmethod
    def loaded(optimizers: Mapping[str, Any]) -> dict[str, dict[str, bytes]]:
        """Return :attr:`~dcp_plugin.core.records.StateDetails.loaded` of the adapters of optimizers."""
        known = {name: _optimizers.get(id(adapter.optimizer)) for name, adapter in optimizers.items()}
        return {name: entry[1] for name, entry in known.items() if entry and entry[0]() is optimizers[name].optimizer}

    def digest(self, rank: int) -> bytes:
        """Return a digest of the entries that may differ between ranks; empty if there are none. Ranks with different
        digests :meth:`compare` their entries.

        If a tensor has the shape of this rank's shard, the digest contains the rank's number. It then differs from that
        of every other rank, and the ranks compare.

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
            # A key differs if a rank has another hash than the first rank that has the key. The stand-in _OWN always
            # differs.
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
    """Return plain optimizer state that belongs to sharded parameters: key -> its slot, and the box of the parameter on
    this rank."""
    slots: dict[str, tuple[str, Box]] = {}
    prefixes = {f"{name}.state.": boxes for name, boxes in shards.items() if boxes}
    for key, value in state.items() if prefixes else ():
        if isinstance(value, ShardedValue) and (value.any_rank or value.stored_whole):
            continue  # equal on all ranks, or an item of torch.save, which has no hash
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


def _hashes(state: Flat, most: float = float("inf")) -> dict[str, bytes]:
    """Return a hash of each value or tensor. The hash of a tensor includes dtype and shape. A tensor has no hash if it
    is stored as one object, or if this rank has no part of it.

    Args:
        most: Size in bytes of a tensor above which a sample of it is hashed.
    """
    hashes: dict[str, bytes] = {}
    tensors: dict[str, ShardedValue] = {}
    for key, value in state.items():
        if isinstance(value, EncodedValue):
            hashes[key] = hashlib.blake2b(value.data, digest_size=16).digest()
        elif value.stored_whole or not value.chunks:
            continue
        elif value.chunks[0].tensor.nbytes > most:
            hashes[key] = sample_of(value.chunks[0].tensor) or b""
        else:
            tensors[key] = value
    rows = hashes_of([value.chunks[0].tensor for value in tensors.values()], 1)
    for (key, value), row in zip(tensors.items(), rows, strict=True):  # a row has up to 8 KiB, and travels to rank 0
        hashes[key] = hashlib.blake2b(row + f"{value.dtype}{value.shape}".encode(), digest_size=16).digest()
    return hashes


def _about_different(hashes_of_ranks: list[Mapping[str, bytes]]) -> str:
    """Return a warning that names each key with different values, and two ranks that differ; empty without differences.
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


def _is_complete(value: ShardedValue | EncodedValue) -> bool:
    return isinstance(value, EncodedValue) or [chunk.sizes for chunk in value.chunks] == [value.shape]


def _hash_at(state: Flat, key: str) -> bytes | None:
    """Return the hash of a slot; None if the state does not have it."""
    return _hashes({key: state[key]}, _PLACES).get(key) if key in state else None


received: dict[str, tuple[bytes, int]] = {}
"""Keys for which this rank had no value until a load gave it one -> the hash of the loaded value, and the ``id`` of the
object that has it."""


def note_received(key: str, value: ShardedValue | EncodedValue | None, owner: int, is_new: bool) -> None:
    """Remember a value that a load gives to this rank, which has held no value there itself.

    An average that only rank 1 keeps is loaded on every rank. From then on rank 0 has an old copy of it, which must not
    replace rank 1's at the next save.

    Args:
        value: None if it is unknown. Any later value then counts as changed.
        owner: The ``id`` of the object that has it.
        is_new: True if the object had no value there before this load. If false, the key is in :data:`received`: an
            earlier load gave the value to this object, or to another one while this one has its own.
    """
    if is_new or received[key][1] == owner:
        received[key] = b"" if value is None else _hashes({key: value}, _SAMPLED).get(key, b""), owner
    else:
        del received[key]


_optimizers: dict[int, tuple[ref[Any], dict[str, bytes]]] = {}
"""``id`` of an optimizer that a load has given slots -> the optimizer, and the hashes of these slots."""


def note_slots(optimizer: Any, slots: Mapping[str, Any]) -> None:
    """Remember the slots that a load gives to an optimizer.

    An optimizer that only rank 1 steps is loaded on every rank. From then on rank 0 has an old copy, which must not
    replace rank 1's at the next save. While all slots have the loaded bytes, this rank has not stepped the optimizer.
    The version counters of tensors would not tell, since fused steps do not count. Shards are not noted: each counts.
    """
    described = {
        key: slot if isinstance(slot, ShardedValue) else EncodedValue(encode(slot))
        for key, slot in slots.items()
        if isinstance(slot, ShardedValue) or is_plain(slot)
    }
    complete = {key: slot for key, slot in described.items() if _is_complete(slot)}
    hashes = _hashes(complete, _PLACES)
    if slots and hashes.keys() == slots.keys() and all(hashes.values()):
        number = id(optimizer)
        _optimizers[number] = ref(optimizer, lambda _: _optimizers.pop(number, None)), hashes


def _not_empty(state: Flat, keys: Iterable[str]) -> Flat:
    """Return the entries under these keys that the state has and that are not empty."""
    return {key: state[key] for key in keys if key in state and not getattr(state[key], "standing", Standing.HOLDS)}


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


class RankName(NamedTuple):
    """Name in a checkpoint of this rank's entry, for a value of which each rank has its own."""

    name: str
    """Name of this rank's entry, or of the value that all ranks share."""
    note: str = ""
    """A remark, to follow the path of the checkpoint in a warning."""
    is_kept: bool = False
    """True if this rank keeps its value, because the checkpoint has none that it could continue with."""
    saved_by: int = 0
    """Number of ranks that saved the value."""
    about: str = ""
    """The difference to the ranks of this load, for a message; empty without a difference."""
    keys: Collection[str] = ()
    """Keys of the value on this rank, if there is a difference."""


def name_on_rank(entry: RankEntry, index: CheckpointIndex, world_size: int | None) -> RankName:
    """Find the entry of this rank.

    Args:
        world_size: Number of ranks that saved the checkpoint; None if it is not recorded.
    """
    own, shared, entries = entry.name_on(entry.rank), entry.shared_name, _entries(index, entry)
    if not entries:
        if shared not in index and not index.under(f"{shared}."):
            return RankName(own)
        note = f" has one value of {shared!r} for all ranks: each rank takes it" if entry.world_size > 1 else ""
        return RankName(shared, note)
    if entry.is_derived:
        from dcp_plugin.core.state.random_streams import about_new_ranks  # the only objects of this kind

        about = about_new_ranks(len(entries), entry.world_size)
        name = own if entry.rank in entries else entry.name_on(min(entries))
        return RankName(name, f": {about}" if about else "")
    saved_by = world_size or max(entries) + 1
    # Each rank of a smaller world has an entry. A position in the data is valid only on the same number of ranks, since
    # other ranks divide the data otherwise.
    if saved_by == entry.world_size or (saved_by > entry.world_size and not entry.is_position):
        return RankName(own)
    is_kept = entry.is_position or entry.rank not in entries
    keys = [own + key for key in entries[min(entries)]]
    return RankName(own, "", is_kept, saved_by, _about_ranks(entry, saved_by), keys)


def _entries(index: CheckpointIndex, entry: RankEntry) -> dict[int, list[str]]:
    """Return the stored keys of a per-rank value by rank, without the value's name in front."""
    entries: dict[int, list[str]] = defaultdict(list)
    steps = entry.above.count(".") + 1
    for key in index.under(f"{entry.above}."):
        rank = key.removeprefix(f"{entry.above}.").partition(".")[0]
        # The step is text. An integer step would be the index of a list.
        if rank.isdecimal() and index.path_of(key)[steps : steps + 1] == (rank,):
            name = entry.name_on(int(rank))
            if f"{key}.".startswith(f"{name}."):
                entries[int(rank)].append(key.removeprefix(name))
    return entries


def _about_ranks(entry: RankEntry, saved_by: int) -> str:
    """Return a line about a per-rank value in a checkpoint that another number of ranks saved."""
    name, world_size = entry.shared_name, entry.world_size
    if entry.is_position:
        return (
            f"{name!r} has the positions of {saved_by} ranks in the data, which {world_size} ranks divide otherwise: "
            f"the data starts at the beginning"
        )
    to_last = "" if world_size == saved_by + 1 else f" to {world_size - 1}"
    return f"{name!r} has the values of {saved_by} ranks, and none for rank {saved_by}{to_last}: these keep their own"
