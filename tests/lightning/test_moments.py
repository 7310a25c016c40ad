"""At whatever moment of an epoch a checkpoint is made, the training goes on as if nothing had been.

The hooks here draw random numbers, too, as augmentations and noise schedules do.
"""

from __future__ import annotations

import itertools
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compare import assert_same
from tests.launch import on_ranks
from tests.training import Stream

MOMENTS: dict[str, tuple[int, dict[str, Any]]] = {
    "the end of an epoch": (3, {"every_n_epochs": 1}),
    "the end of its validation": (3, {"every_n_epochs": 1, "save_on_train_epoch_end": False}),
    "its last batch, before the validation": (3, {"every_n_train_steps": 3}),
    "its middle": (4, {"every_n_train_steps": 4}),
}


def _loader(t: Any, kind: str) -> Any:
    generator = torch.Generator().manual_seed(2)
    return {
        "plain": lambda: t.plain_loader("single"),
        "plain with a generator": lambda: t.DataLoader(t.data(6), batch_size=2, shuffle=True, generator=generator),
        "stateful": lambda: t.stateful_loader("single", 3),
        "stateful without length": lambda: t.StatefulDataLoader(
            Stream(6, lambda number: [torch.randn(6)]), batch_size=2
        ),
    }[kind]()


@pytest.mark.one_of(count=2)
@pytest.mark.parametrize("validated", [False, True], ids=["", "validated"])
@pytest.mark.parametrize("limit", [{"max_epochs": 3, "max_steps": -1}, {"max_steps": 9}], ids=["epochs", "steps"])
@pytest.mark.parametrize("kind", ["plain", "plain with a generator", "stateful", "stateful without length"])
@on_ranks(1)
def test_a_training_goes_on_as_if_nothing_had_been(
    tmp_path: Path, kind: str, limit: dict[str, int], validated: bool
) -> None:
    wrong = []
    for number, moment in enumerate(MOMENTS):
        if moment == "the end of its validation" and not (validated and kind.startswith("stateful")):
            continue
        if moment == "its middle" and kind != "stateful":
            continue  # a plain loader cannot, and Lightning reads one batch ahead of a stream: both are warned about
        step, when = MOMENTS[moment]
        straight = _train(tmp_path / str(number), kind, when, limit, validated, seed=0)
        path = tmp_path / str(number) / f"step={step}.ckpt"
        resumed = _train(tmp_path / "resumed", kind, when, limit, validated, seed=9, ckpt_path=str(path))
        if straight["losses"][step:] != resumed["losses"] or straight["loops"] != resumed["loops"]:
            wrong.append(moment)
    assert not wrong


