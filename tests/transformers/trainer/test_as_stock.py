"""What scripts do with a Trainer's checkpoints, and with the Trainer outside of a training: as with stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dcp_plugin as dcp
from tests.compare import assert_same
from tests.launch import on_ranks
from tests.messages import warned
from tests.transformers.trainer import WORLD_SIZE

ONE_STEP = {"max_steps": 1, "save_steps": 1}


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["single", "ddp"])
@on_ranks(of=lambda layout: WORLD_SIZE[layout])
def test_the_best_checkpoint_is_read_by_from_pretrained(tmp_path: Path, layout: str) -> None:
    from transformers import AutoModelForCausalLM

    from tests.transformers.trainer import training as t

    options = {"eval_strategy": "steps", "eval_steps": 3, "eval_dataset": t.Text(4), "metric_for_best_model": "loss"}
    trainer = t.trainer(tmp_path, layout, config=dcp.CheckpointConfig(async_save=True), **options)
    trainer.train()
    best = trainer.state.best_model_checkpoint
    saved = t.model(seed=9)
    dcp.load({"model": saved}, best)
    assert_same(AutoModelForCausalLM.from_pretrained(best).state_dict(), saved.state_dict())
    assert dcp.verify(best).ok


@on_ranks(1)
def test_weights_for_from_pretrained_can_be_left_out(tmp_path: Path) -> None:
    from tests.transformers.trainer import training as t

    t.trainer(tmp_path, kind=type("Lean", (t.Ours,), {"stock_weights": False}), **ONE_STEP).train()
    assert not (tmp_path / "checkpoint-1/model.safetensors").exists()
    assert t.begin(t.trainer(tmp_path, net=t.model(seed=9)), resume=True).step == 1


@pytest.mark.one_of
@pytest.mark.parametrize("stock_weights", [True, False])
@pytest.mark.parametrize("layout", ["single", "fsdp2"])
@on_ranks(of=lambda layout: WORLD_SIZE[layout])
def test_a_save_pretrained_of_the_models_own_gets_what_stock_gives_it(
    tmp_path: Path, layout: str, stock_weights: bool
) -> None:
    """Nothing is called where stock calls nothing."""
    from tests.transformers.trainer import training as t

    class Net(t.GPT2LMHeadModel):  # type: ignore[misc, name-defined]
        def save_pretrained(self, folder: Any, state_dict: Any = None, **kwargs: Any) -> None:
            Path(folder).mkdir(exist_ok=True)
            weights = self.state_dict() if state_dict is None else state_dict
            Path(folder, "own.txt").write_text(f"{state_dict is None} {sorted(weights)}")

    kinds = {"stock": t.OnCPU, "ours": type("Own", (t.Ours,), {"stock_weights": stock_weights})}
    for name, kind in kinds.items():
        t.trainer(tmp_path / name, layout, kind=kind, net=Net(t.model().config), **ONE_STEP).train()
    stock, ours = (tmp_path / name / "checkpoint-1/own.txt" for name in kinds)
    assert (stock.exists(), ours.exists()) == (layout == "single",) * 2
    assert layout == "fsdp2" or ours.read_text() == stock.read_text()


@pytest.mark.parametrize("more", [True, False])
@on_ranks(1)
def test_a_resume_with_another_frozen_module_warns_and_trains_on_as_stock_does(tmp_path: Path, more: bool) -> None:
    from tests.transformers.trainer import training as t

    def net(has_module: bool) -> Any:
        made = t.model()
        if has_module:
            made.frozen = t.nn.Linear(2, 2).requires_grad_(False)
        return made

    for kind in (t.OnCPU, t.Ours):
        t.trainer(tmp_path / kind.__name__, kind=kind, net=net(not more)).train()
        with warned("frozen.weight") as said:
            ran = t.run(
                t.trainer(tmp_path / kind.__name__, kind=kind, net=net(more)), tmp_path / kind.__name__ / "checkpoint-3"
            )
        assert sorted(ran.losses) == [4, 5, 6]
    assert len(said) == 1
    strict = type("Strict", (t.Ours,), {"strict_resume": True})
    with pytest.raises(dcp.CheckpointMismatch, match=r"frozen\.weight"):
        t.trainer(tmp_path / "Ours", kind=strict, net=net(more)).train(str(tmp_path / "Ours/checkpoint-3"))


@pytest.mark.parametrize("stock_weights", [True, False])
@on_ranks(1)
def test_a_trainer_loads_and_saves_outside_of_a_training(tmp_path: Path, stock_weights: bool) -> None:
    from tests.transformers.trainer import training as t

    kind = type("Own", (t.Ours,), {"stock_weights": stock_weights})
    trained = t.trainer(tmp_path, kind=kind, config=dcp.CheckpointConfig(async_save=True), save_strategy="no")
    trained.train()
    trained._save_checkpoint(trained.model, trial=None)
    assert dcp.verify(tmp_path / "checkpoint-6").ok  # published when the call returns
    other = t.trainer(tmp_path, kind=kind, net=t.model(seed=9))
    other._load_from_checkpoint(str(tmp_path / "checkpoint-6"))
    assert_same(other.model.state_dict(), trained.model.state_dict())


@on_ranks(1)
def test_the_log_names_the_paths_where_the_files_are(tmp_path: Path) -> None:
    import logging

    from tests.transformers.trainer import training as t

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    lines: list[str] = []
    trainer = t.trainer(tmp_path, log_level="info", **ONE_STEP)
    logging.getLogger("transformers").addHandler(Keep())
    trainer.train()
    of_paths = [line for line in lines if "checkpoint" in line and ("saved in" in line or "Saving model" in line)]
    assert f"Saving model checkpoint to {tmp_path}/checkpoint-1" in of_paths
    assert f"Model weights saved in {tmp_path}/checkpoint-1/model.safetensors" in of_paths
    assert all(str(tmp_path) in line for line in of_paths)
