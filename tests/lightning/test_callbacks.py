"""Lightning's own callbacks and features resume with the plugin as they do in a training that was never interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compare import assert_same, full_state
from tests.launch import on_ranks
from tests.lightning import LIGHTNING
from tests.training import WORLD_SIZE


def ddp_or_fsdp2(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.one_of(pytest.mark.parametrize("layout", ["ddp", "fsdp2"])(test))  # type: ignore[no-any-return]


def _resumes(
    root: Path,
    layout: str,
    *,
    model: Callable[[int], Any] | None = None,
    callbacks: Callable[[], list[Any]] = list,
    also: Callable[[Any], dict[str, Any]] = lambda trainer: {},
    at: int = 2,
    epochs: int = 4,
    steps: int = 2,
    plugin: Any = True,
    data: Callable[[], Any] | None = None,
    **options: Any,
) -> None:
    """A training of some epochs, without the plugin; and the same, interrupted after ``at`` of them. They end alike."""
    from tests.lightning import training as t

    def train(seed: int, path: Path | None, *others: Any, **how: Any) -> tuple[Any, list[float]]:
        made = model(seed) if model else t.Model(layout, seed=seed)
        trainer = t.trainer_for(layout, [*callbacks(), *others], max_steps=-1, max_epochs=epochs, **how, **options)
        source = data() if data else {"train_dataloaders": t.plain_loader(layout, steps)}
        trainer.fit(made, **source, ckpt_path=path)
        return trainer, made.losses

    straight, losses = train(0, None, stock=True)
    saving = t.ModelCheckpoint(root / layout, "{epoch}", save_top_k=-1, every_n_epochs=at)
    first, _ = train(0, None, saving, plugin=plugin)
    second, resumed = train(5, root / layout / f"epoch={at - 1}.ckpt", plugin=plugin)
    assert losses[-len(resumed) :] == resumed
    assert len(resumed) < len(losses)
    for one in (first, second):
        assert_same(t.whole_state(straight), t.whole_state(one))
        assert_same(also(straight), also(one))


@pytest.mark.skipif(LIGHTNING < (2, 6), reason="Lightning 2.5 has no EMAWeightAveraging")
@on_ranks(2)
def test_weight_averaging_resumes(tmp_path: Path) -> None:
    """torch cannot copy what fully_shard has sharded, which this callback does."""
    from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging

    _resumes(tmp_path / "mean", "ddp", callbacks=lambda: [WeightAveraging()])
    _resumes(tmp_path / "moving", "ddp", callbacks=lambda: [EMAWeightAveraging(decay=0.5)])


@on_ranks(2)
def test_trap_10_sharded_averages_of_a_callback_are_saved_and_restored_by_all_ranks(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import Callback
    from torch.distributed.tensor import DTensor

    from tests.lightning import training as t

    class Average(Callback):
        """As one writes it for one device."""

        average: Any = None

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            now = {name: parameter.detach().clone() for name, parameter in pl_module.named_parameters()}
            before = self.average or now
            self.average = {name: (value + before[name]) / 2 for name, value in now.items()}

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["average"] = self.average

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            self.average = checkpoint["average"]

    def averages(trainer: Any) -> dict[str, Any]:
        (callback,) = (one for one in trainer.callbacks if isinstance(one, Average))
        assert all(isinstance(value, DTensor) for value in callback.average.values())
        return full_state(callback.average)

    stock = t.trainer_for("fsdp2", [callback := Average()], stock=True, max_steps=3)
    stock.fit(t.Model("fsdp2"), t.plain_loader("fsdp2"))
    stock.save_checkpoint(tmp_path / "stock")
    stored = torch.load(tmp_path / "stock" / "meta.pt", weights_only=False)["average"]["net.body.0.weight"]
    mine = callback.average["net.body.0.weight"].to_local()
    assert torch.equal(stored.to_local(), mine) is (stock.global_rank == 0), "Lightning has saved rank 0's part alone"
    _resumes(tmp_path / "ours", "fsdp2", callbacks=lambda: [Average()], also=averages)


@on_ranks(2)
def test_stochastic_weight_averaging_resumes_after_it_has_begun(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    from tests.lightning import training as t

    class Scheduled(t.Model):
        def configure_optimizers(self) -> Any:
            made = super().configure_optimizers()
            made["lr_scheduler"]["interval"] = "epoch"
            return made

    _resumes(
        tmp_path,
        "ddp",
        model=lambda seed: Scheduled("ddp", seed),
        callbacks=lambda: [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2)],
        epochs=5,
    )


@pytest.mark.parametrize("layout", ["single", "fsdp2"])
@on_ranks(of=lambda layout: WORLD_SIZE[layout])
def test_a_backbone_that_was_unfrozen_before_the_checkpoint_stays_so(tmp_path: Path, layout: str) -> None:
    """Lightning alone resumes with the backbone frozen, and not at all if the model is sharded. Not for DDP: it never
    averages the gradients of what was frozen when it was set up, so the ranks drift apart in any case."""
    from lightning.pytorch.callbacks import BackboneFinetuning

    from tests.lightning import training as t

    class Tuned(t.Model):
        @property
        def backbone(self) -> Any:
            return self.net.body

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.head.parameters(), lr=0.01)

    _resumes(
        tmp_path,
        layout,
        model=lambda seed: Tuned(layout, seed),
        callbacks=lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1, train_bn=False)],
    )


@ddp_or_fsdp2
@on_ranks(2)
def test_manual_optimization_of_two_optimizers_resumes(tmp_path: Path, layout: str) -> None:
    from tests.lightning import training as t

    class Manual(t.Model):
        def __init__(self, seed: int) -> None:
            super().__init__(layout, seed)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = super().training_step(batch, batch_idx)
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
            for schedule in self.lr_schedulers():
                schedule.step()

        def configure_optimizers(self) -> Any:
            body = torch.optim.AdamW(self.net.body.parameters(), lr=0.01)
            head = torch.optim.SGD(self.net.head.parameters(), lr=0.01, momentum=0.9)
            schedules = [torch.optim.lr_scheduler.StepLR(one, 2) for one in (body, head)]
            return [body, head], schedules

    _resumes(tmp_path, layout, model=Manual)


@ddp_or_fsdp2
@on_ranks(2)
def test_gradient_accumulation_resumes(tmp_path: Path, layout: str) -> None:
    from tests.lightning import training as t

    _resumes(tmp_path, layout, steps=4, accumulate_grad_batches=2, plugin=t.DCPCheckpointIO(async_save=True))


@ddp_or_fsdp2
@on_ranks(2)
def test_dataloaders_that_are_made_anew_resume(tmp_path: Path, layout: str) -> None:
    """In the epochs in which they would have been without the interruption."""
    from tests.lightning import training as t

    class Reloading(t.Model):
        def train_dataloader(self) -> Any:
            return t.plain_loader(layout)

    for epochs in (1, 2):
        _resumes(
            tmp_path / str(epochs),
            layout,
            model=lambda seed: Reloading(layout, seed),
            data=dict,
            at=1,
            reload_dataloaders_every_n_epochs=epochs,
        )


@ddp_or_fsdp2
@on_ranks(2)
def test_the_state_of_a_datamodule_and_of_a_gradient_scaler_resume(tmp_path: Path, layout: str) -> None:
    from lightning.pytorch import LightningDataModule
    from lightning.pytorch.plugins import MixedPrecision

    from tests.lightning import training as t

    class Counting(LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.batches = 0

        def train_dataloader(self) -> Any:
            return t.plain_loader(layout, 2)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.batches += 1
            return batch

        def state_dict(self) -> dict[str, Any]:
            return {"batches": self.batches}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.batches = state["batches"]

    def extras(trainer: Any) -> dict[str, Any]:
        plugin = trainer.precision_plugin
        scaler = plugin.scaler.state_dict() if getattr(plugin, "scaler", None) else {}
        return {"batches": trainer.datamodule.batches, **scaler}

    def options() -> dict[str, Any]:
        if layout != "ddp":  # ModelParallel takes no scaler
            return {}
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        return {"plugins": [t.DCPCheckpointIO(), MixedPrecision("16-mixed", "cpu", scaler)]}

    def train(seed: int, path: Any, *callbacks: Any) -> tuple[Any, Any]:
        model = t.Model(layout, seed=seed)
        limits: dict[str, Any] = {"max_steps": -1, "max_epochs": 4}
        trainer = t.trainer_for(layout, callbacks, plugin=True, **limits, **options())
        trainer.fit(model, datamodule=Counting(), ckpt_path=path)
        return trainer, model

    first, model = train(0, None, t.ModelCheckpoint(tmp_path / layout, "{step}", save_top_k=-1))
    second, resumed = train(5, tmp_path / layout / "step=4.ckpt")
    assert resumed.losses == model.losses[4:]
    assert_same(extras(first), extras(second))
    assert_same(t.whole_state(first), t.whole_state(second))


@ddp_or_fsdp2
@on_ranks(2)
def test_hooks_of_the_fits_start_see_the_restored_model(tmp_path: Path, layout: str) -> None:
    """As far as they do with Lightning's own checkpoints: not where it restores sharded models after them."""
    from tests.lightning import training as t

    class Teacher(t.Model):
        def on_fit_start(self) -> None:
            self.at_start = {key: value.detach().clone() for key, value in self.net.state_dict().items()}

    trainer = t.trainer_for(layout, max_steps=2, plugin=True)
    trainer.fit(t.Model(layout), t.plain_loader(layout))
    trainer.save_checkpoint(tmp_path / layout)
    saved = {key: value.detach().clone() for key, value in trainer.lightning_module.net.state_dict().items()}
    model = Teacher(layout, seed=5)
    t.trainer_for(layout, [t.AtTrainStart()], plugin=True).fit(
        model, t.plain_loader(layout), ckpt_path=tmp_path / layout
    )
    same = all(torch.equal(model.at_start[key], saved[key]) for key in saved)
    assert same is (layout == "ddp")
