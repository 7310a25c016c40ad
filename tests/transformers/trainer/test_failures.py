"""A save that fails is raised on all ranks, once, and the training's own exception comes first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dcp_plugin as dcp
from tests.damage import fill_disk
from tests.launch import on_ranks


@on_ranks(2)
def test_a_failed_background_save_ends_the_training_once_on_every_rank(tmp_path: Path) -> None:
    from tests.transformers.trainer import training as t

    config = dcp.CheckpointConfig(async_save=True, timeout=20)
    fill_disk(step=6, rank=1)
    trainer = t.trainer(tmp_path / "last", "ddp", config=config)
    with pytest.raises(dcp.CheckpointError, match=r"rank 1.*disk full"):
        trainer.train()
    trainer._dcp.finish()  # raised once
    names = [path.name for path in (tmp_path / "last").iterdir() if path.name != ".dcp_plugin"]  # rank 0 tidies up yet
    assert names == ["checkpoint-3"], names

    class Breaks(t.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                raise ArithmeticError("the loss is NaN")

    trainer = t.trainer(tmp_path / "whole", "ddp", config=config, callbacks=[Breaks()])
    with pytest.raises(ArithmeticError, match="NaN"):
        trainer.train()
    assert dcp.verify(tmp_path / "whole" / "checkpoint-3").ok

    fill_disk(step=3, rank=1)
    trainer = t.trainer(tmp_path / "both", "ddp", config=config, callbacks=[Breaks()])
    with pytest.raises(ArithmeticError, match="NaN") as raised:
        trainer.train()
    assert "disk full" in raised.value.__notes__[0]


@on_ranks(2)
def test_what_cannot_be_saved_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    """Something fails on one rank before the Trainer waits for all ranks, as it does when there is a best step."""
    from tests.transformers.trainer import training as t

    class Full(t.Ours):  # type: ignore[misc, name-defined]
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            if self.args.process_index == 0:  # all ranks are asked, as by the stock Trainer
                raise OSError("disk full")

        def _determine_best_metric(self, metrics: Any, trial: Any) -> bool:
            self.state.best_global_step = self.state.global_step
            return True

    options = {"eval_strategy": "steps", "eval_steps": 3, "eval_dataset": t.Text(4)}
    with pytest.raises(dcp.CheckpointError, match=r"rank 0.*disk full"):
        t.trainer(tmp_path, "ddp", kind=Full, **options).train()

    class Unsaved(Full):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            """This works."""

        def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
            scheduler = super().create_scheduler(*args, **kwargs)
            if self.args.process_index == 1:
                scheduler.state_dict = lambda: 1 / 0
            return scheduler

    with pytest.raises(dcp.CheckpointError, match=r"rank 1.*division by zero"):
        t.trainer(tmp_path, "ddp", kind=Unsaved, **options).train()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("checkpoint-")]
    with pytest.raises(dcp.CheckpointNotFound, match="no complete checkpoint"):
        t.trainer(tmp_path, "ddp").train(resume_from_checkpoint=True)


@on_ranks(1)
def test_a_lazy_checkpoint_is_the_state_at_its_call_whatever_callbacks_write(tmp_path: Path) -> None:
    import torch

    from tests.compare import assert_same
    from tests.slowness import at_random, slow_copies
    from tests.transformers.trainer import training as t

    class Swaps(t.TrainerCallback):  # type: ignore[misc, name-defined]
        """As averages are swapped in for an evaluation."""

        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            for parameter in model.parameters():
                parameter.data.mul_(0.5)

    found: list[dict[str, torch.Tensor]] = []
    for name, config in {"blocking": {}, "lazy": {"async_save": True, "staging": "lazy"}}.items():
        with slow_copies(at_random(0.002)):
            made = t.trainer(tmp_path / name, config=dcp.CheckpointConfig(**config), callbacks=[Swaps()])
            made.train()
        for step in (3, 6):
            model = t.model(seed=1)
            dcp.Checkpointer(solo=True).load({"model": model}, tmp_path / name / f"checkpoint-{step}")
            found.append(model.state_dict())
    assert_same(found[0], found[2])
    assert_same(found[1], found[3])
