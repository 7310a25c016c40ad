"""``ModelCheckpoint`` and its like, corrected where they assume finished saves and checkpoints that are files.

They ask the file system which names are taken, link to what was saved, and look for ``last`` by time of modification.
A save in the background has none of this on disk yet; and what a crash of another tool left behind may look like a
checkpoint. They also save when an exception ends the training, on whichever ranks it was raised.

A promoted callback is a subclass of the user's own class, like a promoted strategy. Its state, its name in a
checkpoint, and what it decides to save and to delete are Lightning's.

With ``save_interval`` the last of them saves besides, when a save is due: to one name in its directory, where each
replaces the one before. It is among those that ``"last"`` finds.

W&B and MLflow, with ``log_model``, look for files among the paths of a ``ModelCheckpoint`` and ignore directories. Each
checkpoint of ours becomes one artifact, under the names and with the aliases that its file would have: a directory
``model.ckpt`` in the artifact of W&B, the directory of the checkpoint in that of MLflow. What is in an object store
stays there, as a file of Lightning's does.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from dcp_plugin.errors import CheckpointError, CheckpointNotFound
from dcp_plugin.integration.files import is_regular_file, is_taken, paths_in, read_summary, saved_at
from dcp_plugin.integration.lightning_packages import has_base, home_of
from dcp_plugin.lightning import _lightning
from dcp_plugin.lightning.io import DCPCheckpointIO
from dcp_plugin.paths import ObjectPath, PathLike, Where, is_url, resolved, text_of
from dcp_plugin.ranks import Ranks
from dcp_plugin.runs import catalog
from dcp_plugin.runs.damage import note_chosen
from dcp_plugin.sources import source_of
from dcp_plugin.types import CheckpointState

WHERE_IT_SAVES = ("on_train_batch_end", "on_train_epoch_end", "on_validation_end")
"""The hooks in which a ``ModelCheckpoint`` saves."""
TIMED = "last-timed.ckpt"
"""What is saved when ``save_interval`` says so."""

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from dcp_plugin.lightning.strategy import LightningAdapter


def promote_callbacks(trainer: Any) -> None:
    """Have the trainer's callbacks that save checkpoints know about its :class:`DCPCheckpointIO`."""
    for callback in trainer.callbacks:
        if has_base(type(callback), "Checkpoint"):
            callback.__class__ = _promoted(type(callback))  # type: ignore[arg-type]
    _lightning.replace_choice_of_checkpoint(trainer, _Stores(trainer))
    with suppress(ValueError):  # that concerns a fit alone
        tidy_dirpaths(trainer)


def tidy_dirpaths(trainer: Any) -> None:
    """Where the trainer's callbacks save, when it is known, in the usual form: a ``file://`` URL is a local path.

    Raises:
        ValueError: It is a URL of something else than an object store.
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
            """Save if all ranks come to do so; and never hide what has ended the training."""
            adapter = _adapter_of(trainer)
            if adapter is None or not _may_save_on_exception(self, base):
                super().on_exception(trainer, pl_module, exception)
                return
            try:
                if adapter.all_ranks_come_to_save():
                    super().on_exception(trainer, pl_module, exception)
            except Exception as failure:
                exception.add_note(f"Besides, no checkpoint could be saved of it: {failure}")
                rank_zero_warn(f"No checkpoint could be saved of the {type(exception).__name__}: {failure}")

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Pickled as an object of the user's class."""
            return object.__new__, (base,), self.__dict__

    class DCPModelCheckpoint(DCPCheckpoint):
        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            """Lightning links on a disk only."""
            if _adapter_of(trainer) is None:
                super().setup(trainer, pl_module, stage)
                return
            callback: Any = self
            wanted = callback.save_last
            try:
                callback.save_last = wanted and True
                super().setup(trainer, pl_module, stage)
            finally:
                callback.save_last = wanted
            if is_url(text_of(callback.dirpath)):
                _lightning.forget_listings(self)

        def file_exists(self, filepath: PathLike, trainer: Trainer) -> bool:
            adapter = _adapter_of(trainer)
            if adapter is not None and is_url(text_of(filepath)):
                return _is_taken_on_all_ranks(trainer, adapter.io, adapter.io.where(filepath))
            if super().file_exists(filepath, trainer):
                return True
            if adapter is None or not (adapter.io.config.async_save or adapter.io.config.has_local_tier):
                return False
            io = adapter.io
            taken = trainer.is_global_zero and (io.post_commit.is_under_way(filepath) or io.has_locally(filepath))
            return bool(adapter.strategy.reduce_boolean_decision(taken, all=False))

    for name in WHERE_IT_SAVES:
        setattr(DCPCheckpoint, name, _saving_in(name, getattr(base, name)))
    promoted = DCPCheckpoint
    if has_base(base, "ModelCheckpoint"):
        promoted = DCPModelCheckpoint
        _lightning.replace_link_and_search(promoted, _link, _find_last)
    # A callback's name is the key of its state in the checkpoint.
    promoted.__module__, promoted.__name__, promoted.__qualname__ = base.__module__, base.__name__, base.__qualname__
    return promoted


