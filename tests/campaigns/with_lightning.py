"""What the cases of Lightning share: a module, and a Trainer that resumes by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from dcp_plugin import resolve_resume
from dcp_plugin.lightning import DCPCheckpointIO
from tests.campaigns.parts import adam, loss, net, samples
from tests.training import QUIET


class Module(pl.LightningModule):
    """A network with dropout, and Adam."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = net(dropout)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return loss(self.net, batch[0])

    def configure_optimizers(self) -> Any:
        return adam(self)


def fit(module: pl.LightningModule, out: Path, *callbacks: pl.Callback, **options: Any) -> None:
    """Train for four epochs of two steps, with a checkpoint after each, from the newest one."""
    pl.seed_everything(0, verbose=False)
    checkpoint = ModelCheckpoint(out, filename="{step}", save_top_k=-1)
    trainer = pl.Trainer(
        **QUIET,
        max_epochs=4,
        default_root_dir=out,
        callbacks=[*callbacks, checkpoint],
        plugins=[DCPCheckpointIO()],
        **{"num_sanity_val_steps": 0, "log_every_n_steps": 1, **options},
    )
    trainer.fit(module, DataLoader(samples(), batch_size=6, shuffle=True), ckpt_path=resolve_resume("auto", out))
