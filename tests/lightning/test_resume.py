"""A resumed training is the training that was never interrupted, and any strategy resumes what any other saved.

One launch per world size makes all checkpoints, another one, of new processes, resumes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.compare import assert_same
from tests.lives import drawn, layouts_of, live, pairs_of, read, wanted, write
from tests.training import WORLD_SIZE

DRAWN = drawn("lightning", WORLD_SIZE)

LOADERS = ("plain", "stateful")


def _first_lives(root: Path, layouts: list[str]) -> None:
    """Six steps in one go without the plugin; then three steps with it, and a checkpoint of the last."""
    from tests.lightning import training as t

    for layout in layouts:
        for loader in LOADERS:
            straight, model = t.trainer_for(layout), t.Model(layout)
            straight.fit(model, t.LOADERS[loader](layout))
            write(root, f"straight-{layout}-{loader}", model.losses, t.whole_state(straight))

            first, model = t.trainer_for(layout, t.checkpoints(root, layout, loader), max_steps=3), t.Model(layout)
            first.fit(model, t.LOADERS[loader](layout))
            write(root, f"first-{layout}-{loader}", model.losses, t.whole_state(first))


def _second_lives(root: Path, layouts: list[str]) -> None:
    """The other three steps, from the checkpoint, by processes and models that start with other numbers."""
    from tests.lightning import training as t

    for layout in layouts:
        for loader in LOADERS:
            second, model = t.trainer_for(layout, plugin=True), t.Model(layout, seed=5)
            second.fit(model, t.LOADERS[loader](layout), ckpt_path=_checkpoint(root, layout, loader))
            write(root, f"second-{layout}-{loader}", model.losses, t.whole_state(second))


def _under_another_strategy(root: Path, layouts: list[str], pairs: Sequence[tuple[str, str]]) -> None:
    """Resume what other strategies saved, and look at what is there before the first step."""
    from tests.lightning import training as t

    for source, target in pairs:
        if target in layouts:
            look = t.resumed(target, _checkpoint(root, source, "plain"))
            write(root, f"{source}-to-{target}", look.progress, look.state)


def _checkpoint(root: Path, layout: str, loader: str) -> Path:
    return root / f"{layout}-{loader}" / "step=3.ckpt"


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    layouts, pairs = wanted(request, WORLD_SIZE)
    lives = _first_lives, _second_lives, partial(_under_another_strategy, pairs=pairs)
    return live(tmp_path_factory.mktemp("resume"), layouts, *lives)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("layout", layouts_of(DRAWN, WORLD_SIZE))
def test_resume_equals_no_interruption(root: Path, layout: str, loader: str) -> None:
    """ "plain": between two epochs. "stateful": in the middle of one, and over its end."""
    for rank in range(WORLD_SIZE[layout]):
        losses, state = read(root, f"straight-{layout}-{loader}", rank)
        first, _ = read(root, f"first-{layout}-{loader}", rank)
        second, resumed = read(root, f"second-{layout}-{loader}", rank)
        assert (first, second) == (losses[:3], losses[3:])
        assert_same(state, resumed)


@pytest.mark.parametrize(("source", "target"), pairs_of(DRAWN, WORLD_SIZE))
def test_any_strategy_resumes_what_any_strategy_saved(root: Path, source: str, target: str) -> None:
    _, saved = read(root, f"first-{source}-plain", 0)
    progress, loaded = read(root, f"{source}-to-{target}", 0)
    assert_same(saved, loaded)
    assert progress == {"global_step": 3, "current_epoch": 1, "schedule": 3}
