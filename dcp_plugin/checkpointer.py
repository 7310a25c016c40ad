""":class:`Checkpointer`, the interface of all integrations for saving and loading live objects.

A save is a pipeline of stages (:mod:`~dcp_plugin.core.saving.job`): gather the state, stage it on the host, plan,
write, publish. With ``async_save`` a thread runs the stages after staging (:mod:`~dcp_plugin.core.saving.background`).
The stages of a load are in :mod:`~dcp_plugin.core.loading.load`. The failure of one rank is raised on all of them, by
the next collective.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dcp_plugin.core.config import CheckpointConfig, has_local_tier, settings_of_all_ranks
from dcp_plugin.core.errors import refuse_other_systems
from dcp_plugin.core.format.metadata import Aliases, Views
from dcp_plugin.core.interrupts import collector_paused
from dcp_plugin.core.loading.load import Loading
from dcp_plugin.core.loading.matching import LoadMode
from dcp_plugin.core.media import medium_of, refuse_real_run, unpacked
from dcp_plugin.core.paths import PathLike, Where, as_path
from dcp_plugin.core.ranks.collectives import Call, Ranks, together
from dcp_plugin.core.ranks.groups import RankGroups
from dcp_plugin.core.records import LiveState, LoadReport, SaveRequest
from dcp_plugin.core.runs.damage import quarantine_damaged
from dcp_plugin.core.saving.job import SavePipeline
from dcp_plugin.core.saving.queue import RunningSave, SaveHandle, SaveQueue, first_unreported, wait_until_staged
from dcp_plugin.core.saving.writers import CallingThread, Writer, is_rank_zero_busy
from dcp_plugin.core.sources import SourceFiles, keeper_of, source_of
from dcp_plugin.core.types import CheckpointState, public_class

if TYPE_CHECKING:
    from dcp_plugin.core.partial import PartialLoad
    from dcp_plugin.core.saving.save_timing import SaveTiming


@public_class()
class Checkpointer:
    """Interface for saves and loads with one configuration, one process group and one host copy.

    Only one thread at a time may call it. A second thread, or a subscriber of events that would wait for the save in
    flight, gets a :class:`CheckpointError`, and nothing changes. Threads that save concurrently need separate
    Checkpointers.

    Args:
        config: Defaults to ``CheckpointConfig()``.
        solo: If true, this process saves and loads alone, without collectives.
        overrides: Fields of the configuration.

    Raises:
        ValueError, TypeError: A setting is refused, see :class:`CheckpointConfig`.

    Example:
        >>> import dcp_plugin, torch
        >>> state = {"model": torch.nn.Linear(2, 2), "step": 1}
        >>> with dcp_plugin.Checkpointer(async_save=True) as checkpointer:
        ...     handle = checkpointer.save(state, "run/step-1", step=1)  # training may go on now
        ...     handle.wait()
        ...     checkpointer.load(state, "run/step-1").missing
        []
    """

    _compared: tuple[str, ...] = ("",)
    """Starts of the keys of data that the first save compares between ranks: all keys. The subclass for frameworks
    names the user's own objects, since loops and samplers may differ."""

    def __init__(self, config: CheckpointConfig | None = None, *, solo: bool = False, **overrides: Any) -> None:
        refuse_other_systems()
        self.config = CheckpointConfig.merge(config, ("solo",), **overrides)
        # With these settings a call asks rank 0 while the thread of a save uses the group of saves. Two threads must
        # not use one group, so such calls need a second one.
        needs_second = self.config.async_save and (
            self.config.when_busy == "skip" or self.config.save_interval is not None
        )
        self._groups = RankGroups(settings_of_all_ranks(self.config), self.config.timeout, solo, needs_second)
        self._saving = SavePipeline(self.config)
        self._queue = SaveQueue()
        self._writer: Writer = CallingThread(self.config, self._saving, self._groups)
        if self.config.async_save:
            from dcp_plugin.core.saving.background import BackgroundThread  # only asynchronous saves need host copies

            self._writer = BackgroundThread(self.config, self._saving, self._queue, self._groups)
        if (keeper := keeper_of(self.config)) is not None:
            self._writer = keeper.writer(self.config, self._saving, self._queue, self._groups, self._writer)
        self._source = source_of(self.config)
        self._timing: SaveTiming | None = None
        if self.config.save_interval is not None:
            from dcp_plugin.core.saving.save_timing import SaveTiming  # without an interval no save is ever due

            self._timing = SaveTiming(self.config.save_interval, lambda: self._queue.is_saving)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close, also after an exception of the block, which stays the exception: the failure of a save becomes its
        note."""
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"Besides, a save in the background failed: {type(failure).__name__}: {failure}")

    def __del__(self, _program_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        """Warn if a Checkpointer is dropped while it holds resources, unless the program ends.

        The process group is not closed here, because other ranks may be at a different point of the program.
        """
        # Without _writer, the constructor has raised.
        if _program_ends() or not hasattr(self, "_writer") or self._queue.is_inherited:
            return
        held = ["a process group"] * self._groups.held + self._writer.holdings()
        if held:
            message = f"a Checkpointer that nobody has closed has {' and '.join(held)}: close() gives that back"
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)

    def save(
        self,
        state: Mapping[str, Any],
        path: PathLike,
        step: int | None = None,
        files: Callable[[Path], None] | None = None,
        owners: Iterable[Any] = (),
        durable: bool = False,
        metrics: Mapping[str, Any] | None = None,
    ) -> SaveHandle:
        """Save ``state`` as the checkpoint directory ``path``. Collective.

        Args:
            state: Names -> Module, Optimizer, Stateful, tensor, plain value, or a mapping of these.
            path: A directory that all ranks share. The complete save replaces an existing checkpoint at this path.
            step: Step to record in the checkpoint, equal on all ranks.
            files: Called on every rank before ``state`` is gathered, with the directory in which the checkpoint is
                made. The files that it adds are published with the checkpoint and belong to it. It may still change
                ``state``. With it, ``path`` may be a directory with other files, which stay.
            owners: Modules and optimizers whose state dicts are in ``state`` without the objects. With
                ``staging="lazy"``, their tensors may be copied later as well.
            durable: With ``keeper.dir``: copy this save to its path, independent of ``keeper.durable_every``.
            metrics: Names -> numbers or tensors of one element. The checkpoint records those of rank 0, see
                :attr:`dcp_plugin.tools.CheckpointInfo.metrics`.

        Returns:
            A handle. Without ``async_save``, the save is already complete.

        Raises:
            SaveFailed: The save failed, or an earlier background save failed; raised on every rank. The message names
                the ranks that failed. Anything at ``path`` is unchanged.
            DurabilityUnknown: The new checkpoint is at its path, but a loss of power may undo that; raised on every
                rank.
            UnsafeCheckpoint, CheckpointMismatch: The state cannot be saved. The message names all keys.
            CheckpointMismatch: Ranks save to different paths or different steps, or some ranks do not save; raised on
                every rank. The message names two of them.
            RankFailure: A rank died, or did not answer within the timeout.
            CheckpointError: Another call of this checkpointer is under way, in another thread or as the caller of this
                one; or a subscriber makes this call while a save is in flight. Raised on this rank alone.
        """
        return self._save(state, path, step, files, owners, durable, metrics)

    def _save(
        self,
        state: Mapping[str, Any],
        path: PathLike,
        step: int | None,
        files: Callable[[Path], None] | None,
        owners: Iterable[Any],
        durable: bool,
        metrics: Mapping[str, Any] | None,
        views: Views | None = None,
        aliases: Aliases | None = None,
        kinds: Mapping[str, str] | None = None,
    ) -> RunningSave:
        began = time.monotonic()
        handle = RunningSave(as_path(path, self.config.storage_options), step)
        call = Call.save(handle.path, step)
        with self._queue.beginning(handle), together(call):
            # Before the reservation of the save: a keeper names its run in the folder when the first save begins.
            refuse_real_run(handle.path.parent, medium_of(handle.path))
            if self.config.finish_on_sigterm:
                from dcp_plugin.core.saving import sigterm  # imported late, since few configurations use it

                sigterm.watch(self._queue, self.config.timeout)
            may_skip = self.config.async_save and self.config.when_busy == "skip"
            if may_skip and is_rank_zero_busy(self._queue, self._groups, handle.path):
                handle.set_skipped()
                return handle
            ranks = self._writer.wait_for_ranks()
            request = SaveRequest(handle.path, call, step, began, None, views or {}, aliases or {}, files, durable)
            live = LiveState(state, kinds or {}, list(owners), metrics or {}, self._compared, is_data=kinds is not None)
            self._writer.submit(handle, request, live, ranks)
            if self._timing is not None:
                self._timing.paused(time.monotonic() - began, saving=True)
        return handle

    def load(
        self, state: Mapping[str, Any], path: PathLike, partial: PartialLoad | None = None, strict: bool = True
    ) -> LoadReport:
        """Fill ``state`` from a checkpoint, in place. Collective. A save in the background is waited for first.

        Modules and optimizers may be wrapped and distributed differently than at the save.

        The target determines the loaded tensors. The checkpoint must have every tensor of a module, mapping, list or
        ``Stateful``, in its shape. Plain values are replaced in their mapping. Values that only the checkpoint has are
        added to it. An empty mapping or None receives all entries that are stored under its name.

        A mapping or list does not read tensors that only the checkpoint has. A ``Stateful`` gets those that are in no
        rank's target. Its ``load_state_dict`` accepts or refuses them. With ``strict=False`` or
        ``unexpected="ignore"``, a ``Stateful`` does not read them either. A warning names the tensors that are not
        read.
        :func:`~dcp_plugin.resume_or_init` gives every object the state of its save, whatever tensors it has now.

        All checks that are possible in advance run before the first byte is overwritten. A later failure, such as a bad
        disk or a checksum that differs, leaves modules and existing optimizer state partly loaded.

        If another process overwrites or deletes the checkpoint meanwhile, all ranks load the complete old checkpoint or
        the complete new one. The exception is a checkpoint of more than 256 files, some of which may be missing then.
        The load raises ``CheckpointNotFound`` after it has loaded a part.

        Parameters and buffers are filled in place. A module may have code that loads: an override of
        ``load_state_dict`` or ``_load_from_state_dict``, load hooks, or extra state. This code runs in the order and
        with the arguments of ``nn.Module.load_state_dict``. Its tensors are read one submodule after the other. Keys
        that it reports as missing or unexpected raise an error after everything is loaded.

        Args:
            partial: Rules for the keys of ``state`` to load and their names in the checkpoint, equal on all ranks.
                Other targets keep their values. Without rules, everything is loaded and converted to the dtypes of
                ``state``.
            strict: If true, these are errors: missing and unexpected keys of modules and optimizers, missing keys of
                other objects, and different shapes in a ``Stateful``. A key is unexpected if no rank takes it.
                ``False`` takes precedence over the policy ``"error"`` of ``partial``, but not over ``"warn"``.

        Raises:
            SaveFailed: An earlier background save failed, and no caller has got its error; raised on every rank.
                Nothing is loaded.
            CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt, UnsafeCheckpoint: The checkpoint cannot be
                loaded; raised on every rank. A damaged checkpoint that an automatic resume has chosen is quarantined:
                the next resume ignores it.
            CheckpointUnreadable: The file system failed to read; raised on every rank.
            CheckpointMismatch: Keys do not fit; the message names all of them, with a remedy. Or ranks load different
                checkpoints or different parts.
            RankFailure: A rank died, or did not answer within the timeout.
        """
        return self._load(state, path, partial, strict, LoadMode.FILL)

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
            ranks = self._writer.wait_for_ranks()
            wait_until_staged()  # another checkpointer may be copying memory that this load overwrites
            location = as_path(path, self.config.storage_options)
            if ranks.launch is not None:
                from dcp_plugin.core.runs import launches  # only processes without a process group need it

                launches.refuse_another_rank(location, ranks.launch)
            opening = self._open_in_source(location, ranks) if shown is None else nullcontext(shown)
            # The files are innermost: with keeper.dir, this rank serves other ranks until their block ends. All ranks
            # have left it when they meet to quarantine. The collector is outermost: opening makes most of the objects.
            with collector_paused(), quarantine_damaged(ranks, location, mode is LoadMode.RESTORE), opening as files:
                loading = Loading(ranks, self.config, location, partial, strict, files, mode)
                report = loading.run(state)
            self._saving.note_loaded(state, report, loading.checkpoint(), ranks)
            return report

    def _open_in_source(self, path: Where, ranks: Ranks) -> AbstractContextManager[SourceFiles | None]:
        """Wait for the saves in flight, and open the files of a checkpoint in the source. Collective.

        Without ``keeper.dir`` the source has no files, and the load opens those at the path.
        """
        self._queue.wait_recoverable()
        return self._source.open(path, ranks, lambda: unpacked(medium_of(path).open(path, pin=True)))

    def remove(self, path: PathLike) -> None:
        """Delete a checkpoint and its parts in ``keeper.dir`` of the nodes. If a save in flight is writing it, wait for
        that save first. Call this on one rank; with ``keeper.dir``, on rank 0.

        Args:
            path: A checkpoint of this package or of another tool, complete or torn, or a link to a checkpoint. Of a
                link, only the link is deleted.

        Raises:
            CheckpointError: ``path`` is not a checkpoint, or it is the working directory, a directory above that, or a
                complete bucket; nothing is deleted. Or the file system failed, or a subscriber of that save's events
                makes this call.
        """
        from dcp_plugin.core.runs import deletion  # imported late, since few programs delete checkpoints explicitly

        location = as_path(path, self.config.storage_options)
        for handle in self._queue.handles:
            if handle.path == location:
                handle.refuse_in_callback(f"remove {path}")
                handle.wait_done()
        deletion.refuse_other_things(location)
        # A keeper that this checkpointer has met asks all nodes. Otherwise the source deletes the parts of this node.
        (self._writer.saves or self._source).forget(location)
        deletion.remove(location)

    def wait(self) -> None:
        """Wait until no save is in flight.

        Raises:
            SaveFailed: A save that was in flight failed; raised on every rank, once per failure.
            CheckpointError: Another thread is in a call of this checkpointer, or a subscriber waits for the save that
                called it.
        """
        began = time.monotonic()
        with self._queue.call("wait"):
            ended = self._queue.wait_for_all()
            self._writer.free_modules()
            if self._timing is not None:
                self._timing.paused(time.monotonic() - began, saving=False)
            if (error := first_unreported(ended)) is not None:
                raise error

    def due(self, step: int) -> bool:
        """Return whether ``save_interval`` requires a save now, equal on every rank. Collective: call after each step.

        Rank 0 decides. Most calls only compare two numbers. About ten calls in an interval, and at least one per
        minute, broadcast the decision. A save that was not due also restarts the interval. No save is due while another
        is in flight. Without ``save_interval`` no save is ever due, and no message is sent.

        The first call starts the interval and the measurement of steps.

        Args:
            step: Any number that changes from step to step. A repeated call for the same step returns the same answer.

        Raises:
            CheckpointMismatch: Ranks pass different steps; raised on ranks that differ from rank 0.
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
        return self._timing is not None and self._timing.due(step, self._groups.for_calls)

    def close(self) -> None:
        """Finish the saves in flight, free the host copy and leave the process group. Later saves are possible.

        A checkpointer belongs to the process that made it. In a forked process this does nothing, and the other methods
        raise ``CheckpointError``.

        Raises:
            SaveFailed: See :meth:`wait`.
        """
        if self._queue.is_inherited:
            return
        with self._queue.call("close"):
            try:
                self._queue.closes_at = time.monotonic() + self.config.timeout
                self.wait()
            finally:
                if self.config.finish_on_sigterm:
                    from dcp_plugin.core.saving import sigterm  # imported late, as in save()

                    sigterm.forget(self._queue)
                if self._timing is not None:
                    self._timing.ended()
                self._writer.close()
                self._saving.forget_plan()
                self._groups.close()


