"""Tests of the Trainer's integration. transformers is imported by the ranks only, and by their server."""

from typing import Any, NamedTuple

WORLD_SIZE = {"single": 1, "ddp": 2, "fsdp1": 2, "fsdp2": 2, "hsdp": 4}
"""Ways to train, and on how many ranks. ``hsdp`` is FSDP2 on a 2x2 mesh."""


class Ran(NamedTuple):
    """What a training computed on a rank: the state at its end, the loss of every step, and random numbers."""

    state: dict[str, Any]
    losses: dict[int, float]
    numbers: dict[int, tuple[float, ...]]
