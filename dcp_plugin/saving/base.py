"""Keys that saves leave out: excluded keys, and frozen parameters that another checkpoint, the base, has.

With ``trainable_only`` a save leaves out a frozen parameter if, on every rank, it has exactly the bytes that the base
has. A comparison of hashes decides: a load hashes the loaded parameters, and each save hashes them again. A
base that is only named (``base=``) is read and compared once, at the first save. A parameter that a conversion rounded
differs from the base. A parameter that differs is saved, for whatever reason it differs; and all parameters are saved
if the base is deleted or replaced by another checkpoint.

All ranks leave out the same keys: a tensor is stored with all its chunks or not at all. Rank 0 decides from the reports
of all ranks.
"""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from dcp_plugin.config import CheckpointConfig
from dcp_plugin.errors import MAX_CANDIDATES, CheckpointError, CheckpointMismatch, SaveFailed, nearest, some
from dcp_plugin.format.index import CheckpointIndex
from dcp_plugin.format.payload import hashes_of
from dcp_plugin.format.summary import Base
from dcp_plugin.loading.renames import find_prefix
from dcp_plugin.media import medium_of
from dcp_plugin.paths import Where, relative_to, resolved
from dcp_plugin.planning.load import ShardedLoadPlanner
from dcp_plugin.planning.local_inventory import ties_of
from dcp_plugin.ranks import Attempt, Ranks, pack, unpack
from dcp_plugin.records import OpenCheckpoint
from dcp_plugin.storage.open import open_checkpoint
from dcp_plugin.storage.reader import ShardedReader
from dcp_plugin.tensors.host_memory import finish_device_work
from dcp_plugin.types import Flat, Shape, ShardedValue

logger = logging.getLogger("dcp_plugin")

_BATCH = 256 << 20  # bytes of a base to read and compare at a time

_Hashes = tuple[tuple[Shape, Shape, bytes], ...]  # offsets, sizes and hash of each chunk of a tensor on this rank


@dataclass(frozen=True)
class KnownCheckpoint:
    """Checkpoint that was loaded, or named."""

    path: Where
    fingerprint: str


@dataclass(frozen=True)
class LeftOut:
    """Keys that all ranks leave out of a save, and the record of the base for its summary."""

    keys: Mapping[str, str] = field(default_factory=dict)  # our key -> the key in the base
    base: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Origin:
    """Origin of the values of a parameter, and their hashes on this rank."""

    source: KnownCheckpoint
    key: str  # in the source
    hashes: _Hashes | None  # None if a conversion rounded them, so that the source has other values


@dataclass(frozen=True)
class _Frozen:
    """Report of one rank about a frozen parameter."""

    source: KnownCheckpoint | None  # None if the origin is unknown
    key: str  # in the source
    same: bool  # whether the parameter is still equal to the source
    nbytes: int  # on this rank: the source with the most bytes becomes the base


