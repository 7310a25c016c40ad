"""A training without this package, as a rank of its own processes: nothing here imports it, or lets Lightning do so.

Run as a module, on each rank, it resumes from checkpoints with stock Lightning and writes the losses as JSON:
``python -m tests.lightning.stock_training LAYOUT CHECKPOINT LOSSES LAYOUT CHECKPOINT LOSSES …``.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from tests.lightning import WORLD_SIZE
from tests.lightning.cpu_fsdp import CPUFSDPStrategy
from tests.small_training import QUIET, samples

STEPS_PER_EPOCH = 3


class StockModel(pl.LightningModule):
    """Nothing random, since stock Lightning saves no random state. Two groups, a schedule, a frozen layer, a buffer.

    Layouts are those of this package, and ``fsdp2_full``: FSDP2 that saves one file."""

    def __init__(self, layout: str = "single", seed: int = 0, width: int = 7) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(seed)
        self.layout = layout
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, width), nn.Linear(width, 1))
        self.net[0].requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.layout in ("fsdp2", "fsdp2_full"):
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        elif self.layout == "hsdp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        else:
            return
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen += 1
        loss = self.net(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.net[1].parameters()},
            {"params": self.net[2].parameters(), "weight_decay": 0.0, "lr": 0.02},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def strategy_for(layout: str) -> Strategy:
    if layout == "single":
        return SingleDeviceStrategy("cpu")
    if layout == "ddp":
        return DDPStrategy()
    if layout == "fsdp1":
        # Frozen and trained parameters in one flat one need the original ones.
        return CPUFSDPStrategy(state_dict_type="sharded", auto_wrap_policy={nn.Linear}, use_orig_params=True)
    whole = layout.endswith("_full")
    size = WORLD_SIZE[layout.removesuffix("_full")]
    return ModelParallelStrategy(size, 1, save_distributed_checkpoint=not whole)


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
    if layout != "single":
        os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")
    warnings.filterwarnings("ignore", module="lightning|torch")
    ranks = WORLD_SIZE[layout.removesuffix("_full")]
    trainer = pl.Trainer(
        devices=ranks,
        strategy=strategy_for(layout),
        max_epochs=epochs,  # with max_steps, stock Lightning resumes this with a batch too many
        callbacks=list(callbacks),
        plugins=plugins,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        **QUIET,
    )
    model = kind(layout, seed)
    trainer.fit(model, DataLoader(samples(STEPS_PER_EPOCH * 2 * ranks), batch_size=2), ckpt_path=ckpt_path, **more)
    return trainer, model


def resume(layout: str, checkpoint: Path, losses: Path) -> None:
    """Resume, and write the losses of rank 0."""
    _, model = fit(layout, 2, seed=5, ckpt_path=checkpoint)
    if dist.get_rank() == 0:
        losses.write_text(json.dumps(model.losses))


def _without_this_package() -> None:
    """As if it were not installed: it cannot be imported, and its entry points are not there."""
    from lightning.pytorch.trainer.connectors import callback_connector

    assert not any(name.startswith("dcp_plugin") for name in sys.modules)
    sys.modules["dcp_plugin"] = None  # type: ignore[assignment]
    callback_connector._load_external_callbacks = lambda group: []


def done_by(losses: Path, rank: int) -> Path:
    """The file that says that a rank has done all of its work, whatever becomes of the process then."""
    return losses.with_suffix(f".done-by-{rank}")


def main(resume: Callable[[str, Path, Path], None]) -> None:
    """Resume with each layout and checkpoint of the command line, and write to the third path."""
    _without_this_package()
    torch.set_num_threads(1)
    words = sys.argv[1:]
    dist.init_process_group("gloo")
    for layout, checkpoint, out in zip(words[::3], words[1::3], words[2::3], strict=True):
        resume(layout, Path(checkpoint), Path(out))
    done_by(Path(words[-1]), dist.get_rank()).touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(resume)
