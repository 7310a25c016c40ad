"""What the processes of one training leave for those that go on with it, and for the test that compares them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests import launch, sampling


def write(root: Path, name: str, numbers: Sequence[Any], state: dict[str, Any]) -> None:
    rank = torch.distributed.get_rank()
    torch.save({"numbers": numbers, "state": state}, root / f"{name}-{rank}.pt")


def read(root: Path, name: str, rank: int = 0) -> tuple[list[Any], dict[str, Any]]:
    written = torch.load(root / f"{name}-{rank}.pt", weights_only=True)
    return written["numbers"], written["state"]


def crossed(layouts: Mapping[str, int]) -> dict[str, list[str]]:
    """For each layout two others whose checkpoints it loads in ``make test``. The commit draws how far they are from it
    in the list, so that any two layouts meet within some commits."""
    names = list(layouts)
    distance = 1 + sampling.number("crossed", len(names) - 2)
    return {name: [(names * 2)[at + distance + more] for more in (0, 1)] for at, name in enumerate(names)}


def live(root: Path, world_sizes: Mapping[str, int], *lives: Callable[[Path, list[str]], None]) -> Path:
    """One launch per life and world size, of all its layouts."""
    for life in lives:
        for world_size in sorted(set(world_sizes.values())):
            launch.run(life, world_size, root, [name for name, size in world_sizes.items() if size == world_size])
    return root
