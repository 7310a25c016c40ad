"""The copy of one state in host memory: begun in the training thread, and finished in any thread.

The rule: training waits for a copy only while the copy reads memory of the training, and never for a copy that failed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dcp_plugin.core.records import GatheredState, StagedState
from dcp_plugin.core.staging.guard import delay_changes
from dcp_plugin.core.staging.snapshot import HostPool, Snapshot
from dcp_plugin.core.state.named_objects import layouts_of
from dcp_plugin.core.state.step_stable import StepStableMemory
from dcp_plugin.core.types import Flat


class HostCopy:
    """Copy of one state in host memory.

    The constructor copies the tensors that may change at any time. :meth:`finish` copies the step-stable tensors. Until
    ``ended`` is set, code that would change them waits (see :mod:`dcp_plugin.core.staging.guard`).

    Args:
        gathered: This rank's part of the state.
        trained: Modules and optimizers whose tensors :meth:`finish` may copy; empty to copy all of the state now.
        pool: Memory for the copy, whose contents are overwritten.
        encode: Describes leaves as the values and chunks on this rank.
        ended: Event that the caller sets when the copy is finished or has failed.
    """

    def __init__(
        self,
        gathered: GatheredState,
        trained: Iterable[Any],
        pool: HostPool,
        encode: Callable[[Mapping[str, Any]], Flat],
        ended: threading.Event,
    ) -> None:
        began = time.monotonic()
        stable = StepStableMemory(trained)
        self._gathered = gathered
        self._snapshot = Snapshot(gathered.leaves, pool, encode, stable)
        self.copied_at_once = self._snapshot.complete
        """True if the constructor has copied all tensors, so that training need not wait for :meth:`finish`."""
        self.changed = self._snapshot.changed
        """Keys of the tensors that changed before :meth:`finish` had copied them."""
        if not self.copied_at_once:
            delay_changes(stable.modules, ended)
        self._seconds = time.monotonic() - began

    def finish(self) -> StagedState:
        """Copy the remaining tensors. Afterwards this object refers to no memory of the training.

        Raises:
            SaveFailed: Tensors have changed since the constructor ran. The message names them.
        """
        began = time.monotonic()
        gathered, snapshot = self._gathered, self._snapshot
        del self._gathered, self._snapshot
        state, layouts = snapshot.finish(), layouts_of(gathered.leaves)
        return StagedState(state, gathered.details, layouts, self._seconds + time.monotonic() - began)
