"""The plugin that users see: ``Trainer(plugins=[DCPCheckpointIO(async_save=True)])``.

Lightning calls a ``CheckpointIO`` on rank 0 alone, and for sharded strategies not at all. The plugin therefore only
owns the configuration and the Checkpointer. The trainer's strategy, promoted by
:class:`~dcp_plugin.lightning.DCPCallback`, saves and loads with them on all ranks.

A plugin that the user calls directly, or ``ddp_spawn`` to return the weights, is an ordinary ``CheckpointIO``: the
calling process alone saves and loads its dictionary.

Rank 0 reports a save to the log and the loggers, in the training's thread, when the checkpoint is published:

- Each save is a line of text, and a call of ``log_metrics`` with ``checkpoint/blocked_seconds`` (of the training),
  ``checkpoint/seconds`` (until the save was on disk), ``checkpoint/gigabytes`` (of the complete checkpoint) and
  ``checkpoint/gb_per_second`` (of written bytes, without linked ones). These do not pass through the trainer's own
  metrics, so nothing is monitored, shown in the progress bar or stored because of them. The step is that of the report,
  which with saves in the background is a few after the saved step: many loggers want steps in order.
- ``ModelCheckpoint`` calls ``after_save_checkpoint`` as soon as a save has begun. The plugin delays this call until the
  checkpoint is published, too.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from dcp_plugin.checkpointer import Checkpointer, Internals
from dcp_plugin.core.config import CheckpointConfig, fields_in_signature, has_local_tier
from dcp_plugin.core.errors import CheckpointError, logger, size
from dcp_plugin.core.events import SaveFinished
from dcp_plugin.core.partial import PartialLoad
from dcp_plugin.core.paths import PathLike, Where, as_path
from dcp_plugin.core.runs import deletion
from dcp_plugin.core.saving.queue import RunningSave
from dcp_plugin.core.sources import SourceFiles, source_of
from dcp_plugin.core.types import public_class
from dcp_plugin.integration import MODEL, Saver, is_regular_file, lightning_packages, summary_if_readable, that_waits
from dcp_plugin.lightning import layout
from dcp_plugin.lightning.layout import Checkpoint, ForStock
from dcp_plugin.lightning.live_load import open_directories, read_full
from dcp_plugin.start import Start, StartOptions

in_existence: weakref.WeakSet[DCPCheckpointIO] = weakref.WeakSet()
"""Plugins of this process. In a process without plugins, no Trainer needs the callback."""


@dataclass(frozen=True, eq=False)
class _FileChange:
    """Link to a checkpoint, or deletion of a checkpoint, that waits for a save."""

    after: int
    """Number of the save. A later save serves a deletion as well; a link is dropped then."""
    deletes: Where | None
    """The checkpoint to delete; None for a link."""
    make: Callable[[], object]
    in_training: bool
    """True if only the training's thread may make the change: it calls the Checkpointer."""


