"""What people and loggers are told of a save. On rank 0, in the training's thread, when the checkpoint is published.

- Each save is a line of text, and one call of ``log_metrics`` with ``checkpoint/blocked_seconds`` (what the training
  waited for), ``checkpoint/seconds`` (until it was on disk), ``checkpoint/gigabytes`` (of the complete checkpoint) and
  ``checkpoint/gb_per_second`` (of what was written, not of what was linked). These do not pass through the trainer's
  own metrics, so nothing is monitored, shown in the progress bar or stored because of them. The step is the one at
  which loggers are told, which with saves in the background is a few after the one that was saved: many loggers want
  steps in order.
- ``ModelCheckpoint`` calls ``after_save_checkpoint`` as soon as a save has begun: this is delayed, too.
- W&B and MLflow, with ``log_model``, look for files among the paths of a ``ModelCheckpoint`` and ignore directories.
  Each checkpoint of ours becomes one artifact, under the names and with the aliases that its file would have: a
  directory ``model.ckpt`` in the artifact of W&B, the directory of the checkpoint in that of MLflow.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info

from dcp_plugin.errors import CheckpointError
from dcp_plugin.events import SaveFinished
from dcp_plugin.format import SUMMARY
from dcp_plugin.integration.lightning_packages import has_base
from dcp_plugin.lightning import _lightning
from dcp_plugin.media.disk import LocalDisk
from dcp_plugin.storage.open import summary_of

if TYPE_CHECKING:
    from dcp_plugin.lightning.io import PostCommit


@dataclass(frozen=True)
class Report:
    """What a published save cost."""

    event: SaveFinished
    gigabytes: float
    linked: float = 0.0
    """Gigabytes of these that have not changed since the last checkpoint."""

    @classmethod
    def of(cls, event: SaveFinished) -> Report:
        try:
            summary = summary_of(LocalDisk().open(event.path))
        except CheckpointError:  # deleted already: then this rank's share
            return cls(event, event.bytes / 1e9)
        return cls(event, summary.payload_bytes / 1e9, int(summary.reused.get("bytes", 0)) / 1e9)

    @property
    def gb_per_second(self) -> float:
        return max(0.0, self.gigabytes - self.linked) / self.event.seconds if self.event.seconds else 0.0

    def say(self) -> None:
        linked = f", {_in_words(self.linked)} of it linked," if self.linked else ""
        rank_zero_info(
            f"Saved {self.event.path}: {_in_words(self.gigabytes)}{linked} in {self.event.seconds:.2f} s "
            f"({_in_words(self.gb_per_second)}/s). The training waited {self.event.blocked_seconds:.2f} s."
        )

    def log(self, loggers: list[Any], step: int) -> None:
        figures = {
            "checkpoint/blocked_seconds": self.event.blocked_seconds,
            "checkpoint/seconds": self.event.seconds,
            "checkpoint/gigabytes": self.gigabytes,
            "checkpoint/gb_per_second": self.gb_per_second,
        }
        for logger in loggers:
            logger.log_metrics(figures, step=step)


def _in_words(gigabytes: float) -> str:
    return f"{gigabytes:.2f} GB" if gigabytes >= 1 else f"{gigabytes * 1000:.1f} MB"


def tell_when_published(loggers: list[Any], post_commit: PostCommit) -> None:
    """Have loggers told of a checkpoint when it is published, until :func:`tell_at_once`. Some upload what they find at
    the paths of a ``ModelCheckpoint``, or miss it."""
    for logger in loggers:
        if "after_save_checkpoint" not in vars(logger):
            logger.after_save_checkpoint = _WhenPublished(logger.after_save_checkpoint, post_commit)


def tell_at_once(loggers: list[Any]) -> None:
    for logger in loggers:
        if isinstance(vars(logger).get("after_save_checkpoint"), _WhenPublished):
            del logger.after_save_checkpoint


@dataclass(frozen=True)
class _WhenPublished:
    """Tells a logger of a callback as it was at the save.

    ``ModelCheckpoint`` hands out a weak proxy of itself. When the logger looks at it, its ``best_model_path`` may be of
    the next save, which is not there yet.
    """

    tell: Callable[[Any], None]
    post_commit: PostCommit
    copies: dict[int, Any] = field(default_factory=dict)
    """One for each callback: loggers keep what they are told of until the end, by its identity."""

    def __call__(self, callback: Any) -> None:
        at_save = {name: dict(v) if isinstance(v, dict) else v for name, v in callback.__dict__.items()}
        kind, whose = callback.__class__, id(callback.__dict__)  # of what is behind the proxy

        def tell(event: SaveFinished) -> None:
            copy = self.copies.setdefault(whose, kind.__new__(kind))
            copy.__dict__.update(at_save)
            self.tell(copy)

        self.post_commit.in_training(tell)


def upload_directories(loggers: list[Any]) -> None:
    """Have the loggers of W&B and MLflow take checkpoints that are directories, too."""
    for logger in loggers:
        if name := next((name for name in _UPLOADS if has_base(type(logger), name)), None):
            _lightning.replace_scan(logger, functools.partial(_scan, logger, _UPLOADS[name]))


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
        summary = Path(path, SUMMARY)
        if path and summary.is_file():
            score = score.item() if hasattr(score, "item") else score
            metadata = {"score": score, "original_filename": os.path.basename(path)}
            aliases = ["latest", "best"] if path == getattr(callback, "best_model_path", "") else ["latest"]
            found.append(_Found(summary.stat().st_mtime, path, metadata, aliases))
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
