"""Keys that saves leave out: excluded ones, and frozen parameters that another checkpoint, the base, has.

With ``trainable_only`` a frozen parameter is left out if it has, on every rank, the very bytes that the base has. That
is known by 128-bit hashes: what is loaded is hashed during the load, and once more at each save. A base that was only
named (``base=``) is read once, at the first save, to compare. What a conversion has rounded is not what the base has.
A parameter that differs is saved, whatever was done to it; and all are, once the base is gone or is another checkpoint.

All ranks leave out the same keys: a tensor is stored with all its chunks or not at all. Rank 0 decides from what all
ranks tell.
"""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from dcp_plugin.config import CheckpointConfig
from dcp_plugin.errors import MAX_CANDIDATES, CheckpointError, CheckpointMismatch, SaveFailed, nearest, some
from dcp_plugin.format.index import CheckpointIndex
from dcp_plugin.format.payload import hashes_of
from dcp_plugin.format.summary import Base
from dcp_plugin.loading.key_map import find_prefix
from dcp_plugin.media import medium_of
from dcp_plugin.paths import Where, relative_to, resolved
from dcp_plugin.planning.load import ShardedLoadPlanner
from dcp_plugin.planning.local_inventory import ties_of
from dcp_plugin.ranks import Attempt, Ranks, pack, unpack
from dcp_plugin.records import OpenCheckpoint
from dcp_plugin.storage.open import open_alone
from dcp_plugin.storage.reader import ShardedReader
from dcp_plugin.tensors.host_memory import finish_device_work
from dcp_plugin.types import Flat, Shape, ShardedValue

logger = logging.getLogger("dcp_plugin")

_BATCH = 256 << 20  # bytes of a base that are read at a time to compare

_Hashes = tuple[tuple[Shape, Shape, bytes], ...]  # offsets, sizes and hash of each chunk of a tensor on this rank


@dataclass(frozen=True)
class Source:
    """A checkpoint that was loaded, or named."""

    path: Where
    fingerprint: str


@dataclass(frozen=True)
class LeftOut:
    """What all ranks leave out of a save, and the base that has it."""

    keys: Mapping[str, str]  # our key -> the key in the base
    base: Source | None = None

    def summary_of_base(self, checkpoint: Where) -> dict[str, str]:
        """What the summary of a checkpoint says of its base; nothing if it has all."""
        if not self.keys or self.base is None:
            return {}
        relative = relative_to(self.base.path, checkpoint)
        return Base(self.base.path, relative, self.base.fingerprint).to_summary()


@dataclass(frozen=True)
class _Origin:
    """Where the values of a parameter came from, and what they were on this rank."""

    source: Source
    key: str  # in the source
    hashes: _Hashes | None  # None if they were rounded on the way, so that the source has other values


@dataclass(frozen=True)
class _Frozen:
    """What one rank tells of a frozen parameter."""

    source: Source | None  # None if nobody knows where it came from
    key: str  # in the source
    same: bool  # whether the parameter still is what the source has
    nbytes: int  # on this rank: the source that has most is the base


@dataclass(frozen=True)
class _Told:
    """What one rank tells rank 0: the numbers of the ``exclude`` globs that have matched a key of its state, the keys
    if a glob may match none, and its frozen parameters."""

    globs: frozenset[int]
    keys: tuple[str, ...]
    frozen: dict[str, _Frozen]