class PostCommit:
    """Actions of this rank after the newest save of a plugin is published; none if the save fails.

    ``ModelCheckpoint`` links to a checkpoint, deletes the replaced one and notifies the loggers as soon as
    ``Trainer.save_checkpoint`` has returned. With a save in the background that is too early: after a crash the link
    would be broken, and both the new and the old checkpoint would be missing.

    With a local tier a save may have ended before its checkpoint is at its path, or before the previous checkpoint is
    at its path. Links then point to a checkpoint at its path, which is deleted only after a newer checkpoint is at its
    path.
    """

    def __init__(self) -> None:
        self._newest: RunningSave | None = None
        self._number = 0
        """Number of the newest save."""
        self._changes: dict[_FileChange, bool] = {}
        """The changes that wait, in order. The value is True: of two threads that pop a change, one gets it."""
        self._due: deque[Callable[[], object]] = deque()
        """Actions that only the training's thread may run."""
        self._only_local: set[Where | None] = set()
        """Checkpoints in the local tier alone."""

    def follow(self, handle: RunningSave | None) -> None:
        """Delay later actions until this save is published; with None they run at once."""
        self._newest = handle
        self._number += 1
        if handle is not None:
            handle.on_published(partial(self._published, self._number))

    def change(self, make: Callable[[], object], deletes: Where | None = None, in_training: bool = False) -> None:
        """Link to the newest save when it is at its path; or delete a checkpoint when the newest save, or a later one,
        is as durable. Links come first: an old link leads to a checkpoint that is deleted.

        Args:
            make: Function that makes the change, in the thread that publishes.
            deletes: The checkpoint to delete; None for a link.
            in_training: Make the change in :meth:`settle` instead.
        """
        if self._newest is None:
            make()
            return
        self._changes[_FileChange(self._number, deletes, make, in_training)] = True
        self.make_changes()

    def make_changes(self) -> None:
        """Make the changes that wait for the newest save, if it is published."""
        if self._newest is not None and self._newest.finished is not None:
            self._published(self._number, self._newest.finished)

    def _published(self, number: int, event: SaveFinished) -> None:
        durable = event.tier == "durable"
        if durable:
            self._only_local.discard(event.path)
        else:
            self._only_local.add(event.path)
        for change in sorted(self._changes, key=lambda change: change.deletes is not None):
            if change.after > number or not (durable or change.deletes in self._only_local):
                continue
            is_superseded_link = change.deletes is None and change.after < number
            if self._changes.pop(change, False) and not is_superseded_link:
                self._only_local.discard(change.deletes)
                if change.in_training:
                    self._due.append(change.make)
                else:
                    change.make()

    def forget_failed(self) -> None:
        """Forget a failed save, which was reported: its changes are dropped, and later actions wait for no save."""
        if self._newest is not None and self._newest.finished is None:
            self._newest = None
            for change in list(self._changes):  # a copy, since another thread may take a change
                if change.after == self._number:
                    self._changes.pop(change, None)

    def is_under_way(self, path: PathLike) -> bool:
        """Return whether a save to ``path`` is in flight."""
        return self._newest is not None and not self._newest.done() and self._newest.path == as_path(path)

    def run_in_training(self, action: Callable[[SaveFinished], object]) -> None:
        """Run an action that only the training's thread may run (loggers) in :meth:`settle`."""
        newest = self._newest
        if newest is not None and newest.finished is not None:
            action(newest.finished)
        elif newest is not None:
            newest.on_published(lambda event: self._due.append(partial(action, event)))

    def settle(self) -> None:
        """Run the actions that are due, in the training's thread."""
        while self._due:
            self._due.popleft()()


@dataclass(frozen=True)
class _WhenPublished:
    """Delayed ``after_save_checkpoint`` of a logger, which gets the callback in its state at the save.

    ``ModelCheckpoint`` passes a weak proxy of itself. When the logger reads the proxy, ``best_model_path`` may be that
    of the next save, which is not complete yet.
    """

    notify: Callable[[Any], None]
    post_commit: PostCommit
    copies: dict[int, Any] = field(default_factory=dict)
    """A copy of each callback, by its identity: loggers keep these until the end."""

    def __call__(self, callback: Any) -> None:
        at_save = {name: dict(v) if isinstance(v, dict) else v for name, v in callback.__dict__.items()}
        kind, identity = callback.__class__, id(callback.__dict__)  # of the callback behind the proxy

        def notify(event: SaveFinished) -> None:
            copy = self.copies.setdefault(identity, kind.__new__(kind))
            copy.__dict__.update(at_save)
            self.notify(copy)

        self.post_commit.run_in_training(notify)


