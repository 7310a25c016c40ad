"""``log_checkpoint``: runs of W&B and MLflow get references to what is published, and nothing else, from rank 0."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_plugin as dcp
from dcp_plugin import events
from dcp_plugin.tracking import log_checkpoint
from tests import trackers
from tests.damage import bad_disk, raising
from tests.launch import on_ranks
from tests.object_server import Bucket
from tests.slowness import Gate, slow_writes


def _state(seed: int) -> dict[str, Any]:
    return {"weights": torch.full((8, 3), float(seed)), "step": seed}


def _save_in_background(root: Path, tracker: Any) -> None:
    """One that is logged before it is published, and one that fails."""
    gate = Gate()
    with slow_writes(gate), closing(dcp.Checkpointer(async_save=True)) as checkpointer:
        gate.close()
        handle = checkpointer.save(_state(3), root / "step-3", step=3)
        loss = torch.tensor(0.5)
        log_checkpoint(handle, aliases=["best"], metrics={"loss": loss, "ratio": float("inf")})
        loss += 1  # the training goes on
        assert not handle.done()
        if isinstance(tracker, trackers.Mlflow):
            assert tracker.logged() == []
        gate.open()
        handle.wait()
        with bad_disk(raising(OSError("no"))):
            handle = checkpointer.save(_state(4), root / "step-4", step=4)
            log_checkpoint(handle)
            with pytest.raises(dcp.SaveFailed):
                handle.wait()


def _log_what_is_at_no_path(root: Path) -> None:
    (root / "torn").mkdir(parents=True)
    (root / "torn" / "__0_0.distcp").write_bytes(b"the beginning")
    for name, error in (("none", dcp.CheckpointNotFound), ("torn", dcp.CheckpointIncomplete)):
        with pytest.raises(error, match=name):
            log_checkpoint(root / name)
    handle = dcp.SaveHandle(root / "kept", 1)
    log_checkpoint(handle)
    handle.set_published(events.SaveFinished(handle.path, 1, 0, 0.0, 0.0, tier="local"))


@pytest.mark.one_of
@pytest.mark.parametrize("package", ["wandb", "mlflow"])
@on_ranks(2)
def test_a_run_gets_references_to_what_is_published(tmp_path: Path, package: str) -> None:
    root = tmp_path / "run of lr=1"
    tracker = {"wandb": trackers.Wandb, "mlflow": trackers.Mlflow}[package](tmp_path) if dist.get_rank() == 0 else None
    if tracker is not None:
        _log_what_is_at_no_path(root)
    _save_in_background(root, tracker)
    first = dcp.inspect(root / "step-3")
    dist.barrier()
    dcp.save(_state(5), root / "again", step=5)
    if dist.get_rank() == 0:
        os.symlink("again", root / "last")
    log_checkpoint(root / "again", tracker and tracker.run)
    dist.barrier()
    dcp.save(_state(7), root / "again", step=7, metrics={"loss": 0.25})
    log_checkpoint(root / "last")
    torch.distributed.checkpoint.save({"weights": torch.ones(4)}, checkpoint_id=root / "stock", no_dist=False)
    log_checkpoint(root / "stock")
    if tracker is None:
        return

    logged = tracker.logged()
    uris = {name: f"file://{root}/{name}" for name in ("step-3", "again", "stock")}
    assert [{name: uris[name]} for one in logged for name in one.references] == [one.references for one in logged]
    by_step = {one.said["step"]: one for one in logged}
    if package == "wandb":
        assert [(one.said["step"], one.aliases) for one in logged] == [
            (3, ["best", "latest", "step-3"]), (5, ["latest", "step-5"]), (7, ["latest", "step-7"]), (None, ["latest"]),
        ]  # fmt: skip
        assert len({one.digest for one in logged}) == 4
    else:
        assert {step: one.aliases for step, one in by_step.items()} == {
            3: ["checkpoint.best"], 7: [], None: ["checkpoint.latest"],
        }  # fmt: skip
    assert by_step[7].said["metrics"] == {"loss": 0.25}
    said = by_step[3].said
    assert said["metrics"] == {"loss": 0.5, "ratio": "inf"}
    assert dcp.inspect(said["uri"]) == first
    assert (said["bytes"], said["world_size"], said["format"]) == (first.nbytes, 2, "dcp_plugin")
    assert by_step[None].said["format"] == "stock" and by_step[None].said["bytes"] > 16


@pytest.mark.long
@on_ranks(1)
def test_mlflows_registry_gets_versions_with_the_url_as_their_source(tmp_path: Path, bucket: Bucket) -> None:
    options = {"endpoint": os.environ.pop("AWS_ENDPOINT_URL"), "aws_secret_access_key": "the-secret-of-the-tests"}
    tracker = trackers.Mlflow(tmp_path)
    for step in (1, 2):
        dcp.save(_state(step), f"{bucket.url}/run/step-{step}", step=step, storage_options=options)
        best = ["best"] if step == 1 else []
        log_checkpoint(
            f"{bucket.url}/run/step-{step}", tracker.run, aliases=best, register="net", storage_options=options
        )
    versions = sorted((one.version, one.source, one.tags) for one in tracker.client.search_model_versions())
    assert versions == [(step, f"{bucket.url}/run/step-{step}", {"step": str(step)}) for step in (1, 2)]
    best_of = tracker.client.get_model_version_by_alias("net", "best")
    assert (best_of.version, best_of.run_id) == (1, tracker.run.info.run_id)
    assert not any(b"the-secret" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_what_cannot_be_logged_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no run is active: call wandb\.init\(\) or mlflow\.start_run\(\) before, or give"
    ):
        log_checkpoint(tmp_path)
    with pytest.raises(TypeError, match="not a Gate"):
        log_checkpoint(tmp_path, Gate())


@pytest.mark.parametrize(("rank", "size"), [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")])
def test_a_rank_of_a_launcher_without_a_process_group_logs_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: str, size: str
) -> None:
    for name, value in {"SLURM_STEP_ID": "0", rank: "0", size: "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="no run is active"):
        log_checkpoint(tmp_path)
    monkeypatch.setenv(rank, "1")
    log_checkpoint(tmp_path)
