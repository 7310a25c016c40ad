"""The parts that most cases share: a small network, data by step, one update, and the loop that saves.

Nothing here imports a framework.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dcp_plugin as dcp

STEPS, EVERY = 6, 2
"""Steps of a training, and steps from one checkpoint to the next."""


def net(dropout: float = 0.0) -> nn.Module:
    """Return a network with the same weights each time, four inputs and one output."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, 1))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def inputs(step: int) -> torch.Tensor:
    """Return the batch of a step."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def samples(count: int = 12) -> TensorDataset:
    return TensorDataset(torch.randn(count, 4, generator=torch.Generator().manual_seed(1)))


def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the error of a model that is to learn the sum of its inputs."""
    return (model(x) - x.sum(dim=1, keepdim=True)).square().mean()


def update(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss(model, x).backward()
    optimizer.step()


def steps(state: dict[str, Any], out: Path, *, every: int = EVERY, until: int = STEPS) -> Iterator[int]:
    """Yield the number of each step that is left, and save after each ``every`` steps.

    Before the first step of a resume the state is compared with the checkpoint, as the documentation advises.
    """
    if state["step"]:
        dcp.verify_resume(state)
    while state["step"] < until:
        yield state["step"]
        state["step"] += 1
        if state["step"] % every == 0:
            dcp.save(state, out / f"step-{state['step']}", step=state["step"])


class Average(nn.Module):
    """Exponential moving average of a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, parameter in model.named_parameters():
            self.register_buffer(name.replace(".", "_"), parameter.detach().clone())

    @torch.no_grad()
    def follow(self, model: nn.Module) -> None:
        for mean, parameter in zip(self.buffers(), model.parameters(), strict=True):
            mean.lerp_(parameter, 0.1)
