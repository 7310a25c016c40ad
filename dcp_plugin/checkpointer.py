"""The class that every integration talks to: :class:`Checkpointer` saves and loads live objects.

A save is a pipeline of stages (:mod:`~dcp_plugin.saving.job`): gather the state, stage it on the host, plan, write,
publish. With ``async_save`` everything after staging runs in a thread (:mod:`~dcp_plugin.saving.queue`). A load is
:mod:`~dcp_plugin.loading.load`. Every step of either that can fail on one rank ends in an all-or-none collective.
"""

from __future__ import annotations

import logging
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from dcp_plugin import events
from dcp_plugin.calls import Call, together
from dcp_plugin.config import CheckpointConfig
from dcp_plugin.errors import NoSharedMemory
from dcp_plugin.format.metadata import Aliases, Views
from dcp_plugin.loading.load import Loading
from dcp_plugin.loading.matching import LoadMode
from dcp_plugin.media import medium_of
from dcp_plugin.media.packed import unpacked
from dcp_plugin.partial import PartialLoad
from dcp_plugin.paths import PathLike, Where, as_path
from dcp_plugin.ranks import Attempt, RankGroups, Ranks
from dcp_plugin.records import LiveState, LoadReport, SaveRequest, StagedState
from dcp_plugin.runs import launches
from dcp_plugin.runs.damage import setting_aside
from dcp_plugin.runs.interval import SaveInterval
from dcp_plugin.saving.job import HostCopy, SavePipeline, objects_of, raise_as_failed_save
from dcp_plugin.saving.pace import Pace
from dcp_plugin.saving.queue import SaveHandle, SaveQueue, first_untold
from dcp_plugin.sources import SourceFiles, keeper_of, source_of
from dcp_plugin.staging.guard import take_off_hooks, wait_until_copied
from dcp_plugin.staging.snapshot import HostPool
from dcp_plugin.state.names import module_cache
from dcp_plugin.storage.writer import Publication
from dcp_plugin.tensors.host_memory import collector_paused
from dcp_plugin.types import CheckpointState

logger = logging.getLogger("dcp_plugin")


