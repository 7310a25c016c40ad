"""Where frozen parameters came from: which checkpoint has, by 128-bit hash, the very bytes that this rank has.

What is loaded is hashed then and there, and once more at each save. What a conversion has rounded is not what the
checkpoint has. A base that was only named (``base=``) is read once, at the first save, to compare.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dcp_plugin.config import CheckpointConfig, local_path
from dcp_plugin.errors import CheckpointError, CheckpointMismatch
from dcp_plugin.format.checksums import hashes_of
from dcp_plugin.format.index import CheckpointIndex
from dcp_plugin.host_memory import finish_device_work
from dcp_plugin.loading.key_map import find_prefix
from dcp_plugin.messages import nearest, some
from dcp_plugin.planning.load import ShardedLoadPlanner
from dcp_plugin.planning.local_inventory import ties_of
from dcp_plugin.storage.open import Opened, open_alone
from dcp_plugin.storage.reader import ShardedReader
from dcp_plugin.types import Flat, Shape, ShardedValue

_BATCH = 256 << 20  # of a base that is read to compare

Hashes = tuple[tuple[Shape, Shape, bytes], ...]
"""Offsets, sizes and hash of each chunk of a tensor on this rank."""


@dataclass(frozen=True)
class Source:
    """A whole checkpoint that was loaded, or named."""

    path: Path
    fingerprint: str


@dataclass(frozen=True)
class _Origin:
    """Where the values of a parameter came from: the source and the key in it, and what they were on this rank."""

    source: Source
    key: str
    hashes: Hashes | None
    """None if they were rounded on the way, so that the source has other values."""


class Origins:
    """What one rank knows of its frozen parameters."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._origins: dict[str, _Origin] = {}
        self.named: Source | None = None
        """The base that was named, when it has been read."""

    def loaded(self, state: Flat, names: Mapping[str, str], opened: Opened) -> None:
        """Remember what was loaded.

        Args:
            state: The state after the load.
            names: The loaded keys, and their keys in the checkpoint.
        """
        base = opened.base or opened
        source = Source(Path(os.path.realpath(base.path)), base.fingerprint)  # a link may lead elsewhere tomorrow
        left_out = opened.index.left_out
        tensors: dict[str, ShardedValue] = {}
        there: dict[str, str] = {}
        key_in: dict[str, str] = {}
        for key, stored in {**names, **_tied_to(names, state)}.items():
            self._origins.pop(key, None)
            value = state.get(key)
            if not isinstance(value, ShardedValue) or value.stored_whole:
                continue
            if not opened.base or stored in left_out:
                tensors[key], key_in[key], there[key] = value, stored, left_out.get(stored, stored)
        exact = {key: value for key, value in tensors.items() if _is_exact(value, opened.index, key_in[key])}
        hashes = _hashes(exact, self._config.io_threads)
        self._origins |= {key: _Origin(source, there[key], hashes.get(key)) for key in tensors}

    def of_frozen(self, state: Flat) -> dict[str, tuple[Source, str, bool, int]]:
        """Of each frozen parameter: where it came from, its key there, whether it is still the same, and its bytes."""
        frozen = {
            key: one
            for key, one in state.items()
            if isinstance(one, ShardedValue) and one.frozen and not one.stored_whole  # of which nobody knows the bytes
        }
        self._read_named(frozen)
        now = _hashes(frozen, self._config.io_threads)
        origins = {}
        for key, value in frozen.items():
            nbytes = sum(chunk.tensor.nbytes for chunk in value.chunks)
            origin = self._origins.get(key)
            if origin is None:
                origins[key] = (Source(Path(), ""), "", False, nbytes)
            else:
                origins[key] = (origin.source, origin.key, origin.hashes == now[key], nbytes)
        return origins

    def _read_named(self, frozen: Mapping[str, ShardedValue]) -> None:
        """Read a base that was named and not loaded, to know what it has."""
        if self._config.base is None or self.named is not None or not frozen:
            return
        reader = ShardedReader(
            self._config.base, io_threads=self._config.io_threads, verify=self._config.verify_on_load, complete=False
        )
        if reader.index.left_out:
            raise CheckpointMismatch(
                f"{reader.path} is no base: it leaves out frozen parameters itself. Name the base that it has."
            )
        source = Source(Path(os.path.realpath(local_path(reader.path))), reader.fingerprint)
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
        self.named = source


def reason_it_is_lost(base: Source) -> str:
    """Why a base cannot complete a checkpoint any more: it is gone, damaged or another one; empty if it can."""
    try:
        found = open_alone(base.path)
        found.check_files()
    except (CheckpointError, OSError) as error:
        return f"the base {base.path} cannot be read any more ({error})"
    if found.fingerprint != base.fingerprint:
        return f"{base.path} has been overwritten since it was read, and is another checkpoint now"
    return ""


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
