"""A training of Lightning alone: nothing here imports this package. ``tests/lightning/stock_processes.py`` runs it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import strategies
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

from tests.training import QUIET, WORLD_SIZE, as_torchrun_starts_it, cosine, mesh_for, samples

STEPS_PER_EPOCH = 3


class Trained(pl.LightningModule):
    """A module in any layout, which notes its losses. Its subclasses have ``net``, and an optimizer for it."""

    net: Any

    def __init__(self, layout: str = "single", seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layout = layout
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """FSDP2, where Lightning wants it; called again when the trainer is used again."""
        if self.layout in ("fsdp2", "hsdp", "fsdp2_full"):
            self.shard(mesh_for(self.layout))

    def shard(self, mesh: Any) -> None:
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
        self.seen += 1
        loss = self.net(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def make_optimizer(self) -> torch.optim.Optimizer:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine(optimizer), "interval": "step"}}


class StockModel(Trained):
    """Nothing random, since stock Lightning saves no random state. Two groups, a schedule, a frozen layer, a buffer.

    Layouts are those of this package, and ``fsdp2_full``: FSDP2 that saves one file."""

    def __init__(self, layout: str = "single", seed: int = 0, width: int = 7) -> None:
        super().__init__(layout, seed)
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, width), nn.Linear(width, 1))
        self.net[0].requires_grad_(False)

    def make_optimizer(self) -> torch.optim.Optimizer:
        head = {"params": self.net[2].parameters(), "weight_decay": 0.0, "lr": 0.02}
        return torch.optim.AdamW([{"params": self.net[1].parameters()}, head], lr=0.01)


class CPUFSDPStrategy(strategies.FSDPStrategy):
    """FSDPStrategy on a CPU, which Lightning refuses, for no reason that concerns checkpoints. A subclass passes its
    check for a GPU; and FSDP is given the device itself, of which Lightning passes the index, which a CPU has not."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        options: dict[str, Any] = {"sharding_strategy": self.sharding_strategy, **self.kwargs}
        return FullyShardedDataParallel(model, device_id=self.root_device, **options)


def strategy_for(layout: str) -> strategies.Strategy:
    if layout == "single":
        return strategies.SingleDeviceStrategy("cpu")
    if layout == "ddp":
        return strategies.DDPStrategy()
    if layout.startswith("fsdp1"):
        hybrid = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": mesh_for(layout)} if "hsdp" in layout else {}
        return CPUFSDPStrategy(state_dict_type="sharded", auto_wrap_policy={nn.Linear}, **hybrid)
    return strategies.ModelParallelStrategy(ranks_of(layout), 1, save_distributed_checkpoint=layout != "fsdp2_full")


def ranks_of(layout: str) -> int:
    return WORLD_SIZE[layout.removesuffix("_full")]


def trainer_for(layout: str, callbacks: Sequence[Callback] = (), **options: Any) -> pl.Trainer:
    """A quiet trainer of Lightning alone, which saves where it has a ``ModelCheckpoint``."""
    as_torchrun_starts_it(layout)
    options.setdefault("strategy", strategy_for(layout))
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    return pl.Trainer(
        devices=ranks_of(layout), callbacks=list(callbacks), enable_checkpointing=saves, **{**QUIET, **options}
    )


def fit(
    layout: str,
    epochs: int,
    seed: int = 0,
    ckpt_path: Any = None,
    callbacks: Any = (),
    plugins: Any = None,
    kind: Callable[[str, int], Any] = StockModel,
    **more: Any,
) -> tuple[pl.Trainer, Any]:
    """Train a model of a kind; the trainer, and the model."""
    warnings.filterwarnings("ignore", module="lightning|torch")
    # With max_steps, stock Lightning resumes this with a batch too many.
    trainer, model = trainer_for(layout, callbacks, max_epochs=epochs, plugins=plugins), kind(layout, seed)
    data = samples(STEPS_PER_EPOCH * 2 * ranks_of(layout))
    trainer.fit(model, DataLoader(data, batch_size=2), ckpt_path=ckpt_path, **more)
    return trainer, model


def first_checkpoint(folder: Path) -> ModelCheckpoint:
    """A callback that saves the first epoch as ``folder/first.ckpt``."""
    return ModelCheckpoint(folder, filename="first", every_n_epochs=1)


def resume(layout: str, checkpoint: Path) -> list[float]:
    """The losses of the second epoch."""
    losses: list[float] = fit(layout, 2, seed=5, ckpt_path=checkpoint)[1].losses
    return losses
