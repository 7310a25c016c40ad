"""``ModelCheckpoint`` and similar callbacks, corrected where they assume finished saves and single files.

Lightning's callbacks ask the file system which names are taken, link to saved checkpoints, and find ``last`` by time of
modification. But a save in the background is not on disk yet, and garbage from another tool's crash may look like a
checkpoint. The callbacks also save when an exception ends the training, on the ranks that raised it.

A promoted callback is a subclass of the user's own class, like a promoted strategy. Its state, its name in a
checkpoint, and its decisions to save and to delete are Lightning's.

With ``save_interval`` the last of these callbacks also saves when a save is due. The checkpoint has a fixed name in the
callback's directory, where each save replaces the previous checkpoint. ``"last"`` finds it too.

W&B and MLflow, with ``log_model``, look for files among the paths of a ``ModelCheckpoint`` and ignore directories. Each
checkpoint of ours becomes one artifact, with the name and the aliases that a file would have: a directory
``model.ckpt`` in the artifact of W&B, the directory of the checkpoint in that of MLflow. Checkpoints in an object store
are not uploaded, and the same holds for files of stock Lightning.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from dcp_plugin.core.errors import CheckpointError, CheckpointNotFound
from dcp_plugin.core.paths import PathLike, Where, is_link, on_file_system, resolved, text_of
from dcp_plugin.core.ranks.collectives import Ranks
from dcp_plugin.core.runs import catalog, deletion
from dcp_plugin.core.runs.damage import note_chosen
from dcp_plugin.core.sources import source_of
from dcp_plugin.core.types import CheckpointState
from dcp_plugin.integration import is_regular_file, is_taken, kind_of, paths_in, read_summary, saved_at
from dcp_plugin.integration.lightning_packages import has_base, home_of
from dcp_plugin.lightning import _lightning
from dcp_plugin.lightning.io import DCPCheckpointIO

WHERE_IT_SAVES = ("on_train_batch_end", "on_train_epoch_end", "on_validation_end")
"""The hooks in which a ``ModelCheckpoint`` saves."""
TIMED = "last-timed.ckpt"
"""Name of the checkpoints of ``save_interval``."""
_PATIENCE_WITH_AN_EXCEPTION = 60.0
"""Seconds that a rank waits for the others if a callback is to save after an exception. Ranks may differ by a step or
two, which take less time. The timeout of a process group, after which the rank's exception is lost, is much longer."""

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def promote_callbacks(trainer: Any) -> None:
    """Promote the trainer's callbacks that save checkpoints."""
    for callback in trainer.callbacks:
        if has_base(type(callback), "Checkpoint"):
            callback.__class__ = _promoted(type(callback))  # type: ignore[arg-type]
    if (io := plugin_of(trainer)) is not None:
        _lightning.replace_choice_of_checkpoint(trainer, CheckpointChoice(io))
    with suppress(ValueError):  # only a fit needs the directories, and its setup raises
        normalise_dirpaths(trainer)


def normalise_dirpaths(trainer: Any) -> None:
    """Normalise the directories of the trainer's callbacks: a ``file://`` URL becomes a local path.

    Raises:
        ValueError: A directory is a URL, but not of an object store.
    """
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "dirpath", None) is not None:
            callback.dirpath = text_of(callback.dirpath)


