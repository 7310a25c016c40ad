"""Bugs of hooks of Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from tests.campaigns.parts import Average, loss
from tests.campaigns.with_lightning import Module, fit


def weights_made_anew(out: Path) -> None:
    """``configure_optimizers`` comes after the load of the weights, and initialises a layer again.

    https://github.com/huggingface/lerobot/issues/3459, https://github.com/huggingface/picotron/issues/32
    """
    fit(_Adapted(), out)


class _Adapted(Module):
    def configure_optimizers(self) -> Any:
        self.net[3].reset_parameters()  # the bug
        return super().configure_optimizers()


def patience_reset(out: Path) -> None:
    """A callback restores its count of epochs without progress, and sets it to zero when the training starts.

    https://github.com/Lightning-AI/pytorch-lightning/issues/1463
    """
    fit(Module(), out, _Patience())


class _Patience(pl.Callback):
    def __init__(self) -> None:
        self.waited = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.waited = 0  # the bug

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.waited += 1

    def state_dict(self) -> dict[str, int]:
        return {"waited": self.waited}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.waited = state_dict["waited"]


def average_overwritten(out: Path) -> None:
    """A callback restores its moving average, and ``on_fit_start`` copies the weights over it.

    https://github.com/m2lines/Samudra/pull/313, https://github.com/atomistic-machine-learning/schnetpack/pull/785
    """
    fit(Module(), out, _Averages())


class _Averages(pl.Callback):
    def __init__(self) -> None:
        self.average: Any = None
        self.loaded: dict[str, torch.Tensor] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.average = Average(pl_module)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.average = Average(pl_module)  # the bug

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.average.follow(pl_module)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.average.state_dict()

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        self.average.load_state_dict(state_dict)


def noise_seeded_again(out: Path) -> None:
    """A generator of noise is no global random stream, so no checkpoint has it.

    https://github.com/vllm-project/speculators/issues/1027, https://github.com/ai2cm/ace/issues/690
    """
    fit(_Noisy(), out)


class _Noisy(Module):
    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(0)  # the bug: not in on_save_checkpoint

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return loss(self.net, batch[0] + torch.randn(4, generator=self.noise))


def rate_stepped_at_start(out: Path) -> None:
    """A scheduler whose state is restored is stepped once more when the training starts.

    https://github.com/THUDM/slime/pull/1547
    """
    fit(_Stepped(), out)


class _Stepped(Module):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def on_train_start(self) -> None:
        if self.global_step:
            self.lr_schedulers().step()  # the bug
