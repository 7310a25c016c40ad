"""How often to save: the formula, what it is fed with, and that all ranks hear the same."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_plugin as dcp
from dcp_plugin import CheckpointCorrupt, CheckpointMismatch, SaveInterval, events
from dcp_plugin.format.summary import Summary, with_hash
from dcp_plugin.media import WORKSPACE
from dcp_plugin.runs import figures
from dcp_plugin.saving.cheapest_interval import SaveCost, cheapest_seconds, propose
from dcp_plugin.saving.save_timing import PRIOR_SECONDS, Failures, SaveTiming
from dcp_plugin.storage.published import read_summary
from tests import launch
from tests.launch import on_ranks
from tests.places import names_in
from tests.slowness import Gate, slow_writes

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0


# The formula


@pytest.mark.parametrize(("mtbf", "published"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_the_interval_is_the_one_that_daly_has_published(mtbf: float, published: float) -> None:
    """Figures 3 to 5 of the paper: dumps of 5 minutes."""
    assert cheapest_seconds(5 * MINUTE, mtbf) / MINUTE == pytest.approx(published, rel=0.01)


def test_a_save_that_costs_little_has_youngs_interval() -> None:
    assert cheapest_seconds(0.5, DAY) == pytest.approx((2 * 0.5 * DAY) ** 0.5, rel=0.01)
    assert cheapest_seconds(0.0, DAY) == 0.0
    assert cheapest_seconds(5 * DAY, DAY) == DAY, "whoever needs longer for a save than failures leave"


@pytest.mark.parametrize("cost", [0.1, 5.0, 300.0])
def test_any_other_interval_loses_more(cost: float) -> None:
    best = propose(SaveCost(cost), DAY)
    others = [replace(best, seconds=best.seconds * factor) for factor in (0.5, 0.8, 1.25, 2)]
    assert best.lost_share < min(other.lost_share for other in others)


def test_a_job_counts_as_failed_once_a_day_until_it_is_known_better() -> None:
    assert Failures().mtbf_seconds == PRIOR_SECONDS == DAY
    assert Failures(9 * DAY, 0).mtbf_seconds == 10 * DAY
    assert Failures(9 * DAY, 9).mtbf_seconds == DAY
    assert Failures(99 * DAY, 999).mtbf_seconds == pytest.approx(0.1 * DAY)


def test_who_fails_more_often_or_saves_cheaper_saves_more_often() -> None:
    once = propose(SaveCost(4.0), DAY, step_seconds=0.5)
    assert propose(SaveCost(4.0), Failures(DAY, 20).mtbf_seconds, 0.5).seconds < once.seconds
    assert propose(SaveCost(1.0), DAY, 0.5).seconds < once.seconds
    assert propose(SaveCost(3.0, slowed_seconds=1.0), DAY, 0.5) == once, "a wait or slower steps: it is the same"
    assert once.steps == round(once.seconds / 0.5)
    assert propose(SaveCost(4.0), DAY).steps is None


def test_saves_in_the_background_do_not_wait_for_each_other() -> None:
    assert propose(SaveCost(0.001, flight_seconds=300.0), DAY).seconds >= 299


def test_a_copy_to_the_durable_tier_is_not_overtaken_by_the_next() -> None:
    alone = propose(SaveCost(0.5), DAY)
    assert alone.durable_every == 1
    tiers = propose(SaveCost(0.5), DAY, drain_seconds=HOUR)
    assert tiers.seconds == alone.seconds
    assert tiers.durable_every * tiers.seconds >= HOUR > (tiers.durable_every - 1) * tiers.seconds
    assert propose(SaveCost(5.0), DAY, drain_seconds=0.01).durable_every == 1


# What it is fed with


class Measured(SaveTiming):
    """A timing whose clock, and whose save in flight, are a test's."""

    def __init__(self, in_flight: bool = False) -> None:
        self.now, self.in_flight = 0.0, in_flight
        super().__init__(dcp.CheckpointConfig(), lambda: self.in_flight, lambda: self.now)
        self.step_ended()

    def step(self, seconds: float, in_flight: bool = False) -> None:
        self.now, self.in_flight = self.now + seconds, in_flight
        self.step_ended()

    def save(self, blocked: float, flight: float) -> None:
        self.published(events.SaveFinished(Path("step"), None, 0, flight, blocked))


