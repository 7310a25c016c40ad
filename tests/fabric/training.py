"""One small training loop over Fabric that any strategy can run on a CPU, and what can be asked of it.

Functions here run on ranks that ``tests.launch`` has made; to Fabric they look like ranks of torchrun.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader

from dcp_plugin.fabric import attach
from tests import layouts
from tests.training import WORLD_SIZE, Net, as_torchrun_starts_it, cosine, mesh_for, samples, shard, two_groups


class CPUFSDPStrategy(FSDPStrategy):
    """FSDPStrategy on a CPU: as that of ``tests/lightning/stock_training.py``."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        options: dict[str, Any] = {"sharding_strategy": self.sharding_strategy, **self._fsdp_kwargs}
        return FullyShardedDataParallel(module, device_id=self.root_device, **options)


def strategy_for(layout: str) -> Strategy:
    if layout == "single":
        return SingleDeviceStrategy("cpu")
    if layout == "ddp":
        return DDPStrategy()
    if layout.startswith("fsdp1"):
        hybrid = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": mesh_for(layout)} if "hsdp" in layout else {}
        return CPUFSDPStrategy(auto_wrap_policy={nn.Linear}, **hybrid)

    def parallelize(module: nn.Module, mesh: Any) -> nn.Module:
        return shard(module, mesh_for(layout) if layout == "hsdp" else mesh["data_parallel"])

    return ModelParallelStrategy(parallelize, data_parallel_size=WORLD_SIZE[layout], tensor_parallel_size=1)


def fabric_for(layout: str, strategy: Any = None, **options: Any) -> Fabric:
    as_torchrun_starts_it(layout)
    strategy = strategy or strategy_for(layout)
    fabric = Fabric(accelerator="cpu", devices=WORLD_SIZE[layout], strategy=strategy, **options)
    fabric.launch()
    return fabric


def attached(layout: str, **settings: Any) -> Fabric:
    fabric = fabric_for(layout)
    attach(fabric, **settings)
    return fabric


class Training:
    """A script's training: accumulation of two, a schedule, two param groups, a shuffled resumable dataloader.

    An epoch has four optimizer steps.
    """

    def __init__(self, fabric: Fabric, seed: int = 0, shrink: Callable[[nn.Module], nn.Module] | None = None) -> None:
        self.fabric = fabric
        torch.manual_seed(seed)
        net = shrink(Net()) if shrink else Net()
        loader: Any = StatefulDataLoader(samples(16 * fabric.world_size), batch_size=2, shuffle=True)
        model = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(two_groups(model))
        torch.manual_seed(seed + 100 + fabric.global_rank)
        self.loader = fabric.setup_dataloaders(loader)
        self.state: dict[str, Any] = {
            "net": model,
            "optimizer": optimizer,
            "schedule": cosine(optimizer),
            "loader": self.loader,
            "step": 0,
            "history": [],
        }
        self.losses: list[float] = []

    def run(self, until: int) -> Training:
        """Train to a number of optimizer steps."""
        state, batches = self.state, 0
        while state["step"] < until:
            for (batch,) in self.loader:
                batches += 1
                with self.fabric.no_backward_sync(state["net"], enabled=bool(batches % 2)):
                    loss = state["net"](batch).square().mean()
                    self.fabric.backward(loss / 2)
                self.losses.append(loss.item())
                if batches % 2:
                    continue
                state["optimizer"].step()
                state["optimizer"].zero_grad()
                state["schedule"].step()
                state["step"] += 1
                state["history"] = [*state["history"], state["step"]]
                if state["step"] == until:
                    return self
        return self

    def save(self, path: Path | str) -> None:
        self.fabric.save(path, self.state)

    def load(self, path: Path | str) -> dict[str, Any]:
        remainder: dict[str, Any] = self.fabric.load(path, self.state)
        return remainder

    def whole_state(self) -> dict[str, Any]:
        """Model and optimizer by key, every tensor whole. Collective."""
        return whole_state(self.state["net"], self.state["optimizer"])


def whole_state(model: Any, optimizer: Any) -> dict[str, Any]:
    """The state inside of Fabric's wrappers. Collective."""
    return layouts.whole_state(model._forward_module, optimizer.optimizer)
