"""Saves in the background: the stage of the host copy, and the writer that is a thread.

No module is first imported in that thread, because the program may end meanwhile. So this module imports the modules
that only some saves need.
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
from dcp_plugin.core.ranks.collectives import Attempt, Ranks
from dcp_plugin.core.ranks.groups import RankGroups
from dcp_plugin.core.records import GatheredState, LiveState, SaveRequest, StagedState
from dcp_plugin.core.runs import deletion, launches  # noqa: F401
from dcp_plugin.core.saving import progress  # noqa: F401
from dcp_plugin.core.saving.job import SavePipeline
from dcp_plugin.core.saving.queue import RunningSave, SaveQueue, first_unreported, let_training_go_first
from dcp_plugin.core.saving.writers import discarded_on_error, progress_of
from dcp_plugin.core.staging.guard import take_off_hooks
from dcp_plugin.core.staging.host_copy import HostCopy
from dcp_plugin.core.staging.snapshot import HostPool
from dcp_plugin.core.state.names import module_cache
from dcp_plugin.core.state.step_stable import live_objects

logger = logging.getLogger("dcp_plugin")


def begin_copy(
    pipeline: SavePipeline, handle: RunningSave, live: LiveState, pool: Attempt[HostPool], ranks: Ranks
) -> Attempt[HostCopy]:
    """Gather the state, and copy the tensors that may change at any time.

    With lazy staging, step-stable tensors remain for :func:`finish_copy`, and changes of the state wait for that. If
    none remain, the handle is staged when this returns. A failure on this rank stays in the attempt until the ranks
    meet. No change of the state waits for a failed copy.
    """

    def copy_gathered(gathered: GatheredState) -> HostCopy:
        trained = [*live_objects(live.state), *live.owners] if pipeline.is_lazy else []
        return HostCopy(gathered, trained, pool.get(), pipeline.encode, handle.copy_ended)

    handle.set_copying()
    copy = Attempt.of(lambda: pipeline.gather(live, ranks)).then(copy_gathered)
    if copy.failure is not None or copy.get().copied_at_once:
        handle.set_staged(copy.failure)
    return copy


def finish_copy(
    pipeline: SavePipeline, handle: RunningSave, copy: Attempt[HostCopy], ranks: Ranks
) -> Attempt[StagedState]:
    """Copy the remaining tensors, and let training change the state. Called in the thread of a save, or at once.

    The attempt fails with SaveFailed if tensors have changed since :func:`begin_copy`. Later saves then copy the
    complete state in :func:`begin_copy`.
    """
    staged = copy.then(HostCopy.finish)
    if copy.value is not None and copy.value.changed:
        pipeline.is_lazy = False
        logger.warning(
            "rank %d: code other than an optimizer step wrote to the state while it was copied for %s. "
            "From now on, saves copy the state before they return, as with staging='blocking'.",
            ranks.rank,
            handle.path,
        )
    handle.set_staged(staged.failure)
    let_training_go_first()
    return staged


class BackgroundThread:
    """Writer of saves whose caller continues. The caller waits for :func:`begin_copy`; a thread does the rest."""

    saves = None

    def __init__(self, config: CheckpointConfig, pipeline: SavePipeline, queue: SaveQueue, groups: RankGroups) -> None:
        self._config, self._pipeline, self._queue, self._groups = config, pipeline, queue, groups
        self.pool = HostPool()

    def submit(self, handle: RunningSave, request: SaveRequest, live: LiveState, ranks: Ranks) -> None:
        pipeline, queue, config = self._pipeline, self._queue, self._config
        queue.warns_at_exit = ranks.rank == 0
        # The training waits for this block. The thread is started at its end.
        with discarded_on_error(request, config, ranks, lambda: handle in queue.handles) as publication:
            with collector_paused(), module_cache():
                copy = begin_copy(pipeline, handle, live, Attempt(self.pool), ranks)
            timed = replace(request, blocked_seconds=time.monotonic() - request.began)

            def in_thread() -> events.SaveFinished:
                staged = finish_copy(pipeline, handle, copy, ranks)
                with progress_of(request, config, ranks, in_background=True):
                    return pipeline.plan_write_publish(publication, timed, staged, ranks)

            queue.start(handle, request.call, in_thread)

    def wait_for_ranks(self) -> Ranks:
        """Wait for the saves in flight, and return the group of ranks.

        A failed save has failed on all ranks. On some of them, a caller may have got its error from the handle. If a
        rank is left on which no caller has got it, all ranks raise.
        """
        ended = self._queue.wait_for_all()
        self.free_modules()
        unreported = first_unreported(ended)
        try:
            ranks = self._groups.for_saves()
        except BaseException as error:  # must not hide the failure that this call was about to raise
            if unreported is not None:
                error.add_note(
                    f"Before that, a save in the background failed: {type(unreported).__name__}: {unreported}"
                )
            raise
        if any(handle.exception() is not None for handle in ended):
            try:
                ranks.agree("go on after a failed save", Attempt(None, unreported).get)
            except Exception:
                if unreported is not None:
                    raise unreported from unreported.__cause__  # with the traceback of the background thread
                raise
        return ranks

    def free_modules(self) -> None:
        take_off_hooks()

    def holdings(self) -> list[str]:
        return [f"{self.pool.nbytes:,} bytes of host memory"] if self.pool.nbytes else []

    def close(self) -> None:
        self.pool.free()