class KeySelection:
    """Which keys the saves of one checkpointer leave out."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self.provenance = Provenance(config)
        self._globs_checked = not config.exclude
        self._matched: set[int] = set()
        self._said: set[str] = set()

    def without_excluded(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state without the keys that the configuration excludes."""
        if not (globs := self._config.exclude):
            return state
        hits = {key: [number for number, glob in enumerate(globs) if fnmatchcase(key, glob)] for key in state}
        self._matched.update(*hits.values())
        return {key: value for key, value in state.items() if not hits[key]}

    def agree(self, state: Attempt[Flat], ranks: Ranks, path: Where) -> LeftOut:
        """What this save leaves out, the same on all ranks. Collective, if there is anything to agree on.

        Args:
            state: This rank's; if it could not be staged, all ranks raise that.

        Raises:
            SaveFailed: The base is not known, or would be overwritten.
            CheckpointMismatch: A glob matches nothing; the named base does not fit.
        """
        if self._globs_checked and not self._config.trainable_only:
            return LeftOut({})
        decided = ranks.combine(
            f"decide what to leave out of {path}",
            lambda: pack(self._told(state.get())),
            lambda told: self._decide(list(map(unpack, told)), path),
        )
        self._globs_checked = True
        return decided

    def _told(self, state: Flat) -> _Told:
        frozen = self.provenance.of_frozen(state) if self._config.trainable_only else {}
        return _Told(frozenset(self._matched), () if self._globs_checked or self._matched else tuple(state), frozen)

    def _decide(self, told: list[_Told], path: Where) -> LeftOut:
        """On rank 0."""
        if not self._globs_checked:
            self._refuse_idle_globs(told)
        frozen = [(key, one) for each in told for key, one in each.frozen.items()]
        base = self._base_of(frozen, path)
        if base is None or self._is_lost(base):
            return LeftOut({})
        keys: dict[str, str] = {}
        changed: dict[str, None] = {}
        for key, one in frozen:
            same = one.same and one.source is not None and one.source.fingerprint == base.fingerprint
            if not same or keys.setdefault(key, one.key) != one.key:
                changed[key] = None
        if changed:
            self._warn(f"frozen parameters that are not as in {base.path} are saved: {some(list(changed), 5)}")
        return LeftOut({key: there for key, there in keys.items() if key not in changed}, base)

    def _refuse_idle_globs(self, told: list[_Told]) -> None:
        matched = frozenset[int]().union(*(each.globs for each in told))
        globs = [glob for number, glob in enumerate(self._config.exclude) if number not in matched]
        if globs:
            known = list(dict.fromkeys(key for each in told for key in each.keys))
            near = difflib.get_close_matches(globs[0], known[:MAX_CANDIDATES], n=1, cutoff=0.5) or known[:1]
            raise CheckpointMismatch(
                f"exclude={globs!r} matches no key of the state; its keys look like {', '.join(near) or 'nothing'}"
            )

    def _base_of(self, frozen: list[tuple[str, _Frozen]], path: Where) -> Source | None:
        """The named base, or the checkpoint that has most bytes of the frozen parameters; None if none is frozen."""
        if not frozen:
            return None
        nbytes = Counter[str]()
        sources: dict[str, Source] = {}
        for _, one in frozen:
            if one.source is not None:
                nbytes[one.source.fingerprint] += one.nbytes * one.same
                sources[one.source.fingerprint] = one.source
        if not sources:
            keys = list(dict.fromkeys(key for key, _ in frozen))
            raise SaveFailed(
                f"cannot save {path} with trainable_only=True: {len(keys)} parameters are frozen ({some(keys)}), "
                f"and nobody knows which checkpoint has them. Load that one first, through the same checkpointer, or "
                f"name it: base=PATH. trainable_only=False saves everything and links what does not change."
            )
        base = self.provenance.named or max(sources.values(), key=lambda source: nbytes[source.fingerprint])
        if path == base.path or (medium_of(path).kind(path) and resolved(path) == resolved(base.path)):
            raise SaveFailed(
                f"cannot save {path} with trainable_only=True: it is the base, which has the frozen parameters that "
                f"this save leaves out. Save to a new name."
            )
        return base

    def _is_lost(self, base: Source) -> bool:
        """Whether the base has been deleted, moved or overwritten since it was read: then a save without the frozen
        parameters could never be loaded."""
        try:
            found = open_alone(base.path, check=True)
            found.close()
        except (CheckpointError, OSError) as error:
            reason = f"the base {base.path} cannot be read any more ({error})"
        else:
            if found.fingerprint == base.fingerprint:
                return False
            reason = f"{base.path} has been overwritten since it was read, and is another checkpoint now"
        self._warn(f"everything is saved, also what is frozen: {reason}.")
        return True

    def _warn(self, text: str) -> None:
        """Once."""
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s", text)


