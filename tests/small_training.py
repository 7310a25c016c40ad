"""The model, the optimizer and the data that the trainings of all frameworks have in common.

Nothing here imports this package or a framework.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

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


def two_groups(net: Any) -> torch.optim.Optimizer:
    """AdamW over a body, and over a head that has no weight decay."""
    groups = [{"params": net.body.parameters()}, {"params": net.head.parameters(), "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01)


def samples(count: int) -> TensorDataset:
    """Inputs of a :class:`Net`."""
    return TensorDataset(torch.randn(count, 6, generator=torch.Generator().manual_seed(1)))
