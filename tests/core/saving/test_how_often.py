"""How often to save: all ranks decide the same, with few meetings."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_plugin as dcp
from dcp_plugin import CheckpointMismatch
from dcp_plugin.core.media.places import WORKSPACE
from dcp_plugin.core.ranks.collectives import Ranks
from dcp_plugin.core.runs import figures
from dcp_plugin.core.saving.save_timing import SaveTiming
from tests.forge import change_summary
from tests.launch import on_ranks
from tests.places import names_in
from tests.slowness import Gate, slow_writes


def test_time_in_calls_that_save_or_wait_is_no_part_of_a_step() -> None:
    now = 0.0
    timing, alone = SaveTiming(3600.0, lambda: False, lambda: now), Ranks()
    timing.due(0, lambda: alone)
    assert timing.step_seconds is None
    for step, (seconds, waited) in enumerate([(6.0, 5.0), (3.0, 2.0), (1.0, 0.0)], 1):
        timing.paused(waited, saving=step == 2)
        now += seconds
        timing.due(step, lambda: alone)
        assert timing.step_seconds == pytest.approx(1.0)


@pytest.mark.parametrize("interval", ["auto", 0, -1.0, float("nan")])
def test_an_interval_is_a_positive_number_of_seconds(interval: Any) -> None:
    with pytest.raises(
        (TypeError, ValueError), match=r"save_interval must be (a number|positive seconds) or None, got"
    ):
        dcp.CheckpointConfig(save_interval=interval)


def test_a_loop_that_asks_has_only_the_saves_beside_its_checkpoints(tmp_path: Path) -> None:
    checkpointer = dcp.Checkpointer(keep_last=2, save_interval=600.0)
    for step in range(1, 5):
        checkpointer.due(step)
        checkpointer.save({"step": step}, tmp_path / f"step-{step}", step)
    checkpointer.close()
    assert set(os.listdir(tmp_path / WORKSPACE)) == {figures.NAME}
    assert not [line for line in figures.read(tmp_path) if line["event"] != "saved"]


def test_who_does_not_ask_has_nothing_beside_the_checkpoints(tmp_path: Path) -> None:
    dcp.Checkpointer().save({"step": 1}, tmp_path / "step-1")
    assert names_in(tmp_path) == ["step-1"]


def test_a_field_of_a_summary_that_this_version_does_not_know_is_ignored(tmp_path: Path) -> None:
    dcp.save({"step": 1}, tmp_path / "step-1")
    change_summary(tmp_path / "step-1", training={"seconds": 30.0, "failures": "many"})
    state = {"step": 0}
    assert dcp.resume_or_init(state, tmp_path).how == "resumed"
    assert state == {"step": 1}
    assert dcp.verify(tmp_path / "step-1").ok


def test_without_an_interval_no_save_is_due(tmp_path: Path) -> None:
    checkpointer = dcp.Checkpointer()
    for step in range(30):
        checkpointer.save({"step": step}, tmp_path / f"step-{step}", step)
        assert not checkpointer.due(step)


# All ranks hear the same


class Clock:
    """Seconds that pass when a test says so; on rank 1 nothing like those of rank 0."""

    def __init__(self, checkpointer: dcp.Checkpointer) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.now, self._pace = 1000.0 * rank, 1.0 + rank
        checkpointer._timing.clock = lambda: self.now

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
    decide = checkpointer._timing._decide

    def counted() -> tuple[bool, int]:
        nonlocal meetings
        meetings += 1
        return decide()

    checkpointer._timing._decide = counted  # type: ignore[method-assign]
    due = _steps_that_were_due(checkpointer, tmp_path, lambda step: 1.0 if step <= 110 else 2.0)
    gaps = [later - before for before, later in itertools.pairwise(due)]
    assert gaps[0] == pytest.approx(50, abs=1)
    assert gaps[-1] == pytest.approx(25, abs=1)
    assert max(gaps[1:]) * 1.0 <= 50
    assert meetings <= 10 * (len(due) + 1)
    checkpointer.close()


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