def _saving_in(hook: str, original: Callable[..., None]) -> Callable[..., None]:
    """With lazy staging it matters who saves: see :class:`dcp_plugin.lightning.callback.OthersHooks`. And what
    keeps the best is to be durable."""

    @functools.wraps(original)
    def saving(self: Any, trainer: Any, *args: Any) -> None:
        adapter = _adapter_of(trainer)
        if adapter is None:
            original(self, trainer, *args)
            return
        io = adapter.io
        io.monitor = getattr(self, "monitor", None)
        io.compares = io.monitor is not None
        try:
            with nullcontext() if io.others is None else io.others.of_model_checkpoint(hook):
                original(self, trainer, *args)
                if hook == "on_train_batch_end" and hasattr(self, "dirpath"):
                    _save_when_due(self, trainer, adapter)
        finally:
            io.compares, io.monitor = False, None

    return saving


def _save_when_due(callback: Any, trainer: Any, adapter: LightningAdapter) -> None:
    """The last of those that save is called after all other callbacks, which are saved as they are after the batch."""
    if callback is with_directory(trainer)[-1] and adapter.io.is_due(trainer.global_step, adapter.strategy.world_size):
        trainer.save_checkpoint(f"{callback.dirpath}/{TIMED}")


def with_directory(trainer: Any) -> list[Any]:
    """The trainer's callbacks that know where to save."""
    return [callback for callback in trainer.checkpoint_callbacks if hasattr(callback, "dirpath")]


def _may_save_on_exception(callback: Any, base: type[Any]) -> bool:
    """Whether ranks have to meet before the callback's hook: one that is not Lightning's may do anything. An exception
    of one rank alone waits long for the others."""
    owner = next(cls for cls in base.__mro__ if "on_exception" in vars(cls))
    return home_of(owner) is None or (owner.__name__ != "Callback" and getattr(callback, "save_on_exception", True))


def _adapter_of(trainer: Any) -> LightningAdapter | None:
    """None if the strategy does not save with the plugin: the callback may come from a trainer whose strategy did."""
    return getattr(trainer.strategy, "dcp_adapter", None)


def _link(trainer: Any, target: PathLike, link: PathLike, original: Any) -> None:
    """Link when the target is published; until then the old link stays."""
    adapter = _adapter_of(trainer)
    if adapter is None:
        original(trainer, target, link)
        return
    there, name = adapter.io.where(target), adapter.io.where(link)
    if trainer.is_global_zero and there != name:
        adapter.io.post_commit.link(lambda: catalog.link(name, there))
    trainer.strategy.barrier("link to a checkpoint")


