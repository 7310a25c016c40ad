"""Checkpoints among the artifacts of W&B and MLflow: what ``log_model`` of their loggers is for.

These loggers look for files among the paths of a ``ModelCheckpoint``, and pass over directories without a word. Here
each checkpoint of ours becomes one artifact, under the names and with the aliases that its file would have: a directory
``model.ckpt`` in the artifact of W&B, the directory of the checkpoint in that of MLflow. When and of which paths is the
logger's business; with saves in the background it is told when they are published (:mod:`.reporting`).
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_plugin.format.names import SUMMARY
from dcp_plugin.lightning._lightning import (
    SETTINGS_LOGGED,
    artifact_name,
    logged_times,
    replace_scan,
    scored_paths,
)
from dcp_plugin.lightning._packages import has_base


@dataclass(frozen=True)
class _Found:
    """A checkpoint that a logger does not have yet."""

    time: float
    path: str
    metadata: dict[str, Any]
    aliases: list[str]


def upload_directories(loggers: list[Any]) -> None:
    """Have the loggers take checkpoints that are directories, too."""
    for logger in loggers:
        if name := next((name for name in _UPLOADS if has_base(type(logger), name)), None):
            replace_scan(logger, _Scan(logger, name))


@dataclass(frozen=True)
class _Scan:
    """In place of the logger's own method, which it calls for files."""

    logger: Any
    kind: str

    def __call__(self, callback: Any) -> None:
        logged = logged_times(self.logger, callback)
        for found in sorted(_directories(callback), key=lambda found: found.time):
            if logged.get(found.path, float("-inf")) < found.time:
                _UPLOADS[self.kind](self.logger, found, callback)
                logged[found.path] = found.time


def _directories(callback: Any) -> list[_Found]:
    found = []
    for path, score in scored_paths(callback).items():
        summary = Path(path, SUMMARY)
        if path and summary.is_file():
            metadata = {
                "score": score.item() if hasattr(score, "item") else score,
                "original_filename": os.path.basename(path),
            }
            aliases = ["latest", "best"] if path == getattr(callback, "best_model_path", "") else ["latest"]
            found.append(_Found(summary.stat().st_mtime, path, metadata, aliases))
    return found


def _to_wandb(logger: Any, found: _Found, callback: Any) -> None:
    wandb: Any = importlib.import_module("wandb")
    metadata = {**found.metadata, callback.__class__.__name__: _settings(callback)}  # of a weak proxy
    artifact = wandb.Artifact(name=artifact_name(logger), type="model", metadata=metadata)
    artifact.add_dir(os.path.realpath(found.path), name="model.ckpt", policy=logger.add_file_policy)
    logger.experiment.log_artifact(artifact, aliases=found.aliases)


def _to_mlflow(logger: Any, found: _Found, callback: Any) -> None:
    folder = Path(found.path).stem
    whole = os.path.realpath(found.path)
    logger.experiment.log_artifacts(logger.run_id, whole, f"{folder}/{os.path.basename(found.path)}")
    with tempfile.TemporaryDirectory() as beside:
        metadata = {**found.metadata, "Checkpoint": _settings(callback)}
        Path(beside, "metadata.yaml").write_text(json.dumps(metadata, indent=2))  # which is YAML
        Path(beside, "aliases.txt").write_text(str(found.aliases))
        logger.experiment.log_artifacts(logger.run_id, beside, folder)


def _settings(callback: Any) -> dict[str, Any]:
    return {name: getattr(callback, name) for name in SETTINGS_LOGGED if hasattr(callback, name)}


_UPLOADS: dict[str, Callable[[Any, _Found, Any], None]] = {"WandbLogger": _to_wandb, "MLFlowLogger": _to_mlflow}
