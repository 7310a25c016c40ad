"""A resumed training is the training that was never interrupted, and any strategy loads what any other saved.

One launch per world size makes all checkpoints, another one, of new processes, loads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.compare import assert_same
from tests.lives import drawn, layouts_of, live, pairs_of, read, wanted, write
from tests.training import WORLD_SIZE

DRAWN = drawn("fabric", WORLD_SIZE)

MOMENTS = {"middle": 3, "after_first_epoch": 5}
"""Optimizer steps before the checkpoint: an epoch has four."""


def _first_lives(root: Path, layouts: list[str]) -> None:
    """Six steps in one go without this package; then some of them with it, and a checkpoint."""
    from dcp_plugin.fabric import attach
    from tests.fabric import training as t

    for layout in layouts:
        straight = t.Training(t.fabric_for(layout))
        straight.run(6)
        write(root, f"straight-{layout}", straight.losses, straight.whole_state())
        for moment, steps in MOMENTS.items():
            fabric = t.fabric_for(layout)
            with attach(fabric, async_save=moment == "middle"):
                first = t.Training(fabric)
                first.run(steps)
                first.save(root / f"{layout}-{moment}")
                write(root, f"first-{layout}-{moment}", first.losses, first.whole_state())


def _second_lives(root: Path, layouts: list[str]) -> None:
    """The other steps, by processes and models that start with other numbers."""
    from tests.fabric import training as t

    for layout in layouts:
        for moment, steps in MOMENTS.items():
            fabric = t.attached(layout)
            second = t.Training(fabric, seed=5)
            assert second.load(root / f"{layout}-{moment}") == {}
            assert second.state["history"] == list(range(1, steps + 1))
            second.run(6)
            write(root, f"second-{layout}-{moment}", second.losses, second.whole_state())


def _under_another_strategy(root: Path, layouts: list[str], pairs: Sequence[tuple[str, str]]) -> None:
    from tests.fabric import training as t

    for source, target in pairs:
        if target in layouts:
            fabric = t.attached(target)
            training = t.Training(fabric, seed=5)
            del training.state["loader"]
            fabric.load(root / f"{source}-middle", training.state)
            schedule = training.state["schedule"].last_epoch
            write(root, f"{source}-to-{target}", [training.state["step"], schedule], training.whole_state())


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    layouts, pairs = wanted(request, WORLD_SIZE)
    lives = _first_lives, _second_lives, partial(_under_another_strategy, pairs=pairs)
    return live(tmp_path_factory.mktemp("resume"), layouts, *lives)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("layout", layouts_of(DRAWN, WORLD_SIZE))
def test_resume_equals_no_interruption(root: Path, layout: str, moment: str) -> None:
    """With dropout, a schedule, accumulation and shuffling; in the first epoch and over its end, and in the second."""
    for rank in range(WORLD_SIZE[layout]):
        losses, state = read(root, f"straight-{layout}", rank)
        first, _ = read(root, f"first-{layout}-{moment}", rank)
        second, resumed = read(root, f"second-{layout}-{moment}", rank)
        assert first + second == losses
        assert_same(state, resumed)


@pytest.mark.parametrize(("source", "target"), pairs_of(DRAWN, WORLD_SIZE))
def test_any_strategy_loads_what_any_strategy_saved(root: Path, source: str, target: str) -> None:
    _, saved = read(root, f"first-{source}-middle")
    numbers, loaded = read(root, f"{source}-to-{target}")
    assert_same(saved, loaded)
    assert numbers == [3, 3]