@functools.cache
def _promoted(base: type[Any]) -> type[Any]:
    if getattr(base, "promoted_by_dcp_plugin", False):
        return base

    class DCPCheckpoint(base):  # type: ignore[misc]
        promoted_by_dcp_plugin = True

        def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
            """Save if all ranks take part. A failure becomes a note on the exception that ended the training."""
            io = _io_of(trainer)
            if io is None or not _may_save_on_exception(self, base):
                super().on_exception(trainer, pl_module, exception)
                return
            try:
                if _all_ranks_come_to_save(trainer, io):
                    super().on_exception(trainer, pl_module, exception)
            except Exception as failure:
                exception.add_note(f"Besides, no checkpoint could be saved of it: {failure}")
                rank_zero_warn(f"No checkpoint could be saved of the {type(exception).__name__}: {failure}")

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Pickle the callback as an object of the user's class."""
            return object.__new__, (base,), self.__dict__

    class DCPModelCheckpoint(DCPCheckpoint):
        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            """Set up the callback, even with ``save_last="link"`` in an object store, which Lightning refuses."""
            if _io_of(trainer) is None:
                super().setup(trainer, pl_module, stage)
                return
            callback: Any = self
            save_last = callback.save_last
            try:
                callback.save_last = save_last and True
                super().setup(trainer, pl_module, stage)
            finally:
                callback.save_last = save_last
            _lightning.forget_listings(self)

        def file_exists(self, filepath: PathLike, trainer: Trainer) -> bool:
            io = _io_of(trainer)
            in_a_store = io is not None and on_file_system(text_of(filepath)) is None
            if not in_a_store and super().file_exists(filepath, trainer):
                return True
            return io is not None and _is_taken_on_all_ranks(trainer, io, io.where(filepath))

    for name in WHERE_IT_SAVES:
        setattr(DCPCheckpoint, name, _saving_in(name, getattr(base, name)))
    promoted = DCPCheckpoint
    if has_base(base, "ModelCheckpoint"):
        promoted = DCPModelCheckpoint
        _lightning.replace_link(promoted, _link)
    # A callback's name is the key of its state in the checkpoint.
    promoted.__module__, promoted.__name__, promoted.__qualname__ = base.__module__, base.__name__, base.__qualname__
    return promoted


