"""On another number of processes: the same state, the same moment of the schedule, each sample once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_plugin.core.paths import Where, as_path
from tests import launch
from tests.compare import assert_same
from tests.messages import logged
from tests.object_server import Bucket

SAMPLES = 48
STEPS = 2  # optimizer steps of the interrupted epoch: 2 accumulated batches of 2 samples each, on every process


def _save(root: Path, layout: str, name: str, options: dict[str, Any], place: Where | None = None) -> None:
    from tests.accelerate import training as t

    run = t.start(layout, samples=SAMPLES, **options)
    run.train(STEPS, at={STEPS: lambda: run.accelerator.save_state(str((place or root) / name))})
    torch.save((run.samples, _moment(run), run.whole_state()), root / f"{name}-{run.accelerator.process_index}.pt")


def _moment(run: Any) -> float:
    """The optimizer steps that the schedule has seen."""
    stride = 1 if run.accelerator.split_batches else run.accelerator.num_processes
    return float(run.scheduler.scheduler.last_epoch / stride)


def _load(
    root: Path, layout: str, name: str, saved_on: int, options: dict[str, Any], place: Where | None = None
) -> dict[str, Any]:
    from tests.accelerate import training as t

    said = logged()
    run = t.start(layout, seed=7, samples=SAMPLES, **options)
    run.accelerator.load_state(str((place or root) / name))
    saved = [torch.load(root / f"{name}-{rank}.pt", weights_only=True) for rank in range(saved_on)]
    assert_same(run.whole_state(), saved[0][2])
    assert _moment(run) == saved[0][1]
    assert run.scheduler.get_last_lr() == [run.optimizer.param_groups[0]["lr"]]
    drawn = torch.rand(2).tolist()
    for batch in run.loader:
        run.samples += batch[1].tolist()
    before = [sample for samples, _, _ in saved for sample in samples]
    return {"before": before, "after": run.samples, "said": said, "drawn": drawn}


@pytest.mark.one_of
@pytest.mark.parametrize("data", [{}, {"use_seedable_sampler": True}, {"split_batches": True}])
@pytest.mark.parametrize(("before", "after"), [("ddp", "single"), ("single", "ddp"), ("ddp", "own_hsdp")])
def test_each_sample_of_the_epoch_is_seen_exactly_once(
    tmp_path: Path, before: str, after: str, data: dict[str, Any]
) -> None:
    from tests.accelerate import WORLD_SIZE

    options = {"data": data, "batch": 4 if data.get("split_batches") else 2}
    launch.run(_save, WORLD_SIZE[before], tmp_path, before, "ck", options)
    ranks = launch.run(_load, WORLD_SIZE[after], tmp_path, after, "ck", WORLD_SIZE[before], options)
    seen = ranks[0]["before"] + [sample for rank in ranks for sample in rank["after"]]
    consumed = STEPS * 2 * (4 if data.get("split_batches") else 2 * WORLD_SIZE[before])
    total = 4 if data.get("split_batches") else 2 * WORLD_SIZE[after]
    assert consumed % total == 0, "this test is about the exact case"
    assert sorted(seen) == list(range(SAMPLES))


def test_what_two_ranks_saved_to_a_bucket_one_resumes(tmp_path: Path, bucket: Bucket) -> None:
    place = as_path(bucket.url)
    launch.run(_save, 2, tmp_path, "fsdp2", "ck", {}, place)
    (found,) = launch.run(_load, 1, tmp_path, "single", "ck", 2, {}, place)
    assert sorted(found["before"] + found["after"]) == list(range(SAMPLES))


def test_what_does_not_divide_is_repeated_and_said(tmp_path: Path) -> None:
    """3 batches of 2 on one process; two take 4 at once."""
    launch.run(_save, 1, tmp_path, "single", "ck", {"accumulate": 1, "batch": 3})
    ranks = launch.run(_load, 2, tmp_path, "ddp", "ck", 1, {"batch": 4})
    (said,) = [message for message in ranks[0]["said"] if "repeated" in message]
    assert "had consumed 6 samples" in said and "multiple of the 8" in said and "6 are repeated" in said
    assert sorted(sample for rank in ranks for sample in rank["after"]) == list(range(SAMPLES))


def test_new_ranks_get_streams_of_their_own_the_same_each_time_and_it_is_said(tmp_path: Path) -> None:
    launch.run(_save, 1, tmp_path, "single", "ck", {})
    twice = [launch.run(_load, 2, tmp_path, "ddp", "ck", 1, {}) for _ in range(2)]
    drawn = [[rank["drawn"] for rank in ranks] for ranks in twice]
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]
    assert any("random states for 1 of 2 ranks" in message for message in twice[0][0]["said"])
    assert not twice[0][1]["said"], "once, not on every rank"
    assert any("position 4 instead of 2, which is the same moment" in message for message in twice[0][0]["said"])


@pytest.mark.parametrize("kind", ["onecycle", "cosine", "sequential", "plateau"])
def test_a_schedule_goes_on_at_the_same_moment(kind: str) -> None:
    """Compared with one that ran on the new number of processes from the start."""
    from accelerate.scheduler import AcceleratedScheduler

    from dcp_plugin.accelerate.extra_state import RestoringSchedule

    def make(processes: int) -> tuple[Any, Any]:
        torch.manual_seed(0)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5, momentum=0.9)
        lr = torch.optim.lr_scheduler
        horizon = 40 * processes
        inner = {
            "onecycle": lambda: lr.OneCycleLR(optimizer, 0.5, total_steps=horizon),
            "cosine": lambda: lr.CosineAnnealingLR(optimizer, horizon),
            "sequential": lambda: lr.SequentialLR(
                optimizer,
                [lr.LinearLR(optimizer, 0.1, total_iters=5 * processes), lr.CosineAnnealingLR(optimizer, horizon)],
                [5 * processes],
            ),
            "plateau": lambda: lr.ReduceLROnPlateau(optimizer),
        }[kind]()
        return AcceleratedScheduler(inner, optimizer), optimizer

    def run(scheduler: Any, steps: int) -> None:
        for _ in range(steps):
            scheduler.scheduler.optimizer.step()
            scheduler.scheduler.step(*([1.0] if kind == "plateau" else []))

    saved, _ = make(4)
    run(saved, 12 * 4)
    fresh, optimizer = make(2)
    restoring = RestoringSchedule(fresh, 2)
    said = restoring.finish({"state": saved.state_dict(), "stride": 4})
    if kind == "plateau":
        assert "cannot be converted" in said
        return
    assert "position 24 instead of 48" in said
    reference, reference_optimizer = make(2)
    run(reference, 12 * 2)
    for _ in range(3):
        assert optimizer.param_groups[0]["lr"] == reference_optimizer.param_groups[0]["lr"]
        assert optimizer.param_groups[0]["momentum"] == reference_optimizer.param_groups[0]["momentum"]
        run(fresh, 1)
        run(reference, 1)