def test_what_a_save_costs_is_what_it_blocks_and_what_steps_take_longer() -> None:
    timing = Measured()
    for _ in range(5):  # ten steps of a second between two saves; the four in flight take a quarter longer
        timing.now += 2.0
        timing.paused(2.0, saving=True)
        timing.save(2.0, 2.0 + 4 * 1.25)
        for step in range(10):
            timing.step(1.25 if step < 4 else 1.0, in_flight=step < 3)
    assert timing.step_seconds == pytest.approx(1.0)
    assert timing.cost is not None
    assert astuple(timing.cost) == pytest.approx((2.0, 4 * 0.25, 7.0))
    assert timing.cost.seconds == pytest.approx(3.0)


def test_nothing_is_known_before_the_first_save_and_the_first_is_not_believed_for_long() -> None:
    timing = Measured()
    assert timing.cost is None and timing.step_seconds is None and timing.proposal is None
    timing.save(30.0, 40.0)
    assert timing.cost == SaveCost(30.0, 0.0, 40.0)
    timing.save(1.0, 2.0)
    assert timing.cost == SaveCost(1.0, 0.0, 2.0)


def test_waiting_for_an_earlier_save_is_a_cost_of_the_next_one() -> None:
    timing = Measured(in_flight=True)
    timing.paused(5.0, saving=False)
    timing.save(1.0, 1.0)
    timing.step(6.0)
    assert timing.cost == SaveCost(6.0, 0.0, 1.0)
    assert timing.step_seconds == pytest.approx(1.0), "what the wait took is no part of the step"


def test_a_checkpoint_counts_the_restarts_of_its_run_and_no_file_does(tmp_path: Path) -> None:
    for restarts in range(3):
        checkpointer = dcp.Checkpointer(keep_last=2, save_interval="auto")
        clock = Clock(checkpointer)
        dcp.resume_or_init({"step": 0}, tmp_path, checkpointer=checkpointer)
        for step in range(1, 5):
            checkpointer.due(step)
            checkpointer.save({"step": step}, tmp_path / f"step-{restarts}-{step}", step)
            clock.after(10.0)
        checkpointer.close()
        newest = read_summary(tmp_path / f"step-{restarts}-4")
        assert newest is not None and newest.training == {"seconds": 30.0 * (restarts + 1), "failures": restarts}
    assert set(os.listdir(tmp_path / WORKSPACE)) == {figures.NAME}
    assert not [line for line in figures.read(tmp_path) if line["event"] != "saved"]


def test_a_load_from_another_folder_or_during_the_training_is_no_restart(tmp_path: Path) -> None:
    for folder, resumes in (("a", ""), ("b", "a"), ("c", "c")):
        checkpointer, state = dcp.Checkpointer(save_interval="auto"), {"step": 1}
        if resumes == "a":
            checkpointer.load(state, tmp_path / "a" / "step-1")
        checkpointer.due(1)
        checkpointer.save(state, tmp_path / folder / "step-1", 1)
        if resumes == "c":
            checkpointer.load(state, tmp_path / "c" / "step-1")
            checkpointer.due(2)
            checkpointer.save(state, tmp_path / "c" / "step-1", 2)
        checkpointer.close()
        summary = read_summary(tmp_path / folder / "step-1")
        assert summary is not None and summary.training["failures"] == 0


@pytest.mark.parametrize(
    "training", [[1], {"seconds": 1}, {"seconds": "1", "failures": 0}, {"seconds": 1e99, "failures": 0}]
)
def test_a_summary_with_other_things_than_counts_is_damaged(training: Any) -> None:
    content = json.loads(Summary(1, 1.0, 1, 0, 0, 0, "").encode())
    del content["sha256"]
    with pytest.raises(CheckpointCorrupt, match="damaged"):
        Summary.decode(with_hash(content | {"training": training}), "dcp_plugin.json")


