"""One small training that any strategy can run on a CPU, and what can be asked of it.

Functions here run on ranks that ``tests.launch`` has made; to Lightning they look like ranks of torchrun.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from dcp_plugin.lightning import DCPCheckpointIO
from dcp_plugin.paths import Where
from dcp_plugin.state import inside_ddp
from tests import layouts
from tests.lightning import WORLD_SIZE
from tests.lightning.cpu_fsdp import CPUFSDPStrategy
from tests.small_training import QUIET, Net, two_groups
from tests.small_training import samples as data


class Model(pl.LightningModule):
    """Dropout (random numbers), a schedule, two param groups, uneven sizes, a buffer."""

    def __init__(self, layout: str = "single", seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layout = layout
        self.net = nn.Sequential(OrderedDict(Net().named_children()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """FSDP2, where Lightning wants it; called again when the trainer is used again."""
        if self.layout == "fsdp2":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        elif self.layout == "hsdp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        else:
            return
        fully_shard(self.net.body, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen += 1
        loss = self.net(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = two_groups(self.net)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def strategy_for(layout: str) -> Strategy:
    if layout == "single":
        return SingleDeviceStrategy("cpu")
    if layout == "ddp":
        return DDPStrategy()
    if layout == "fsdp1":
        return CPUFSDPStrategy(state_dict_type="sharded", auto_wrap_policy={nn.Linear})
    if layout == "fsdp1_hsdp":
        hybrid: Any = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}
        return CPUFSDPStrategy(state_dict_type="sharded", auto_wrap_policy={nn.Linear}, **hybrid)
    return ModelParallelStrategy(data_parallel_size=WORLD_SIZE[layout], tensor_parallel_size=1)


def trainer_for(
    layout: str,
    callbacks: Sequence[Callback] = (),
    *,
    plugin: bool | DCPCheckpointIO | None = False,
    stock: bool = False,
    **options: Any,
) -> pl.Trainer:
    """A quiet trainer of six steps. With a ``ModelCheckpoint`` among the callbacks it has the plugin, unless it is to
    be ``stock``: Lightning alone."""
    if layout != "single":
        os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning|torchdata")
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    io = plugin if isinstance(plugin, DCPCheckpointIO) else DCPCheckpointIO() if plugin or saves else None
    io = None if stock else io
    options.setdefault("strategy", strategy_for(layout))
    return pl.Trainer(
        devices=WORLD_SIZE[layout],
        callbacks=list(callbacks),
        enable_checkpointing=saves,
        **{**QUIET, "max_steps": 6, "plugins": [io] if io else None, **options},
    )


def checkpoints(root: Where, layout: str, loader: str) -> list[Callback]:
    """At the end of each epoch, or in the middle of the first."""
    when: Any = {"every_n_epochs": 1} if loader == "plain" else {"every_n_train_steps": 3}
    return [ModelCheckpoint(root / f"{layout}-{loader}", filename="{step}", save_top_k=-1, **when)]


def plain_loader(layout: str, steps: int = 3) -> DataLoader[Any]:
    """An epoch has ``steps`` steps."""
    return DataLoader(data(steps * 2 * WORLD_SIZE[layout]), batch_size=2, shuffle=True)


def stateful_loader(layout: str, steps: int = 4) -> StatefulDataLoader[Any]:
    """An epoch has ``steps`` steps."""
    return StatefulDataLoader(data(steps * 2 * WORLD_SIZE[layout]), batch_size=2, shuffle=True)


def whole_state(trainer: pl.Trainer) -> dict[str, Any]:
    """Model and optimizers by key, every tensor whole. Collective."""
    return layouts.whole_state(inside_ddp(trainer.strategy.model), *trainer.optimizers)


class AtTrainStart(Callback):
    """Looks at what a resumed training starts with, and ends it."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.progress: dict[str, int] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.state = whole_state(trainer)
        schedule = trainer.lr_scheduler_configs[0].scheduler.last_epoch
        self.progress = {
            "global_step": trainer.global_step,
            "current_epoch": trainer.current_epoch,
            "schedule": schedule,
        }
        trainer.should_stop = True


LOADERS = {"plain": plain_loader, "stateful": stateful_loader}
