"""Origins of this process's tensors: the checkpoints that it has loaded, and what they had.

A checkpoint with ``trainable_only`` is not complete: it leaves out frozen parameters that another checkpoint, its
*base*, has. No load looks for the base. Three rules replace the search:

1. A save leaves out a frozen parameter only if, on every rank, its bytes are those that this process has loaded from
   the base (:func:`origins_of`). A hash of each local shard decides, taken when it was loaded.
2. A parameter that the checkpoint leaves out must be in the target already. This process must have loaded it from the
   base, which the fingerprint identifies, and the target must still have the loaded bytes (:func:`not_loaded`).
   Otherwise the load is an error, with any ``strict``, and overwrites nothing.
3. The memory is of the process, not of one ``Checkpointer``. Every load is noted
   (:data:`~dcp_plugin.core.loading.loaded_parts`). A load takes hashes only if its ``Checkpointer`` has
   ``trainable_only``, because they cost time. A shard cannot be compared if it has no hash or was cut otherwise when it
   was loaded. A save then saves it. For a load the fingerprint decides, if the base was loaded into modules of the
   target.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dcp_plugin.core.errors import CheckpointError, some
from dcp_plugin.core.format.index import CheckpointIndex
from dcp_plugin.core.format.payload import hashes_of
from dcp_plugin.core.format.summary import Base
from dcp_plugin.core.loading import MOST_REMEMBERED, LoadedPart, loaded_parts
from dcp_plugin.core.paths import Where, resolved
from dcp_plugin.core.planning.local_inventory import ties_of
from dcp_plugin.core.records import OpenCheckpoint
from dcp_plugin.core.storage.open import open_checkpoint
from dcp_plugin.core.tensors._torch import is_meta, is_tensor, sharded_value
from dcp_plugin.core.tensors.host_memory import finish_device_work
from dcp_plugin.core.types import Flat, ShardedValue

_Shards = frozenset[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bytes]]
"""Dtype, offsets, sizes and hash of each chunk of a tensor on this rank."""


@dataclass(frozen=True)
class Origin:
    """Origin of a parameter: a key of a checkpoint that this process has loaded."""

    path: Where
    fingerprint: str
    key: str
    rounded: bool
    """True if the load has rounded the numbers to the parameter's dtype."""


@dataclass
class _Loads:
    """Loads of this process from one checkpoint that took hashes."""

    names: dict[tuple[str, torch.dtype], Origin] = field(default_factory=dict)
    """By key and dtype of the target."""
    shards: dict[str, _Shards] = field(default_factory=dict)
    """Key in the checkpoint -> the chunks that this rank has loaded, of all targets."""


_loads: dict[str, _Loads] = {}
"""By fingerprint, in the order of the loads; at most :data:`~dcp_plugin.core.loading.MOST_REMEMBERED`."""


def remember(state: Flat, names: Mapping[str, str], opened: OpenCheckpoint, threads: int) -> None:
    """Remember what a load has put into the tensors of a state.

    Args:
        names: The loaded keys, and their keys in the checkpoint.
    """
    names = {**names, **_tied_to(names, state)}
    tensors = {key: value for key in names if isinstance(value := state.get(key), ShardedValue)}
    # A tensor with stored_whole is a torch.save file in the checkpoint, whose bytes are not compared.
    tensors = {key: value for key, value in tensors.items() if not value.stored_whole}
    path = resolved(opened.path)  # a link may later be redirected
    loads = _loads[opened.fingerprint] = _loads.pop(opened.fingerprint, _Loads())
    for key, shards in _shards_of(tensors, threads).items():
        stored = names[key]
        rounded = not _is_exact(tensors[key], opened.index, stored)
        loads.names[key, tensors[key].dtype] = Origin(path, opened.fingerprint, stored, rounded)
        loads.shards[stored] = loads.shards.get(stored, frozenset()) | shards
    for oldest in list(_loads)[:-MOST_REMEMBERED]:
        del _loads[oldest]


def was_loaded(key: str, value: ShardedValue) -> bool:
    """Return whether a load that took hashes has filled a tensor with this key and dtype."""
    return any((key, value.dtype) in loads.names for loads in _loads.values())


def origins_of(frozen: Mapping[str, ShardedValue], threads: int) -> dict[str, list[Origin]]:
    """Return the checkpoints from which each parameter was loaded, the last first, if it still has the loaded bytes on
    this rank."""
    shards = _shards_of(frozen, threads)
    return {
        key: [
            origin
            for loads in reversed(_loads.values())
            if (origin := loads.names.get((key, value.dtype))) is not None and shards[key] <= loads.shards[origin.key]
        ]
        for key, value in frozen.items()
    }


