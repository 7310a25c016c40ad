"""The parts of a training that are the same in every framework: layouts, model, optimizer, data and environment.

``tests/lightning``, ``tests/fabric``, ``tests/accelerate`` and ``tests/transformers/trainer`` have a ``training.py``
each, which sets up and runs the loop of its framework. Nothing here imports this package or a framework.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset, TensorDataset

WORLD_SIZE = {"single": 1, "ddp": 2, "fsdp1": 2, "fsdp2": 2, "hsdp": 4, "fsdp1_hsdp": 4}
"""Strategies of Lightning and Fabric, and on how many ranks they train. ``hsdp`` is FSDP2 on a 2x2 mesh."""

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Options of a Trainer of Lightning that computes on the CPU, and shows nothing."""


class Net(nn.Module):
    """Dropout (random numbers), uneven sizes, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.3), nn.LayerNorm(7))
        self.head = nn.Linear(7, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(self.body(x))  # type: ignore[no-any-return]


def two_groups(net: Any, lr: float = 0.01) -> torch.optim.Optimizer:
    """AdamW over a body, and over a head that has no weight decay."""
    groups = [{"params": net.body.parameters()}, {"params": net.head.parameters(), "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr)


def cosine(optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def samples(count: int) -> TensorDataset:
    """Inputs of a :class:`Net`."""
    return TensorDataset(torch.randn(count, 6, generator=torch.Generator().manual_seed(1)))


class Stream(IterableDataset[Any]):
    """Samples ``sample(1)`` to ``sample(length)`` in each epoch, from a position that the dataset keeps itself."""

    def __init__(self, length: int, sample: Callable[[int], Any]) -> None:
        self._length, self._sample, self._position = length, sample, 0

    def __iter__(self) -> Iterator[Any]:
        while self._position < self._length:
            self._position += 1
            yield self._sample(self._position)
        self._position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["position"]


def shard(net: Any, mesh: DeviceMesh) -> Any:
    """FSDP2 over a model, whose body is a unit of its own."""
    fully_shard(net.body, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def mesh_for(layout: str) -> DeviceMesh:
    """All ranks; for a hybrid layout, two replicas on two ranks each."""
    if layout.endswith("hsdp"):
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (dist.get_world_size(),))


def as_torchrun_starts_it(layout: str) -> None:
    """Let Lightning and Fabric take this process for a rank of torchrun, and say nothing about it."""
    if layout != "single":
        os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning|torchdata")


def as_one_process() -> None:
    """Let Accelerate take this process for one that torchrun has not started."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
