"""The recipe of the guide: runs of W&B and MLflow get references to what is published, from rank 0 alone."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_plugin as dcp
from tests import trackers
from tests.damage import bad_disk, raising
from tests.launch import on_ranks
from tests.slowness import Gate, slow_writes


def _state(seed: int) -> dict[str, Any]:
    return {"weights": torch.full((8, 3), float(seed)), "step": seed}


@pytest.mark.one_of
@on_ranks(2)
def test_a_run_of_wandb_gets_a_reference_when_a_save_is_published(tmp_path: Path) -> None:
    """A save is noted before it is published; another fails."""
    tracker = trackers.Wandb(tmp_path) if dist.get_rank() == 0 else None
    recipe = trackers.recipe(run=tracker and tracker.run)
    gate = Gate()
    with slow_writes(gate), closing(dcp.Checkpointer(async_save=True)) as checkpointer:
        gate.close()
        handle = checkpointer.save(_state(3), tmp_path / "step=3", step=3, metrics={"loss": 0.5})
        handle.on_published(recipe["published"])
        assert not handle.done()
        gate.open()
        handle.wait()
        with bad_disk(raising(OSError("no"))):
            handle = checkpointer.save(_state(4), tmp_path / "step=4", step=4)
            handle.on_published(recipe["published"])
            with pytest.raises(dcp.SaveFailed):
                handle.wait()
    if tracker is not None:
        [logged] = tracker.logged()
        assert logged.aliases == ["best", "latest", "step-3"]
        assert logged.refers_to(f"file://{tmp_path}/step=3")
        assert dcp.inspect(logged.facts["uri"]).nbytes == logged.facts["bytes"]
        assert (logged.facts["step"], logged.facts["metrics"]) == (3, {"loss": 0.5})


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
@on_ranks(1)
def test_a_replaced_checkpoint_is_noted_anew(tmp_path: Path, package: str) -> None:
    tracker = {"wandb": trackers.Wandb, "mlflow": trackers.Mlflow}[package](tmp_path)
    run = tracker.run if isinstance(tracker, trackers.Wandb) else tracker.run.info.run_id
    for step in (5, 7):
        dcp.save(_state(step), tmp_path / "again", step=step)
        trackers.recipe()[f"to_{package}"](tmp_path / "again", run, ["best"])
    logged = tracker.logged()
    assert all(entry.refers_to(f"file://{tmp_path}/again") for entry in logged)
    assert {"best", "latest"} <= set(logged[-1].aliases)
    assert [entry.facts["step"] for entry in logged] == {"wandb": [5, 7], "mlflow": [7]}[package]
    assert len({entry.digest for entry in logged}) == len(logged), "W&B has a version for each digest"
