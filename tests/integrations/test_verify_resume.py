"""The comparison of a resume in each framework: after its restore, and before code of the user's that changes state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dcp_plugin as dcp
from tests.launch import on_ranks
from tests.messages import refusal, warned


def lightning_fit(root: Path, epochs: int, callbacks: Any = (), **options: Any) -> Any:
    """Fit to a number of epochs, from the last checkpoint if there is one. Return the report of the resume."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from dcp_plugin.lightning import DCPCheckpointIO

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch).square().sum()

        validation_step = training_step

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters())
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    io = DCPCheckpointIO(**options)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saving = ModelCheckpoint(root, save_last=True, enable_version_counter=False)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=epochs, plugins=[io], callbacks=[saving, *callbacks], **quiet)
    data = torch.utils.data.DataLoader(torch.randn(4, 4), batch_size=4)
    trainer.fit(Module(), data, data, ckpt_path=root / "last.ckpt" if (root / "last.ckpt").exists() else None)
    assert "on_run_start" not in vars(trainer.fit_loop)
    return io.started and io.started.report


def callback(**hooks: Any) -> Any:
    import lightning.pytorch as pl

    return type(
        "Hooks", (pl.Callback,), {name: lambda self, t, m, hook=hook: hook(t, m) for name, hook in hooks.items()}
    )()


def set_rate(trainer: Any, module: Any) -> None:
    trainer.optimizers[0].param_groups[0]["lr"] = 7.0


@pytest.mark.filterwarnings("ignore:The '(train|val)_dataloader' does not have many workers")
@on_ranks(1)
def test_lightning_compares_before_the_hooks_of_the_user(tmp_path: Path) -> None:
    lightning_fit(tmp_path, 1)
    assert lightning_fit(tmp_path, 2, [callback(on_train_start=set_rate)]).exact
    initialise = callback(on_fit_start=lambda trainer, module: nn.init.ones_(module.net[0].weight))
    with warned("overwritten after the restore: model.net.0.weight") as messages:
        assert lightning_fit(tmp_path, 3, [initialise]).exact is False
    assert len(messages) == 1
    step = callback(on_sanity_check_start=lambda trainer, module: trainer.lr_scheduler_configs[0].scheduler.step())
    call = lambda: lightning_fit(tmp_path, 4, [step], verify_resume="error")  # noqa: E731
    refusal(dcp.CheckpointMismatch, call, "stepped once more", "lr_schedulers.0.last_epoch")
    assert lightning_fit(tmp_path, 4, [step], expect_changed=["lr_schedulers.*", "lr"]).exact
    assert lightning_fit(tmp_path, 5, [step], verify_resume=False).exact is None


@on_ranks(1)
def test_a_fit_that_does_not_train_leaves_nothing_behind(tmp_path: Path) -> None:
    lightning_fit(tmp_path, 1)
    assert lightning_fit(tmp_path, 1).exact is None


@pytest.mark.parametrize("is_wrong", [False, True])
@on_ranks(2)
def test_accelerate_compares_at_the_end_of_load_state(tmp_path: Path, is_wrong: bool) -> None:
    from accelerate import Accelerator

    from dcp_plugin.accelerate import attach

    class Count:
        n, takes = 0, True

        def state_dict(self) -> dict[str, Any]:
            return {"n": self.n}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.n = state["n"] if self.takes else self.n

    accelerator, count = Accelerator(cpu=True), Count()
    checkpoints = attach(accelerator, verify_resume="error" if is_wrong else "auto")
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.register_for_checkpointing(count)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedule.step()
    count.n = 1
    accelerator.save_state(tmp_path / "state")
    count.n = 0
    count.takes = not (is_wrong and accelerator.process_index == 1)
    if is_wrong:
        load = lambda: accelerator.load_state(tmp_path / "state")  # noqa: E731
        refusal(dcp.CheckpointMismatch, load, "on 2 ranks", "rank 1: not restored: extra.registered.0.n")
    else:
        accelerator.load_state(tmp_path / "state")
        assert checkpoints.last_load is not None and checkpoints.last_load.exact
    checkpoints.detach()


@on_ranks(2)
def test_accelerate_refuses_ranks_that_do_not_all_compare(tmp_path: Path) -> None:
    from accelerate import Accelerator

    from dcp_plugin.accelerate import attach

    accelerator = Accelerator(cpu=True)
    checkpoints = attach(accelerator, verify_resume=("error", False)[accelerator.process_index])
    accelerator.prepare(nn.Linear(3, 2))
    accelerator.save_state(tmp_path / "state")
    load = lambda: accelerator.load_state(tmp_path / "state")  # noqa: E731
    refusal(dcp.CheckpointMismatch, load, "verify_resume='error' and False")
    checkpoints.detach()


@on_ranks(1)
def test_fabric_compares_at_the_end_of_a_load_with_an_optimizer_and_before_the_loop(tmp_path: Path) -> None:
    from lightning.fabric import Fabric

    from dcp_plugin.fabric import attach

    def made() -> tuple[Any, Any, dict[str, Any]]:
        fabric = Fabric(accelerator="cpu", devices=1)
        checkpoints, model = attach(fabric), nn.Linear(3, 2)
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return fabric, checkpoints, {"net": model, "optimizer": optimizer, "schedule": schedule, "step": 1}

    fabric, checkpoints, state = made()
    fabric.backward(state["net"](torch.ones(1, 3)).sum())
    state["optimizer"].step()
    state["schedule"].step()
    fabric.save(tmp_path / "run" / "step-1", state)
    checkpoints.detach()
    fabric, checkpoints, state = made()
    assert checkpoints.resume_or_init(state, tmp_path / "run").report.exact
    report = dcp.verify_resume(state)
    assert report is not None and report.exact
    state["schedule"].step()
    with warned("stepped once more after the restore: extra.schedule.last_epoch") as messages:
        report = dcp.verify_resume(state)
    assert report is not None and report.exact is False
    assert len(messages) == 1
    checkpoints.last_load = None
    fabric.load(tmp_path / "run" / "step-1", {"net": state["net"]})
    assert checkpoints.last_load.exact is None
    checkpoints.detach()


@on_ranks(1)
def test_the_trainer_compares_before_on_train_begin(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    from tests.transformers.trainer import training as t

    class Rate(TrainerCallback):
        def on_train_begin(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
            optimizer.param_groups[0]["lr"] = 7.0

    class Stepped(t.Ours):
        def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
            prepared = super()._prepare_for_training(*args, **kwargs)
            self.lr_scheduler.step()
            return prepared

    t.trainer(tmp_path).train()
    exact = t.trainer(tmp_path)
    exact.add_callback(Rate())
    exact.train(str(tmp_path / "checkpoint-3"))
    assert exact.resume_report is not None and exact.resume_report.exact
    shifted = t.trainer(tmp_path, kind=Stepped)
    with warned("stepped once more after the restore: extra.lr_scheduler.last_epoch") as messages:
        shifted.train(str(tmp_path / "checkpoint-3"))
    assert len(messages) == 1 and shifted.resume_report.exact is False
    strict = t.trainer(tmp_path, kind=type("Strict", (Stepped,), {"verify_resume": "error"}))
    refusal(dcp.CheckpointMismatch, lambda: strict.train(str(tmp_path / "checkpoint-3")), "extra.lr_scheduler")
    assert "on_train_begin" not in vars(strict.callback_handler)