def _train(
    root: Path, kind: str, when: dict[str, Any], limit: dict[str, int], validated: bool, seed: int, **fit: Any
) -> dict[str, Any]:
    """Nine steps, or from a checkpoint to the ninth: the losses, and where the loops ended."""
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    from tests.lightning import training as t

    class Noise(Callback):
        def on_train_start(self, *args: Any) -> None:
            torch.rand(3)

        def on_train_epoch_start(self, *args: Any) -> None:
            torch.rand(2), random.random()

        def on_train_batch_start(self, *args: Any) -> None:
            random.random()

    class Model(t.Model):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("mean", loss, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            self.log("loss", self.net(batch[0]).square().mean())

        def configure_optimizers(self) -> Any:
            made = super().configure_optimizers()
            if when != {"every_n_epochs": 1}:  # Lightning steps no schedule on a metric of an epoch that was cut short
                return made
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(made["optimizer"], patience=0, threshold=10.0)
            return [made["optimizer"]], [made["lr_scheduler"], {"scheduler": plateau, "monitor": "mean"}]

    model = Model(seed=seed)
    random.seed(seed)
    validation = t.DataLoader(t.data(4), batch_size=2) if validated else None
    trainer = t.trainer_for("single", [Noise(), ModelCheckpoint(root, "{step}", save_top_k=-1, **when)], **limit)
    trainer.fit(model, _loader(t, kind), validation, **fit)
    loops = trainer.fit_loop.state_dict()
    del loops["state_dict"]  # the dataloader's
    return {"losses": model.losses, "loops": loops}


def _next_number(given: torch.Tensor, position: int) -> list[torch.Tensor]:
    """Each number once, whichever process reads it, and whatever its position."""
    given.add_(1)
    return [torch.full((6,), float(given))]


@pytest.mark.one_of
@pytest.mark.parametrize("moment", ["the end of an epoch", "its last batch, before the validation"])
@on_ranks(1)
def test_a_resume_at_the_end_of_an_epoch_takes_nothing_from_a_stream_that_it_does_not_train_on(
    tmp_path: Path, moment: str
) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    from tests.lightning import training as t

    class Model(t.Model):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            trained_on.extend(batch[0][:, 0].tolist())
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            pass

    for kind, workers in itertools.product((DataLoader, t.StatefulDataLoader), (0, 1)):
        given = torch.zeros((), dtype=torch.int64).share_memory_()
        feed, trained_on, root = Stream(6, partial(_next_number, given)), [], tmp_path / f"{kind.__name__}-{workers}"
        for epochs, path in ((1, None), (3, root / "step=3.ckpt")):
            saving = ModelCheckpoint(root, "{step}", save_top_k=-1, **MOMENTS[moment][1])
            trainer = t.trainer_for("single", [saving], max_epochs=epochs, max_steps=-1)
            loader = kind(feed, batch_size=2, num_workers=workers)
            trainer.fit(Model(), loader, t.DataLoader(t.data(2)), ckpt_path=path)
        assert trained_on == [float(number) for number in range(1, 19)], (kind, workers)
        assert given == 18


@on_ranks(1)
def test_a_checkpoint_of_the_start_of_an_epoch_does_not_skip_that_epoch(tmp_path: Path) -> None:
    """With Lightning alone it does."""
    from lightning.pytorch.callbacks import Callback

    from tests.lightning import training as t

    class Save(Callback):
        def on_train_epoch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(path)

    for stock in (True, False):
        for kind in ("plain", "stateful"):
            straight, resumed, path = t.Model(), t.Model(seed=9), tmp_path / f"{kind}-{stock}"
            for model, callbacks, source in ((straight, [Save()], None), (resumed, [], path)):
                trainer = t.trainer_for("single", callbacks, plugin=not stock, max_epochs=3, max_steps=-1)
                trainer.fit(model, t.LOADERS[kind]("single", 3), ckpt_path=source)
            assert (resumed.losses == straight.losses[3:]) is not stock, (stock, kind)
            assert (len(resumed.losses) == 6) is not stock


@on_ranks(1)
def test_callbacks_that_change_from_epoch_to_epoch_go_on_in_the_middle_of_one(tmp_path: Path) -> None:
    """Three epochs of six batches; the accumulation makes 6, 3 and 2 steps of them."""
    from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, StochasticWeightAveraging

    from tests.lightning import training as t

    class Model(t.Model):
        def configure_optimizers(self) -> Any:
            made = super().configure_optimizers()
            made["lr_scheduler"]["interval"] = "epoch"  # the only one that averaging replaces correctly
            return made

    def train(name: str, seed: int, path: Path | None) -> tuple[list[float], dict[str, Any]]:
        model = Model(seed=seed)
        saving = ModelCheckpoint(tmp_path / name, "{step}", save_top_k=-1, every_n_train_steps=1)
        trainer = t.trainer_for("single", [changing[name](), saving], max_epochs=3, max_steps=-1)
        trainer.fit(model, t.stateful_loader("single", 6), ckpt_path=path)
        return model.losses, t.whole_state(trainer)

    changing = {
        "accumulation": lambda: GradientAccumulationScheduler({0: 1, 1: 2, 2: 3}),
        "averaging": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2),
    }
    moments = {
        "accumulation": ((5, 5), (7, 8), (8, 10), (10, 15)),
        "averaging": ((5, 5), (7, 7), (11, 11), (14, 14)),
    }
    for name, of_callback in moments.items():
        losses, state = train(name, 0, None)
        for step, batches in of_callback:
            resumed, its_state = train(name, 9, tmp_path / name / f"step={step}.ckpt")
            assert resumed == losses[batches:], (name, step)
            assert_same(state, its_state)
