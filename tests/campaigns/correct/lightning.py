"""Correct modules and callbacks of Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging
from torch.utils.data import DataLoader

from tests.campaigns.parts import adam, loss, net, samples
from tests.campaigns.with_lightning import Module, fit


def gan_by_hand(out: Path) -> None:
    """A GAN with two optimizers and manual optimization."""
    fit(_Gan(), out)


class _Gan(Module):
    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.automatic_optimization = False
        self.generator = torch.nn.Linear(2, 4)
        torch.nn.init.eye_(self.generator.weight)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        fake = self.generator(torch.randn(6, 2))
        for optimizer, error in ((first, -self.net(fake).mean()), (second, self.net(batch[0]).square().mean())):
            optimizer.zero_grad()
            self.manual_backward(error)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return adam(self.generator), adam(self.net)


def rate_set_at_start(out: Path) -> None:
    """``on_train_start`` sets the learning rate that the run has, at each start."""
    fit(_Rated(), out)


class _Rated(Module):
    def on_train_start(self) -> None:
        self.optimizers().param_groups[0]["lr"] = 0.01


def average_in_validation(out: Path) -> None:
    """Lightning's own moving average, which is swapped into the module for each validation."""
    fit(_Validated(dropout=0.5), out, EMAWeightAveraging(decay=0.9), num_sanity_val_steps=2)


class _Validated(Module):
    def val_dataloader(self) -> Any:
        return DataLoader(samples(), batch_size=6)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("error", loss(self.net, batch[0]))


def stopped_early(out: Path) -> None:
    """A schedule and a callback that follow a metric."""
    fit(_Plateau(), out, EarlyStopping("error", patience=3))


class _Plateau(_Validated):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "error"}}


def module_sized_by_data(out: Path) -> None:
    """``setup`` makes a layer, and ``on_load_checkpoint`` adds a key that old checkpoints lack."""
    fit(_Sized(), out)


class _Sized(Module):
    def setup(self, stage: str) -> None:
        self.net = net()
        self.register_buffer("seen", torch.zeros(()))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"].setdefault("seen", torch.zeros(()))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen += 1
        return super().training_step(batch, batch_idx)