def test_who_does_not_ask_has_nothing_beside_the_checkpoints(tmp_path: Path) -> None:
    checkpointer = dcp.Checkpointer()
    checkpointer.save({"step": 1}, tmp_path / "step-1")
    proposed = checkpointer.proposed_interval()
    assert proposed is not None and proposed.mtbf_seconds == DAY and proposed.steps is None
    assert names_in(tmp_path) == ["step-1"]


# All ranks hear the same


class Clock:
    """Seconds that pass when a test says so; on rank 1 nothing like those of rank 0."""

    def __init__(self, checkpointer: dcp.Checkpointer) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.now, self._pace = 1000.0 * rank, 1.0 + rank
        checkpointer.save_timing.clock = lambda: self.now

    def after(self, seconds: float) -> None:
        self.now += seconds * self._pace


def _steps_that_were_due(checkpointer: dcp.Checkpointer, path: Path, seconds: Callable[[int], float]) -> list[int]:
    clock, due = Clock(checkpointer), []
    for step in range(1, 201):
        clock.after(seconds(step))
        if checkpointer.due(step):
            due.append(step)
            checkpointer.save({"step": step}, path / f"step-{step}", step)
            checkpointer.wait()
        assert checkpointer.due(step) == (step in due[-1:]), "asked again for the same step"
    return due


@pytest.mark.parametrize("async_save", [False, True])
@on_ranks(2)
def test_all_ranks_save_at_the_same_steps_by_the_clock_of_rank_0(tmp_path: Path, async_save: bool) -> None:
    checkpointer = dcp.Checkpointer(save_interval=50.0, async_save=async_save)
    due = _steps_that_were_due(checkpointer, tmp_path, lambda step: 1.0)
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, due)
    assert everybody[0] == everybody[1]
    assert all(abs(later - before - 50) <= 1 for before, later in itertools.pairwise([1, *due])), due
    checkpointer.close()


def test_few_steps_meet_and_slower_steps_are_noticed(tmp_path: Path) -> None:
    checkpointer = dcp.Checkpointer(save_interval=50.0)
    meetings = 0
    decide = checkpointer.save_timing._decide

    def counted() -> tuple[bool, int]:
        nonlocal meetings
        meetings += 1
        return decide()

    checkpointer.save_timing._decide = counted  # type: ignore[method-assign]
    due = _steps_that_were_due(checkpointer, tmp_path, lambda step: 1.0 if step <= 110 else 2.0)
    gaps = [later - before for before, later in itertools.pairwise(due)]
    assert gaps[0] == pytest.approx(50, abs=1)
    assert gaps[-1] == pytest.approx(25, abs=1)
    assert max(gaps[1:]) * 1.0 <= 50
    assert meetings <= 10 * (len(due) + 1)
    checkpointer.close()


@on_ranks(2)
def test_auto_saves_after_a_minute_and_then_by_what_that_has_cost(tmp_path: Path) -> None:
    told: list[events.IntervalProposed] = []
    unsubscribe = events.subscribe(
        lambda event: told.append(event) if isinstance(event, events.IntervalProposed) else None
    )
    checkpointer = dcp.Checkpointer(save_interval="auto", events=str(tmp_path / "events.jsonl"))
    clock = Clock(checkpointer)
    first = next(step for step in range(1, 100) if not clock.after(1.0) and checkpointer.due(step))
    assert first == pytest.approx(61, abs=1)
    assert checkpointer.proposed_interval() is None
    checkpointer.save({"step": first}, tmp_path / "step", first)
    proposed = checkpointer.proposed_interval()
    assert isinstance(proposed, SaveInterval) and 0 < proposed.seconds < DAY
    if dist.get_rank() == 0:
        assert [one.seconds for one in told] == [proposed.seconds]
        assert proposed.mtbf_seconds == pytest.approx(DAY + 60, abs=1.5)
        lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        assert [line["event"] for line in lines] == ["saved", "interval"]
        assert lines[1]["seconds"] == proposed.seconds
    else:
        assert told == []
    again = next(step for step in itertools.count(first + 1) if not clock.after(1.0) and checkpointer.due(step))
    wanted: list[Any] = [proposed.seconds]
    dist.broadcast_object_list(wanted, src=0)
    assert again - first == pytest.approx(wanted[0], rel=0.02, abs=1.5)
    checkpointer.close()
    unsubscribe()


