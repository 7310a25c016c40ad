"""What the processes of one training leave for those that go on with it, and for the test that compares them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import launch, sampling


def write(root: Path, name: str, numbers: Sequence[Any], state: dict[str, Any]) -> None:
    rank = torch.distributed.get_rank()
    torch.save({"numbers": numbers, "state": state}, root / f"{name}-{rank}.pt")


def read(root: Path, name: str, rank: int = 0) -> tuple[list[Any], dict[str, Any]]:
    written = torch.load(root / f"{name}-{rank}.pt", weights_only=True)
    return written["numbers"], written["state"]


def drawn(name: str, layouts: Mapping[str, int]) -> list[str]:
    """The two layouts that ``make test`` trains with: each loads what the other one has saved. The commit draws them,
    so that any two layouts meet within some commits."""
    names = list(layouts)
    first, distance = sampling.number(name, len(names)), 1 + sampling.number(f"after {name}", len(names) - 1)
    return [names[first], names[(first + distance) % len(names)]]


def layouts_of(drawn: Sequence[str], layouts: Iterable[str]) -> list[Any]:
    """Each layout, as a value of ``parametrize``: those that are not drawn are long."""
    return [layout if layout in drawn else pytest.param(layout, marks=pytest.mark.long) for layout in layouts]


def pairs_of(drawn: Sequence[str], world_sizes: Mapping[str, int]) -> list[Any]:
    """Each pair of layouts, as values of ``parametrize``: those but the two pairs of what is drawn are long."""
    among = [*itertools.permutations(drawn)]
    every = itertools.product(world_sizes, repeat=2)
    return [pair if pair in among else pytest.param(*pair, marks=pytest.mark.long) for pair in every]


def wanted(request: pytest.FixtureRequest, world_sizes: Mapping[str, int]) -> tuple[dict[str, int], list[Any]]:
    """The layouts that the cases to run of this file look at, with their world sizes; and the pairs of layouts."""
    cases = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    pairs = [(case["source"], case["target"]) for case in cases if "source" in case]
    named = {layout for pair in pairs for layout in pair} | {case["layout"] for case in cases if "layout" in case}
    return {layout: size for layout, size in world_sizes.items() if layout in named}, pairs


def live(root: Path, world_sizes: Mapping[str, int], *lives: Callable[[Path, list[str]], None]) -> Path:
    """One launch per life and world size, of all its layouts."""
    for life in lives:
        for world_size in sorted(set(world_sizes.values())):
            launch.run(life, world_size, root, [name for name, size in world_sizes.items() if size == world_size])
    return root
