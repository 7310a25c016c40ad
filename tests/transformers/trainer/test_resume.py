"""A resumed training is the training that was never interrupted; on other ranks, what was trained is."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import dcp_plugin as dcp
from dcp_plugin.core.paths import Where, as_path
from tests import launch, sampling
from tests.compare import assert_same
from tests.launch import on_ranks
from tests.lives import layouts_of
from tests.messages import warned
from tests.object_server import Bucket
from tests.places import copy_folder
from tests.transformers.trainer import WORLD_SIZE, Ran

DRAWN = list(WORLD_SIZE)[sampling.number("transformers", len(WORLD_SIZE))]
"""The layout that ``make test`` trains in."""

OTHER_LAYOUT = {"single": "fsdp2", "ddp": "hsdp", "fsdp1": "fsdp2", "fsdp2": "single", "hsdp": "ddp"}

CASES: dict[str, dict[str, Any]] = {
    "middle of an epoch": {"save_steps": 3},
    "async, end of an epoch": {"save_steps": 4, "async_save": True},
    "no accumulation": {"save_steps": 3, "gradient_accumulation_steps": 1},
}


def _cases_of(layout: str) -> list[str]:
    """One case is enough to see that a layout is no exception."""
    return list(CASES)[: 1 if layout in ("fsdp1", "hsdp") else None]


def _options(case: str) -> dict[str, Any]:
    options = dict(CASES[case])
    return {"config": dcp.CheckpointConfig(async_save=options.pop("async_save", False)), **options}


def _train(root: Path, layout: str, resume: bool = False) -> dict[str, Ran]:
    """Each case of a layout, in one go or from its checkpoint."""
    from tests.transformers.trainer import training as t

    results = {}
    for case in _cases_of(layout):
        options = _options(case)
        path = root / case / f"checkpoint-{options['save_steps']}" if resume else None
        if resume:
            options |= {"save_strategy": "no", "net": t.model(seed=9)}
        trainer = t.trainer(root / case, layout, **options)
        # Now, since the filters of t.trainer would hide it.
        warnings.filterwarnings("error", message=".*loaded exactly, but|.*draws others than without")
        results[case] = t.run(trainer, path)
    return results


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Straight trainings by layout, made when first asked for: their folder, and the results of all ranks."""
    made: dict[str, tuple[Path, list[Any]]] = {}

    def get(layout: str) -> tuple[Path, list[Any]]:
        if layout not in made:
            root = tmp_path_factory.mktemp(layout)
            made[layout] = root, launch.run(_train, WORLD_SIZE[layout], root, layout)
        return made[layout]

    return get


@pytest.mark.parametrize("layout", layouts_of([DRAWN], WORLD_SIZE))
def test_resume_equals_no_interruption(trained: Any, layout: str) -> None:
    root, straight = trained(layout)

    resumed = launch.run(_train, WORLD_SIZE[layout], root, layout, True)

    for rank, (whole, rest) in enumerate(zip(straight, resumed, strict=True)):
        for case in _cases_of(layout):
            one, other = whole[case], rest[case]
            assert_same(one.state, other.state)
            assert len(other.numbers) == 6 - CASES[case]["save_steps"]
            assert other.losses.items() <= one.losses.items(), (rank, case)  # logged on rank 0
            assert other.numbers.items() <= one.numbers.items(), (rank, case)
    if layout == "ddp":
        one, other = (straight[rank]["no accumulation"].numbers for rank in (0, 1))
        assert one != other, "each rank draws its own random numbers, or this test shows little"


def test_a_copy_in_a_bucket_is_resumed_by_its_url(trained: Any, bucket: Bucket, tmp_path: Path) -> None:
    path = trained(DRAWN)[0] / "middle of an epoch" / "checkpoint-3"
    url = as_path(bucket.url) / "run" / path.name
    copy_folder(path, url)
    expected, _, _ = launch.run(_begin, WORLD_SIZE[DRAWN], path, DRAWN)[0]
    for state, step, _ in launch.run(_begin, WORLD_SIZE[DRAWN], url, DRAWN, tmp_path):
        assert step == 3
        assert_same(state, expected)


@on_ranks(1)
def test_what_transformers_alone_has_saved_is_refused_by_its_url(bucket: Bucket, tmp_path: Path) -> None:
    from tests.transformers.trainer import training as t

    t.trainer(tmp_path, kind=t.OnCPU, max_steps=3).train()
    url = as_path(bucket.url) / "checkpoint-3"
    copy_folder(tmp_path / "checkpoint-3", url)
    before = set(tmp_path.iterdir())
    with pytest.raises(ValueError, match=f"{url} is a URL.*Copy it to a directory"):
        t.begin(t.trainer(tmp_path), url)
    with pytest.raises(dcp.CheckpointNotFound, match=f"{url.parent / 'nothing'}"):
        t.begin(t.trainer(tmp_path), url.parent / "nothing")
    assert set(tmp_path.iterdir()) == before


def _begin(path: Where, layout: str, root: Path | None = None, **options: Any) -> Any:
    from tests.transformers.trainer import training as t

    to = root or Path(path).parent
    trainer = t.trainer(to / f"to-{layout}", layout, net=t.model(seed=9), **options)
    with warned(str(path)) as said:
        seen = t.begin(trainer, path)
    return seen.state, seen.step, said


@pytest.mark.parametrize("source", layouts_of([DRAWN], OTHER_LAYOUT))
def test_resume_in_another_layout_restores_every_byte(trained: Any, source: str) -> None:
    target = OTHER_LAYOUT[source]
    path = trained(source)[0] / "middle of an epoch" / "checkpoint-3"
    expected, _, nothing = launch.run(_begin, WORLD_SIZE[source], path, source)[0]
    assert not nothing

    begun = launch.run(_begin, WORLD_SIZE[target], path, target)

    for state, step, _ in begun:
        assert step == 3
        assert_same(state, expected)
    said = [message for _, _, messages in begun for message in messages]
    if WORLD_SIZE[source] == WORLD_SIZE[target]:
        assert not said
    else:
        assert len(said) == 1
        assert "model and optimizer are loaded exactly, but" in said[0]
        assert "samples per step" in said[0]
