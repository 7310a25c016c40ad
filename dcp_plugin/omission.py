"""What a save leaves out on purpose: keys that nobody wants, and frozen parameters that another checkpoint has.

With ``trainable_only`` a frozen parameter is left out if it has, on every rank, the very bytes that were loaded from
the base, by 128-bit hash, and no conversion had rounded them; it is saved otherwise. So nothing is lost, whatever was
done to a "frozen" parameter. What was loaded is hashed then and there. A base that was only named (``base=``) is read
once, at the first save, to compare. Nothing is left out once the base is not there any more, or is another checkpoint.

All ranks leave out the same: a tensor is there as a whole or not at all. Rank 0 decides from what all ranks say.
"""

from __future__ import annotations

import difflib
import logging
import os
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from dcp_plugin.config import CheckpointConfig, local_path
from dcp_plugin.errors import CheckpointError, CheckpointMismatch, SaveFailed
from dcp_plugin.planning.holdings import ties_of
from dcp_plugin.planning.load import ShardedLoadPlanner, nearest, some
from dcp_plugin.ranks import Ranks
from dcp_plugin.state.source import find_prefix
from dcp_plugin.storage.hashing import hashes_of
from dcp_plugin.storage.hostmemory import finish_device_work
from dcp_plugin.storage.index import CheckpointIndex
from dcp_plugin.storage.opening import Opened, open_alone
from dcp_plugin.storage.reader import ShardedReader
from dcp_plugin.storage.summary import Base, Summary
from dcp_plugin.types import Flat, Shape, ShardedValue

logger = logging.getLogger("dcp_plugin")

_BATCH = 256 << 20  # of a base that is read to compare
_MOST_KEYS = 20_000  # that are looked through for a hint

Hashes = tuple[tuple[Shape, Shape, bytes], ...]
"""Offsets, sizes and hash of each chunk of a tensor on this rank."""


@dataclass(frozen=True)
class _Source:
    """A whole checkpoint that was loaded, or named."""

    path: Path
    fingerprint: str


@dataclass(frozen=True)
class _Origin:
    """Where the values of a parameter came from: the source and the key in it, and what they were on this rank."""

    source: _Source
    key: str
    hashes: Hashes | None
    """None if they were rounded on the way, so that the source has other values."""


@dataclass(frozen=True)
class LeftOut:
    """What all ranks leave out, and the checkpoint that has it."""

    keys: dict[str, str]
    """Our key -> the key in the base."""
    path: Path | None = None
    fingerprint: str = ""

    def base_of(self, checkpoint: Path) -> dict[str, str]:
        """What the summary of a checkpoint says of its base."""
        assert self.path is not None
        relative = os.path.relpath(os.path.realpath(self.path), os.path.realpath(checkpoint))
        return Base(self.path, relative, self.fingerprint).to_summary()


@dataclass(frozen=True)
class _Claim:
    """What one rank tells: the globs that have matched, and of its frozen parameters where they came from and
    whether they are still the same. Bytes count for the choice of the base."""

    globs: tuple[int, ...]
    keys: tuple[str, ...]
    origins: dict[str, tuple[_Source, str, bool, int]]

    def encode(self) -> bytes:
        return zlib.compress(pickle.dumps(self), 1)

    @staticmethod
    def decode(data: bytes) -> _Claim:
        claim: _Claim = pickle.loads(zlib.decompress(data))
        return claim


