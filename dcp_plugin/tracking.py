"""References to checkpoints in the runs of W&B and MLflow: path, step, metrics and size. Nothing is uploaded.

The rule: a tracker gets only published checkpoints, and its entry changes with the checkpoint. So the entry of W&B has
a digest of the checkpoint's index, which has the checksum of every item. W&B by itself would hash all files again, or
would not notice that a checkpoint was replaced. The digest needs one small file, whatever the size of the checkpoint.

This module imports neither package: a caller with a run has imported its package.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from math import isfinite
from typing import Any

import torch.distributed as dist

from dcp_plugin.events import SaveFinished
from dcp_plugin.integration.lightning_packages import has_base
from dcp_plugin.launcher import this_launch
from dcp_plugin.paths import PathLike, StorageOptions, Where, as_path, resolved, uri_of
from dcp_plugin.saving.queue import SaveHandle
from dcp_plugin.storage.published import read_summary
from dcp_plugin.storage.reader import ShardedReader

logger = logging.getLogger("dcp_plugin")

LATEST = "latest"


def log_checkpoint(
    checkpoint: SaveHandle | PathLike,
    run: Any = None,
    *,
    name: str | None = None,
    aliases: Sequence[str] = (),
    metrics: Mapping[str, Any] | None = None,
    register: str | None = None,
    storage_options: StorageOptions | None = None,
) -> None:
    """Log a checkpoint in a run of W&B or MLflow: its URI, step, metrics and size. Nothing is uploaded.

    W&B gets a version of an artifact of type ``"model"`` with one reference to the checkpoint, and the aliases
    ``latest`` and ``step-<step>``. MLflow gets ``checkpoints/<name>.json`` among the run's artifacts and the URI as its
    tag ``checkpoint.latest``.

    For a save in the background this returns at once. The thread that saves logs the checkpoint when it is published;
    so an MLflow server that does not answer delays the next save. Errors of that thread are logged. A save that fails,
    is skipped or ends only in ``local_dir`` creates no entry.

    All ranks may call this; only rank 0 logs.

    Args:
        checkpoint: The result of ``save``; or the path or URL of a checkpoint of this package or of another tool.
        run: A run of either package, or Lightning's ``WandbLogger`` or ``MLFlowLogger``; by default the runs that are
            active in this process, for MLflow in this thread.
        name: The name of W&B's artifact; by default ``model-<id of the run>``, as in Lightning's logger.
        aliases: Additional aliases, such as ``"best"``; in MLflow tags ``checkpoint.<alias>`` with the URI.
        metrics: Metrics to log with the checkpoint; by default those that it was saved with.
        register: The model of MLflow's registry that gets a version with the URI as its source, and ``aliases``.
        storage_options: Access to the store of a URL, see :class:`~dcp_plugin.CheckpointConfig`.

    Raises:
        ValueError: No run is active; or ``register`` is given without MLflow.
        TypeError: ``run`` is of neither package.
        CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt: The path has no complete checkpoint.

    Example:
        >>> import dcp_plugin, torch
        >>> from dcp_plugin.tracking import log_checkpoint
        >>> dcp_plugin.save({"weights": torch.ones(3)}, "run/step-1", step=1)
        >>> log_checkpoint("run/step-1")
        Traceback (most recent call last):
        ...
        ValueError: no run is active: call wandb.init() or mlflow.start_run() before, or give run=
    """
    if _rank() != 0:
        return
    aliases = (aliases,) if isinstance(aliases, str) else tuple(aliases)
    floats = (
        None if metrics is None else {key: float(value) for key, value in metrics.items()}
    )  # copied, because the caller may change them
    trackers = _trackers(run, name, register)

    def log(path: Where) -> None:
        facts = _facts(resolved(path), floats)  # a link such as last.ckpt may get another target
        for tracker in trackers:
            tracker(facts, aliases)

    def published(event: SaveFinished) -> None:
        if event.tier == "durable":
            log(event.path)
        else:
            logger.info("%s is not logged: it is only in local_dir", event.path)

    if isinstance(checkpoint, SaveHandle):
        checkpoint.on_published(published)
    else:
        log(as_path(checkpoint, storage_options))


def _rank() -> int:
    """Return the rank of this process, also before and after the process group exists."""
    if dist.is_initialized():
        return dist.get_rank()
    launch = this_launch()
    return 0 if launch is None else launch.rank


def _facts(path: Where, metrics: Mapping[str, float] | None) -> dict[str, Any]:
    """Return the facts about a checkpoint as JSON values, with its own metrics if ``metrics`` is None."""
    saved = _facts_saved(path)
    numbers = saved["metrics"] if metrics is None else metrics
    plain = {name: x if isfinite(x) else str(x) for name, x in numbers.items()}  # JSON has no inf and nan
    return {"uri": uri_of(path), **saved, "metrics": plain}


def _facts_saved(path: Where) -> dict[str, Any]:
    summary = read_summary(path)
    if summary is None:
        with ShardedReader(path, complete=False) as reader:
            opened, fingerprint = reader.opened, reader.fingerprint
        return {
            "step": None,
            "saved": None,
            "bytes": sum(opened.index.files.values()),
            "format": opened.format,
            "fingerprint": fingerprint,
            "metrics": {},
        }
    base = {"base": summary.base["path"]} if summary.base else {}
    return {
        "step": summary.step,
        "saved": datetime.fromtimestamp(summary.time, UTC).isoformat(),
        "bytes": summary.payload_bytes,
        "format": summary.format,
        "fingerprint": summary.index_sha256,
        "metrics": dict(summary.metrics),
        "world_size": summary.world_size,
        "versions": summary.versions,
        **base,
    }


_Tracker = Callable[[dict[str, Any], tuple[str, ...]], None]
"""Function that logs the facts about a checkpoint, under these aliases, to a run."""


def _trackers(run: Any, name: str | None, register: str | None) -> list[_Tracker]:
    """Return a function that logs to the run, or one for each active run.

    The caller's thread calls this, because MLflow's run is active only in that thread.
    """
    runs = _active() if run is None else [(_kind_of(run), run)]
    if not runs:
        raise ValueError("no run is active: call wandb.init() or mlflow.start_run() before, or give run=")
    if register is not None and all(kind == "wandb" for kind, _ in runs):
        raise ValueError(f"register={register!r} is for MLflow's registry of models, but the run is a W&B run")
    return [_to_wandb(active, name) if kind == "wandb" else _to_mlflow(active, register) for kind, active in runs]


def _active() -> list[tuple[str, Any]]:
    wandb, mlflow = sys.modules.get("wandb"), sys.modules.get("mlflow")
    runs = {"wandb": getattr(wandb, "run", None), "mlflow": mlflow.active_run() if mlflow is not None else None}
    return [(kind, run) for kind, run in runs.items() if run is not None]


def _kind_of(run: Any) -> str:
    cls = type(run)
    for kind, logger_name in (("wandb", "WandbLogger"), ("mlflow", "MLFlowLogger")):
        if cls.__module__.partition(".")[0] == kind or has_base(cls, logger_name):
            return kind
    raise TypeError(
        f"run= must be a run of W&B or MLflow, or Lightning's WandbLogger or MLFlowLogger, not a {cls.__qualname__}"
    )


def _to_wandb(run: Any, name: str | None) -> _Tracker:
    run = run.experiment if has_base(type(run), "WandbLogger") else run

    def log(facts: dict[str, Any], aliases: tuple[str, ...]) -> None:
        wandb: Any = importlib.import_module("wandb")
        artifact = wandb.Artifact(name or f"model-{run.id}", type="model", metadata=facts)
        uri, step = facts["uri"], facts["step"]
        # The digest differs for other contents, for another save and for another path.
        digest = hashlib.sha256(f"{uri}\n{facts['fingerprint']}\n{facts['saved']}".encode()).hexdigest()
        # add_reference() would list a directory, and hash its files or query the store with its own credentials. It
        # takes no digest. The code below is its last step.
        kind: Any = importlib.import_module("wandb.sdk.artifacts.artifact_manifest_entry").ArtifactManifestEntry
        artifact.manifest.add_entry(kind(path=_name_in(uri), ref=uri, digest=digest, size=facts["bytes"]))
        run.log_artifact(artifact, aliases=[LATEST, *([] if step is None else [f"step-{step}"]), *aliases])

    return log


def _to_mlflow(run: Any, register: str | None) -> _Tracker:
    if has_base(type(run), "MLFlowLogger"):
        client, run_id = run.experiment, run.run_id
    else:
        client, run_id = importlib.import_module("mlflow").MlflowClient(), run.info.run_id

    def log(facts: dict[str, Any], aliases: tuple[str, ...]) -> None:
        client.log_dict(run_id, facts, f"checkpoints/{_name_in(facts['uri'])}.json")
        for alias in (LATEST, *aliases):
            client.set_tag(run_id, f"checkpoint.{alias}", facts["uri"])
        if register is not None:
            _register(client, run_id, register, facts, aliases)

    return log


def _name_in(uri: str) -> str:
    """Return the name of a checkpoint in its directory; the name of the bucket if it is a complete bucket."""
    return uri.rpartition("/")[2]


def _register(client: Any, run_id: str, model: str, facts: dict[str, Any], aliases: tuple[str, ...]) -> None:
    exceptions: Any = importlib.import_module("mlflow.exceptions")
    try:
        client.create_registered_model(model)
    except exceptions.MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    tags = {} if facts["step"] is None else {"step": str(facts["step"])}
    version = client.create_model_version(model, facts["uri"], run_id, tags=tags, await_creation_for=0).version
    for alias in aliases:
        client.set_registered_model_alias(model, alias, version)
