"""Numbers that belong to a checkpoint: whoever saves says them, whoever looks at it finds them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import dcp_plugin as dcp
from dcp_plugin.core.format.summary import MOST_METRICS, Summary, with_hash
from dcp_plugin.errors import CheckpointCorrupt, SaveFailed
from tests.launch import on_ranks


def test_what_was_given_is_in_the_checkpoint_and_in_the_list(tmp_path: Path) -> None:
    given = {
        "val_loss": torch.tensor([0.25]),
        "accuracy": np.float64(0.5),
        "tokens": 3,
        "diverged": math.nan,
        "": -math.inf,
    }
    dcp.save({"n": 1}, tmp_path / "a", step=1, metrics=given)
    dcp.save({"n": 1}, tmp_path / "b", step=2)
    first, second = dcp.list_checkpoints(tmp_path)
    for found in (first.metrics, dcp.inspect(tmp_path / "a").metrics):
        assert math.isnan(found.pop("diverged"))
        assert found == {"val_loss": 0.25, "accuracy": 0.5, "tokens": 3.0, "": -math.inf}
        assert {type(value) for value in found.values()} == {float}
    assert second.metrics == dcp.inspect(tmp_path / "b").metrics == {}
    assert "val_loss 0.25" in str(dcp.inspect(tmp_path / "a")) and len({first, second}) == 2
    text = (tmp_path / "a" / "dcp_plugin.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["metrics"]["diverged"] == "nan", "any reader of JSON takes it"


@pytest.mark.parametrize("value", ["0.3", torch.ones(2), None, 10**400, 1j, {"a": 1}])
def test_what_is_no_number_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(SaveFailed, match=r"the metric 'val_loss' is a .*, not a number"):
        dcp.save({"n": 1}, tmp_path / "a", metrics={"epoch": 1, "val_loss": value})
    assert not (tmp_path / "a").exists()
    with pytest.raises(SaveFailed, match="a metric's name must be text"):
        dcp.save({"n": 1}, tmp_path / "a", metrics={"x" * 300: 1})
    with pytest.raises(SaveFailed, match="1001 metrics"):
        dcp.save({"n": 1}, tmp_path / "a", metrics={str(n): n for n in range(MOST_METRICS + 1)})


NO_METRICS = [None, [], {"a": "0.3"}, {"a": None}, {"a": True}, {"a": [1]}, {"a": 10**400}, {"a": "NaN"}]


@pytest.mark.parametrize("said", [*NO_METRICS, {"x" * 300: 1}, {str(n): n for n in range(1001)}])
def test_what_cannot_be_metrics_is_damage(said: Any) -> None:
    whole = Summary(1, 1.0, 1, 0, 0, 0, "", "", "")
    assert Summary.decode(whole.encode(), "it") == whole
    content = {name: value for name, value in json.loads(whole.encode()).items() if name != "sha256"}
    with pytest.raises(CheckpointCorrupt, match="it is damaged"):
        Summary.decode(with_hash({**content, "metrics": said}), "it")


@on_ranks(2)
def test_those_of_rank_0_count_and_what_one_rank_cannot_tell_ends_the_save_on_all(tmp_path: Path) -> None:
    rank = dist.get_rank()
    for local_dir in (None, str(tmp_path / "local")):
        checkpointer, path = (
            dcp.Checkpointer(async_save=True, keeper=local_dir and {"dir": local_dir}),
            tmp_path / ("a" if local_dir is None else "b"),
        )
        checkpointer.save({"n": 1}, path, metrics={"loss": torch.tensor(float(rank + 7))}).wait()
        with pytest.raises(SaveFailed, match="'loss' is a str"):
            checkpointer.save({"n": 1}, tmp_path / "not", metrics={"loss": "7" if rank else 7}).wait()
        checkpointer.close()
        assert dcp.inspect(path).metrics == {"loss": 7.0}
    dist.barrier()
    assert not (tmp_path / "not").exists()


@on_ranks(2)
def test_lightning_says_what_its_callbacks_see_and_what_a_model_checkpoint_monitors(tmp_path: Path) -> None:
    from tests.lightning import training as t

    class Logging(t.Model):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, sync_dist=True)
            return loss

    best = t.ModelCheckpoint(tmp_path, filename="{step}", monitor="loss", every_n_train_steps=2, save_top_k=-1)
    newest = t.ModelCheckpoint(tmp_path / "n", filename="{step}", monitor="step", mode="max", every_n_train_steps=3)
    t.trainer_for("ddp", [best, newest]).fit(Logging("ddp"), t.stateful_loader("ddp"))
    if dist.get_rank() == 0:
        metrics = {state.path: state.metrics for state in dcp.list_checkpoints(tmp_path)}
        scores = {Path(path): float(score) for path, score in best.best_k_models.items()}
        assert len(scores) == 3 and scores == {path: metrics[path]["loss"] for path in scores}
        assert metrics[tmp_path / "n" / "step=6.ckpt"]["step"] == 6.0


@on_ranks(1)
def test_a_trainer_says_what_it_has_logged_at_the_step_that_it_saves(tmp_path: Path) -> None:
    from tests.transformers.trainer import training as t

    evaluating = {"eval_strategy": "steps", "eval_steps": 3, "logging_steps": 2, "metric_for_best_model": "loss"}
    trainer = t.trainer(tmp_path, save_steps=2, eval_dataset=t.Text(2), **evaluating)
    trainer.train()
    found = {state.path.name: state.metrics for state in dcp.list_checkpoints(tmp_path)}
    logged = {(entry["step"], name): value for entry in trainer.state.log_history for name, value in entry.items()}
    last = found["checkpoint-6"]
    assert set(last) == {"loss", "grad_norm", "learning_rate", "eval_loss"}
    assert all(value == logged[6, name] for name, value in last.items())
    assert "eval_loss" not in found["checkpoint-4"] and found["checkpoint-4"]["loss"] == logged[4, "loss"]


@on_ranks(1)
def test_a_script_with_an_accelerator_gives_them_to_save_state(tmp_path: Path) -> None:
    from tests.accelerate import training as t

    run = t.start("ddp")
    run.accelerator.save_state(str(tmp_path / "a"), metrics={"loss": torch.tensor(0.5)})
    assert dcp.inspect(tmp_path / "a").metrics == {"loss": 0.5}
