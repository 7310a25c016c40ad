"""The class that every integration talks to: :class:`Checkpointer` saves and loads live objects.

A save is a pipeline of stages (:mod:`~dcp_plugin.saving.job`): gather the state, stage it on the host, plan, write,
publish. With ``async_save`` everything after staging runs in a thread (:mod:`~dcp_plugin.saving.queue`). A load is
:mod:`~dcp_plugin.loading.load`. Every step of either that can fail on one rank ends in an all-or-none collective.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from dcp_plugin.calls import Call, together
from dcp_plugin.config import CheckpointConfig
from dcp_plugin.format.metadata import Aliases, Views
from dcp_plugin.loading.load import Loading
from dcp_plugin.loading.matching import LoadMode
from dcp_plugin.media import medium_of
from dcp_plugin.media.packed import unpacked
from dcp_plugin.partial import PartialLoad
from dcp_plugin.paths import PathLike, Where, as_path
from dcp_plugin.ranks import Attempt, RankGroups, Ranks
from dcp_plugin.records import LiveState, LoadReport, SaveRequest
from dcp_plugin.runs import launches
from dcp_plugin.runs.damage import setting_aside
from dcp_plugin.runs.interval import SaveInterval
from dcp_plugin.saving.job import SavePipeline
from dcp_plugin.saving.pace import Pace
from dcp_plugin.saving.queue import SaveHandle, SaveQueue, first_untold
from dcp_plugin.saving.writers import is_rank_zero_busy, writer_of
from dcp_plugin.sources import SourceFiles, source_of
from dcp_plugin.staging.guard import take_off_hooks, wait_until_copied
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

    _compares_ranks = True
    """Whether the first save warns of data that differs between ranks. A framework in which the values of rank 0 count
    by rule has a subclass."""

    def __init__(self, config: CheckpointConfig | None = None, *, solo: bool = False, **overrides: Any) -> None:
        self.config = CheckpointConfig.merge(config, ("solo",), **overrides)
        self._solo = solo
        talks = self.config.when_busy != "wait" or self.config.save_interval is not None
        aside = self.config.async_save and talks
        self._groups = RankGroups(self.config.of_all_ranks, self.config.timeout, solo, aside)
        self._saving = SavePipeline(self.config)
        self._queue = SaveQueue()
        self._writer = writer_of(self.config, self._saving, self._queue, self._groups)
        self._source = source_of(self.config)
        self.pace = Pace(self.config, lambda: self._queue.is_saving)
        """For integrations: measures steps, and what saves cost."""

    def __del__(self, _program_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        """Warn when a Checkpointer is dropped while it holds resources, unless the program ends. The group is not left
        here: the other ranks need not be at the same point."""
        if _program_ends() or not hasattr(self, "_writer"):  # a setting was refused, and nothing made
            return
        if self._queue.is_inherited:
            return
        held = ["a process group"] * self._groups.held + self._writer.holdings()
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
            may_skip = self.config.async_save and self.config.when_busy == "skip"
            if may_skip and is_rank_zero_busy(self._writer, self._groups, handle.path):
                handle.set_skipped()
                return handle
            ranks = self._writer.meet(begins_save=True)
            request = SaveRequest(handle.path, call, step, began, None, views or {}, aliases or {}, files, durable)
            is_data = kinds is not None
            live = LiveState(state, kinds or {}, list(owners), metrics or {}, self._compares_ranks, is_data)
            self._writer.submit(handle, request, live, ranks)
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
        return _load(self, state, path, partial, strict, LoadMode.FILL)

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
        return _load(self, state, path, partial, strict, LoadMode.RESTORE, files)

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
            ranks = self._writer.meet()
            where = as_path(path, self.config.storage_options)
            if not self._writer.is_attached:
                self._source.settle(where.parent, ranks)
            with _open(self, where, ranks) as files:
                if files is None or files.is_at_path:
                    yield None
                    return
                yield files
                ranks.agree(f"end to look at {where}", lambda: None)  # no rank needs this node's files any more

    def surviving(self, root: PathLike) -> tuple[CheckpointState, ...]:
        """Return the saves at or below ``root`` that a load finds on the nodes, but not at their paths. Collective.

        First, keepers of an earlier training finish the saves that were handed over to them.

        Raises:
            RankFailure: A rank died, or did not answer within the timeout.
        """
        if not self.config.has_keeper:
            return ()
        ranks, where = self._writer.meet(), as_path(root, self.config.storage_options)
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
        if not self._writer.forget(where):
            self._source.forget(where)
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
            self._queue.wait_recoverable()
            take_off_hooks()

    def bring_newest(self) -> None:
        """Bring the newest save to its path, if it is in ``local_dir`` alone; :meth:`close` does, too. Not with
        ``durable_every=None``.

        Raises:
            SaveFailed: As :meth:`wait`.
        """
        with self._queue.call("bring the newest save to its path"):
            self.wait()
            self._writer.bring_newest()

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
        return self.pace.due(step, self._groups.front)

    def step_ended(self) -> None:
        """Measure a step, for :meth:`proposed_interval`, where nobody asks whether a save is due."""
        self.pace.step_ended()

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
                self._writer.close()
                self._saving.forget_plan()
                self._groups.close()


def _load(
    checkpointer: Checkpointer,
    state: Mapping[str, Any],
    path: PathLike,
    partial: PartialLoad | None,
    strict: bool,
    mode: LoadMode,
    shown: SourceFiles | None = None,
) -> LoadReport:
    with checkpointer._queue.call(f"load {path}"), together(Call.load(path)):
        ranks = checkpointer._writer.meet()
        wait_until_copied()  # another checkpointer may be copying what this load overwrites
        where = as_path(path, checkpointer.config.storage_options)
        launches.refuse_another_rank(where, ranks.launch)
        opening = _open(checkpointer, where, ranks) if shown is None else nullcontext(shown)
        with collector_paused(), setting_aside(ranks, where, mode is LoadMode.RESTORE), opening as files:
            loading = Loading(ranks, checkpointer.config, where, partial, strict, files, mode)
            report = loading.run(state)
        checkpointer._saving.loaded(state, report, loading.opened, ranks)
        return report


def _open(checkpointer: Checkpointer, path: Where, ranks: Ranks) -> AbstractContextManager[SourceFiles | None]:
    """Open the files that the source has of a checkpoint, after the saves in flight. Collective."""
    checkpointer._queue.wait_recoverable()
    return checkpointer._source.open(path, ranks, lambda: unpacked(medium_of(path).open(path, pin=True)))
