"""Saves that a keeper writes (:mod:`dcp_plugin.tiers`): stage into shared memory, plan, hand over, wait for the end.

Ranks meet to plan and to hand over, as for any save; from then on no rank is needed. The threads of saves meet once
more, in a group of their own, when the keepers have written. If a keeper has missed its deadline, the ranks revoke the
save and write it themselves, from the same host copy. That memory is not used again, since the keeper may continue.

The keeper reports the end of a save to each rank. A failure is logged, and raised by the caller that waits for the
save, but not by the next save: ranks learn of it at different times, and the training continues.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from dcp_plugin.core import events
from dcp_plugin.core.config import CheckpointConfig, has_local_tier
from dcp_plugin.core.errors import CheckpointError, NoSharedMemory, SaveFailed, logger
from dcp_plugin.core.interrupts import collector_paused
from dcp_plugin.core.media import add_files, medium_of
from dcp_plugin.core.paths import Where, options_of
from dcp_plugin.core.planning.save import in_table_order
from dcp_plugin.core.ranks.collectives import Attempt, Ranks, together
from dcp_plugin.core.ranks.groups import RankGroups, of_default_group
from dcp_plugin.core.records import LiveState, SavePlan, SaveRequest, Spent, StagedState
from dcp_plugin.core.runs import figures
from dcp_plugin.core.saving.background import begin_copy, finish_copy
from dcp_plugin.core.saving.job import SavePipeline, raise_as_failed_save
from dcp_plugin.core.saving.queue import RunningSave, SaveQueue, let_training_go_first
from dcp_plugin.core.saving.writers import Writer
from dcp_plugin.core.staging.guard import take_off_hooks
from dcp_plugin.core.staging.host_copy import HostCopy
from dcp_plugin.core.staging.snapshot import HostPool
from dcp_plugin.core.state.names import module_cache
from dcp_plugin.core.storage.part_writer import Publication, recorded_time
from dcp_plugin.tiers import plain
from dcp_plugin.tiers.journal_records import End, Head, Items, RankJob, keeper_options
from dcp_plugin.tiers.keeper_client import KeeperClient
from dcp_plugin.tiers.local_checkpoints import new_token, path_of, time_of
from dcp_plugin.tiers.node import copy_tree
from dcp_plugin.tiers.wire import KeeperLost

_LOOK_SECONDS = 0.5
"""Seconds between two checks whether the training has stopped waiting."""


@dataclass
class _HandedOver:
    """A save that was handed over to the keepers."""

    token: str
    staged: StagedState
    planned: SavePlan


class KeeperWriter:
    """The writer of a configuration that asks for a keeper. It meets the keepers at the first save.

    Args:
        fallback: The writer of saves that no keeper can take: some node lacks shared memory.
    """

    def __init__(
        self, config: CheckpointConfig, pipeline: SavePipeline, queue: SaveQueue, groups: RankGroups, fallback: Writer
    ) -> None:
        self._config, self._pipeline, self._queue, self._groups = config, pipeline, queue, groups
        self._fallback = fallback
        self.saves: KeptSaves | None = None

    def submit(self, handle: RunningSave, request: SaveRequest, live: LiveState, ranks: Ranks) -> None:
        try:
            if self.saves is None:
                self.saves = KeptSaves(self._config, handle.path.parent, ranks, self._pipeline, self._queue)
            self.saves.submit(handle, request, live, ranks)
        except NoSharedMemory as error:
            self._submit_without_keeper(error, handle, request, live, ranks)
            return
        except Exception as error:
            raise_as_failed_save(error, handle.path)
        if not self._config.async_save:
            ranks.agree(f"save {handle.path}", handle.wait)

    def _submit_without_keeper(
        self, error: NoSharedMemory, handle: RunningSave, request: SaveRequest, live: LiveState, ranks: Ranks
    ) -> None:
        """Give a save to the fallback, because keepers could not take it. Collective.

        Raises:
            NoSharedMemory: The saves are for ``keeper.dir`` alone.
        """
        if self.saves is not None:
            self._queue.wait_written()
            self.saves.release_memory()
        for earlier in self._queue.handles:  # which a keeper may yet bring to the same path
            if earlier.path == handle.path:
                earlier.wait_done()
        if keeper_options(self._config).durable_every is None:
            raise error
        if ranks.rank == 0:
            logger.warning("%s is saved without a keeper: %s", handle.path, error)
        self._fallback.submit(handle, request, live, ranks)

    def wait_for_ranks(self) -> Ranks:
        """Wait until no save in flight talks to other ranks. Each rank learns at another time how a save ends, so the
        error of a failed save is raised by the caller that waits for it."""
        for handle in self._queue.handles:
            handle.wait_turn()
        self._queue.drop_succeeded()
        self.free_modules()
        return self._groups.for_saves()

    def free_modules(self) -> None:
        take_off_hooks()

    def holdings(self) -> list[str]:
        kept = [] if self.saves is None else [f"{self.saves.memory.nbytes:,} bytes of shared memory, and a keeper"]
        return self._fallback.holdings() + kept

    def close(self) -> None:
        self._fallback.close()
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

    Raises:
        NoSharedMemory: On every rank.
    """

    def __init__(
        self, config: CheckpointConfig, root: Where, ranks: Ranks, pipeline: SavePipeline, queue: SaveQueue
    ) -> None:
        self._config, self._pipeline, self._queue = config, pipeline, queue
        self.group = Ranks()
        """The group in which the threads of saves agree."""
        self.client = KeeperClient(config, root, ranks, queue)
        pipeline.newest_time = max(pipeline.newest_time, self.client.training.newest)
        self.memory = HostPool(partial(self.client.spool.allocate, self.client.rank))
        """The host copy, in shared memory."""
        self._has_warned_of_clock = False
        self._newest: tuple[str, RunningSave] | None = None

    def _pool(self) -> HostPool:
        """Return the host copy for the next save, after the earlier save is written.

        Raises:
            NoSharedMemory: The keeper is passed over.
        """
        self._queue.wait_written()
        self.client.refuse_if_passed_over()
        if not all(self.client.spool.is_there(slab) for slab in self.memory.slabs):
            self.memory.free()
        return self.memory

    def release_memory(self) -> None:
        """Free the host copy."""
        self.memory.free()
        self.client.spool.release(self.memory.slabs)

    def submit(self, handle: RunningSave, request: SaveRequest, live: LiveState, ranks: Ranks) -> None:
        """Copy the state, hand the copy over to the keepers, and follow the save in a thread. Collective.

        Raises:
            NoSharedMemory: On every rank: the keepers cannot take the save.
            CheckpointError: On every rank: the save was not handed over.
        """
        if ranks.size > 1 and (self.group.size == 1 or not self.group.usable):
            # One rank may come at once, and another after it has waited for its keeper until the timeout.
            self.group = of_default_group(3 * self._config.timeout)
        self._queue.closes_at = None
        # The training waits for this block. The thread is started at its end.
        with self._files_of(handle, request, ranks) as extra_files, collector_paused(), module_cache():
            copy = begin_copy(self._pipeline, handle, live, Attempt.of(self._pool), ranks)
            is_lazy = self._config.staging == "lazy"
            if is_lazy and ranks.combine(f"stage {handle.path}", lambda: not copy.get().copied_at_once, any):
                # A rank copies the rest in its thread. So all ranks hand over in their threads: that is collective.
                self._start_handover(handle, self._timed(request), copy, extra_files, ranks)
                return
            staged = finish_copy(self._pipeline, handle, copy, ranks)
            with self._followed_or_freed():
                save = self._hand_over(request, staged, extra_files, ranks)
                timed = self._timed(request)
                self._queue.start(
                    handle,
                    request.call,
                    lambda: self._follow(save, handle, timed),
                    in_keeper=True,
                    on_start=lambda: self._enter(save, handle),
                )

    def _start_handover(
        self,
        handle: RunningSave,
        request: SaveRequest,
        copy: Attempt[HostCopy],
        extra_files: Path | None,
        ranks: Ranks,
    ) -> None:
        """Start a thread that finishes the copy, hands it over and follows the save."""

        def in_thread() -> events.SaveFinished:
            staged = finish_copy(self._pipeline, handle, copy, ranks)
            try:
                with self._followed_or_freed():
                    save = self._hand_over(request, staged, extra_files, ranks)
                    self._enter(save, handle)
            except Exception as error:
                self._pipeline.fail(error, request, ranks.rank)
            return self._follow(save, handle, request)

        self._queue.start(handle, request.call, in_thread, in_keeper=True)

    @contextmanager
    def _files_of(self, handle: RunningSave, request: SaveRequest, ranks: Ranks) -> Iterator[Path | None]:
        """Yield a directory of this rank with the caller's files; None if there are none. Collective if the caller has
        files."""
        extra_files: Path | None = None
        if (files := request.files) is not None:
            extra_files = ranks.agree(f"add files to {handle.path}", lambda: self._add_files(files))
        try:
            yield extra_files
        finally:  # the thread renames the directory when it hands the save over
            if extra_files is not None and handle not in self._queue.handles:
                shutil.rmtree(extra_files, ignore_errors=True)

    def _add_files(self, files: Callable[[Path], None]) -> Path | None:
        try:
            directory = Path(tempfile.mkdtemp(prefix="files-", dir=self.client.spool.folder))
        except OSError as error:
            raise NoSharedMemory(f"cannot write to {self.client.spool.folder}: {error}") from error
        files(directory)
        if any(directory.iterdir()):
            return directory
        directory.rmdir()
        return None

    @contextmanager
    def _followed_or_freed(self) -> Iterator[None]:
        """Free the host copy if the block ends before a thread follows the save: a keeper may write from the memory."""
        newest = self._newest
        try:
            yield
        except BaseException:  # Ctrl-C, too
            if self._newest is newest:
                self.memory.free()
            raise

    def _enter(self, save: _HandedOver, handle: RunningSave) -> None:
        """Note a save that is handed over, and that a thread follows."""
        self._newest = save.token, handle
        handle.set_handed_over()

    def _timed(self, request: SaveRequest) -> SaveRequest:
        """Return the request with the seconds that an asynchronous save has blocked the training, unless they are noted
        already."""
        if not self._config.async_save or request.blocked_seconds is not None:
            return request
        return replace(request, blocked_seconds=time.monotonic() - request.began)

    def _hand_over(
        self, request: SaveRequest, staged: Attempt[StagedState], extra_files: Path | None, ranks: Ranks
    ) -> _HandedOver:
        """Plan, and give the save to the keepers. Collective.

        Raises:
            CheckpointError: On every rank.
        """
        self.client.spool.release(self.memory.slabs)
        staged = self._pipeline.leave_out(request, staged, ranks)

        def name() -> Path:  # on rank 0
            now = self.client.now()
            self._pipeline.newest_time = newest = recorded_time(self._pipeline.newest_time, now)
            behind = newest - now
            if behind > 60.0 and not self._has_warned_of_clock:
                self._has_warned_of_clock = True
                logger.warning("the clock is %.0f s behind the newest save. Recorded times go on from there.", behind)
            return Path(new_token(newest))

        planned = self._pipeline.plan(request, staged, name, ranks)
        token = planned.directory.name

        def begin() -> RankJob:
            events.emit(events.SaveStarted(request.path, request.step))
            return self._job(token, request, staged.get(), planned, ranks)

        self.client.hand_over(request.path, token, Attempt.of(begin), extra_files, ranks)
        return _HandedOver(token, staged.get(), planned)

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
        job = RankJob(
            token=token,
            rank=ranks.rank,
            path=path,
            step=request.step,
            config=replace(self._config, storage_options=None),
            items=plain.encode(Items.of(planned.rank_plan, planned.state, self.client.spool)),
            frozen=planned.frozen,
            loaded=None if loaded is None else str(loaded),
            options=options_of(path) or None,
            client=self.client.spool.client,
            key=self.client.training.key,
            began=request.began,
            spent=Spent(self._timed(request).blocked_seconds, staged.copy_seconds),
            beside_rank_zero=self.client.beside_rank_zero,
        )
        if (plan := planned.rank_plan.global_plan) is None:
            return job
        head = Head(
            table=plan.table,
            order=in_table_order(plan),
            left_out=dict(staged.left_out),
            rounded=dict(staged.rounded),
            empty=plan.empty,
            facts=self._pipeline.facts(request, staged, ranks.size, plan.objects),
            save_id=str(uuid.uuid4()),
            among_other_files=request.files is not None,
            run=figures.this_run(),
            durable=request.durable,
        )
        return replace(job, head=plain.encode(head))

    def _follow(self, save: _HandedOver, handle: RunningSave, request: SaveRequest) -> events.SaveFinished:
        """Wait until the save has ended, and report its milestones to the handle and the subscribers.

        Raises:
            CheckpointError: The save has failed.
        """
        let_training_go_first()
        staging_seconds = save.staged.copy_seconds
        try:
            if reason := self._meet_when_written(save, request):
                return self._write_without_keeper(save, handle, request, reason)
        finally:
            del save.staged, save.planned  # this thread may wait for long until the keeper has published it
            handle.set_written()
        try:
            local = None
            if has_local_tier(self._config):
                local = self._follow_locally(save.token, handle, request)
            return self._finished(self._end_of(save.token, request, local), request, staging_seconds, local)
        except Exception as error:
            self._pipeline.fail(error, request, self.client.rank)

    def _end_of(self, token: str, request: SaveRequest, local: float | None) -> End:
        """Return the end of a save.

        Raises SaveFailed if it has not ended when the training stops waiting, or if the keeper does not answer."""
        try:
            if (end := self.client.wait(token, "end").end) is not None:
                return end
            kept, why = "in memory", f"the keeper has not published it within {self._config.timeout:.0f} s, and goes on"
        except (KeeperLost, NoSharedMemory) as error:
            kept, why = "in memory" if isinstance(error, KeeperLost) else "lost", str(error)
        kept = kept if local is None else "complete in keeper.dir"
        raise SaveFailed(f"{request.path} is {kept}, and not durable: {why}")

    def _meet_when_written(self, save: _HandedOver, request: SaveRequest) -> str:
        """Return a message about the keeper that has missed its deadline; empty if all have written.

        Collective in the threads of saves.

        If a rank has died meanwhile, the others learn only from their keepers how the save ends.
        """

        def wait() -> tuple[int, str]:
            closes_at, seconds = self._queue.closes_at, self._config.timeout
            if closes_at is not None:
                seconds = max(0.0, min(seconds, closes_at - time.monotonic()))
            try:
                state = self.client.wait(save.token, "written", seconds)
            except SaveFailed as error:
                if isinstance(error, KeeperLost):
                    self.client.pass_over(error)
                # Another failure is raised again by :meth:`_end_of`.
                return (2, str(error)) if isinstance(error, (KeeperLost, NoSharedMemory)) else (0, "")
            if not state.written:
                return 1, f"the keeper of rank {self.client.rank} has not written it in {self._config.timeout:.0f} s"
            if state.end is not None and isinstance(state.end.failure, KeeperLost):
                return 2, str(state.end.failure)
            return 0, ""

        step = f"see that keepers have written {request.path}"
        try:
            _, reason = self.group.combine(step, wait, lambda reasons: max(reasons))
            return reason
        except CheckpointError as error:
            logger.debug("ranks do not meet: %s", error)
            return ""

    def _write_without_keeper(
        self, save: _HandedOver, handle: RunningSave, request: SaveRequest, reason: str
    ) -> events.SaveFinished:
        """Revoke a save that a keeper has not written, and write it to its path. Collective in the threads of saves.

        Raises:
            CheckpointError: On every rank.
        """
        path, ranks = request.path, self.group
        if ranks.rank == 0:
            logger.warning("%s is written without a keeper: %s", path, reason)
        handle.set_local(SaveFailed(f"{path} is not complete in keeper.dir: {reason}"))
        publication = Publication(path, medium_of(path, self._config.io.direct))

        staged, plan = Attempt(save.staged), save.planned

        def reserve() -> SavePlan:
            files = ranks.agree(f"revoke the save of {path}", lambda: self.client.revoke(save.token, path))
            if keeper_options(self._config).durable_every is None:
                raise SaveFailed(f"cannot save {path}: {reason}")
            has_files = request.files is not None
            directory = ranks.from_zero(f"reserve {path}", lambda: publication.reserve(has_files, time_of(save.token)))

            def add() -> None:
                publication.medium.join(directory, path)
                add_files(publication.medium, directory, lambda to: copy_tree(files, to))

            if has_files:
                ranks.agree(f"add files to {path}", add if files.is_dir() else lambda: None)
            return replace(plan, directory=directory)

        def write() -> events.SaveFinished:
            with together(request.call):  # another thread than the one that follows the save
                return self._pipeline.plan_write_publish(
                    publication, request, staged, ranks, reserve_planned=reserve, degraded=reason
                )

        try:
            return self._unless_closed(request, write)
        finally:
            self.memory.free()

    def _unless_closed(self, request: SaveRequest, write: Callable[[], events.SaveFinished]) -> events.SaveFinished:
        """Return the result of ``write``.

        Raises SaveFailed if it has none at ``timeout`` after the training stops waiting: the path may hang.
        """
        results: list[Attempt[events.SaveFinished]] = []
        thread = threading.Thread(target=lambda: results.append(Attempt.of(write)), name="dcp-write", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            closes_at = self._queue.closes_at
            if not results and closes_at is not None and time.monotonic() > closes_at + self._config.timeout:
                error = SaveFailed(
                    f"{request.path} is not durable: it is still being written, and is lost when this process ends"
                )
                self._pipeline.fail(error, request, self.client.rank)
        return results[0].get()

    def _follow_locally(self, token: str, handle: RunningSave, request: SaveRequest) -> float | None:
        try:
            state = self.client.wait(token, "local")
        except (KeeperLost, NoSharedMemory) as error:
            raise SaveFailed(f"{request.path} is written on its nodes, and not durable: {error}") from error
        if not state.local:
            end = state.end
            why = "the keeper has not completed it yet" if end is None else end.error or end.degraded
            handle.set_local(SaveFailed(f"{request.path} is not complete in keeper.dir: {why}"))
            return None
        seconds = time.monotonic() - request.began
        self._pipeline.emit(events.SavedLocally(request.path, request.step, seconds, self.client.rank, state.copies))
        handle.set_local()
        return seconds

    def _finished(
        self, end: End, request: SaveRequest, staging_seconds: float, local: float | None
    ) -> events.SaveFinished:
        if end.failure is not None:
            raise end.failure
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
            copies=end.copies,
            degraded=end.degraded,
        )
        self._pipeline.emit(event)
        return event

    def forget(self, path: Where) -> None:
        """Delete the nodes' parts of the saves to ``path``."""
        self.client.forget(path_of(path))

    def bring_newest(self) -> None:
        """Copy the newest save to its path if it is only complete locally, and wait until it is there.

        Raises:
            CheckpointError: The copy fails.
        """
        if self._newest is None or keeper_options(self._config).durable_every is None:
            return
        token, handle = self._newest
        if handle.finished is None or handle.finished.tier == "durable":
            return
        try:
            if not self.client.drain(token):
                return
            end = self.client.wait(token, "end").end
        except (KeeperLost, NoSharedMemory) as error:
            raise SaveFailed(f"{handle.path} is complete in keeper.dir, and not durable: {error}") from error
        if end is None:
            raise SaveFailed(f"{handle.path} is only in keeper.dir: the keeper has not copied it to its path yet")
        if end.failure is not None:
            raise SaveFailed(
                f"{handle.path} is complete in keeper.dir, and not durable: {end.failure}"
            ) from end.failure
        event = replace(handle.finished, tier="durable")
        handle.set_durable(event)
        self._pipeline.emit(event)

    def close(self) -> None:
        """Give back the host copy, and leave the keeper."""
        self.release_memory()
        self.client.close()
        if self.group.size > 1:
            self.group.close()
