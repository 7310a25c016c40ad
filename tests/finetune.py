"""A frozen backbone with nine tenths of the bytes and a head that trains, in every layout; and what a save wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from dcp_plugin import events
from tests import layouts
from tests.layouts import wrap

WIDTH = 256


class Tuned(nn.Module):
    """8 frozen layers and a trained one. SGD without momentum: what the optimizer adds does not count."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.head = nn.Linear(WIDTH, WIDTH // 2)
        self.backbone.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))  # type: ignore[no-any-return]


def build(layout: str = "plain", seed: int = 0, layers: int = 8) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = wrap(layout, Tuned(layers), "backbone")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.SGD(trained, lr=0.01)


train = partial(layouts.train, inputs=(4, WIDTH))


@contextmanager
def finished_saves() -> Iterator[list[events.SaveFinished]]:
    """What this rank's saves say when they end, in turn."""
    finished: list[events.SaveFinished] = []

    def note(event: events.Event) -> None:
        if isinstance(event, events.SaveFinished):
            finished.append(event)

    unsubscribe = events.subscribe(note)
    try:
        yield finished
    finally:
        unsubscribe()
