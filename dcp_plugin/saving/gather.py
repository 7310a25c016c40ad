"""What a save takes from the live objects: gathered at the call, copied then or later, described for the planner.

What fails here on one rank is kept until all ranks meet: a rank that raised alone would leave the others waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcp_plugin.config import CheckpointConfig
from dcp_plugin.planning.local_inventory import Shards
from dcp_plugin.planning.save import encode_state
from dcp_plugin.saving.base import Omission
from dcp_plugin.staging.guard import Guard
from dcp_plugin.staging.snapshot import HostPool, Snapshot
from dcp_plugin.state.adapters import adapters_of, gather_state, layouts_of, shards_in
from dcp_plugin.state.annotations import StepStableMemory
from dcp_plugin.storage.writer import ShardedWriter
from dcp_plugin.types import Flat, KeyPath, ShardedValue


@dataclass
class Gathered:
    """The state of one save on one rank, from the call until it is written."""

    config: CheckpointConfig
    path: Path
    step: int | None
    writer: ShardedWriter
    began: float
    kinds: dict[str, str]
    """Of the names under which there are only state dicts."""
    leaves: dict[str, Any] = field(default_factory=dict)
    """What was gathered, until it is described."""
    state: Flat = field(default_factory=dict)
    paths: dict[str, KeyPath] = field(default_factory=dict)
    shards: Shards = field(default_factory=dict)
    """Of the parameters of each optimizer, what this rank has."""
    failure: Exception | None = None
    """Gathering or copying has failed here; told when all ranks meet."""
    snapshot: Snapshot | None = None
    changed_meanwhile: bool = False
    """Whether the state changed before its copy was made: by what no optimizer announces."""
    guard: Guard | None = None
    blocked: float | None = None
    """Seconds that the caller waited; None if for all of it."""
    copied: float = 0.0
    """Seconds that the copy to host memory took."""

    def gather(self, state: Mapping[str, Any], omission: Omission, owners: list[Any]) -> None:
        """This rank's part of the state.

        Args:
            owners: Modules and optimizers whose state dicts are in the state.
        """
        try:
            parts = adapters_of(state, stock_aliases=bool(self.config.stock_aliases))
            leaves, self.paths = gather_state(parts)
            self.leaves = omission.without_excluded(leaves)
            live = {part.name: part.kind for part in parts if part.kind in ("module", "optimizer")}
            self.writer.facts["kinds"] = {**self.kinds, **live}
            self.shards = shards_in(parts, self.kinds, owners)
        except Exception as error:
            self.failure = error

    def snapshot_into(self, pool: HostPool, owners: list[Any]) -> None:
        """Copy what was gathered, but for what stays as it is until the next step of an optimizer: memory of
        ``owners``."""
        if self.failure is not None:
            return
        began = time.monotonic()
        try:
            still = StepStableMemory(owners)
            self.snapshot = Snapshot(self.leaves, pool, self._encode, still)
            if not self.snapshot.complete:
                self.guard = Guard(still.modules)
        except Exception as error:
            self.failure = error
        self.copied = time.monotonic() - began

    def describe(self) -> None:
        """Describe the state itself, for a save that copies nothing."""
        self._take(lambda: self._encode(self.leaves))

    def copy(self) -> None:
        """Finish the copy; from now on the state may change."""
        began = time.monotonic()
        try:
            if self.snapshot is not None:
                self._take(self.snapshot.finish)
                self.changed_meanwhile = bool(self.snapshot.changed)
        finally:
            self.snapshot = None
            self.release()
        self.copied += time.monotonic() - began

    def _encode(self, leaves: Mapping[str, Any]) -> Flat:
        return encode_state(leaves, self.config.allow_pickle)

    def _take(self, described: Callable[[], Flat]) -> None:
        if self.failure is None:
            try:
                self.state = described()
                self.writer.frozen = {k for k, v in self.state.items() if isinstance(v, ShardedValue) and v.frozen}
                self.writer.facts["layouts"] = layouts_of(self.leaves)
            except Exception as error:
                self.failure = error
        self.leaves = {}

    def release(self) -> None:
        """Nothing that changes the state needs to wait any longer."""
        if self.guard is not None:
            self.guard.release()
