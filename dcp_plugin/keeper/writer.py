"""Saves that a keeper writes (:mod:`dcp_plugin.keeper`): stage into shared memory, plan, hand over, wait to be told.

Ranks meet to plan and to hand over, as for any save; from then on no rank is needed. How a save ends is the keeper's to
tell, to each rank on its own: a save that fails then is logged, and raised by who waits for it, but not by the next
save, since ranks would hear of it at different times and the training is to go on.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dcp_plugin import events
from dcp_plugin.calls import together
from dcp_plugin.config import CheckpointConfig
from dcp_plugin.errors import NoSharedMemory, SaveFailed
from dcp_plugin.keeper.client import KeeperClient
from dcp_plugin.keeper.inventory import path_of
from dcp_plugin.keeper.local_checkpoints import new_token
from dcp_plugin.keeper.spool import End, Head, Items, RankJob
from dcp_plugin.paths import ObjectPath, Where
from dcp_plugin.planning.save import in_table_order
from dcp_plugin.ranks import Attempt, RankGroups, Ranks
from dcp_plugin.records import LiveState, SavePlan, SaveRequest, Spent, StagedState
from dcp_plugin.runs import figures
from dcp_plugin.saving.job import HostCopy, SavePipeline, raise_as_failed_save
from dcp_plugin.saving.queue import SaveHandle, SaveQueue
from dcp_plugin.saving.writers import Writer
from dcp_plugin.staging.guard import take_off_hooks
from dcp_plugin.staging.snapshot import HostPool
from dcp_plugin.state.names import module_cache
from dcp_plugin.tensors.host_memory import collector_paused

logger = logging.getLogger("dcp_plugin")


class _Pool:
    """A host copy in shared memory, and the save that a keeper has yet to write from it."""

    def __init__(self, client: KeeperClient) -> None:
        self.memory = HostPool(client.allocate)
        self.token: str | None = None


class KeeperWriter:
    """The writer of a configuration that asks for a keeper. It meets the keepers at the first save.

    Args:
        below: The writer of saves that no keeper can take: some node lacks shared memory.
    """

    def __init__(
        self, config: CheckpointConfig, pipeline: SavePipeline, queue: SaveQueue, groups: RankGroups, below: Writer
    ) -> None:
        self._config, self._pipeline, self._queue, self._groups = config, pipeline, queue, groups
        self._below = below
        self.saves: KeptSaves | None = None

    @property
    def is_attached(self) -> bool:
        return self.saves is not None

    def submit(self, handle: SaveHandle, request: SaveRequest, live: LiveState, ranks: Ranks) -> None:
        try:
            self._submit(handle, request, live, ranks)
        except NoSharedMemory as error:
            if self.saves is not None:
                self.saves.give_up_pools()
            for earlier in self._queue.handles:  # which a keeper may yet bring to the same path
                if earlier.path == handle.path:
                    earlier.wait_done()
            if self._config.local_dir is not None and self._config.durable_every is None:
                raise
            if ranks.rank == 0:
                logger.warning("%s is saved without a keeper: %s", handle.path, error)
            self._below.submit(handle, request, live, ranks)
            return
        except Exception as error:
            raise_as_failed_save(error, handle.path)
        if not self._config.async_save:
            ranks.agree(f"save {handle.path}", handle.wait)

    def _submit(self, handle: SaveHandle, request: SaveRequest, live: LiveState, ranks: Ranks) -> None:
        if self.saves is None:
            pools = 1 + int(self._config.async_save and self._config.when_busy == "queue")
            self.saves = KeptSaves(self._config, handle.path.parent, ranks, self._pipeline, pools)
        saves, attached = self.saves, None
        try:
            if (files := request.files) is not None:
                attached = ranks.agree(f"add files to {handle.path}", lambda: saves.add_files(files))
            with collector_paused(), module_cache():
                self._stage_and_hand_over(saves, handle, live, request, ranks, attached)
        finally:  # it has another name by now if it was handed over, or will have
            if attached is not None and handle not in self._queue.handles:
                shutil.rmtree(attached, ignore_errors=True)

    def _stage_and_hand_over(
        self,
        saves: KeptSaves,
        handle: SaveHandle,
        live: LiveState,
        request: SaveRequest,
        ranks: Ranks,
        attached: Path | None,
    ) -> None:
        copy = HostCopy(self._pipeline.encode)
        self._pipeline.begin_copy(copy, live, Attempt.of(saves.pool), ranks)  # a pool may fail on one rank alone
        later = not copy.complete
        if self._config.staging == "lazy":  # all ranks go on in this thread, or all in another
            try:
                later = ranks.combine(f"stage {handle.path}", lambda: copy.has_begun() and later, any)
            except BaseException:
                copy.release()
                raise
        if later:
            finish = lambda: self._pipeline.finish_copy(copy, handle, ranks)  # noqa: E731
            saves.start_later(self._queue, handle, request, finish, attached, ranks)
        else:
            handle.set_staged()
            saves.start(self._queue, handle, request, copy.finish(), attached, ranks)

    def meet(self, begins_save: bool = False) -> Ranks:
        """Wait until no save in flight talks to other ranks. Each rank learns at another time how a save ends, so the
        error of a failed save is raised by the caller that waits for it."""
        for handle in self._queue.handles:
            handle.wait_turn()
        self._queue.drop_succeeded()
        take_off_hooks()
        return self._groups.main()

    def is_free(self) -> bool:
        return self._below.is_free() if self.saves is None else self.saves.is_free()

    def holdings(self) -> list[str]:
        kept = [] if self.saves is None else [f"{self.saves.nbytes:,} bytes of shared memory, and a keeper"]
        return self._below.holdings() + kept

    def forget(self, path: Where) -> bool:
        if self.saves is not None:
            self.saves.client.forget(path_of(path))
        return self.saves is not None

    def bring_newest(self) -> None:
        if self.saves is not None:
            self.saves.bring_newest()

    def close(self) -> None:
        self._below.close()
        saves, self.saves = self.saves, None
        if saves is not None:
            try:
                saves.bring_newest()
            finally:
                saves.close()


class KeptSaves:
    """The saves of one checkpointer that go through a keeper. Collective to make.

    Args:
        root: The folder of checkpoints.
        pools: How many saves may be staged and not written.

    Raises:
        NoSharedMemory: On every rank.
    """

    def __init__(self, config: CheckpointConfig, root: Where, ranks: Ranks, pipeline: SavePipeline, pools: int) -> None:
        self._config, self._pipeline = config, pipeline
        self.client = KeeperClient(config, root, ranks)
        self._pools = [_Pool(self.client) for _ in range(pools)]
        self._process = os.getpid()
        self._count = 0
        self._newest: tuple[str, SaveHandle] | None = None

    @property
    def nbytes(self) -> int:
        """Of host copies."""
        return sum(pool.memory.nbytes for pool in self._pools)

    def is_free(self) -> bool:
        """Whether the next save need not wait for its host copy."""
        token = self._next().token
        if token is not None and not self.client.is_attached:
            return False
        return token is None or self.client.wait(token, "written", 0.0) is not False

    def _next(self) -> _Pool:
        return self._pools[self._count % len(self._pools)]

    def pool(self) -> HostPool:
        """The host copy of the next save, when the keeper has written what was in it."""
        pool = self._next()
        if pool.token is not None:
            self.client.wait(pool.token, "written")
            pool.token = None
        if not all(self.client.spool.is_there(memory) for memory in pool.memory.slabs):
            pool.memory.free()
        return pool.memory

    def give_up_pools(self) -> None:
        """Give back what the next save cannot use, because there is not enough."""
        for pool in self._pools:
            if pool.token is None:
                pool.memory.free()
        self._release()

    def _release(self) -> None:
        self.client.spool.release([slab for pool in self._pools for slab in pool.memory.slabs])

    def add_files(self, files: Callable[[Path], None]) -> Path | None:
        """Return a directory of this rank with the caller's files for the next save; None if there are none."""
        try:
            directory = Path(tempfile.mkdtemp(prefix="files-", dir=self.client.spool.folder))
        except OSError as error:
            raise NoSharedMemory(f"nothing can be put into {self.client.spool.folder}: {error}") from error
        files(directory)
        if any(directory.iterdir()):
            return directory
        directory.rmdir()
        return None

    def start(
        self,
        queue: SaveQueue,
        handle: SaveHandle,
        request: SaveRequest,
        staged: Attempt[StagedState],
        attached: Path | None,
        ranks: Ranks,
    ) -> None:
        """Hand a save over, and follow it in a thread. Collective.

        Raises:
            CheckpointError: On every rank: it was not handed over.
        """
        token = self.hand_over(request, staged, attached, ranks)
        self._newest = token, handle
        handle.set_handed_over()
        timed = request
        if self._config.async_save:
            timed = replace(request, blocked_seconds=time.monotonic() - request.began)
        seconds = staged.get().copy_seconds
        queue.start(handle, lambda: None, lambda _: self.follow(token, handle, timed, seconds), in_keeper=True)

    def start_later(
        self,
        queue: SaveQueue,
        handle: SaveHandle,
        request: SaveRequest,
        finish: Callable[[], Attempt[StagedState]],
        attached: Path | None,
        ranks: Ranks,
    ) -> None:
        """Like :meth:`start`, in a thread, once the copy is finished."""
        timed = replace(request, blocked_seconds=time.monotonic() - request.began)

        def write(staged: Attempt[StagedState]) -> events.SaveFinished:
            try:
                with together(request.call):
                    token = self.hand_over(timed, staged, attached, ranks)
            except Exception as error:
                self._pipeline.abort(error, timed, ranks.rank)
            self._newest = token, handle
            handle.set_handed_over()
            return self.follow(token, handle, timed, staged.get().copy_seconds)

        queue.start(handle, finish, write, in_keeper=True)

    def hand_over(self, request: SaveRequest, staged: Attempt[StagedState], attached: Path | None, ranks: Ranks) -> str:
        """Plan, and give the save to the keepers. Collective.

        Returns:
            What stands for the save.

        Raises:
            CheckpointError: On every rank.
        """
        self._release()
        staged = self._pipeline.leave_out(request, staged, ranks)
        planned = self._pipeline.plan(request, staged, lambda: Path(new_token()), ranks)
        token = planned.directory.name

        def begin() -> RankJob:
            events.emit(events.SaveStarted(request.path, request.step))  # a subscriber that raises ends it on all ranks
            return self._job(token, request, staged.get(), planned, ranks)

        job = Attempt.of(begin)
        pool = self._next()
        try:
            self.client.hand_over(request.path, token, job, attached, ranks)
        except BaseException:  # Ctrl-C, for one: a keeper may write from this memory all the same
            pool.memory.free()
            raise
        pool.token, self._count = token, self._count + 1
        return token

    def _job(
        self,
        token: str,
        request: SaveRequest,
        staged: StagedState,
        planned: SavePlan,
        ranks: Ranks,
    ) -> RankJob:
        loaded, self._pipeline.last_loaded = self._pipeline.last_loaded, None
        path = request.path
        options = dict(path.options.items()) if isinstance(path, ObjectPath) and path.options else None
        job = RankJob(
            token=token,
            rank=ranks.rank,
            path=path,
            step=request.step,
            config=replace(self._config, storage_options=None),
            items=Items.of(planned.rank_plan, planned.state, self.client.spool),
            frozen=planned.frozen,
            loaded=None if loaded is None else str(loaded),
            options=options,
            client=self.client.spool.client,
            began=request.began,
            spent=Spent(self._blocked(request), staged.copy_seconds),
            beside_rank_zero=self.client.beside_rank_zero,
        )
        if (plan := planned.rank_plan.global_plan) is None:
            return job
        head = Head(
            table=plan.table,
            order=in_table_order(plan),
            left_out=dict(staged.left_out),
            empty=planned.empty,
            facts=self._pipeline.facts(request, staged, ranks.size),
            save_id=str(uuid.uuid4()),
            among_other_files=request.files is not None,
            run=figures.this_run(),
            durable=request.durable,
        )
        return replace(job, head=head)

    def _blocked(self, request: SaveRequest) -> float | None:
        """What the training has waited when it hands a save over; None if it goes on waiting."""
        if request.blocked_seconds is None and self._config.async_save:
            return time.monotonic() - request.began
        return request.blocked_seconds

    def follow(
        self, token: str, handle: SaveHandle, request: SaveRequest, staging_seconds: float
    ) -> events.SaveFinished:
        """Wait until the save has ended, and tell the handle and the subscribers how far it is.

        Raises:
            CheckpointError: It has failed.
        """
        local = None
        try:
            if self._config.local_dir is not None:
                local = self._follow_locally(token, handle, request)
            end = self.client.wait(token, "end")
            assert isinstance(end, End)
            return self._finished(end, request, staging_seconds, local)
        except Exception as error:
            self._pipeline.abort(error, request, self.client.rank)

    def _follow_locally(self, token: str, handle: SaveHandle, request: SaveRequest) -> float | None:
        found = self.client.wait(token, "local")
        if isinstance(found, End) and not found.local:
            text = f"{request.path} is not complete in local_dir"
            handle.set_local(SaveFailed(f"{text}: {found.error or 'it went straight to its path'}"))
            return None
        seconds = time.monotonic() - request.began
        self._pipeline.emit(events.SavedLocally(request.path, request.step, seconds, self.client.rank))
        handle.set_local()
        return seconds

    def _finished(
        self, end: End, request: SaveRequest, staging_seconds: float, local: float | None
    ) -> events.SaveFinished:
        if end.error is not None and not end.published:
            raise end.error
        now = time.monotonic() - request.began
        nbytes, reused = end.bytes.get(self.client.rank, (0, 0))
        event = events.SaveFinished(
            request.path,
            request.step,
            nbytes,
            seconds=now,
            blocked_seconds=now if request.blocked_seconds is None else request.blocked_seconds,
            staging_seconds=staging_seconds,
            write_seconds=end.seconds,
            rank=self.client.rank,
            bytes_reused=reused,
            tier="durable" if end.published else "local",
            local_seconds=local,
        )
        self._pipeline.emit(event)
        return event

    def bring_newest(self) -> None:
        """Bring the newest save to its path if it is complete locally alone, and wait until it is there.

        Raises:
            CheckpointError: It cannot be brought there.
        """
        if self._newest is None or self._config.durable_every is None:
            return
        token, handle = self._newest
        if handle.finished is None or handle.finished.tier == "durable" or not self.client.drain(token):
            return
        end = self.client.wait(token, "end")
        assert isinstance(end, End)
        if end.error is not None and not end.published:
            raise end.error
        handle.finished = replace(handle.finished, tier="durable")
        self._pipeline.emit(handle.finished)

    def close(self) -> None:
        """Give back the host copies, and leave the keeper. Nothing in a forked process, which has neither."""
        if os.getpid() != self._process:
            return
        for pool in self._pools:
            pool.memory.free()
        self._release()
        self.client.close()
