"""Saves in the background: the copy of the state in host memory, and the thread that writes from it.

No module is first imported in that thread, because the program may end meanwhile: this module imports the modules that
only some saves need.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from dcp_plugin.core import events
from dcp_plugin.core.config import CheckpointConfig
from dcp_plugin.core.format import derived_index  # noqa: F401
from dcp_plugin.core.format.pickles import rebuild  # noqa: F401
from dcp_plugin.core.interrupts import collector_paused
from dcp_plugin.core.media import packed_view  # noqa: F401
from dcp_plugin.core.planning import load_balance  # noqa: F401
from dcp_plugin.core.ranks.calls import together
from dcp_plugin.core.ranks.collectives import Attempt, Ranks
from dcp_plugin.core.ranks.groups import RankGroups
from dcp_plugin.core.records import GatheredState, LiveState, SaveRequest, StagedState
from dcp_plugin.core.runs import deletion, launches  # noqa: F401
from dcp_plugin.core.saving import progress  # noqa: F401
from dcp_plugin.core.saving.job import SavePipeline
from dcp_plugin.core.saving.queue import RunningSave, SaveQueue
from dcp_plugin.core.saving.writers import CallingThread
from dcp_plugin.core.staging.guard import delay_changes, take_off_hooks
from dcp_plugin.core.staging.snapshot import HostPool, Snapshot
from dcp_plugin.core.state.named_objects import layouts_of
from dcp_plugin.core.state.names import module_cache
from dcp_plugin.core.state.step_stable import StepStableMemory, live_objects

logger = logging.getLogger("dcp_plugin")


class HostCopy:
    """Host copy of one asynchronous save.

    :meth:`begin` does not copy step-stable tensors during the call; :meth:`finish` copies them in another thread. Until
    the save is staged, or has failed, code that would change them waits (see :mod:`dcp_plugin.core.staging.guard`). A
    failure on this rank stays in the copy until the ranks meet.
    """

    def __init__(self, pipeline: SavePipeline, handle: RunningSave, ranks: Ranks) -> None:
        self._pipeline, self._handle, self._ranks = pipeline, handle, ranks
        self._begun: Attempt[tuple[GatheredState, Snapshot]] = Attempt(None)
        self.complete = True
        """False if :meth:`finish` has tensors to copy."""
        self._seconds = 0.0

    def needs_finish(self) -> bool:
        """Return whether :meth:`finish` has tensors to copy. Raise the error of :meth:`begin` on this rank."""
        self._begun.get()
        return not self.complete

    def begin(self, live: LiveState, pool: Attempt[HostPool]) -> None:
        """Gather the state, and copy the tensors that may change at any time.

        Args:
            pool: Memory for the copy, whose contents are overwritten.
        """

        def copy(gathered: GatheredState) -> tuple[GatheredState, Snapshot]:
            began = time.monotonic()
            stable = StepStableMemory([*live_objects(live.state), *live.owners] if self._pipeline.is_lazy else [])
            snapshot = Snapshot(gathered.leaves, pool.get(), self._pipeline.encode, stable)
            if not snapshot.complete:
                self.complete = False
                delay_changes(stable.modules, self._handle)
            self._seconds = time.monotonic() - began
            return gathered, snapshot

        self._begun = Attempt.of(lambda: self._pipeline.gather(live, self._ranks)).then(copy)

    def finish(self) -> Attempt[StagedState]:
        """Copy the remaining tensors, then let training change the state. The copy refers to no memory of the state.

        The attempt fails with SaveFailed, naming tensors that changed since :meth:`begin`. Later saves then copy the
        complete state in :meth:`begin`.
        """
        attempt, self._begun = self._begun, Attempt(None)

        def copy(in_progress: tuple[GatheredState, Snapshot]) -> StagedState:
            began = time.monotonic()
            gathered, snapshot = in_progress
            try:
                state, layouts = snapshot.finish(), layouts_of(gathered.leaves)
                return StagedState(state, gathered.details, layouts, self._seconds + time.monotonic() - began)
            finally:
                if snapshot.changed:
                    self._pipeline.is_lazy = False
                    logger.warning(
                        "rank %d: code other than an optimizer step wrote to the state while it was copied for %s. "
                        "From now on, saves copy the state before they return, as with staging='blocking'.",
                        self._ranks.rank,
                        self._handle.path,
                    )

        try:
            return attempt.then(copy)
        finally:
            self._handle.set_staged()


class BackgroundThread(CallingThread):
    """Writer of asynchronous saves: one thread per save, which writes from a copy in host memory."""

    def __init__(self, config: CheckpointConfig, pipeline: SavePipeline, queue: SaveQueue, groups: RankGroups) -> None:
        super().__init__(config, pipeline, queue, groups)
        self.pool = HostPool()

    def submit(self, handle: RunningSave, request: SaveRequest, live: LiveState, ranks: Ranks) -> None:
        copy = HostCopy(self._pipeline, handle, ranks)
        self._queue.warns_at_exit = ranks.rank == 0
        with self.publication(handle, request, ranks) as publication:
            with collector_paused(), module_cache():
                copy.begin(live, Attempt(self.pool))
            if copy.complete:
                handle.set_staged()
            timed = replace(request, blocked_seconds=time.monotonic() - request.began)

            def write(staged: Attempt[StagedState]) -> events.SaveFinished:
                with self.progress(handle, ranks, in_background=True), together(request.call):
                    return self._pipeline.run(publication, timed, staged, ranks)

            self._queue.start(handle, copy.finish, write)

    def free_modules(self) -> None:
        take_off_hooks()

    def holdings(self) -> list[str]:
        return [f"{self.pool.nbytes:,} bytes of host memory"] if self.pool.nbytes else []

    def close(self) -> None:
        self.pool.free()
