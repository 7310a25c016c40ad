"""A resumed training is the training that was never interrupted, and any strategy loads what any other saved.

One launch per world size makes all checkpoints, another one, of new processes, loads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import launch
from tests.compare import assert_same
from tests.fabric import WORLD_SIZE

MOMENTS = {"middle": 3, "after_first_epoch": 5}
"""Optimizer steps before the checkpoint: an epoch has four."""


def _first_lives(root: Path, layouts: list[str]) -> None:
    """Six steps in one go without this package; then some of them with it, and a checkpoint."""
    from dcp_plugin.fabric import attach
    from tests.fabric import training as t

    for layout in layouts:
        straight = t.Training(t.fabric_for(layout))
        straight.run(6)
        _write(root, f"straight-{layout}", straight.losses, straight.whole_state())
        for moment, steps in MOMENTS.items():
            fabric = t.fabric_for(layout)
            with attach(fabric, async_save=moment == "middle"):
                first = t.Training(fabric)
                first.run(steps)
                first.save(root / f"{layout}-{moment}")
                _write(root, f"first-{layout}-{moment}", first.losses, first.whole_state())


def _second_lives(root: Path, layouts: list[str]) -> None:
    """The other steps, by processes and models that start with other numbers."""
    from dcp_plugin.fabric import attach
    from tests.fabric import training as t

    for layout in layouts:
        for moment, steps in MOMENTS.items():
            fabric = t.fabric_for(layout)
            attach(fabric)
            second = t.Training(fabric, seed=5)
            assert second.load(root / f"{layout}-{moment}") == {}
            assert second.state["history"] == list(range(1, steps + 1))
            second.run(6)
            _write(root, f"second-{layout}-{moment}", second.losses, second.whole_state())


def _under_another_strategy(root: Path, layouts: list[str]) -> None:
    from dcp_plugin.fabric import attach
    from tests.fabric import training as t

    for layout in layouts:
        for source in WORLD_SIZE:
            fabric = t.fabric_for(layout)
            attach(fabric)
            training = t.Training(fabric, seed=5)
            del training.state["loader"]
            fabric.load(root / f"{source}-middle", training.state)
            schedule = training.state["schedule"].last_epoch
            _write(root, f"{source}-to-{layout}", [training.state["step"], schedule], training.whole_state())


def _write(root: Path, name: str, numbers: list[Any], state: dict[str, Any]) -> None:
    rank = torch.distributed.get_rank()
    torch.save({"numbers": numbers, "state": state}, root / f"{name}-{rank}.pt")


def _read(root: Path, name: str, rank: int = 0) -> tuple[list[Any], dict[str, Any]]:
    written = torch.load(root / f"{name}-{rank}.pt", weights_only=True)
    return written["numbers"], written["state"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("resume")
    layouts_of = {size: [name for name in WORLD_SIZE if WORLD_SIZE[name] == size] for size in (1, 2, 4)}
    for work in (_first_lives, _second_lives, _under_another_strategy):
        for world_size, layouts in layouts_of.items():
            launch.run(work, world_size, root, layouts)
    return root


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("layout", WORLD_SIZE)
def test_resume_equals_no_interruption(root: Path, layout: str, moment: str) -> None:
    """With dropout, a schedule, accumulation and shuffling; in the first epoch and over its end, and in the second."""
    for rank in range(WORLD_SIZE[layout]):
        losses, state = _read(root, f"straight-{layout}", rank)
        first, _ = _read(root, f"first-{layout}-{moment}", rank)
        second, resumed = _read(root, f"second-{layout}-{moment}", rank)
        assert first + second == losses
        assert_same(state, resumed)


@pytest.mark.parametrize("target", WORLD_SIZE)
@pytest.mark.parametrize("source", WORLD_SIZE)
def test_any_strategy_loads_what_any_strategy_saved(root: Path, source: str, target: str) -> None:
    _, saved = _read(root, f"first-{source}-middle")
    numbers, loaded = _read(root, f"{source}-to-{target}")
    assert_same(saved, loaded)
    assert numbers == [3, 3]
