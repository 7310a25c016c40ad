"""One small training that any strategy can run on a CPU with the plugin, and what can be asked of it.

Functions here run on ranks that ``tests.launch`` has made; to Lightning they look like ranks of torchrun.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from dcp_plugin.core.paths import Where
from dcp_plugin.core.state import inside_ddp
from dcp_plugin.lightning import DCPCheckpointIO
from tests import layouts
from tests.lightning import stock_training
from tests.lightning.stock_training import strategy_for as strategy_for
from tests.training import WORLD_SIZE, Net, shard, two_groups
from tests.training import samples as data


class Model(stock_training.Trained):
    """Dropout (random numbers), a schedule, two param groups, uneven sizes, a buffer."""

    def __init__(self, layout: str = "single", seed: int = 0) -> None:
        super().__init__(layout, seed)
        self.net = nn.Sequential(OrderedDict(Net().named_children()))

    def shard(self, mesh: Any) -> None:
        shard(self.net, mesh)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return two_groups(self.net)


class FineTune(Model):
    """With its body frozen or not, and perhaps an adapter. Only what trains is in the optimizer."""

    def __init__(
        self, layout: str = "single", seed: int = 0, *, frozen: bool = True, adapter: bool = False, meta: bool = False
    ) -> None:
        super().__init__(layout, seed)
        if adapter:
            self.net.adapter = nn.Linear(1, 1)
        self.net.body.requires_grad_(not frozen)
        if meta:
            self.net = self.net.to("meta")

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("validated", self.net(batch[0]).square().mean(), sync_dist=True)


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
    if not stock and (plugin or any(isinstance(callback, ModelCheckpoint) for callback in callbacks)):
        options = {"plugins": [plugin if isinstance(plugin, DCPCheckpointIO) else DCPCheckpointIO()], **options}
    return stock_training.trainer_for(layout, callbacks, **{"max_steps": 6, **options})


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


LOADERS = {"plain": plain_loader, "stateful": stateful_loader}


def whole_state(trainer: pl.Trainer) -> dict[str, Any]:
    """Model and optimizers by key, every tensor whole. Collective."""
    return layouts.whole_state(inside_ddp(trainer.strategy.model), *trainer.optimizers)


class AtTrainStart(Callback):
    """Looks at what a training starts with, in its sanity check too, and ends it unless it is to go on."""

    def __init__(self, *, stop: bool = True) -> None:
        self.state: dict[str, Any] = {}
        self.at_sanity_check: dict[str, Any] = {}
        self.progress: dict[str, int] = {}
        self._stop = stop

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.at_sanity_check = whole_state(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.state = whole_state(trainer)
        schedule = trainer.lr_scheduler_configs[0].scheduler.last_epoch
        epoch = trainer.current_epoch
        self.progress = {"global_step": trainer.global_step, "current_epoch": epoch, "schedule": schedule}
        trainer.should_stop = self._stop


def saved(layout: str, path: Where, model: Any = None, **options: Any) -> dict[str, Any]:
    """The whole state after three steps, which is in the checkpoint at ``path``."""
    trainer = trainer_for(layout, **{"plugin": True, "max_steps": 3, **options})
    trainer.fit(model or Model(layout), plain_loader(layout))
    trainer.save_checkpoint(path)
    return whole_state(trainer)


def resumed(layout: str, path: Any, model: Any = None, *callbacks: Callback, **options: Any) -> AtTrainStart:
    """What a training that resumes from ``path`` starts with. Its state is empty if the training did not start."""
    look = AtTrainStart()
    trainer = trainer_for(layout, [*callbacks, look], **{"plugin": True, **options})
    trainer.fit(model or Model(layout, seed=5), plain_loader(layout), ckpt_path=path)
    return look