def test_no_save_is_due_while_one_is_in_flight(tmp_path: Path) -> None:
    checkpointer, gate = dcp.Checkpointer(async_save=True, save_interval=5.0), Gate()
    clock = Clock(checkpointer)
    with slow_writes(gate):
        gate.close()
        assert not checkpointer.due(0)
        handle = checkpointer.save({"weights": torch.ones(3)}, tmp_path / "step-1")
        clock.after(100.0)
        assert not checkpointer.due(1)
        gate.open()
        handle.wait()
        clock.after(1.0)
        assert [checkpointer.due(step) for step in range(2, 9)].count(True) == 1
    checkpointer.close()


def test_steps_that_are_slower_while_a_save_is_in_flight_are_part_of_its_cost(tmp_path: Path) -> None:
    checkpointer, gate = dcp.Checkpointer(async_save=True), Gate()
    clock = Clock(checkpointer)

    def steps(numbers: range, seconds: float) -> None:
        for step in numbers:
            clock.after(seconds)
            assert not checkpointer.due(step), "without an interval none is ever due"

    steps(range(10), 1.0)
    with slow_writes(gate):
        gate.close()
        handle = checkpointer.save({"weights": torch.ones(3)}, tmp_path / "step-10")
        steps(range(10, 20), 3.0)
        gate.open()
        handle.wait()
    steps(range(20, 30), 1.0)
    proposed = checkpointer.proposed_interval()
    assert proposed is not None
    assert proposed.cost_seconds == pytest.approx(10 * 2.0, abs=3.0)
    assert proposed.steps == pytest.approx(proposed.seconds, rel=0.01)
    checkpointer.close()
    assert checkpointer.proposed_interval() == proposed, "what is known stays known"


@on_ranks(2)
def test_ranks_at_different_steps_are_told(tmp_path: Path) -> None:
    checkpointer = dcp.Checkpointer(save_interval=5.0)
    if dist.get_rank() == 0:
        checkpointer.due(7)
    else:
        with pytest.raises(
            CheckpointMismatch, match="rank 0 asks whether to save after step 7, but rank 1 after step 8"
        ):
            checkpointer.due(8)
    checkpointer.close()


# Runs that are killed


def _train(root: Path, how: str) -> tuple[str, float, int]:
    """A run of twenty steps of a minute each, which may kill itself, or how the next one sees it."""
    checkpointer = dcp.Checkpointer(async_save=True, save_interval=300.0)
    clock = Clock(checkpointer)
    start = dcp.resume_or_init({"step": 0}, root, checkpointer=checkpointer)
    for step in range(20):
        clock.after(60.0)
        if checkpointer.due(step):
            checkpointer.save({"step": step}, root / f"{how}-{step}", step)
            checkpointer.wait()
        if how == "killed" and step == 16:
            os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()
    proposed = checkpointer.proposed_interval()
    assert proposed is not None
    return start.how, proposed.mtbf_seconds, dist.get_rank()


def test_a_run_that_was_killed_is_a_failure_to_the_next(tmp_path: Path) -> None:
    launch.run(_train, 2, tmp_path, "killed", killed=[0, 1])
    (how, first, _), _ = launch.run(_train, 2, tmp_path, "closed")
    assert how == "resumed"
    assert first == pytest.approx((DAY + 900 + 900) / 2, rel=0.01), "15 minutes of both, and one failure"