class Omission:
    """What the saves of one checkpointer leave out."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._origins: dict[str, _Origin] = {}
        self._named: _Source | None = None
        self._checked = not config.exclude
        self._matched: set[int] = set()
        self._said = ""
        self._lost = ""

    @property
    def remembers(self) -> bool:
        """Whether to tell of loads."""
        return self._config.trainable_only

    def without_excluded(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state without what nobody wants."""
        globs = self._config.exclude
        if not globs:
            return state
        kept = {}
        for key, value in state.items():
            hits = [number for number, glob in enumerate(globs) if fnmatchcase(key, glob)]
            self._matched.update(hits)
            if not hits:
                kept[key] = value
        return kept

    def loaded(self, state: Flat, names: Mapping[str, str], opened: Opened) -> None:
        """Remember what was loaded.

        Args:
            state: The state after the load.
            names: The loaded keys, and their keys in the checkpoint.
        """
        base = opened.base or opened
        source = _Source(Path(os.path.realpath(base.path)), base.fingerprint)  # a link may lead elsewhere tomorrow
        left_out = opened.index.left_out
        tensors: dict[str, ShardedValue] = {}
        there: dict[str, str] = {}
        key_in: dict[str, str] = {}
        for key, stored in {**names, **_tied_to(names, state)}.items():
            self._origins.pop(key, None)
            value = state.get(key)
            if isinstance(value, ShardedValue) and (not opened.base or stored in left_out):
                tensors[key], key_in[key], there[key] = value, stored, left_out.get(stored, stored)
        exact = {key: value for key, value in tensors.items() if _is_exact(value, opened.index, key_in[key])}
        hashes = _hashes(exact, self._config.io_threads)
        self._origins |= {key: _Origin(source, there[key], hashes.get(key)) for key in tensors}

    def agree(self, state: Flat, ranks: Ranks, path: Path, failure: Exception | None) -> LeftOut:
        """What this save leaves out, the same on all ranks. Collective, if there is anything to agree on.

        Args:
            failure: This rank's state could not be gathered; told to all.

        Raises:
            SaveFailed: The base is not known, or would be overwritten.
            CheckpointMismatch: A glob matches nothing; the named base does not fit.
        """
        if self._checked and not self._config.trainable_only:
            return LeftOut({})

        def claim() -> bytes:
            if failure is not None:
                raise failure
            return self._claim(state).encode()

        def decide(claims: list[bytes]) -> LeftOut:
            return self._decide(list(map(_Claim.decode, claims)), path)

        decided = ranks.combine(f"decide what to leave out of {path}", claim, decide)
        self._checked = True
        return decided

    def _claim(self, state: Flat) -> _Claim:
        if not self._config.trainable_only:
            return _Claim(tuple(self._matched), tuple(state) if not self._matched else (), {})
        frozen = {key: one for key, one in state.items() if isinstance(one, ShardedValue) and one.frozen}
        self._read_named(frozen)
        now = _hashes(frozen, self._config.io_threads)
        origins = {}
        for key, value in frozen.items():
            nbytes = sum(chunk.tensor.nbytes for chunk in value.chunks)
            origin = self._origins.get(key)
            if origin is None:
                origins[key] = (_Source(Path(), ""), "", False, nbytes)
            else:
                origins[key] = (origin.source, origin.key, origin.hashes == now[key], nbytes)
        return _Claim(tuple(self._matched), () if self._checked else tuple(state), origins)

    def _decide(self, claims: list[_Claim], path: Path) -> LeftOut:
        """On rank 0."""
        idle = set(range(len(self._config.exclude))).difference(*(claim.globs for claim in claims))
        if idle and not self._checked:
            globs = [self._config.exclude[number] for number in sorted(idle)]
            known = list(dict.fromkeys(key for claim in claims for key in claim.keys))
            near = difflib.get_close_matches(globs[0], known[:_MOST_KEYS], n=1, cutoff=0.5) or known[:1]
            raise CheckpointMismatch(
                f"exclude={globs!r} matches no key of the state; its keys look like {', '.join(near) or 'nothing'}"
            )
        frozen = list(dict.fromkeys(key for claim in claims for key in claim.origins))
        if not frozen:
            return LeftOut({})
        size: dict[str, int] = {}
        for source, _, same, nbytes in (one for claim in claims for one in claim.origins.values()):
            size[source.fingerprint] = size.get(source.fingerprint, 0) + nbytes * same
        sources = {one[0].fingerprint: one[0] for claim in claims for one in claim.origins.values()}
        sources.pop("", None)
        if not sources:
            raise SaveFailed(
                f"cannot save {path} with trainable_only=True: {len(frozen)} parameters are frozen ({some(frozen)}), "
                f"and nobody knows which checkpoint has them. Load that one first, through the same checkpointer, or "
                f"name it: base=PATH. trainable_only=False saves everything and links what does not change."
            )
        base = self._named or max(sources.values(), key=lambda source: size[source.fingerprint])
        if path == base.path or (path.exists() and os.path.realpath(path) == os.path.realpath(base.path)):
            raise SaveFailed(
                f"cannot save {path} with trainable_only=True: it is the base, which has the frozen parameters that "
                f"this save leaves out. Save to a new name."
            )
        if self._is_lost(base):
            return LeftOut({})
        keys: dict[str, str] = {}
        changed: set[str] = set()
        for claim in claims:
            for key, (source, there, same, _) in claim.origins.items():
                if same and source.fingerprint == base.fingerprint and keys.setdefault(key, there) == there:
                    continue
                changed.add(key)
        kept = [key for key in frozen if key in changed]
        self._say(base, kept)
        left = {key: there for key, there in keys.items() if key not in changed}
        return LeftOut(left, base.path, base.fingerprint)

    def _is_lost(self, base: _Source) -> bool:
        """Whether the base has been deleted, moved or overwritten since it was read: then a save without the frozen
        parameters could never be loaded."""
        reason = _reason_it_is_lost(base)
        if reason and reason != self._lost:
            logger.warning("everything is saved, also what is frozen: %s.", reason)
        self._lost = reason
        return bool(reason)

    def _say(self, base: _Source, saved: list[str]) -> None:
        said = some(saved, 5) if saved else ""
        if said and said != self._said:
            logger.warning("frozen parameters that are not as in %s are saved: %s", base.path, said)
        self._said = said

    def _read_named(self, frozen: Mapping[str, ShardedValue]) -> None:
        """Read a base that was named and not loaded, to know what it has."""
        if self._config.base is None or self._named is not None or not frozen:
            return
        reader = ShardedReader(
            self._config.base, io_threads=self._config.io_threads, verify=self._config.verify_on_load, complete=False
        )
        if reader.index.left_out:
            raise CheckpointMismatch(
                f"{reader.path} is no base: it leaves out frozen parameters itself. Name the base that it has."
            )
        source = _Source(Path(os.path.realpath(local_path(reader.path))), reader.fingerprint)
        known = {origin.source.fingerprint for origin in self._origins.values()}
        if source.fingerprint not in known:
            names = _names_in(frozen, reader)
            inside = {key: value for key, value in frozen.items() if key in names}
            exact = {key: value for key, value in inside.items() if _is_exact(value, reader.index, names[key])}
            self._origins |= {key: _Origin(source, names[key], None) for key in inside}
            for batch in _batches(exact):
                copies = {key: _like(value) for key, value in batch.items()}
                planner = ShardedLoadPlanner(strict=False)
                planner.use_index(dict(copies), reader.index, names)
                reader.read_data(planner.create_local_plan(), planner).wait()
                hashes = _hashes(copies, self._config.io_threads)
                self._origins |= {key: _Origin(source, names[key], hashes[key]) for key in batch}
        self._named = source


