"""``if accelerator.is_main_process: accelerator.save_state(path)``, as in most scripts that train with DDP."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_plugin as dcp
from dcp_plugin.accelerate import attendance
from tests import launch
from tests.compare import assert_same
from tests.launch import on_ranks
from tests.messages import logged
from tests.slowness import RankGate


def _about(what: str, messages: list[str]) -> list[str]:
    return [text for text in messages if what in text]


class _Waits:
    """The waits of rank 0 for another rank, without a clock: while ``alone`` they end at once, and else in a minute."""

    def __init__(self, alone: bool = False) -> None:
        self.alone, self.seconds = alone, list[float]()
        self.at_deadline: Callable[[], object] = lambda: None
        self._appears = attendance._appears
        attendance._appears = self

    def __call__(self, store: Any, keys: tuple[str, ...], seconds: float) -> None:
        self.seconds.append(seconds)
        if self.alone:
            self.at_deadline()
        else:
            self._appears(store, keys, 60.0)


def _start(layout: str = "ddp", **options: Any) -> Any:
    from tests.accelerate import training as t

    run = t.start(layout, timeout=60.0, **options)
    run.model.eval()  # dropout draws from the random streams, which a save of rank 0 alone has of rank 0 only
    return run


def _after_coming(act: Callable[[], None]) -> None:
    """From now on another rank than 0 calls ``act`` when it has come to a save."""
    come = attendance.Attendance._come

    def come_and_act(self: attendance.Attendance, path: Path) -> bool:
        is_alone = come(self, path)
        act()
        return is_alone

    attendance.Attendance._come = come_and_act  # type: ignore[method-assign]


def _ranks_of(path: Path) -> int:
    """How many ranks have made a checkpoint together."""
    return sum(key.key.endswith(".streams.torch") for key in dcp.inspect(path).tensors)


@pytest.mark.usefixtures("forked_keepers")
@pytest.mark.one_of
@pytest.mark.parametrize("settings", ["now", "in the background", "by a keeper", "into a local directory"])
@on_ranks(2)
def test_a_save_of_the_main_process_alone_resumes_on_all_ranks(tmp_path: Path, settings: str) -> None:
    options: dict[str, Any] = {"async_save": settings != "now"}
    if settings == "by a keeper":
        options["keeper"] = dcp.Keeper()
    if settings == "into a local directory":
        options |= {"keeper": {"dir": str(tmp_path / "local"), "durable_every": 2}}
    run, messages = _start(**options), logged()
    _Waits(alone=True)
    states = {}

    def save(step: int) -> None:
        states[step] = run.whole_state()
        if run.accelerator.is_main_process:
            run.accelerator.save_state(str(tmp_path / f"step-{step}"))

    run.train(3, at={step: lambda step=step: save(step) for step in (1, 2, 3)})
    run.attached.close()
    told = _about("so rank 0 saves alone", messages)
    assert len(told) == int(run.accelerator.is_main_process)
    assert all("step-1" in text and "test_main_process_saves.py:" in text for text in told)

    dist.barrier()
    other, messages = _start(seed=5), logged()
    for step, state in states.items():
        assert dcp.verify(tmp_path / f"step-{step}").ok
        other.accelerator.load_state(str(tmp_path / f"step-{step}"))
        assert_same(other.whole_state(), state)
    assert len(_about("random states for 1 of 2 ranks", messages)) == (3 if other.accelerator.is_main_process else 0)


@on_ranks(2)
def test_a_rank_that_comes_after_the_decision_saves_nothing_and_gets_the_long_wait_again(tmp_path: Path) -> None:
    run, messages, waits = _start(), logged(), _Waits(alone=True)
    for step in range(4):
        run.train(1)
        is_late, alone = step == 1, RankGate(f"rank 0 has saved {step}")
        if not run.accelerator.is_main_process and is_late:
            alone()
        if run.accelerator.is_main_process or is_late:
            run.accelerator.save_state(str(tmp_path / "latest"))
        if run.accelerator.is_main_process:
            alone.open()
        dist.barrier()
    assert _ranks_of(tmp_path / "latest") == 1
    if run.accelerator.is_main_process:
        assert waits.seconds == [60.0, 1.0, 60.0, 1.0]
        assert len(_about("so rank 0 saves alone", messages)) == 2
    else:
        (text,) = messages
        assert "rank 1 came to the save of" in text and "random streams of this rank" in text


@pytest.mark.parametrize("first", [0, 1])
@on_ranks(2)
def test_ranks_that_come_one_after_the_other_save_together(tmp_path: Path, first: int) -> None:
    run, come, waits = _start(), RankGate("the first has come"), _Waits()
    if dist.get_rank() != first:
        come()
        waits.alone = first == 1  # rank 1 is there, so rank 0 does not have to wait
    elif first == 0:
        appears = waits._appears
        waits._appears = lambda *args: come.open() or appears(*args)
    else:
        _after_coming(come.open)
    run.accelerator.save_state(str(tmp_path / "step-1"))
    assert _ranks_of(tmp_path / "step-1") == 2


@pytest.mark.parametrize("rank_1_comes", ["before", "after"])
@on_ranks(2)
def test_at_the_deadline_both_ranks_decide_the_same(tmp_path: Path, rank_1_comes: str) -> None:
    run, waits, is_main = _start(), _Waits(alone=True), dist.get_rank() == 0
    over, come, saved = RankGate("the wait is over"), RankGate("rank 1 has come"), RankGate("rank 0 has saved")
    if rank_1_comes == "before":
        waits.at_deadline = lambda: (over.open(), come())
        _after_coming(come.open)
    if not is_main:
        (over if rank_1_comes == "before" else saved)()
    run.accelerator.save_state(str(tmp_path / "step-1"))
    saved.open()
    dist.barrier()
    assert _ranks_of(tmp_path / "step-1") == (2 if rank_1_comes == "before" else 1)


@pytest.mark.one_of(count=2)
@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("names", ["one path", "two paths", "two paths at one step", "automatic names"])
@on_ranks(2)
def test_saves_of_all_ranks_follow_saves_of_the_main_process(tmp_path: Path, names: str, async_save: bool) -> None:
    automatic = names == "automatic names"
    run, waits = _start(project=tmp_path if automatic else None, async_save=async_save), _Waits()
    main = run.accelerator.is_main_process
    for step in range(6):
        path = None if automatic else str(tmp_path / ("latest" if names == "one path" else f"step-{step}"))
        if names == "two paths at one step":
            waits.alone = True
            if main:
                run.accelerator.save_state(str(tmp_path / "best"))
            waits.alone = False
            run.accelerator.save_state(path)
        elif step >= 3 or main:
            waits.alone = step < 3
            run.accelerator.save_state(path)
        run.train(1)
    run.attached.wait()
    dist.barrier()
    together = tmp_path / "checkpoints" / "checkpoint_5" if automatic else Path(path)
    assert _ranks_of(together) == 2
    if names == "two paths at one step":
        assert _ranks_of(tmp_path / "best") == 1
    if automatic:
        found = [path.name for path in sorted((tmp_path / "checkpoints").iterdir())]
        assert found == [f"checkpoint_{number}" for number in range(6)]
    run.accelerator.load_state(None if automatic else str(together))


@on_ranks(2)
def test_one_path_is_saved_twice_between_two_steps(tmp_path: Path) -> None:
    run, waits = _start(), _Waits()
    for _ in range(2):
        run.accelerator.save_state(str(tmp_path / "latest"))
        assert _ranks_of(tmp_path / "latest") == 2
    dist.barrier()
    waits.alone = True
    if run.accelerator.is_main_process:
        run.accelerator.save_state(str(tmp_path / "latest"))
    dist.barrier()
    assert _ranks_of(tmp_path / "latest") == 1


@on_ranks(2)
def test_a_rank_that_has_made_another_number_of_steps_saves_with_the_others(tmp_path: Path) -> None:
    """As at the end of ``accelerator.join_uneven_inputs``."""
    run, waits, come = _start(), _Waits(alone=True), RankGate("rank 1 has come")
    waits.at_deadline = come
    _after_coming(come.open)
    if run.accelerator.is_main_process:
        run.optimizer.step()
    run.accelerator.save_state(str(tmp_path / "last"))
    assert _ranks_of(tmp_path / "last") == 2


@on_ranks(2)
def test_rank_0_names_the_path_at_which_another_rank_waits(tmp_path: Path) -> None:
    run, messages, waits, come = _start(), logged(), _Waits(alone=True), RankGate("rank 1 has come")
    waits.at_deadline = come
    _after_coming(come.open)
    if run.accelerator.is_main_process:
        run.accelerator.save_state(str(tmp_path / "best"))
        assert _about(f"Another rank waits in a save of {tmp_path / 'last'}: ", messages)
    run.accelerator.save_state(str(tmp_path / "last"))


@on_ranks(2)
def test_a_save_to_another_path_on_each_rank_fails_on_all_ranks(tmp_path: Path) -> None:
    run = _start()
    for step in (1, 2):
        run.train(1)
        with pytest.raises(dcp.CheckpointMismatch) as error:
            run.accelerator.save_state(str(tmp_path / f"step-{step}-of-rank-{dist.get_rank()}"))
        assert all(f"rank {rank} saves {tmp_path}/step-{step}-of-rank-{rank}" in str(error.value) for rank in (0, 1))
    run.accelerator.save_state(str(tmp_path / "last"))
    assert _ranks_of(tmp_path / "last") == 2
    assert not list(tmp_path.glob("*-of-rank-*"))


@on_ranks(2)
def test_a_second_process_group_in_the_same_store_begins_anew(tmp_path: Path) -> None:
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    run, waits = _start(), _Waits(alone=True)
    if run.accelerator.is_main_process:
        run.accelerator.save_state(str(tmp_path / "latest"))
    dist.barrier()
    run.accelerator.end_training()
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("second", store), rank=rank, world_size=2)
    again, waits.alone = _start(), False
    again.accelerator.save_state(str(tmp_path / "latest"))
    assert _ranks_of(tmp_path / "latest") == 2


@on_ranks(2)
def test_decisions_do_not_pile_up_in_the_store(tmp_path: Path) -> None:
    run, store, waits = _start(), dist.distributed_c10d._get_default_store(), _Waits()
    attendance._MOST_DECISIONS = 3
    counts = []
    for step in range(12):
        if run.accelerator.is_main_process or step >= 6:
            waits.alone = step < 6
            run.accelerator.save_state(str(tmp_path / "latest"))
        run.train(1)
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    assert counts[3] == counts[5]
    assert counts[7] == counts[11]


@on_ranks(2)
def test_a_failed_background_save_of_rank_0_alone_is_raised_on_all_ranks(tmp_path: Path) -> None:
    from dcp_plugin.core.storage import part_writer

    run, write, waits = _start(async_save=True), part_writer.PartWriter.write, _Waits(alone=True)

    def broken(*args: Any) -> Any:
        raise OSError("no space left")

    if run.accelerator.is_main_process:
        part_writer.PartWriter.write = broken  # type: ignore[method-assign]
        run.accelerator.save_state(str(tmp_path / "bad"))
    dist.barrier()
    waits.alone = False
    with pytest.raises(dcp.SaveFailed, match="no space left"):
        run.accelerator.save_state(str(tmp_path / "next"))
    part_writer.PartWriter.write = write  # type: ignore[method-assign]
    run.accelerator.save_state(str(tmp_path / "next"))
    run.accelerator.load_state(str(tmp_path / "next"))
    run.attached.close()


@on_ranks(2)
def test_rank_0_saves_when_the_other_ranks_have_ended(tmp_path: Path) -> None:
    run = _start()
    _Waits(alone=True)
    if run.accelerator.is_main_process:
        RankGate("rank 1 ends")()
        run.accelerator.save_state(str(tmp_path / "last"))
        assert dcp.verify(tmp_path / "last").ok
    else:
        RankGate("rank 1 ends").open()
    run.accelerator.end_training()


@on_ranks(2)
def test_sharded_saves_decide_nothing(tmp_path: Path) -> None:
    run = _start("fsdp2")
    attendance.Attendance.rank_0_saves_alone = None  # type: ignore[assignment,method-assign]
    run.accelerator.save_state(str(tmp_path / "step-1"))
    assert _ranks_of(tmp_path / "step-1") == 2


def _train(root: Path, die_at: int | None = None, async_save: bool = False) -> None:
    """Make nine steps as diffusers' scripts do: the main process saves, and a restart takes the newest name."""
    run, done = _start(async_save=async_save), 0
    _Waits(alone=True)
    names = sorted(path.name for path in root.glob("checkpoint-*"))
    if names:
        run.accelerator.load_state(str(root / names[-1]))
        done = int(names[-1].removeprefix("checkpoint-"))

    def save(step: int) -> None:
        if run.accelerator.is_main_process:
            run.accelerator.save_state(str(root / f"checkpoint-{step}"))
        if step == die_at:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    run.train(9 - done, at={step - done: lambda step=step: save(step) for step in (2, 4, 6, 8)})
    run.attached.close()
    torch.save((run.losses, run.whole_state()), root / f"{dist.get_rank()}.pt")


@pytest.mark.one_of("async_save")
@pytest.mark.parametrize("async_save", [False, True])
def test_a_killed_training_whose_main_process_saves_resumes_exactly(tmp_path: Path, async_save: bool) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    straight.mkdir()
    killed.mkdir()
    launch.run(_train, 2, straight)
    outcomes = launch.outcomes_of(_train, 2, killed, 6, async_save)
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * 2, outcomes[0].traceback
    launch.run(_train, 2, killed)
    for rank in range(2):
        losses, state = torch.load(straight / f"{rank}.pt", weights_only=True)
        later_losses, later_state = torch.load(killed / f"{rank}.pt", weights_only=True)
        assert later_losses == losses[-len(later_losses) :]
        assert_same(later_state, state)
