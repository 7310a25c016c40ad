"""A resumed training is the training that was never interrupted; on other hardware it has the same state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dcp_plugin.core.paths import Where
from tests import launch
from tests.accelerate import WORLD_SIZE
from tests.compare import assert_same

SAVED_AT = {"in the middle of an epoch": 3, "at the end of an epoch": 6}


@pytest.mark.one_of
@pytest.mark.parametrize(
    ("layout", "place"),
    [
        *((layout, "disk") for layout in WORLD_SIZE),
        ("ddp", "s3"),
        *(pytest.param(layout, "s3", marks=pytest.mark.long) for layout in WORLD_SIZE if layout != "ddp"),
    ],
    indirect=["place"],
)
def test_resume_equals_no_interruption(tmp_path: Path, place: Where, layout: str) -> None:
    """24 samples per rank, batches of 2, accumulation of 2: an epoch has 6 optimizer steps."""
    launch.run(_straight, WORLD_SIZE[layout], tmp_path, place, layout)
    launch.run(_resumed, WORLD_SIZE[layout], tmp_path, place, layout)


def _straight(root: Path, place: Where, layout: str) -> None:
    from tests.accelerate import training as t

    run = t.start(layout, samples=24 * WORLD_SIZE[layout])
    saves = {step: lambda step=step: run.accelerator.save_state(str(place / str(step))) for step in SAVED_AT.values()}
    run.train(9, at=saves)
    torch.save((run.losses, run.samples, run.whole_state()), root / f"{run.accelerator.process_index}.pt")


def _resumed(root: Path, place: Where, layout: str) -> None:
    from tests.accelerate import training as t

    for when, step in SAVED_AT.items():
        run = t.start(layout, seed=5, samples=24 * WORLD_SIZE[layout])
        run.accelerator.load_state(str(place / str(step)))
        run.train(9 - step)
        losses, samples, state = torch.load(root / f"{run.accelerator.process_index}.pt", weights_only=True)
        assert run.samples == samples[4 * step :], when
        assert run.losses == losses[2 * step :], when
        assert_same(run.whole_state(), state)