def not_loaded(
    opened: OpenCheckpoint, kept: Mapping[str, str], live: Mapping[str, Any], module: nn.Module | None
) -> list[str]:
    """Return a line for each reason why a load cannot do without keys that the checkpoint leaves out.

    Args:
        kept: Keys of targets, and their keys in the checkpoint, which leaves them out.
        live: The targets.
        module: The module that has the targets; None if another object has them.
    """
    base = Base.of_summary(opened.summary.base if opened.summary else {}, opened.path)
    loads, parts = _loads.get(base.fingerprint, _Loads()), _loaded_from(base)
    in_base = {key: opened.index.left_out[stored] for key, stored in kept.items()}
    absent = [key for key, stored in in_base.items() if not any(stored in part.keys for part in parts)]
    is_filled = module is None or any(each in part.modules for part in parts for each in module.modules())
    here = {key: live[key] for key in kept if key not in absent and is_tensor(live[key]) and not is_meta(live[key])}
    tensors = {key: sharded_value(tensor) for key, tensor in here.items()}
    known = {key: loads.shards.get(in_base[key], frozenset()) for key in tensors}
    # The others are not hashed: there is nothing to compare their hashes with.
    cut_alike = {key: value for key, value in tensors.items() if _boxes(value) <= {shard[:3] for shard in known[key]}}
    shards = _shards_of(cut_alike)
    other, elsewhere, rounded = [], [], []
    for key, value in tensors.items():
        if not shards.get(key, frozenset()) <= known[key]:
            other.append(key)
        elif key not in shards and not is_filled:
            elsewhere.append(key)
        elif opened.index.rounded.get(kept[key], str(value.dtype)) != str(value.dtype):
            rounded.append(key)
    what = "left out of the checkpoint, because they were frozen and had the bytes of"
    call = f"resume_or_init(..., init_from={str(base.path)!r}), with the same arguments at each start,"
    reasons = (
        (absent, f"this process has not loaded that. {call} loads it first; so does a load of it before this one"),
        (other, f"here they have other bytes. {call} loads them again"),
        (elsewhere, f"this process has loaded that into other objects. {call} loads it into these first"),
        (rounded, "they were rounded to another dtype than they have here. Load into the dtype of the save"),
    )
    return [
        f"{some(keys)} {'is' if len(keys) == 1 else 'are'} {what} {base.path} (fingerprint {base.fingerprint[:12]}): "
        f"{reason}"
        for keys, reason in reasons
        if keys
    ]


def _loaded_from(base: Base) -> list[LoadedPart]:
    """Return the parts of a base that this process has loaded."""
    parts = []
    for (path, known), part in list(loaded_parts.items()):
        fingerprint = known
        if not known:
            with suppress(CheckpointError, OSError), closing(open_checkpoint(path)) as opened:
                fingerprint = opened.fingerprint
        if fingerprint == base.fingerprint:
            loaded_parts[path, known] = loaded_parts.pop((path, known), part)  # in use: now the last
            parts.append(part)
    return parts


def _tied_to(names: Mapping[str, str], state: Flat) -> dict[str, str]:
    """Return the parameters loaded under another name of the same memory, and their keys in the checkpoint."""
    ties = ties_of(state)
    first = {ties.get(key, key): stored for key, stored in names.items()}
    return {key: first[ties.get(key, key)] for key in state if key not in names and ties.get(key, key) in first}


def _boxes(value: ShardedValue) -> set[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]]:
    return {(value.dtype, chunk.offsets, chunk.sizes) for chunk in value.chunks}


def _shards_of(tensors: Mapping[str, ShardedValue], threads: int = 2) -> dict[str, _Shards]:
    chunks = [(key, value.dtype, chunk) for key, value in tensors.items() for chunk in value.chunks]
    finish_device_work(chunk.tensor for _, _, chunk in chunks)
    hashes = hashes_of([chunk.tensor for _, _, chunk in chunks], threads)
    shards: dict[str, list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bytes]]] = {key: [] for key in tensors}
    for (key, dtype, chunk), digest in zip(chunks, hashes, strict=True):
        shards[key].append((dtype, chunk.offsets, chunk.sizes, digest))
    return {key: frozenset(of_key) for key, of_key in shards.items()}


def _is_exact(value: ShardedValue, index: CheckpointIndex, key: str) -> bool:
    """Return whether the stored numbers equal the value's numbers, without rounding to its dtype.

    The stored tensor can then stand for the value, whatever dtype a later load has.
    """
    stored, here = index.table.dtype_of(index.slots[key]), value.dtype
    if stored is None or stored == here:
        return stored == here
    widened = stored.is_floating_point and here.is_floating_point and stored.itemsize < here.itemsize
    return widened and here in (torch.float32, torch.float64)
