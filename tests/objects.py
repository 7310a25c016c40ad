"""Objects of users, reduced to what a checkpoint sees of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Holder:
    """A ``Stateful`` that is its state, and nothing else."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class WithExtra(nn.Module):
    """A module with a weight, and with an extra state of any kind."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class PickledAs:
    """An object that is pickled as a call, or as whatever else ``__reduce__`` may return."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def attack(proof: Path) -> PickledAs:
    """Return an object of which unpickling makes a directory."""
    return PickledAs(os.mkdir, (str(proof),))