@public_class("dcp_plugin.lightning")
class DCPCheckpointIO(Saver):
    """Sharded, crash-safe checkpoints that any strategy on any number of ranks resumes from.

    Args:
        config: Settings of saves and loads; the defaults if omitted.
        weights_only: For checkpoints of Lightning's own (files, and ``meta.pt`` in directories of its sharded
            strategies), as in ``fit(weights_only=...)``: False executes code from the file; None uses torch's default,
            which does not. Lightning ignores the argument of ``fit`` with a sharded strategy. Our own checkpoints never
            need it.
        init_from: A pre-trained checkpoint for the model of a ``fit`` with ``ckpt_path=None``, which resumes from no
            checkpoint. It is read when model and optimizers are set up and sharded, before any step. If ``ckpt_path``
            leaves out frozen parameters (``trainable_only``), it is loaded first, and ``ckpt_path`` over it.
        partial: The keys of the model that ``init_from`` fills, such as ``model.backbone.*``, and their source keys;
            all keys if omitted.
        verify_resume: Compare the live state with the loaded one before ``on_train_start`` of a resumed ``fit``:
            ``"auto"`` warns of a difference, ``"error"`` raises it on all ranks, False compares nothing.
        expect_changed: Globs of keys, or of their last segments, that the program changes before that, such as
            ``"lr"``.
        overrides: Fields of :class:`~dcp_plugin.CheckpointConfig`, such as ``async_save=True``.

    Raises:
        ValueError: A value is out of range or not supported with Lightning; or ``partial`` without ``init_from``.
        TypeError: An override names no field.

    Example:
        ``Trainer(plugins=[DCPCheckpointIO(async_save=True)]).fit(module, ckpt_path="last")``
    """

    world_size = 1

    @fields_in_signature
    def __init__(
        self,
        config: CheckpointConfig | None = None,
        *,
        weights_only: bool | None = None,
        init_from: PathLike | None = None,
        partial: PartialLoad | None = None,
        verify_resume: Literal["auto", "error", False] = "auto",
        expect_changed: Sequence[str] = (),
        **overrides: Any,
    ) -> None:
        StartOptions(init_from=init_from, partial=partial)  # raises if the options contradict each other
        _register_as_plugin()
        other_options = ("weights_only", "init_from", "partial", "verify_resume", "expect_changed")
        super().__init__(that_waits(CheckpointConfig.merge(config, other_options, **overrides), "ModelCheckpoint"))
        self.weights_only = weights_only
        self.init_from = init_from
        self.partial = partial
        self.check_options = verify_resume, expect_changed
        self.started: Start | None = None
        """The start of the last ``fit``, set before ``on_sanity_check_start`` and ``on_train_start``; None if it
        continued an earlier ``fit`` of the same Trainer."""
        self.post_commit = PostCommit()
        self.on_saved: Callable[[dict[str, float]], None] | None = None
        """Function that logs the figures of a published save; the callback sets it on rank 0."""
        self.hooks_after_saves: set[str] | None = None
        """Hooks in which code that comes after a ``ModelCheckpoint`` may write weights; the callback sets them with
        ``staging="lazy"``."""
        self._held_back: list[Any] = []
        self._asked: int | None = None
        self.serves_strategy = False
        """True if all ranks save; a promoted strategy sets it, together with ``world_size``."""
        self.saving_hook = ""
        """Name of the hook in which a ``ModelCheckpoint`` or similar callback is saving."""
        self.monitor: str | None = None
        """Metric by which the saving callback keeps the best checkpoints. It may need any of its checkpoints later."""
        self.all_came: bool | None = None
        """True if all ranks have met to save after an exception; None if they have not tried."""
        in_existence.add(self)

    def __repr__(self) -> str:
        """Return the text that Lightning's error shows for a plugin that was made before Lightning was imported."""
        return "DCPCheckpointIO (make it after both the Trainer's package and dcp_plugin.lightning are imported)"

    def save(
        self,
        state: dict[str, Any],
        path: PathLike,
        step: int | None,
        owners: Iterable[Any] = (),
        added: ForStock | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> RunningSave:
        """Save on all ranks of a promoted strategy.

        Args:
            owners: The model and the optimizers whose state dicts are in ``state``: lazy staging copies theirs later.
            metrics: Metrics of the saved model.
            added: Additions for stock Lightning, which resumes from this checkpoint.

        Raises:
            SaveFailed: This save failed, or the previous save did and its failure was not raised yet.
        """
        self._wait_by(Internals.wait_until_kept)
        aliases, files = added or (None, None)
        self.post_commit.follow(None)
        handle = self.internals.save(
            state,
            path,
            step,
            files,
            owners=owners,
            aliases=aliases,
            kinds=layout.kinds_of(state),
            durable=self.monitor is not None,
            metrics=metrics,
        )
        self.post_commit.follow(handle)
        self.post_commit.run_in_training(self._report)
        # After a ModelCheckpoint, the last of the callbacks, only hooks of the module and of similar callbacks remain.
        # Any other caller of a save may write weights as soon as the save returns.
        writers = self.hooks_after_saves
        if not self.saving_hook or writers is None or self.saving_hook in writers:
            handle.wait_staged()
        return handle

    def hold_back(self, loggers: list[Any]) -> None:
        """Notify loggers of a checkpoint only when it is published, until the teardown. Some loggers upload the files
        at the paths of a ``ModelCheckpoint``, and would miss those of an unfinished save."""
        self._held_back = list(loggers)
        for observer in loggers:
            if "after_save_checkpoint" not in vars(observer):
                observer.after_save_checkpoint = _WhenPublished(observer.after_save_checkpoint, self.post_commit)

    def _report(self, event: SaveFinished) -> None:
        """Report the cost of a published save to the log and the loggers, on rank 0."""
        if event.rank != 0:
            return
        summary = summary_if_readable(event.path)
        total, linked = event.bytes, 0  # the checkpoint was deleted meanwhile: the share of this rank
        if summary is not None:
            total, linked = summary.payload_bytes, int(summary.reused.get("bytes", 0))
        per_second = max(0, total - linked) / event.seconds if event.seconds else 0.0
        unchanged = f", {size(linked)} of it linked," if linked else ""
        tier = "" if event.tier == "durable" else " in keeper.dir"
        rank_zero_info(
            f"Saved {event.path}{tier}: {size(total)}{unchanged} in {event.seconds:.2f} s "
            f"({size(per_second)}/s). The training waited {event.blocked_seconds:.2f} s."
        )
        if self.on_saved is not None:
            figures = {
                "checkpoint/blocked_seconds": event.blocked_seconds,
                "checkpoint/seconds": event.seconds,
                "checkpoint/gigabytes": total / 1e9,
                "checkpoint/gb_per_second": per_second / 1e9,
            }
            self.on_saved(figures)

    def is_due(self, step: int) -> bool:
        """Return after a batch whether a save is due by ``save_interval``. Collective.

        Args:
            step: Number of optimizer steps. No save is due after further batches of the same step, or after the first
                batch of a fit, which may be within a step.
        """
        before, self._asked = self._asked, step
        if before in (None, step) or self.config.save_interval is None:
            return False
        return self.checkpointer.due(step)

    def wait(self) -> None:
        """Wait for the save in flight and for its links and deletions.

        Raises:
            SaveFailed: The save failed. The error is raised once; the links and deletions of the save are dropped.
        """
        self._wait_by(lambda internals: internals.of.wait())

    def _wait_by(self, wait: Callable[[Internals], None]) -> None:
        try:
            if self._checkpointer is not None:
                wait(self.internals)
        except Exception:
            self.post_commit.forget_failed()
            raise
        self.post_commit.settle()

    def has_locally(self, path: PathLike) -> bool:
        """Return whether this node has a part of a save to this path in its local tier."""
        return source_of(self.config).newest_time(self.where(path)) is not None

    def start(self, model: nn.Module, strict: bool) -> Start:
        """Load ``init_from``, if it is set, into the model of a promoted strategy. Collective.

        Raises:
            CheckpointError: ``init_from`` does not exist, or does not fit; raised on every rank.
        """
        return self._start_options(strict).start(self.checkpointer, {MODEL: model})

    def load_before(self, model: nn.Module, strict: bool, path: Where, files: SourceFiles | None) -> None:
        """Load ``init_from`` into the model, if the checkpoint at ``path`` leaves out what it may have. Collective."""
        self._start_options(strict).load_before(self.checkpointer, {MODEL: model}, path, files)

    def _start_options(self, strict: bool) -> StartOptions:
        return StartOptions(
            init_from=self.init_from,
            partial=self.partial,
            strict=strict,
            storage_options=self.config.storage_options,
        )

    def save_checkpoint(self, checkpoint: Checkpoint, path: PathLike, storage_options: Any | None = None) -> None:
        """Save a dictionary from this process alone."""
        lightning_packages.refuse_storage_options(storage_options, "DCPCheckpointIO(storage_options={...})")
        self._warn_if_not_promoted()
        state = layout.to_state(layout.beside_ours(checkpoint), self.config.allow_pickle)
        self._alone().save(state, path, kinds=layout.kinds_of(state))

    def load_checkpoint(
        self, path: PathLike, map_location: Any | None = None, weights_only: bool | None = None
    ) -> Checkpoint:
        """Return the full dictionary, in host memory. A file is a checkpoint of Lightning's own."""
        weights_only = self.weights_only if weights_only is None else weights_only
        checkpoint_path = self.where(path)
        if self.post_commit.is_under_way(checkpoint_path):
            self.wait()
        if is_regular_file(checkpoint_path):
            return layout.read(checkpoint_path, weights_only, map_location or "cpu")
        return read_full(checkpoint_path, self._alone(), weights_only)

    def remove_checkpoint(self, path: PathLike) -> None:
        """Delete a checkpoint; if a save is in flight, after that save is published.

        ``ModelCheckpoint`` deletes the old checkpoint as soon as the save of the new one returns. With ``async_save``
        both checkpoints could be missing after a crash.
        """
        self._warn_if_not_promoted()
        checkpoint_path = self.where(path)
        in_tier = has_local_tier(self.config)
        remove = self._remove_everywhere if in_tier else deletion.remove
        self.post_commit.change(partial(remove, checkpoint_path), deletes=checkpoint_path, in_training=in_tier)

    def _remove_everywhere(self, path: Where) -> None:
        try:
            (self._checkpointer or Checkpointer(self.config, solo=True)).remove(path)
        except (CheckpointError, OSError) as error:  # an old checkpoint does no harm
            logger.warning("could not delete the old checkpoint %s: %s", path, error)

    def teardown(self) -> None:
        """Wait for the save in flight and free the resources of saving. The plugin can be used again.

        Raises:
            SaveFailed: A save failed, as in :meth:`wait`.
        """
        try:
            self.wait()
            if self._checkpointer is not None and has_local_tier(self.config):
                self.internals.bring_newest()
                self.post_commit.make_changes()
                self.post_commit.settle()
        finally:
            checkpointer, self._checkpointer = self._checkpointer, None
            self.post_commit.settle()
            self.post_commit.follow(None)
            for observer in self._held_back:
                if isinstance(vars(observer).get("after_save_checkpoint"), _WhenPublished):
                    del observer.after_save_checkpoint
            self._held_back, self.on_saved, self._asked = [], None, None
            if checkpointer is not None:
                checkpointer.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for the processes of ``ddp_spawn``."""
        return {**self.__dict__, "_checkpointer": None, "post_commit": PostCommit(), "on_saved": None, "_held_back": []}

    def _alone(self) -> Internals:
        """Return those of a Checkpointer that needs no closing: no process group, no background, no keeper."""
        return Internals(Checkpointer(self.config, solo=True, async_save=False, keeper=None))

    def _warn_if_not_promoted(self) -> None:
        if self.serves_strategy or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return
        self.serves_strategy = True  # warn once
        warnings.warn(
            "DCPCheckpointIO is used by rank 0 alone: the strategy has not been promoted, so each checkpoint goes "
            "through rank 0's memory, and the random state of the ranks is not saved. The callback that promotes it "
            "comes with the installed package (entry points); without installation, add callbacks=[DCPCallback()]. A "
            "Fabric has no callbacks: dcp_plugin.fabric.attach(fabric) promotes its strategy.",
            stacklevel=3,
        )


def _register_as_plugin() -> None:
    """Register the class as a ``CheckpointIO`` of the imported packages, or else of all installed packages. Have
    Lightning's errors name the function that opens a directory."""
    imported = [package for package in lightning_packages.PACKAGES if package.fabric_imported]
    for package in imported or lightning_packages.installed():
        package.fabric("plugins").CheckpointIO.register(DCPCheckpointIO)
    open_directories()


if any(package.fabric_imported for package in lightning_packages.PACKAGES):  # LightningCLI asks before it makes one
    _register_as_plugin()