class Checkpointer:
    """Saves and loads, with one configuration, one process group and one host copy for all its saves.

    One thread at a time may call it: a second one, and a subscriber of events that would wait for the save in flight,
    get a :class:`CheckpointError` and change nothing. Threads that save side by side need a Checkpointer each.

    Args:
        config: Defaults to ``CheckpointConfig()``.
        solo: This process alone saves and loads; no collectives.
        overrides: Fields of the configuration.

    Raises:
        ValueError, TypeError: A setting is refused, see :class:`CheckpointConfig`.

    Example:
        >>> import dcp_plugin, torch
        >>> state = {"model": torch.nn.Linear(2, 2), "step": 1}
        >>> checkpointer = dcp_plugin.Checkpointer(async_save=True)
        >>> handle = checkpointer.save(state, "run/step-1", step=1)  # training may go on now
        >>> handle.wait()
        >>> checkpointer.load(state, "run/step-1").missing
        []
        >>> checkpointer.close()
    """

    def __init__(self, config: CheckpointConfig | None = None, *, solo: bool = False, **overrides: Any) -> None:
        self.config = CheckpointConfig.merge(config, ("solo",), **overrides)
        self._solo = solo
        talks = self.config.when_busy != "wait" or self.config.save_interval is not None
        aside = self.config.async_save and talks
        self._groups = RankGroups(self.config.of_all_ranks, self.config.timeout, solo, aside)
        self._may_go_on = int(self.config.async_save and self.config.when_busy == "queue")
        """How many saves may be in flight when another one begins."""
        self._pools = [HostPool() for _ in range(1 + self._may_go_on)]
        self._saves = 0
        self._saving = SavePipeline(self.config)
        self._queue = SaveQueue()
        self._lazy = self.config.staging == "lazy"
        self._source = source_of(self.config)
        self._kept: Any = None  # the writer of the keeper, once something was saved
        self.compares_ranks = True
        """Whether the first save warns of data that differs between ranks. Integrations of frameworks in which the
        values of rank 0 count by rule set it to False."""
        self.pace = Pace(self.config)
        """For integrations: measures steps, and what saves cost."""

    def __del__(self, _program_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        """Warn when a Checkpointer is dropped while it holds resources, unless the program ends. The group is not left
        here: the other ranks need not be at the same point."""
        if _program_ends() or not hasattr(self, "_queue"):  # a setting was refused, and nothing made
            return
        if self._queue.is_inherited:
            return
        held = ["a process group"] * self._groups.held
        held += [f"{pool.nbytes:,} bytes of host memory" for pool in self._pools if pool.nbytes]
        if self._kept is not None:
            held.append(f"{self._kept.nbytes:,} bytes of shared memory, and a keeper")
        if held:
            said = f"a Checkpointer that nobody has closed has {' and '.join(held)}: close() gives that back"
            warnings.warn(said, ResourceWarning, stacklevel=2, source=self)

    def save(
        self,
        state: Mapping[str, Any],
        path: PathLike,
        step: int | None = None,
        files: Callable[[Path], None] | None = None,
        views: Views | None = None,
        owners: Iterable[Any] = (),
        aliases: Aliases | None = None,
        kinds: Mapping[str, str] | None = None,
        durable: bool = False,
        metrics: Mapping[str, Any] | None = None,
    ) -> SaveHandle:
        """Save ``state`` as the checkpoint directory ``path``. Collective.

        Args:
            state: Name to Module, Optimizer, Stateful, tensor, plain value, or a mapping of these.
            path: A directory that all ranks share. A checkpoint that is there is replaced when this one is complete.
            step: Recorded in the checkpoint. The same on all ranks.
            files: Called on every rank, before anything else happens, with the directory in which the checkpoint is
                being made. What it puts there is published with the checkpoint, and belongs to it. It may still
                change ``state``. With it, ``path`` may be a directory that has other files in it already; they stay.
            views: More tables of contents for stock loaders, see :mod:`dcp_plugin.format.metadata`.
            owners: Modules and optimizers whose state dicts are in ``state`` without themselves. With
                ``staging="lazy"``: what is theirs may be copied later, too.
            aliases: More keys for stock loaders, see there too.
            kinds: Which names of ``state`` are state dicts of a ``"module"`` or an ``"optimizer"``, so that a load
                finds them under other names, as it does those of live objects. With it, all of ``state`` is data: an
                object in one of its mappings is a value, which is not asked for its state.
            durable: With ``local_dir``: bring this save to its path, whatever ``durable_every`` says.
            metrics: Numbers by name, or tensors of one element: what this checkpoint has reached. Those of rank 0 are
                recorded in it, see :attr:`dcp_plugin.CheckpointInfo.metrics`.

        Returns:
            A handle; the save is complete already unless the configuration says ``async_save``.

        Raises:
            SaveFailed: On every rank, naming the ranks where it went wrong. What was at ``path`` is untouched. Also
                raised for an earlier background save that failed.
            DurabilityUnknown: On every rank. The new checkpoint is there, but a loss of power may undo that.
            UnsafeCheckpoint, CheckpointMismatch: The state cannot be saved; naming all keys.
            CheckpointMismatch: Ranks save to different paths or different steps, or some do not save; on every rank,
                naming two of them.
            RankFailure: A rank died, or did not answer within the timeout.
            CheckpointError: On this rank alone: another call of this checkpointer is under way, of another thread or
                one that this one comes from; or this comes from a subscriber, while a save is in flight.
        """
        began = time.monotonic()
        handle = SaveHandle(as_path(path, self.config.storage_options), step)
        handle.on_published(self.pace.published)
        call = Call.save(handle.path, step)
        with self._queue.beginning(handle), together(call):
            if self.config.finish_on_sigterm:
                from dcp_plugin.saving import sigterm  # few configurations ask for it

                sigterm.watch(self._queue, self.config.timeout)
            if self._to_be_skipped(handle.path):
                handle.set_skipped()
                return handle
            ranks = self._meet_again(self._may_go_on)
            publication = Publication(handle.path, medium_of(handle.path, self.config.direct_io))
            request = SaveRequest(handle.path, call, step, began, views=views or {}, aliases=aliases or {})
            request = replace(request, with_files=files is not None, durable=durable)
            is_data = kinds is not None
            live = LiveState(state, kinds or {}, list(owners), metrics or {}, self.compares_ranks, is_data)
            if self.config.has_keeper and self._save_by_keeper(handle, live, request, ranks, files):
                self.pace.paused(time.monotonic() - began, saving=True)
                return handle
            if files is not None:
                self._add_files(publication, files)
            run = self._save_in_background if self.config.async_save else self._save_now
            run(handle, publication, live, request, ranks)
            self.pace.paused(time.monotonic() - began, saving=True)
        return handle

    def load(
        self, state: Mapping[str, Any], path: PathLike, partial: PartialLoad | None = None, strict: bool = True
    ) -> LoadReport:
        """Fill ``state`` from a checkpoint, in place. Collective.

        Modules and optimizers may be wrapped and distributed in another way than those that were saved. The target says
        which tensors are loaded: those of mappings, lists and ``Stateful`` objects have to be in the checkpoint with
        their shapes, as in a module. Plain values are replaced in the mapping that holds them, and those that only the
        checkpoint has are added. An empty mapping or None receives everything that is stored under its name.

        Tensors that only the checkpoint has: a mapping or list does not read them. A ``Stateful`` is handed those that
        no rank's target has, and its own ``load_state_dict`` judges them; with ``strict=False`` or
        ``unexpected="ignore"`` they are not read. One warning names the tensors that are not read. To hand every object
        what it had at the save, whatever it has now, use :func:`~dcp_plugin.resume_or_init`.

        Everything that can be checked is checked before the first byte is overwritten. What remains: if reading
        fails half-way (a bad disk, a checksum that differs), modules and existing optimizer state are partly loaded.

        Another process may overwrite or delete the checkpoint meanwhile: all ranks load the old one or the new one, as
        a whole. Of one with more than 256 files, some may be missed then: that is a ``CheckpointNotFound``, half-way.

        Parameters and buffers are filled in their own memory. Where a module has a ``load_state_dict``, a
        ``_load_from_state_dict``, load hooks or extra state of its own, these run in the order of
        ``nn.Module.load_state_dict``, with what that would hand them; what they ask for is read one submodule after
        the other, and what they then find missing or unexpected is raised when all is loaded.

        Args:
            partial: Which keys of ``state`` to load, and from where; the others keep their values. The same on all
                ranks. Without one, everything is loaded, and converted to the dtypes of ``state``.
            strict: Whether missing and unexpected keys of modules and optimizers, missing keys of anything else, and
                other shapes in a ``Stateful`` are errors. A key is unexpected if no rank takes it. ``False`` goes
                before ``partial``'s ``"error"``; its ``"warn"`` still warns.

        Raises:
            CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt, UnsafeCheckpoint: On every rank. If an
                automatic resume has chosen ``path``, and it is damaged, it is set aside for the next one.
            CheckpointUnreadable: On every rank: the file system failed to read.
            CheckpointMismatch: Naming all keys that do not fit, and what would make them; or ranks that load
                different checkpoints, or different parts.
            RankFailure: A rank died, or did not answer within the timeout.
        """
        return self._load(state, path, partial, strict, LoadMode.FILL)

    def restore(
        self,
        state: Mapping[str, Any],
        path: PathLike,
        partial: PartialLoad | None = None,
        strict: bool = True,
        files: SourceFiles | None = None,
    ) -> LoadReport:
        """:meth:`load` for integrations, which restore what the run itself has saved. Collective.

        Mappings, lists and ``Stateful`` objects are handed what they had at the save: tensors of any shape, also those
        that they do not have now. One warning names tensors that the target has and the checkpoint lacks. A rank is not
        handed what another rank's target has as a shard, or in a module or optimizer.

        Args and errors as in :meth:`load`; ``files`` are those of :meth:`shown`, where this rank restores alone.
        """
        return self._load(state, path, partial, strict, LoadMode.RESTORE, files)

    def _load(
        self,
        state: Mapping[str, Any],
        path: PathLike,
        partial: PartialLoad | None,
        strict: bool,
        mode: LoadMode,
        shown: SourceFiles | None = None,
    ) -> LoadReport:
        with self._queue.call(f"load {path}"), together(Call.load(path)):
            ranks = self._meet_again()
            wait_until_copied()  # another checkpointer may be copying what this load overwrites
            where = as_path(path, self.config.storage_options)
            launches.refuse_another_rank(where, ranks.launch)
            opening = self._open(where, ranks) if shown is None else nullcontext(shown)
            with collector_paused(), setting_aside(ranks, where), opening as files:
                loading = Loading(ranks, self.config, where, partial, strict, files, mode)
                report = loading.run(state)
            self._saving.loaded(state, report, loading.opened, ranks)
            return report

    @contextmanager
    def shown(self, path: PathLike) -> Iterator[SourceFiles | None]:
        """Open the files of a checkpoint that only a source has, for integrations that examine it before they load it.

        All ranks leave the block together. Collective.

        Returns:
            The files, as long as the block runs; None if the checkpoint is to be read at its path.

        Raises:
            RankFailure: As :meth:`load`.
        """
        if not self.config.has_local_tier:
            yield None
            return
        with self._queue.call(f"look at {path}"):
            ranks = self._meet_again()
            where = as_path(path, self.config.storage_options)
            if self._kept is None:
                self._source.settle(where.parent, ranks)
            with self._open(where, ranks) as files:
                if files is None or files.is_at_path:
                    yield None
                    return
                yield files
                ranks.agree(f"end to look at {where}", lambda: None)  # no rank needs this node's files any more

    def _open(self, path: Where, ranks: Ranks) -> AbstractContextManager[SourceFiles | None]:
        """Open what the source has of a checkpoint, after the saves in flight. Collective."""
        for handle in self._queue.handles:
            handle.wait_recoverable()
        return self._source.open(path, ranks, lambda: unpacked(medium_of(path).open(path, pin=True)))

    def surviving(self, root: PathLike) -> tuple[CheckpointState, ...]:
        """Return the saves at or below ``root`` that a load finds on the nodes, but not at their paths. Collective.

        First, keepers of an earlier training finish the saves that were handed over to them.

        Raises:
            RankFailure: A rank died, or did not answer within the timeout.
        """
        if not self.config.has_keeper:
            return ()
        ranks, where = self._meet_again(), as_path(root, self.config.storage_options)
        self._source.settle(where, ranks)
        return tuple(self._source.states(where, ranks))

    def set_local_aside(self, path: Where) -> bool:
        """Exclude the nodes' saves to a path from all later starts; return whether any node has one. Collective."""
        return self._source.quarantine(path, self.ranks)

    def remove(self, path: PathLike) -> None:
        """Delete a checkpoint, with what nodes have of it in ``local_dir``, after the save in flight if that is writing
        it. Call it on one rank: with ``local_dir``, on rank 0.

        Args:
            path: A checkpoint of this package or of another tool, complete or torn, or a link to one: then the link
                alone goes.

        Raises:
            CheckpointError: There is something else at ``path``, or it is the working directory, a directory above
                that, or a whole bucket: nothing is deleted. Or the file system failed; or a subscriber of that save's
                events calls it.
        """
        from dcp_plugin.runs import retention  # few programs delete by themselves

        where = as_path(path, self.config.storage_options)
        for handle in self._queue.handles:
            if handle.path == where:
                handle.refuse_in_callback(f"remove {path}")
                handle.wait_done()
        retention.refuse_to_remove_other_things(where)
        (self._source if self._kept is None else self._kept).forget(where)
        retention.remove(where)

    def wait(self) -> None:
        """Wait until no save is in flight.

        Raises:
            SaveFailed: A save that was in flight failed, on every rank; raised once.
            CheckpointError: Another thread is in a call of this checkpointer, or a subscriber waits for its own save.
        """
        began = time.monotonic()
        with self._queue.call("wait"):
            ended = self._queue.wait_for_all_but(0)
            take_off_hooks()
            self.pace.paused(time.monotonic() - began, saving=False)
            Attempt(None, first_untold(ended)).get()

    def wait_until_kept(self) -> None:
        """Wait until what was saved survives this training: with ``local_dir``, until it is complete there, and while
        it is on its way to its path. Integrations wait for no more before they go on.

        Raises:
            SaveFailed: As :meth:`wait`; not with ``local_dir``, where a save that fails is told in the log, and raised
                by :meth:`wait`: ranks hear of it at different times, and the training is to go on.
        """
        if not self.config.has_local_tier:
            self.wait()
            return
        with self._queue.call("wait"):
            for handle in self._queue.handles:
                handle.wait_recoverable()
            take_off_hooks()

    def bring_newest(self) -> None:
        """Bring the newest save to its path, if it is in ``local_dir`` alone; :meth:`close` does, too. Not with
        ``durable_every=None``.

        Raises:
            SaveFailed: As :meth:`wait`.
        """
        with self._queue.call("bring the newest save to its path"):
            self.wait()
            if self._kept is not None:
                self._kept.bring_newest()

    def due(self, step: int) -> bool:
        """Whether to save now, by ``save_interval``: the same answer on every rank. Collective: after each step.

        Rank 0 decides. Most calls only compare two numbers; about ten in an interval, and one a minute at least, are a
        broadcast. A save that is called without being due counts, too. While one is in flight, none is due. With
        ``"auto"`` the first is due after a minute; what it costs tells when the next one is. Without ``save_interval``
        none is ever due, and nothing is sent.

        From the first call on, steps are measured, and rank 0 keeps a small file beside the checkpoints, in which the
        next run sees how this one has ended: call :meth:`close` at the end.

        Args:
            step: Any number that changes from step to step; asked again for the same one, the answer is the same.

        Raises:
            CheckpointMismatch: Ranks ask for different steps; on those that differ from rank 0.
            RankFailure: A rank died, or did not answer within the timeout.

        Example:
            >>> import dcp_plugin, torch
            >>> model = torch.nn.Linear(2, 2)
            >>> checkpointer = dcp_plugin.Checkpointer(save_interval=600)
            >>> for step in range(100):
            ...     if checkpointer.due(step):
            ...         checkpointer.save({"model": model}, f"run/step-{step}", step=step)
            >>> checkpointer.close()
        """
        return self.pace.due(step, self._is_saving(), self._groups.front)

    def _is_saving(self) -> bool:
        """Whether a save is in flight that a restart would not find yet."""
        return any(not handle.recoverable() for handle in self._queue.in_flight)

    def step_ended(self) -> None:
        """Measure a step, for :meth:`proposed_interval`, where nobody asks whether a save is due."""
        self.pace.step_ended(self._is_saving())

    def proposed_interval(self) -> SaveInterval | None:
        """How often to save: the cheapest interval, by what is known now; None before the first save.

        Each rank has measured itself, and rank 0 alone knows of earlier failures: ask there. Steps are measured by
        :meth:`due`; without it, what a save costs is what its call took.
        """
        return self.pace.proposal

    @property
    def ranks(self) -> Ranks:
        """The group in which an integration lets all ranks agree on something. Collective."""
        return self._groups.front()

    def all_ranks_come_to(self, step: str, within: float) -> bool:
        """Whether every rank calls this, in a situation in which some may not; True for a rank alone.

        False after ``within`` seconds, and at once if the ranks have not met yet or an earlier failure parted them.
        """
        ranks = self._groups.known
        return self._solo or (ranks is not None and ranks.usable and ranks.all_come_to(step, within))

    def close(self) -> None:
        """Finish what is in flight, free the host copy and leave the process group. Saving again is possible.

        A checkpointer belongs to the process that made it: in a process that is forked from that one, this does
        nothing, and the other methods raise ``CheckpointError``.

        A run that ends without this, or while an exception is handled, has failed, as far as :meth:`due` is concerned.

        Raises:
            SaveFailed: As :meth:`wait`.
        """
        if self._queue.is_inherited:
            return
        clean = not isinstance(sys.exception(), Exception)  # else that is what ends the training
        with self._queue.call("close"):
            try:
                self.wait()
            finally:
                if self.config.finish_on_sigterm:
                    from dcp_plugin.saving import sigterm  # as in save

                    sigterm.forget(self._queue)
                self.pace.ended(clean)
                for pool in self._pools:
                    pool.free()
                if self._kept is not None:
                    self._close_kept(self._kept)
                self._saving.forget_plan()
                self._groups.close()

    def _close_kept(self, kept: Any) -> None:
        self._kept = None
        try:
            kept.bring_newest()
        finally:
            kept.close()

    def _meet_again(self, may_go_on: int = 0) -> Ranks:
        """The group of ranks, after all saves in flight but the last ``may_go_on`` have ended.

        All ranks know the failures of these saves, but on some the handle may have raised them already: then all
        raise if any has not. A group that a save in flight has just lost stays: other ranks may not have noticed
        yet, and making a new one is collective. The next call that waits for that save makes it.
        """
        if self.config.has_keeper:
            self._wait_for_turn()
            return self._groups.main()
        ended = self._queue.wait_for_all_but(may_go_on)
        take_off_hooks()
        untold = first_untold(ended)
        known = self._groups.known
        try:
            ranks = known if self._queue.handles and known is not None else self._groups.main()
        except BaseException as error:  # which is not to hide the failure that this call was going to raise
            if untold is not None:
                error.add_note(f"Before that, a save in the background failed: {type(untold).__name__}: {untold}")
            raise
        if any(handle.exception() is not None for handle in ended):
            try:
                ranks.agree("go on after a failed save", Attempt(None, untold).get)
            except Exception:
                if untold is not None:
                    raise untold from untold.__cause__  # as it was raised in the background, traceback and all
                raise
        return ranks

    def _wait_for_turn(self) -> None:
        """Until no save in flight talks to other ranks. How it ends is told to each rank at another time: what fails is
        raised by who waits for it."""
        for handle in self._queue.handles:
            handle.wait_turn()
        self._queue.let_go_of_ended()
        take_off_hooks()

    def _to_be_skipped(self, path: Where) -> bool:
        """Whether rank 0 is still busy with an earlier save: then no rank saves."""
        if not self.config.async_save or self.config.when_busy != "skip":
            return False
        front = self._groups.front()
        busy = front.from_zero("see whether a save is in flight", self._is_busy)
        if busy and front.rank == 0:
            logger.warning("%s is NOT saved: an earlier save is still in flight (when_busy='skip')", path)
        return busy

    def _is_busy(self) -> bool:
        if self._kept is not None:
            return not self._kept.is_free()
        return not all(handle.done() for handle in self._queue.handles)

    def _add_files(self, publication: Publication, files: Callable[[Path], None]) -> None:
        path, ranks = publication.path, self._groups.front()

        def add() -> None:
            publication.medium.join(directory, path)
            publication.medium.attach(directory, files)

        try:
            directory = ranks.from_zero(f"reserve {path}", lambda: publication.reserve(among_other_files=True))
            ranks.agree(f"add files to {path}", add)
        except Exception as error:
            publication.discard()
            raise_as_failed_save(error, path)
        except BaseException:  # Ctrl-C
            publication.discard()
            raise

    def _save_by_keeper(
        self,
        handle: SaveHandle,
        live: LiveState,
        request: SaveRequest,
        ranks: Ranks,
        files: Callable[[Path], None] | None,
    ) -> bool:
        """Whether it was handed to a keeper. If some node lacks shared memory it is not, on any rank."""
        attached: Path | None = None
        try:
            kept = self._kept_saves(handle.path, ranks)
            if files is not None:
                attached = ranks.agree(f"add files to {handle.path}", lambda: kept.add_files(files))
            with collector_paused(), module_cache():
                self._stage_and_hand_over(kept, handle, live, request, ranks, attached)
        except NoSharedMemory as error:
            if self._kept is not None:
                self._kept.give_up_pools()
            for earlier in self._queue.handles:  # which a keeper may yet bring to the same path
                if earlier.path == handle.path:
                    earlier.wait_done()
            if self.config.durable_every is None:
                raise
            if ranks.rank == 0:
                logger.warning("%s is saved without a keeper: %s", handle.path, error)
            return False
        except Exception as error:
            raise_as_failed_save(error, handle.path)
        finally:
            if attached is not None:  # it has another name by now if it was handed over, or will have
                self._drop_if_left(handle, attached)
        if not self.config.async_save:
            ranks.agree(f"save {handle.path}", handle.wait)
        return True

    def _drop_if_left(self, handle: SaveHandle, attached: Path) -> None:
        if handle not in self._queue.handles:
            shutil.rmtree(attached, ignore_errors=True)

    def _stage_and_hand_over(
        self,
        kept: Any,
        handle: SaveHandle,
        live: LiveState,
        request: SaveRequest,
        ranks: Ranks,
        attached: Path | None,
    ) -> None:
        lazy = self._lazy
        gathered = Attempt.of(lambda: self._saving.gather(live, ranks))
        pool = Attempt.of(kept.pool)  # which may fail on one rank alone
        copy = HostCopy(pool.value or HostPool(), self._saving.encode)
        begun = gathered.then(lambda it: pool.then(lambda _: copy.begin(it, objects_of(live) if lazy else [])).get())
        later = not copy.complete
        if self.config.staging == "lazy":  # all ranks go on in this thread, or all in another
            try:
                step = f"stage {handle.path}"
                later = ranks.combine(step, lambda: begun.then(lambda _: later).get(), any)
            except BaseException:
                copy.release()
                raise
        if later:
            finish = lambda: self._finish_copy(handle, begun, copy, ranks)  # noqa: E731
            kept.start_later(self._queue, handle, request, finish, attached, ranks)
        else:
            handle.set_staged()
            staged = begun.then(lambda _: copy.finish())
            kept.start(self._queue, handle, request, staged, attached, ranks)

    def _kept_saves(self, path: Where, ranks: Ranks) -> Any:
        if self._kept is None:
            keeper = keeper_of(self.config)
            assert keeper is not None
            self._kept = keeper.writer(self.config, path.parent, ranks, self._saving, 1 + self._may_go_on)
        return self._kept

    def _save_now(
        self, handle: SaveHandle, publication: Publication, live: LiveState, request: SaveRequest, ranks: Ranks
    ) -> None:
        with collector_paused(), events.progress(handle.path, self._shows_progress(ranks)):
            with module_cache():
                try:
                    staged = Attempt.of(lambda: self._saving.gather(live, ranks)).then(self._saving.stage_in_place)
                except BaseException:  # Ctrl-C, or SystemExit in a state_dict
                    publication.discard()
                    raise
            event = self._saving.run(publication, request, staged, ranks)
        handle.set_published(event)

    def _save_in_background(
        self, handle: SaveHandle, publication: Publication, live: LiveState, request: SaveRequest, ranks: Ranks
    ) -> None:
        copy = HostCopy(self._pools[self._saves % len(self._pools)], self._saving.encode)
        self._queue.warns_at_exit = ranks.rank == 0
        try:
            with collector_paused(), module_cache():
                gathered = Attempt.of(lambda: self._saving.gather(live, ranks))
                begun = gathered.then(lambda it: copy.begin(it, objects_of(live) if self._lazy else []))
            if copy.complete:
                handle.set_staged()
            timed = replace(request, blocked_seconds=time.monotonic() - request.began)

            def write(staged: Attempt[StagedState]) -> events.SaveFinished:
                shown = events.progress(handle.path, self._shows_progress(ranks), in_background=True)
                with shown, together(request.call):
                    return self._saving.run(publication, timed, staged, ranks)

            self._queue.start(handle, lambda: self._finish_copy(handle, begun, copy, ranks), write)
        finally:  # Ctrl-C comes also when the thread runs already
            if handle in self._queue.handles:
                self._saves += 1  # and not before: the next one takes the other pool, which may be in use
            else:
                copy.release()  # nobody will make the copy that others wait for
                publication.discard()

    def _finish_copy(
        self, handle: SaveHandle, begun: Attempt[None], copy: HostCopy, ranks: Ranks
    ) -> Attempt[StagedState]:
        try:
            staged = begun.then(lambda _: copy.finish())
            if copy.changed:
                self._lazy = False
                logger.warning(
                    "rank %d: from now on saves copy the state before they return, as with staging='blocking': "
                    "something that is not a step of an optimizer wrote to it while %s was being copied",
                    ranks.rank,
                    handle.path,
                )
            return staged
        finally:
            handle.set_staged()
            copy.release()

    def _shows_progress(self, ranks: Ranks) -> bool:
        wanted = sys.stderr.isatty() if self.config.progress == "auto" else self.config.progress
        return wanted and ranks.rank == 0
