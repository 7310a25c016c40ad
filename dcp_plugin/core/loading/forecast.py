"""Forecast of a load: the items that it would fill, and the misfits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from dcp_plugin.core.config import CheckpointConfig
from dcp_plugin.core.format.index import CheckpointIndex, StoredTensor
from dcp_plugin.core.loading.load import Loading, about_misfits
from dcp_plugin.core.partial import PartialLoad
from dcp_plugin.core.paths import PathLike, Where, as_path
from dcp_plugin.core.ranks.collectives import Ranks
from dcp_plugin.core.records import LoadReport, Match


@dataclass(frozen=True)
class PlannedItem:
    """A target that a load would fill."""

    key: str
    stored: str
    """Key in the checkpoint."""
    shape: tuple[int, ...] | None
    """Shape of the tensor; None for a value that is no tensor."""
    dtype: str
    """Dtype in the checkpoint; empty for a value."""
    target_dtype: str
    nbytes: int
    """Size in the checkpoint."""


@dataclass(frozen=True)
class PlannedLoad:
    """Forecast of a load, made by :func:`plan_load`."""

    path: Where
    items: list[PlannedItem]
    report: LoadReport
    """Keys that would be missing, unexpected, renamed, left out and cast. Nothing is loaded."""
    error: str
    """The error message of the load; empty if the load would succeed."""
    warnings: list[str]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)


def plan_load(
    state: Mapping[str, Any], path: PathLike, partial: PartialLoad | None = None, strict: bool = True
) -> PlannedLoad:
    """Return the items that :func:`dcp_plugin.load` would load and the misfits, without loading. Modules may be on the
    meta device.

    Args:
        state: The state to load into.
        path: The checkpoint.
        partial: The part to load; everything by default.
        strict: If true, missing and unexpected keys are errors, unless ``partial`` sets another policy.

    Raises:
        CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt, UnsafeCheckpoint: The checkpoint cannot be opened.
        CheckpointMismatch: A sub-module is not in the state. The result lists all other misfits.
    """
    checkpoint_path = as_path(path)
    loading = Loading(Ranks(), CheckpointConfig(), checkpoint_path, partial, strict)
    match, index = loading.forecast(state), loading.checkpoint().index
    items = [_planned(key, match, index) for key in (*match.targets, *match.deferred)]
    return PlannedLoad(
        checkpoint_path, items, match.report, about_misfits(checkpoint_path, match.problems), [*match.warnings]
    )


def _planned(key: str, match: Match, index: CheckpointIndex) -> PlannedItem:
    stored, target = match.stored[key], match.targets.get(key) or match.deferred.get(key)
    entry = index[stored]
    wanted = str((target and target.dtype) or "").removeprefix("torch.")
    if isinstance(entry, StoredTensor):
        dtype = str(entry.dtype).removeprefix("torch.")
        return PlannedItem(key, stored, entry.shape, dtype, wanted, prod(entry.shape) * entry.dtype.itemsize)
    return PlannedItem(key, stored, None, "", wanted, entry.chunks[0].location.length)