class Provenance:
    """Which checkpoint one rank's frozen parameters came from, and whether they still are what it has."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._origins: dict[str, _Origin] = {}
        self.named: Source | None = None  # the base that was named, when it has been read

    def loaded(self, state: Flat, names: Mapping[str, str], opened: OpenCheckpoint) -> None:
        """Remember what was loaded.

        Args:
            state: The state after the load.
            names: The loaded keys, and their keys in the checkpoint.
        """
        base = opened.base or opened
        source = Source(resolved(base.path), base.fingerprint)  # a link may lead elsewhere tomorrow
        left_out = opened.index.left_out
        tensors: dict[str, ShardedValue] = {}
        names = {**names, **_tied_to(names, state)}
        for key, stored in names.items():
            self._origins.pop(key, None)
            value = state.get(key)
            if isinstance(value, ShardedValue) and not value.stored_whole and (not opened.base or stored in left_out):
                tensors[key] = value
        exact = {key: value for key, value in tensors.items() if _is_exact(value, opened.index, names[key])}
        hashes = _hashes(exact, self._config.io_threads)
        for key in tensors:
            self._origins[key] = _Origin(source, left_out.get(names[key], names[key]), hashes.get(key))

    def of_frozen(self, state: Flat) -> dict[str, _Frozen]:
        """What is known of each frozen parameter of a state."""
        tensors = ((key, one) for key, one in state.items() if isinstance(one, ShardedValue))
        # Nobody knows the bytes of those that are stored_whole.
        frozen = {key: one for key, one in tensors if one.frozen and not one.stored_whole}
        if frozen and self._config.base is not None and self.named is None:
            self.named = self._read(self._config.base, frozen)
        now = _hashes(frozen, self._config.io_threads)
        told = {}
        for key, value in frozen.items():
            origin = self._origins.get(key)
            nbytes = sum(chunk.tensor.nbytes for chunk in value.chunks)
            if origin is None:
                told[key] = _Frozen(None, "", False, nbytes)
            else:
                told[key] = _Frozen(origin.source, origin.key, origin.hashes == now[key], nbytes)
        return told

    def _read(self, base: str, frozen: Mapping[str, ShardedValue]) -> Source:
        """Read a base that was named, unless it was loaded, to know what it has."""
        threads = self._config.io_threads
        reader = ShardedReader(base, io_threads=threads, verify=self._config.verify_on_load, complete=False)
        with reader:
            return self._source_in(reader, frozen)

    def _source_in(self, reader: ShardedReader, frozen: Mapping[str, ShardedValue]) -> Source:
        if reader.index.left_out:
            raise CheckpointMismatch(
                f"{reader.path} is no base: it leaves out frozen parameters itself. Name the base that it has."
            )
        source = Source(resolved(reader.path), reader.fingerprint)
        if any(origin.source.fingerprint == source.fingerprint for origin in self._origins.values()):
            return source
        names = _names_in(frozen, reader)
        self._origins |= {key: _Origin(source, there, None) for key, there in names.items()}
        exact = {key: frozen[key] for key, there in names.items() if _is_exact(frozen[key], reader.index, there)}
        for batch in _batches(exact):
            copies = {key: _like(value) for key, value in batch.items()}
            planner = ShardedLoadPlanner(strict=False)
            planner.use_index(dict(copies), reader.index, names)
            reader.read_data(planner.create_local_plan(), planner).wait()
            hashes = _hashes(copies, self._config.io_threads)
            self._origins |= {key: _Origin(source, names[key], now) for key, now in hashes.items()}
        return source


def _tied_to(names: Mapping[str, str], state: Flat) -> dict[str, str]:
    """Parameters that were filled under another name, which is the same memory; and what that is in the checkpoint."""
    ties = ties_of(state)
    first = {ties.get(key, key): stored for key, stored in names.items()}
    return {key: first[ties.get(key, key)] for key in state if key not in names and ties.get(key, key) in first}


def _hashes(tensors: Mapping[str, ShardedValue], threads: int) -> dict[str, _Hashes]:
    chunks = [(key, chunk) for key, value in tensors.items() for chunk in value.chunks]
    finish_device_work(chunk.tensor for _, chunk in chunks)
    hashes: dict[str, _Hashes] = dict.fromkeys(tensors, ())
    for (key, chunk), said in zip(chunks, hashes_of([chunk.tensor for _, chunk in chunks], threads), strict=True):
        hashes[key] = (*hashes[key], (chunk.offsets, chunk.sizes, said))
    return hashes


def _names_in(frozen: Mapping[str, ShardedValue], reader: ShardedReader) -> dict[str, str]:
    """The key in the base of each parameter that it has: the same, or behind one prefix."""
    names = {key: key for key in frozen if key in reader.index}
    if not names:
        if (prefix := find_prefix(frozen, reader.index)) is None:
            raise CheckpointMismatch(
                f"base={reader.path} has none of the frozen parameters ({some(list(frozen))}), also not behind a "
                f"prefix{nearest(next(iter(frozen)), reader.index)}. Load it with PartialLoad(rename=...) first."
            )
        here, there = prefix
        names = {key: there + key.removeprefix(here) for key in frozen}
        names = {key: name for key, name in names.items() if name in reader.index}
    return {key: there for key, there in names.items() if _fits(frozen[key], reader.index, there)}


def _fits(value: ShardedValue, index: CheckpointIndex, key: str) -> bool:
    slot = index.slots[key]
    return index.table.dtype_of(slot) is not None and index.table.shape_of(slot) == value.shape


def _is_exact(value: ShardedValue, index: CheckpointIndex, key: str) -> bool:
    """Whether the stored numbers are the value's, not rounded to its dtype: then they can stand for it whatever dtype
    it will be loaded into."""
    stored, here = index.table.dtype_of(index.slots[key]), value.dtype
    if stored is None or stored == here:
        return stored == here
    widened = stored.is_floating_point and here.is_floating_point and stored.itemsize < here.itemsize
    return widened and here in (torch.float32, torch.float64)


def _like(value: ShardedValue) -> ShardedValue:
    """Memory for the same chunks on the host."""
    chunks = (chunk._replace(tensor=torch.empty(chunk.sizes, dtype=value.dtype)) for chunk in value.chunks)
    return replace(value, chunks=tuple(chunks))


def _batches(tensors: Mapping[str, ShardedValue]) -> Iterator[dict[str, ShardedValue]]:
    batch: dict[str, ShardedValue] = {}
    size = 0
    for key, value in tensors.items():
        batch[key] = value
        size += sum(chunk.tensor.nbytes for chunk in value.chunks)
        if size >= _BATCH:
            yield batch
            batch, size = {}, 0
    if batch:
        yield batch