class KeySelection:
    """Choice of the keys that the saves of one checkpointer leave out.

    It knows the origins of the frozen parameters on this rank, and whether they are still equal to those of the
    checkpoint that they come from.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._origins: dict[str, _Origin] = {}
        self._named: KnownCheckpoint | None = None  # the named base, after it was read
        self._globs_checked = not config.exclude
        self._matched: set[int] = set()  # numbers of the globs in ``exclude`` that have matched a key on this rank
        self._warned: set[str] = set()  # warnings that were logged

    def loaded(self, state: Flat, names: Mapping[str, str], opened: OpenCheckpoint) -> None:
        """Remember the loaded checkpoint.

        Args:
            state: The state after the load.
            names: The loaded keys, and their keys in the checkpoint.
        """
        base = opened.base or opened
        source = KnownCheckpoint(resolved(base.path), base.fingerprint)  # a link may later be redirected
        left_out = opened.index.left_out
        tensors: dict[str, ShardedValue] = {}
        names = {**names, **_tied_to(names, state)}
        for key, stored in names.items():
            self._origins.pop(key, None)
            value = state.get(key)
            if isinstance(value, ShardedValue) and not value.stored_whole and (not opened.base or stored in left_out):
                tensors[key] = value
        exact = {key: value for key, value in tensors.items() if _is_exact(value, opened.index, names[key])}
        hashes = _hashes(exact, self._config.io.threads)
        for key in tensors:
            self._origins[key] = _Origin(source, left_out.get(names[key], names[key]), hashes.get(key))

    def _frozen_in(self, state: Flat) -> dict[str, _Frozen]:
        """Return the report of this rank about each frozen parameter of a state."""
        tensors = ((key, value) for key, value in state.items() if isinstance(value, ShardedValue))
        # A parameter with stored_whole is a torch.save file in the base, whose bytes are not compared.
        frozen = {key: value for key, value in tensors if value.frozen and not value.stored_whole}
        if frozen and self._config.base is not None and self._named is None:
            self._named = self._read(self._config.base, frozen)
        now = _hashes(frozen, self._config.io.threads)
        reports = {}
        for key, value in frozen.items():
            origin = self._origins.get(key)
            nbytes = sum(chunk.tensor.nbytes for chunk in value.chunks)
            if origin is None:
                reports[key] = _Frozen(None, "", False, nbytes)
            else:
                reports[key] = _Frozen(origin.source, origin.key, origin.hashes == now[key], nbytes)
        return reports

    def _read(self, base: str, frozen: Mapping[str, ShardedValue]) -> KnownCheckpoint:
        """Read a named base, unless it was loaded, to find out which parameters it has."""
        config = self._config
        options, threads, verify = config.storage_options, config.io.threads, config.io.verify
        with ShardedReader(base, io_threads=threads, verify=verify, complete=False, storage_options=options) as reader:
            if reader.index.left_out:
                raise CheckpointMismatch(
                    f"{reader.path} cannot be the base: it leaves out frozen parameters itself. Name its base instead."
                )
            source = KnownCheckpoint(resolved(reader.path), reader.fingerprint)
            if any(origin.source.fingerprint == source.fingerprint for origin in self._origins.values()):
                return source
            names = _names_in(frozen, reader)
            self._origins |= {key: _Origin(source, stored, None) for key, stored in names.items()}
            exact = {key: frozen[key] for key, stored in names.items() if _is_exact(frozen[key], reader.index, stored)}
            for batch in _batches(exact):
                copies = {key: _like(value) for key, value in batch.items()}
                planner = ShardedLoadPlanner(strict=False)
                planner.use_index(dict(copies), reader.index, names)
                reader.read_data(planner.create_local_plan(), planner).wait()
                hashes = _hashes(copies, threads)
                self._origins |= {key: _Origin(source, names[key], now) for key, now in hashes.items()}
        return source

    def without_excluded(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state without the keys that the configuration excludes."""
        if not (globs := self._config.exclude):
            return state
        hits = {key: [number for number, glob in enumerate(globs) if fnmatchcase(key, glob)] for key in state}
        self._matched.update(*hits.values())
        return {key: value for key, value in state.items() if not hits[key]}

    def agree(self, state: Attempt[Flat], ranks: Ranks, path: Where) -> LeftOut:
        """Check the globs of the first save, and return the keys that the save leaves out, the same on all ranks.
        Collective, if any may be left out.

        Args:
            state: The state of this rank; if its staging failed, all ranks raise the failure.

        Raises:
            SaveFailed: The base is unknown, or would be overwritten.
            CheckpointMismatch: A glob matches no key; the named base does not fit.
        """
        if not self._globs_checked:
            keys = state.then(lambda flat: [] if self._matched else list(flat))
            step = f"check what to exclude from {path}"
            ranks.combine(step, lambda: (self._matched, keys.get()), self._refuse_idle_globs)
            self._globs_checked = True
        if not self._config.trainable_only:
            return LeftOut()
        return ranks.combine(
            f"decide what to leave out of {path}",
            lambda: pack(self._frozen_in(state.get())),
            lambda reports: self._decide(list(map(unpack, reports)), path),
        )

    def _decide(self, reports: list[dict[str, _Frozen]], path: Where) -> LeftOut:
        """Decide on rank 0 from the reports of all ranks."""
        frozen = [(key, parameter) for report in reports for key, parameter in report.items()]
        base = self._base_of(frozen, path)
        if base is None or self._is_lost(base):
            return LeftOut()
        keys: dict[str, str] = {}
        changed: dict[str, None] = {}
        for key, parameter in frozen:
            same = parameter.same and parameter.source is not None and parameter.source.fingerprint == base.fingerprint
            if not same or keys.setdefault(key, parameter.key) != parameter.key:
                changed[key] = None
        if changed:
            self._warn(f"frozen parameters that are not as in {base.path} are saved: {some(list(changed), 5)}")
        record = Base(base.path, relative_to(base.path, path), base.fingerprint).to_summary()
        return LeftOut({key: base_key for key, base_key in keys.items() if key not in changed}, record)

    def _refuse_idle_globs(self, reports: list[tuple[set[int], list[str]]]) -> None:
        """Refuse globs that match no key of any rank.

        Args:
            reports: For each rank, the numbers of the globs that match a key; and the keys, if none does.
        """
        matched = set[int]().union(*(globs for globs, _ in reports))
        globs = [glob for number, glob in enumerate(self._config.exclude) if number not in matched]
        if globs:
            keys = list(dict.fromkeys(key for _, others in reports for key in others))
            near = difflib.get_close_matches(globs[0], keys[:MAX_CANDIDATES], n=1, cutoff=0.5) or keys[:1]
            raise CheckpointMismatch(
                f"exclude={globs!r} matches no key of the state; its keys look like {', '.join(near) or 'nothing'}"
            )

    def _base_of(self, frozen: list[tuple[str, _Frozen]], path: Where) -> KnownCheckpoint | None:
        """Return the named base, or the checkpoint with most bytes of the frozen parameters; None if none is frozen."""
        if not frozen:
            return None
        nbytes = Counter[str]()
        sources: dict[str, KnownCheckpoint] = {}
        for _, parameter in frozen:
            if parameter.source is not None:
                nbytes[parameter.source.fingerprint] += parameter.nbytes * parameter.same
                sources[parameter.source.fingerprint] = parameter.source
        if not sources:
            keys = list(dict.fromkeys(key for key, _ in frozen))
            raise SaveFailed(
                f"cannot save {path} with trainable_only=True: {len(keys)} parameters are frozen ({some(keys)}), and "
                f"no known checkpoint has them. Load the one that has them first, through the same checkpointer, or "
                f"name it with base=PATH. trainable_only=False saves everything and links unchanged tensors."
            )
        base = self._named or max(sources.values(), key=lambda source: nbytes[source.fingerprint])
        if path == base.path or (medium_of(path).kind(path) and resolved(path) == resolved(base.path)):
            raise SaveFailed(
                f"cannot save {path} with trainable_only=True: this path is the base, which has the frozen parameters "
                f"that the save leaves out. Save to a new name."
            )
        return base

    def _is_lost(self, base: KnownCheckpoint) -> bool:
        """Return whether the base has been deleted, moved or overwritten since it was read.

        Then a save without the frozen parameters could never be loaded.
        """
        try:
            current = open_checkpoint(base.path, check=True, complete=False)
            fingerprint = current.fingerprint  # that of a folder of another tool is computed from its open files
            current.close()
        except (CheckpointError, OSError) as error:
            reason = f"the base {base.path} cannot be read any more ({error})"
        else:
            if fingerprint == base.fingerprint:
                return False
            reason = f"{base.path} has been overwritten since it was read, and is another checkpoint now"
        self._warn(f"everything is saved, also what is frozen: {reason}.")
        return True

    def _warn(self, text: str) -> None:
        """Log a warning once."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)


def _tied_to(names: Mapping[str, str], state: Flat) -> dict[str, str]:
    """Return the parameters loaded under another name of the same memory, and their keys in the checkpoint."""
    ties = ties_of(state)
    first = {ties.get(key, key): stored for key, stored in names.items()}
    return {key: first[ties.get(key, key)] for key in state if key not in names and ties.get(key, key) in first}


def _hashes(tensors: Mapping[str, ShardedValue], threads: int) -> dict[str, _Hashes]:
    chunks = [(key, chunk) for key, value in tensors.items() for chunk in value.chunks]
    finish_device_work(chunk.tensor for _, chunk in chunks)
    hashes: dict[str, _Hashes] = dict.fromkeys(tensors, ())
    for (key, chunk), digest in zip(chunks, hashes_of([chunk.tensor for _, chunk in chunks], threads), strict=True):
        hashes[key] = (*hashes[key], (chunk.offsets, chunk.sizes, digest))
    return hashes


def _names_in(frozen: Mapping[str, ShardedValue], reader: ShardedReader) -> dict[str, str]:
    """Return the key in the base of each parameter that the base has: the same key, or the key after one prefix."""
    names = {key: key for key in frozen if key in reader.index}
    if not names:
        if (prefix := find_prefix(frozen, reader.index)) is None:
            raise CheckpointMismatch(
                f"base={reader.path} has none of the frozen parameters ({some(list(frozen))}), not even under a "
                f"prefix{nearest(next(iter(frozen)), reader.index)}. Load it with PartialLoad(rename=...) first."
            )
        local, stored = prefix
        names = {key: stored + key.removeprefix(local) for key in frozen}
        names = {key: name for key, name in names.items() if name in reader.index}
    return {key: stored for key, stored in names.items() if _fits(frozen[key], reader.index, stored)}


def _fits(value: ShardedValue, index: CheckpointIndex, key: str) -> bool:
    slot = index.slots[key]
    return index.table.dtype_of(slot) is not None and index.table.shape_of(slot) == value.shape


def _is_exact(value: ShardedValue, index: CheckpointIndex, key: str) -> bool:
    """Return whether the stored numbers equal the value's numbers, without rounding to its dtype.

    The stored tensor can then stand for the value, whatever dtype a later load has.
    """
    stored, here = index.table.dtype_of(index.slots[key]), value.dtype
    if stored is None or stored == here:
        return stored == here
    widened = stored.is_floating_point and here.is_floating_point and stored.itemsize < here.itemsize
    return widened and here in (torch.float32, torch.float64)


def _like(value: ShardedValue) -> ShardedValue:
    """Return empty host memory for the same chunks."""
    memory = (torch.empty(chunk.sizes, dtype=value.dtype, device="cpu") for chunk in value.chunks)
    chunks = (chunk._replace(tensor=tensor) for chunk, tensor in zip(value.chunks, memory, strict=True))
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