def _is_taken_on_all_ranks(trainer: Any, io: DCPCheckpointIO, path: Where) -> bool:
    """Return whether rank 0 sees something at a path, or a save to it has begun. Collective in Lightning's own group:
    that save may use ours.

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


def _plugin_of(trainer: Any) -> DCPCheckpointIO | None:
    io = _lightning.unwrapped(trainer.strategy.checkpoint_io)
    return io if isinstance(io, DCPCheckpointIO) else None


@dataclass(frozen=True)
class _Stores:
    """What Lightning has to know of object stores to choose a checkpoint, see :mod:`~dcp_plugin.lightning._lightning`.

    And of what is in the local tier alone, as far as this node has it: Lightning chooses before ranks can talk to each
    other. Nothing is asked for a trainer without the plugin.
    """

    trainer: Any

    def concerns(self, path: str) -> bool:
        io = _plugin_of(self.trainer)
        return io is not None and (io.config.has_local_tier or is_url(text_of(path)))

    def newest(self, paths: set[str]) -> str | None:
        io = _plugin_of(self.trainer)
        assert io is not None, "only a trainer with the plugin asks"
        times = {str(where): time for where in map(io.where, paths) if (time := _time_of(io, where)) is not None}
        return max(times, key=times.__getitem__) if times else None

    def numbers(self, folder: str, name: re.Pattern[str], committed: bool) -> list[int]:
        io = _plugin_of(self.trainer)
        assert io is not None, "only a trainer with the plugin asks"
        root = io.where(folder)
        local = [state.path for state in _local_in(io, root)]
        paths = [*local, *(path for path in paths_in(root) if path not in local)]
        there = [(found, path) for path in paths if (found := name.fullmatch(path.name))]
        usable = [(found, path) for found, path in there if not committed or not _reason_to_pass_over(path, local)]
        return [int(found[1]) for found, _ in usable]


def _local_in(io: DCPCheckpointIO, folder: Where) -> list[CheckpointState]:
    """What was saved to a folder and is not there, as far as this node has it. Keepers of a training before are waited
    for first: they may be about to put it there."""
    source = source_of(io.config)
    source.settle(folder, Ranks())
    return [state for state in source.states(folder) if state.path.parent in (folder, resolved(folder))]


def _time_of(io: DCPCheckpointIO, path: Where) -> float | None:
    """When a checkpoint, or a file that is one, was made; None if it is not there."""
    if (local := source_of(io.config).newest_time(path)) is not None:
        return local
    return saved_at(path)


def _find_last(callback: Any, trainer: Any, search: Callable[..., set[str]]) -> set[str]:
    """What is called ``last``, and can be resumed from."""
    io = _plugin_of(trainer)
    if io is None:
        return search(callback, trainer)
    folder = io.where(_lightning.folder_of(callback, trainer))
    local = _local_in(io, folder) if callback.save_last else []
    if isinstance(folder, ObjectPath):
        paths = list(map(str, paths_in(folder)))
        found = _lightning.search_among(callback, paths, lambda: search(callback, trainer))
        found = {str(io.where(path)) for path in found}
    else:
        found = search(callback, trainer)
    if local:
        newest = max(local, key=lambda state: state.time)
        if all((_time_of(io, io.where(path)) or 0.0) < newest.time for path in found):
            return {str(newest.path)}
    return _committed(io, found)


def _committed(io: DCPCheckpointIO, found: set[str]) -> set[str]:
    """Of what is called ``last``, what can be resumed from; if there is nothing, the newest checkpoint beside it.

    Raises:
        CheckpointNotFound: Something was saved and nothing can be resumed from. To train from scratch without a word
            would be wrong then.
    """
    passed_over = {path: reason for path in sorted(found) if (reason := _reason_to_pass_over(io.where(path)))}
    if not passed_over:
        _note_chosen(found)
        return found
    said = "; ".join(f"{path}: {reason}" for path, reason in passed_over.items())
    remaining = found - passed_over.keys()
    if not remaining:
        beside = catalog.latest(io.where(next(iter(passed_over))).parent, io.config.storage_options)
        if beside is None:
            raise CheckpointNotFound(
                f'ckpt_path="last", but nothing here can be resumed from: {said}. Delete it to train from scratch.'
            )
        remaining = {str(beside)}
    rank_zero_warn(f'ckpt_path="last" passes over {said}. Resuming from {" or ".join(sorted(remaining))}.')
    _note_chosen(remaining)
    return remaining


def _note_chosen(found: set[str]) -> None:
    for path in found:
        note_chosen(path)


def _reason_to_pass_over(path: Where, local: Collection[Where] = ()) -> str:
    if path in local:
        return ""
    if isinstance(path, ObjectPath):
        return "" if is_regular_file(path) else catalog.reason_to_pass_over(path)
    if not path.exists():
        return f"it is a link to {os.readlink(path)}, which is not there" if path.is_symlink() else "it is gone"
    return "" if path.is_file() else catalog.reason_to_pass_over(path)


def upload_directories(loggers: list[Any]) -> None:
    """Have the loggers of W&B and MLflow take checkpoints that are directories, too."""
    for logger in loggers:
        if upload := next((upload for name, upload in _UPLOADS.items() if has_base(type(logger), name)), None):
            _lightning.replace_scan(logger, functools.partial(_scan, logger, upload))


@dataclass(frozen=True)
class _Found:
    """A checkpoint that a logger does not have yet."""

    time: float
    path: str
    metadata: dict[str, Any]
    aliases: list[str]


def _scan(logger: Any, upload: Callable[[Any, _Found, Any], None], callback: Any) -> None:
    """Replaces the logger's own method that looks for new files."""
    logged = _lightning.logged_times(logger, callback)
    for found in sorted(_directories(callback), key=lambda found: found.time):
        if logged.get(found.path, float("-inf")) < found.time:
            upload(logger, found, callback)
            logged[found.path] = found.time


