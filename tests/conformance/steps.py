"""One step of a training, and what else happens to a model between two of them."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 6


def inputs(number: int) -> torch.Tensor:
    """The same on every rank."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    torch.manual_seed(number)  # for dropout
    return model(inputs(number)).abs().float().square().mean()


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None, number: int = 0) -> float:
    """The loss before the step."""

    def closure() -> torch.Tensor:
        model.zero_grad()
        loss = loss_of(model, number)
        if loss.requires_grad:
            loss.backward()
        return loss.detach()

    return float(closure() if optimizer is None else optimizer.step(closure))