def _reason_it_is_lost(base: _Source) -> str:
    try:
        found = open_alone(base.path)
        found.check_files()
    except (CheckpointError, OSError) as error:
        return f"the base {base.path} cannot be read any more ({error})"
    if found.fingerprint != base.fingerprint:
        return f"{base.path} has been overwritten since it was read, and is another checkpoint now"
    return ""


def about_excluded(summary: Summary | None, missing: Iterable[str]) -> list[str]:
    """Said with missing keys that the save left out on purpose."""
    globs = summary.exclude if summary else []
    found = [key for key in missing if any(fnmatchcase(key, glob) for glob in globs)]
    return [f"{some(found, 3)} left out at save by exclude={globs!r}"] if found else []


def _tied_to(names: Mapping[str, str], state: Flat) -> dict[str, str]:
    """Parameters that were filled under another name, which is the same memory; and what that is in the checkpoint."""
    ties = ties_of(state)
    first = {ties.get(key, key): stored for key, stored in names.items()}
    return {key: first[ties.get(key, key)] for key in state if key not in names and ties.get(key, key) in first}


def _hashes(tensors: Mapping[str, ShardedValue], threads: int) -> dict[str, Hashes]:
    chunks = [(key, chunk) for key, value in tensors.items() for chunk in value.chunks]
    finish_device_work(chunk.tensor for _, chunk in chunks)
    hashes: dict[str, Hashes] = dict.fromkeys(tensors, ())
    for (key, chunk), said in zip(chunks, hashes_of([chunk.tensor for _, chunk in chunks], threads), strict=True):
        hashes[key] = (*hashes[key], (chunk.offsets, chunk.sizes, said))
    return hashes


def _names_in(frozen: Mapping[str, ShardedValue], reader: ShardedReader) -> dict[str, str]:
    """The key in the base of each parameter that it has: the same, or behind one prefix."""
    names = {key: key for key in frozen if key in reader.index}
    if not names:
        prefix = find_prefix(frozen, reader.index)
        if prefix is None:
            raise CheckpointMismatch(
                f"base={reader.path} has none of the frozen parameters ({some(list(frozen))}), also not behind a "
                f"prefix{nearest(next(iter(frozen)), reader.index)}. Load it with PartialLoad(rename=...) first."
            )
        names = {key: prefix.stored(key) for key in frozen if prefix.stored(key) in reader.index}
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
    chunks = (replace(chunk, tensor=torch.empty(chunk.sizes, dtype=value.dtype)) for chunk in value.chunks)
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