@dataclass(frozen=True)
class Internals:
    """Further calls of a Checkpointer, for integrations and for the start of a run."""

    of: Checkpointer

    def save(
        self,
        state: Mapping[str, Any],
        path: PathLike,
        step: int | None = None,
        files: Callable[[Path], None] | None = None,
        owners: Iterable[Any] = (),
        durable: bool = False,
        metrics: Mapping[str, Any] | None = None,
        views: Views | None = None,
        aliases: Aliases | None = None,
        kinds: Mapping[str, str] | None = None,
    ) -> RunningSave:
        """Save; see :meth:`Checkpointer.save`. Collective.

        Args:
            views: Further tables of contents for stock loaders, see :mod:`dcp_plugin.core.format.metadata`.
            aliases: Further keys for stock loaders, see :mod:`dcp_plugin.core.format.metadata`.
            kinds: Names of ``state`` that are state dicts of a ``"module"`` or an ``"optimizer"``. A load then matches
                them by kind, as it matches live objects. With it, all of ``state`` is data: an object in a mapping is a
                value, and its ``state_dict`` is not called.
        """
        return self.of._save(state, path, step, files, owners, durable, metrics, views, aliases, kinds)

    def restore(
        self,
        state: Mapping[str, Any],
        path: PathLike,
        partial: PartialLoad | None = None,
        strict: bool = True,
        files: SourceFiles | None = None,
    ) -> LoadReport:
        """Load a checkpoint of the same run. Collective.

        Mappings, lists and ``Stateful`` objects get the tensors that they had at the save, of any shape, including
        tensors that they do not have now. A warning names the tensors that the target has and the checkpoint lacks.
        A tensor that another rank's target has, as a shard or in a module or optimizer, belongs to that rank: no other
        rank gets it.

        Arguments and errors are those of :meth:`Checkpointer.load`. ``files`` are the files of :meth:`shown` if this
        rank restores alone.
        """
        return self.of._load(state, path, partial, strict, LoadMode.RESTORE, files)

    @contextmanager
    def shown(self, path: PathLike) -> Iterator[SourceFiles | None]:
        """Open the files of a checkpoint that only a source has, for an integration that examines it before a load.

        All ranks leave the block together. Collective.

        Returns:
            The files, valid during the block; None if the checkpoint can be read at its path.

        Raises:
            SaveFailed, RankFailure: See :meth:`Checkpointer.load`.
        """
        if not has_local_tier(self.of.config):
            yield None
            return
        with self.of._queue.call(f"look at {path}"):
            ranks = self.of._writer.wait_for_ranks()
            location = as_path(path, self.of.config.storage_options)
            if self.of._writer.saves is None:
                self.of._source.settle(location.parent, ranks)
            with self.of._open_in_source(location, ranks) as files:
                is_only_in_source = files is not None and not files.is_at_path
                yield files if is_only_in_source else None
                if is_only_in_source:  # after the meeting no rank reads this node's files
                    ranks.agree(f"end to look at {location}", lambda: None)

    def surviving(self, root: PathLike) -> tuple[CheckpointState, ...]:
        """Return the saves at or below ``root`` that are only on the nodes, where a load finds them. Collective.

        Before the search, keepers of an earlier training finish the saves that they have received.

        Raises:
            SaveFailed: See :meth:`Checkpointer.load`.
            RankFailure: A rank died, or did not answer within the timeout.
        """
        if self.of.config.keeper is None:
            return ()
        ranks, location = self.of._writer.wait_for_ranks(), as_path(root, self.of.config.storage_options)
        self.of._source.settle(location, ranks)
        return tuple(self.of._source.states(location, ranks))

    def set_local_aside(self, path: Where) -> bool:
        """Exclude the nodes' saves to a path from all later starts. Return whether any node has such a save.
        Collective."""
        return self.of._source.quarantine(path, self.ranks)

    def wait_until_kept(self) -> None:
        """Wait until all saves survive the end of this training. With ``keeper.dir`` this means that they are complete
        there; their copies to their paths may still be under way. Integrations wait for this before they continue.

        Raises:
            SaveFailed: See :meth:`Checkpointer.wait`. With ``keeper.dir`` a failure is only logged here, and
                the next wait raises it: ranks learn of it at different times, and the training must continue.
        """
        if not has_local_tier(self.of.config):
            self.of.wait()
            return
        with self.of._queue.call("wait"):
            self.of._queue.wait_recoverable()
            self.of._writer.free_modules()

    def bring_newest(self) -> None:
        """Copy the newest save to its path if only ``keeper.dir`` has it. :meth:`Checkpointer.close` does the same.
        With ``keeper.durable_every=None``, do nothing.

        Raises:
            SaveFailed: See :meth:`Checkpointer.wait`.
        """
        with self.of._queue.call("bring the newest save to its path"):
            self.of.wait()
            if (saves := self.of._writer.saves) is not None:
                saves.bring_newest()

    @property
    def ranks(self) -> Ranks:
        """The group in which an integration lets all ranks agree. Collective."""
        return self.of._groups.for_calls()

    def all_ranks_come_to(self, step: str, within: float) -> bool:
        """Return whether every rank makes this call, for situations in which some ranks may not. True for a single
        rank.

        The result is False after ``within`` seconds. It is False at once if the ranks have not met yet, or if an
        earlier failure has closed their group.
        """
        ranks = self.of._groups.group_of_saves
        return self.of._groups.solo or (ranks is not None and ranks.usable and ranks.all_come_to(step, within))

    def share_timing(self, other: Checkpointer) -> None:
        """Measure the steps of two checkpointers together: each of them saves for the same loop."""
        self.of._timing = other._timing