def _directories(callback: Any) -> list[_Found]:
    found = []
    for path, score in _lightning.scored_paths(callback).items():
        if not path or is_url(text_of(path)):  # as for a file in a store: these loggers upload what is on a disk
            continue
        summary = None
        with suppress(CheckpointError, OSError):
            summary = read_summary(Path(path))
        if summary is not None:
            score = score.item() if hasattr(score, "item") else score
            metadata = {"score": score, "original_filename": os.path.basename(path)}
            aliases = ["latest", "best"] if path == getattr(callback, "best_model_path", "") else ["latest"]
            found.append(_Found(summary.time, path, metadata, aliases))
    return found


def _to_wandb(logger: Any, found: _Found, callback: Any) -> None:
    wandb: Any = importlib.import_module("wandb")
    metadata = {**found.metadata, callback.__class__.__name__: _settings(callback)}  # of a weak proxy
    artifact = wandb.Artifact(name=_lightning.artifact_name(logger), type="model", metadata=metadata)
    artifact.add_dir(os.path.realpath(found.path), name="model.ckpt", policy=logger.add_file_policy)
    logger.experiment.log_artifact(artifact, aliases=found.aliases)


def _to_mlflow(logger: Any, found: _Found, callback: Any) -> None:
    artifact = Path(found.path).stem
    directory = os.path.realpath(found.path)
    logger.experiment.log_artifacts(logger.run_id, directory, f"{artifact}/{os.path.basename(found.path)}")
    with tempfile.TemporaryDirectory() as beside:
        metadata = {**found.metadata, "Checkpoint": _settings(callback)}
        Path(beside, "metadata.yaml").write_text(json.dumps(metadata, indent=2))  # which is YAML
        Path(beside, "aliases.txt").write_text(str(found.aliases))
        logger.experiment.log_artifacts(logger.run_id, beside, artifact)


def _settings(callback: Any) -> dict[str, Any]:
    return {name: getattr(callback, name) for name in _lightning.SETTINGS_LOGGED if hasattr(callback, name)}


_UPLOADS: dict[str, Callable[[Any, _Found, Any], None]] = {"WandbLogger": _to_wandb, "MLFlowLogger": _to_mlflow}
