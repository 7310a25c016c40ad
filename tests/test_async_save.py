"""A background save holds the state of its call, whatever training does meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_plugin as dcp
from dcp_plugin import progress
from tests import launch
from tests.compare import assert_same
from tests.layouts import build, train, whole_state
from tests.memory import extra_peak


def _train_during_saves(root: Path) -> None:
    gate = threading.Event()

    def slow(event: progress.Event) -> None:
        if isinstance(event, progress.BytesWritten):
            assert gate.wait(30)

    unsubscribe = progress.subscribe(slow)
    ours = dcp.Checkpointer(async_save=True)
    model, optimizer = build("fsdp2")
    expected = []
    for step in range(1, 4):
        train(model, optimizer, 1, seed=step)
        expected.append(whole_state(model, optimizer))
        gate.clear()
        handle = ours.save({"model": model, "optim": optimizer, "extra": {"step": step}}, root / str(step), step)
        assert handle.staged() and not handle.done()
        train(model, optimizer, 2, seed=step)  # collectives of the trainer, while the save is held back
        assert not (root / str(step)).exists()
        gate.set()
    ours.close()
    unsubscribe()
    for step, state in enumerate(expected, 1):
        other, fresh = build("fsdp2", seed=4)
        extra: dict[str, int] = {}
        dcp.load({"model": other, "optim": fresh, "extra": extra}, root / str(step))
        assert_same(whole_state(other, fresh), state)
        assert extra["step"] == step


def test_each_background_save_equals_the_state_at_its_call(tmp_path: Path) -> None:
    launch.run(_train_during_saves, 2, tmp_path)


def test_the_host_copy_is_reused_grown_shrunk_and_freed_and_ties_are_kept(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(50, 50), "b": torch.nn.Linear(50, 50)})
    model["b"].weight = model["a"].weight
    ours = dcp.Checkpointer(async_save=True)
    (pool,) = ours._pools

    def held_after_saving(state: Any) -> tuple[list[int], int]:
        ours.save(state, tmp_path / "ck").wait()
        return [slab.data_ptr() for slab in pool.slabs], pool.nbytes

    one_weight = 50 * 50 * 4 + 2 * 256
    memory, held = held_after_saving({"model": model})
    assert 50 * 50 * 4 < held < one_weight + 2 * 64, "the tied weight has one place"
    assert held_after_saving({"model": model}) == (memory, held)
    _, grown = held_after_saving({"model": model, "more": torch.ones(10_000)})
    assert held + 40_000 <= grown < held + 40_000 + 64
    assert held_after_saving({"model": model})[1] == held
    ours.close()
    assert not pool.nbytes


@pytest.mark.parametrize("staging", ["blocking", "lazy"])
def test_many_background_saves_need_one_host_copy(tmp_path: Path, staging: str) -> None:
    model = torch.nn.Linear(4096, 4096)
    ours = dcp.Checkpointer(async_save=True, staging=staging)
    ours.save({"warm": torch.ones(1 << 20)}, tmp_path / "ck").wait()

    def save_often() -> None:
        for _ in range(4):
            ours.save({"model": model}, tmp_path / "ck").wait()

    copy = 64 << 20
    assert extra_peak(save_often) < copy + (24 << 20)
    assert extra_peak(save_often) < 16 << 20, "the copy is there already"
    ours.close()


def test_what_moves_from_the_later_copy_to_the_one_at_the_call_is_not_held_twice(tmp_path: Path) -> None:
    model = torch.nn.Linear(4096, 4096)
    ours = dcp.Checkpointer(async_save=True, staging="lazy", reuse=False)
    ours.save({"model": model}, tmp_path / "ck").wait()

    def save_frozen() -> None:
        model.requires_grad_(False)
        ours.save({"model": model}, tmp_path / "ck").wait()

    assert extra_peak(save_frozen) < 24 << 20
    ours.close()


def test_removing_the_checkpoint_in_flight_waits_for_it(tmp_path: Path) -> None:
    ours = dcp.Checkpointer(async_save=True)
    ours.save({"t": torch.ones(1000)}, tmp_path / "ck")
    ours.remove(tmp_path / "ck")
    ours.close()
    assert not (tmp_path / "ck").exists()


def _events(root: Path) -> list[str]:
    seen: list[progress.Event] = []
    progress.subscribe(seen.append)
    model, optimizer = build("fsdp2")
    dcp.save({"model": model, "optim": optimizer}, root / "ck", step=5)
    assert isinstance(seen[0], progress.SaveStarted) and seen[0].step == 5
    assert isinstance(seen[-1], progress.SaveFinished) and seen[-1].bytes > 0
    written = [event for event in seen if isinstance(event, progress.BytesWritten)]
    assert written[-1].written == written[-1].total
    files = [name for name in (root / "ck").iterdir() if name.name.startswith(f"__{dist.get_rank()}_")]
    assert seen[-1].bytes == sum(file.stat().st_size for file in files)
    return [type(event).__name__ for event in seen]


def test_events_tell_each_ranks_share(tmp_path: Path) -> None:
    launch.run(_events, 2, tmp_path)


@pytest.mark.parametrize("fails", [False, True])
def test_a_program_that_does_not_wait_ends_when_the_save_is_on_disk_and_says_so(tmp_path: Path, fails: bool) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _FORGETS_TO_WAIT, str(tmp_path / "ck"), str(int(fails))], capture_output=True, text=True
    )
    assert ended.returncode == 0
    assert f"the program ends while {tmp_path / 'ck'} is being saved" in ended.stderr
    assert ("was NOT saved, and the program ended without asking" in ended.stderr) == fails
    assert ("disk full" in ended.stderr) == fails
    assert (dcp.latest(tmp_path) is None) == fails
    if not fails:
        assert dcp.verify(tmp_path / "ck").ok


_FORGETS_TO_WAIT = """
import sys, time, torch, dcp_plugin as dcp
from dcp_plugin import progress

def slowly(event):
    if isinstance(event, progress.SaveStarted):
        time.sleep(1.0)  # the main thread has ended by now
        if int(sys.argv[2]):
            raise OSError("disk full")

progress.subscribe(slowly)
dcp.Checkpointer(async_save=True).save({"w": torch.ones(1 << 20)}, sys.argv[1])
"""