def _saving_in(hook: str, original: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that saves. The plugin knows during the hook which hook and whose monitor it is."""

    @functools.wraps(original)
    def saving(self: Any, trainer: Any, *args: Any) -> None:
        io = _io_of(trainer)
        if io is None:
            original(self, trainer, *args)
            return
        io.saving_hook, io.monitor = hook, getattr(self, "monitor", None)
        try:
            original(self, trainer, *args)
            # All other callbacks have run before the last one that saves, so their saved state is that after the batch.
            is_last = hook == "on_train_batch_end" and self in with_directory(trainer)[-1:]
            if is_last and io.is_due(trainer.global_step):
                trainer.save_checkpoint(f"{self.dirpath}/{TIMED}")
        finally:
            io.saving_hook, io.monitor = "", None

    return saving


def with_directory(trainer: Any) -> list[Any]:
    """Return the trainer's callbacks that have a directory to save in."""
    return [callback for callback in trainer.checkpoint_callbacks if hasattr(callback, "dirpath")]


def _may_save_on_exception(callback: Any, base: type[Any]) -> bool:
    """Return whether the callback's ``on_exception`` may save, so that all ranks must meet before it.

    A user's own hook may do anything. If no hook can save, an exception of a single rank need not wait for the others.
    """
    owner = next(cls for cls in base.__mro__ if "on_exception" in vars(cls))
    return home_of(owner) is None or (owner.__name__ != "Callback" and getattr(callback, "save_on_exception", True))


def _all_ranks_come_to_save(trainer: Any, io: DCPCheckpointIO) -> bool:
    """Return whether all ranks had an exception at the same step, so that they can save together.

    Ranks meet once; later calls return the same result.
    """
    if io.all_came is None:
        io.wait()
        # Ranks that stopped at different steps would save a checkpoint of mixed steps.
        step = trainer.global_step
        purpose = f"save what an exception left at step {step}"
        io.all_came = io.internals.all_ranks_come_to(purpose, _PATIENCE_WITH_AN_EXCEPTION)
        if not io.all_came and step > 0:  # nothing is lost before the first step
            warnings.warn(
                f"Rank {trainer.strategy.global_rank} saves no checkpoint of its exception: all ranks would have to "
                "take part, and it is not known that all of them had one at the same step.",
                stacklevel=2,
            )
    return io.all_came


def _io_of(trainer: Any) -> DCPCheckpointIO | None:
    """Return the plugin of a promoted strategy; None without: another trainer may have promoted the callback."""
    adapter = getattr(trainer.strategy, "dcp_adapter", None)
    return None if adapter is None else adapter.io


def _link(trainer: Any, target: PathLike, link: PathLike, original: Any) -> None:
    """Link to ``target`` when it is published; until then the old link stays."""
    io = _io_of(trainer)
    if io is None:
        original(trainer, target, link)
        return
    checkpoint, name = io.where(target), io.where(link)
    if trainer.is_global_zero and checkpoint != name:
        io.post_commit.change(functools.partial(deletion.link, name, checkpoint))
    trainer.strategy.barrier("link to a checkpoint")


def _is_taken_on_all_ranks(trainer: Any, io: DCPCheckpointIO, path: Where) -> bool:
    """Return whether rank 0 sees an entry at a path, or a save to the path has begun. Collective in Lightning's own
    group, since that save may be using ours.

    Raises:
        CheckpointError: The store does not answer.
    """
    taken, failure = False, ""
    if trainer.is_global_zero:
        try:
            taken = io.post_commit.is_under_way(path) or io.has_locally(path) or is_taken(path)
        except CheckpointError as error:
            failure = str(error)
    taken, failure = trainer.strategy.broadcast((taken, failure))
    if failure:
        raise CheckpointError(failure)
    return bool(taken)


def plugin_of(trainer: Any) -> DCPCheckpointIO | None:
    """Return the trainer's plugin, also inside of wrappers."""
    io = _lightning.unwrapped(trainer.strategy.checkpoint_io)
    return io if isinstance(io, DCPCheckpointIO) else None


@dataclass(frozen=True)
class CheckpointChoice:
    """Lightning's choice of a checkpoint, on a disk, in an object store and in a local tier.

    The choice includes checkpoints that only this node's local tier has: Lightning chooses before ranks can
    communicate.
    """

    io: DCPCheckpointIO

    def last(self, trainer: Any, others: Iterable[str]) -> str | None:
        """Return the newest of the checkpoints called ``last`` and of the paths ``others``; None without any.

        Raises:
            CheckpointNotFound: Checkpoints were saved, but none can be resumed from. Silently training from scratch
                would be wrong.
        """
        callbacks = [item for item in trainer.checkpoint_callbacks if has_base(type(item), "ModelCheckpoint")]
        folders = [_lightning.folder_of(callback, trainer) for callback in callbacks]
        candidates = set(map(self.io.where, others))
        for callback, folder in zip(callbacks, folders, strict=True):
            candidates |= self._called_last(callback, self.io.where(folder))
        times = {str(path): time for path in candidates if (time := self._time_of(path)) is not None}
        if not times:
            rank_zero_warn(
                f'fit(ckpt_path="last"): there is none in {" or ".join(folders)}. No checkpoint will be loaded.'
            )
        return max(times, key=times.__getitem__, default=None)

    def numbers(self, folder: str, name: re.Pattern[str], usable: bool = False) -> list[int]:
        """Return the number in the first group of ``name`` for each matching entry of a folder; only of checkpoints
        that can be resumed from if ``usable``."""
        root = self.io.where(folder)
        local = [state.path for state in self._local_in(root)]
        paths = [*local, *(path for path in paths_in(root) if path not in local)]
        named = [(match, path) for path in paths if (match := name.fullmatch(path.name))]
        return [int(match[1]) for match, path in named if not usable or path in local or not _reason_to_pass_over(path)]

    def _called_last(self, callback: Any, folder: Where) -> set[Where]:
        """Return the checkpoints called ``last`` that can be resumed from, or a newer one of the local tier alone; if
        none can, the newest checkpoint in the folder."""
        # The callback's own search drops the scheme of a bucket from the paths, and answers from cached listings.
        paths = {
            path
            for path in paths_in(folder)
            if path.name.endswith(callback.FILE_EXTENSION) and re.match(callback.CHECKPOINT_NAME_LAST, path.name)
        }
        local = self._local_in(folder) if callback.save_last else []
        newest = max(local, key=lambda state: state.time, default=None)
        if newest is not None and all((self._time_of(path) or 0.0) < newest.time for path in paths):
            return {newest.path}
        passed_over = {path: reason for path in sorted(paths, key=str) if (reason := _reason_to_pass_over(path))}
        chosen = paths - passed_over.keys()
        if passed_over:
            reasons = "; ".join(f"{path}: {reason}" for path, reason in passed_over.items())
            chosen = chosen or {self._newest_in(folder, reasons)}
            names = " or ".join(sorted(map(str, chosen)))
            rank_zero_warn(f'ckpt_path="last" passes over {reasons}. Resuming from {names}.')
        for path in chosen:
            note_chosen(path)
        return chosen

    def _newest_in(self, folder: Where, reasons: str) -> Where:
        newest = catalog.latest(folder, self.io.config.storage_options)
        if newest is None:
            raise CheckpointNotFound(
                f'ckpt_path="last", but nothing here can be resumed from: {reasons}. Delete it to train from scratch.'
            )
        return self.io.where(newest)

    def _local_in(self, folder: Where) -> list[CheckpointState]:
        """Return the saves to a folder that only this node's local tier has. Before that, wait for keepers of an
        earlier training, which may be publishing them."""
        source = source_of(self.io.config)
        source.settle(folder, Ranks())
        return [state for state in source.states(folder) if state.path.parent in (folder, resolved(folder))]

    def _time_of(self, path: Where) -> float | None:
        """Return the time at which a checkpoint directory or file was made; None if it does not exist."""
        local = source_of(self.io.config).newest_time(path)
        return saved_at(path) if local is None else local


def _reason_to_pass_over(path: Where) -> str:
    if not kind_of(path):
        return f"it is a link to {os.readlink(path)}, which is not there" if is_link(path) else "it is gone"
    return "" if is_regular_file(path) else catalog.reason_to_pass_over(path)


def upload_directories(loggers: list[Any]) -> None:
    """Have the loggers of W&B and MLflow also upload checkpoints that are directories."""
    for logger in loggers:
        if upload := next((upload for name, upload in _UPLOADS.items() if has_base(type(logger), name)), None):
            _lightning.replace_scan(logger, functools.partial(_scan, logger, upload))


def _scan(logger: Any, upload: Callable[[Any, Any, str, dict[str, Any], list[str]], None], callback: Any) -> None:
    """Upload new files with the logger's own method, which this function replaces, and then new checkpoints.

    Args:
        callback: A weak proxy of a ``ModelCheckpoint``.
    """
    logged = _lightning.logged_times(logger, callback)
    scores = _lightning.scored_paths(callback)
    times: dict[str, float] = {}
    for path in scores:
        # These loggers only upload from a disk. A path may have a file of Lightning's, or no checkpoint.
        with suppress(CheckpointError, OSError):
            local = on_file_system(text_of(path)) if path else None
            if local is not None and (summary := read_summary(local)) is not None:
                times[path] = summary.time
    for path in sorted(times, key=times.__getitem__):
        if logged.get(path, float("-inf")) < times[path]:
            score = scores[path].item() if hasattr(scores[path], "item") else scores[path]
            metadata = {"score": score, "original_filename": os.path.basename(path)}
            aliases = ["latest", "best"] if path == getattr(callback, "best_model_path", "") else ["latest"]
            upload(logger, callback, path, metadata, aliases)
            logged[path] = times[path]


def _settings(callback: Any) -> dict[str, Any]:
    return {name: getattr(callback, name) for name in _lightning.SETTINGS_LOGGED if hasattr(callback, name)}


def _to_wandb(logger: Any, callback: Any, path: str, metadata: dict[str, Any], aliases: list[str]) -> None:
    wandb: Any = importlib.import_module("wandb")
    metadata = {**metadata, callback.__class__.__name__: _settings(callback)}
    artifact = wandb.Artifact(name=_lightning.artifact_name(logger), type="model", metadata=metadata)
    artifact.add_dir(os.path.realpath(path), name="model.ckpt", policy=logger.add_file_policy)
    logger.experiment.log_artifact(artifact, aliases=aliases)


def _to_mlflow(logger: Any, callback: Any, path: str, metadata: dict[str, Any], aliases: list[str]) -> None:
    artifact, metadata = Path(path).stem, {**metadata, "Checkpoint": _settings(callback)}
    logger.experiment.log_artifacts(logger.run_id, os.path.realpath(path), f"{artifact}/{os.path.basename(path)}")
    with tempfile.TemporaryDirectory() as extra_files:
        Path(extra_files, "metadata.yaml").write_text(json.dumps(metadata, indent=2))  # JSON is YAML
        Path(extra_files, "aliases.txt").write_text(str(aliases))
        logger.experiment.log_artifacts(logger.run_id, extra_files, artifact)


_UPLOADS = {"WandbLogger": _to_wandb, "MLFlowLogger": _to_mlflow}
