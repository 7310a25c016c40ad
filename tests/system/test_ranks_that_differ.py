"""Ranks that do different things get one error that names both, and a rank that waits says for whom."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dcp_plugin as dcp
from dcp_plugin import events
from dcp_plugin.checkpointer import Internals
from dcp_plugin.core.ranks import collectives, rank_group
from tests.dying import lose
from tests.launch import on_ranks
from tests.limits import HANG
from tests.messages import refusal
from tests.places import names_in
from tests.slowness import RankGate

HERE = Path(__file__)
TIMEOUT = 600
"""Seconds. Who waits for the others waits longer than the test may."""


_refused = partial(refusal, dcp.CheckpointMismatch)


def _state(value: float = 0.0) -> dict[str, Any]:
    return {"t": torch.full((3,), value), "n": value}


# Ranks that make different calls


@pytest.mark.one_of("options")
@pytest.mark.parametrize("options", [{}, {"async_save": True}, {"async_save": True, "staging": "lazy"}])
@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_different_steps_of_one_path_are_never_mixed(tmp_path: Path, world_size: int, options: Any) -> None:
    path, last = tmp_path / "ck", world_size - 1
    ours = dcp.Checkpointer(timeout=TIMEOUT, **options)
    ours.save(_state(1.0), path, step=1)
    ours.wait()
    step = 5 if dist.get_rank() == last else 10

    def save() -> None:
        ours.save(_state(step), path, step=step)
        ours.wait()

    _refused(save, f"rank {last} saves {path} (step 5) and rank 0 saves {path} (step 10)")
    assert names_in(tmp_path) == ["ck"], "nothing of it was written"
    loaded = _state()
    assert dcp.load(loaded, path).loaded and loaded["n"] == 1.0
    ours.save(_state(2.0), path, step=2)
    ours.close()
    assert dcp.inspect(path).step == 2, "the ranks have met again"


@pytest.mark.parametrize("files", [False, True])
@on_ranks(2)
def test_a_rank_that_loads_does_not_get_what_a_save_sends(tmp_path: Path, files: bool) -> None:
    old, new = tmp_path / "step-5", tmp_path / "step-10"
    ours = dcp.Checkpointer(timeout=TIMEOUT)
    ours.save(_state(5.0), old, step=5)
    target = _state()
    for saves in (0, 1):
        if dist.get_rank() == saves:
            call: Any = partial(ours.save, _state(10.0), new, 10, (lambda directory: None) if files else None)
        else:
            call = partial(ours.load, target, old)
        _refused(call, f"rank {saves} saves {new} (step 10)", f"rank {1 - saves} loads {old}")
    assert target["n"] == 0 and not target["t"].any()
    dist.barrier()
    assert names_in(tmp_path) == ["step-5"] and dcp.verify(old).ok


@on_ranks(2)
def test_a_rank_that_resumes_does_not_meet_one_that_saves_or_loads(tmp_path: Path) -> None:
    ours, path = dcp.Checkpointer(timeout=TIMEOUT), tmp_path / "step-5"
    ours.save(_state(5.0), path, step=5)
    resume = partial(dcp.resume_or_init, _state(), tmp_path, checkpointer=ours)
    for other in (partial(ours.load, _state(), path), partial(ours.save, _state(), path, step=6)):
        for resumes in (0, 1):
            refusal(
                dcp.CheckpointMismatch,
                resume if dist.get_rank() == resumes else other,
                f"rank {resumes} looks for a checkpoint",
            )
    assert dcp.resume_or_init(_state(), tmp_path, checkpointer=ours).step == 5


@on_ranks(2)
def test_one_path_may_be_written_in_several_ways(tmp_path: Path) -> None:
    rank = dist.get_rank()
    if rank == 0:
        (tmp_path / "real").mkdir()
        (tmp_path / "alias").symlink_to(tmp_path / "real")
    dist.barrier()
    os.chdir(tmp_path / "real" if rank else tmp_path)
    ours = dcp.Checkpointer(timeout=TIMEOUT)
    for mine in (("alias/ck", "ck"), (tmp_path / "alias" / "ck", "../real/ck")):
        ours.save(_state(1.0), mine[rank], step=1)
        assert ours.load(_state(), mine[rank]).loaded
    _refused(lambda: ours.save(_state(), "ck", step=2), f"rank 1 saves {tmp_path}/real/ck")
    assert not (tmp_path / "ck").exists(), "names of two working directories are two paths"


@on_ranks(2)
def test_copies_of_one_checkpoint_may_be_at_a_path_of_each_node(tmp_path: Path) -> None:
    dcp.save(_state(1.0), tmp_path / "node-0")
    if dist.get_rank() == 0:
        dcp.copy(tmp_path / "node-0", tmp_path / "node-1")
    dist.barrier()
    ours, target = dcp.Checkpointer(timeout=TIMEOUT), _state()
    ours.load(target, tmp_path / f"node-{dist.get_rank()}")
    assert target["n"] == 1.0


@on_ranks(2)
def test_links_that_each_host_resolves_in_its_own_way_are_one_path(tmp_path: Path) -> None:
    def of_this_host(path: Path) -> Path:
        return Path(f"/mnt/host-{dist.get_rank()}{path}")

    collectives.resolved = of_this_host  # as with an automounter
    ours = dcp.Checkpointer(timeout=TIMEOUT)
    for step in (1, 2):
        ours.save(_state(step), tmp_path / "ck", step=step)
    dist.barrier()
    assert dcp.inspect(tmp_path / "ck").step == 2


@on_ranks(2)
def test_threads_in_another_order_on_each_rank_are_told_and_nothing_is_mixed(tmp_path: Path) -> None:
    """Each thread has a Checkpointer. Those that meet first belong to different saves."""
    first = threading.Event()
    messages: list[str] = []

    def save(name: str, comes_first: bool) -> None:
        if not comes_first:
            first.wait()
        try:
            messages.append(_refused(lambda: dcp.save(_state(), tmp_path / name, timeout=TIMEOUT)))
        finally:
            first.set()

    rank = dist.get_rank()
    threads = [threading.Thread(target=save, args=(name, (name == "a") == (rank == 0))) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(messages) == 2
    for message, (own, other) in zip(messages, ("ab", "ba"), strict=True):
        assert f"rank 1 saves {tmp_path / other} and rank 0 saves {tmp_path / own}" in message
    assert not names_in(tmp_path)


@on_ranks(2)
def test_a_question_that_rank_0_alone_was_asked_is_no_answer_to_a_save(tmp_path: Path) -> None:
    ours = dcp.Checkpointer(timeout=TIMEOUT, save_interval=60.0)
    ours.save(_state(1.0), tmp_path / "step-1", step=1)

    def save() -> None:
        if dist.get_rank() > 0 or ours.due(2):
            ours.save(_state(2.0), tmp_path / "step-2", step=2)

    refusal(
        dcp.CheckpointMismatch, save, "rank 1 saves", "step-2 (step 2) and rank 0 asks whether to save after step 2"
    )
    ours.close()
    assert not (tmp_path / "step-2").exists()


@on_ranks(2)
def test_a_save_that_was_interrupted_and_begun_anew_does_not_go_on_with_the_old_one(tmp_path: Path) -> None:
    ours = dcp.Checkpointer(timeout=TIMEOUT)

    def interrupt(event: events.Event) -> None:
        if dist.get_rank() == 1 and isinstance(event, events.SaveStarted):
            raise KeyboardInterrupt

    stop = events.subscribe(interrupt)
    if dist.get_rank() == 1:
        with pytest.raises(KeyboardInterrupt):
            ours.save(_state(1.0), tmp_path / "ck", step=1)
        stop()
    message = refusal(
        dcp.CheckpointMismatch, lambda: ours.save(_state(1.0), tmp_path / "ck", step=1), "has to plan", "has to write"
    )
    assert message.count("saves") == 2
    ours.close()
    assert not (tmp_path / "ck").exists()


@on_ranks(3)
def test_a_save_that_meets_an_exception_elsewhere_names_it(tmp_path: Path) -> None:
    ours = dcp.Checkpointer(timeout=TIMEOUT)
    ours.save(_state(), tmp_path / "a", step=1)
    if dist.get_rank() == 1:
        refusal(
            dcp.CheckpointMismatch, lambda: ours.save(_state(), tmp_path / "b", step=2), "is about to save what is left"
        )
    else:
        assert not Internals(ours).all_ranks_come_to("save what is left", 60.0)
    ours.close()
    assert names_in(tmp_path) == ["a"]


# Ranks that do not come


class _Log(logging.Handler):
    """Opens a gate at the first message."""

    def __init__(self, gate: RankGate) -> None:
        super().__init__()
        self.gate, self.messages = gate, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.gate.open()


def _logged_while(late: int, call: Callable[[], object], calls_again: bool = True) -> list[str]:
    """What this rank logs while rank ``late`` comes to a call only when somebody has logged something."""
    collectives.REPORT_AFTER = 0.1
    gate = RankGate(f"logged while {late} is late")
    log = _Log(gate)
    logging.getLogger("dcp_plugin").addHandler(log)
    dist.barrier()  # the first Checkpointer of a process imports modules, which takes longer on some ranks
    if dist.get_rank() == late:
        gate()
    call()
    logging.getLogger("dcp_plugin").removeHandler(log)
    dist.barrier()
    return log.messages


@pytest.mark.one_of("options", "late")
@pytest.mark.parametrize("options", [{}, {"async_save": True}])
@pytest.mark.parametrize("late", [1, 0])
@pytest.mark.parametrize("meets", [True, False])
@on_ranks(3)
def test_a_save_that_waits_for_a_rank_names_it_and_the_line_of_the_call(
    tmp_path: Path, meets: bool, late: int, options: Any
) -> None:
    ours = dcp.Checkpointer(timeout=TIMEOUT, **options)
    if not meets:
        ours.save(_state(), tmp_path / "first")
        ours.wait()

    def save() -> None:
        ours.save(_state(), tmp_path / "ck", step=1)  # the line of the call
        ours.wait()

    messages = _logged_while(late, save)
    ours.close()
    reporter = 0 if late else 1
    if dist.get_rank() != reporter:
        assert messages == []
        return
    line = 1 + HERE.read_text().splitlines().index(
        '        ours.save(_state(), tmp_path / "ck", step=1)  # the line of the call'
    )
    sentence = f"still waiting for rank {late}; does every rank call save?"
    assert messages == [f"{sentence} (called at {HERE}:{line})"]


@on_ranks(2)
def test_a_load_that_waits_says_so_and_is_loaded_when_the_rank_comes(tmp_path: Path) -> None:
    ours, target = dcp.Checkpointer(timeout=TIMEOUT), _state()
    ours.save(_state(1.0), tmp_path / "ck")
    messages = _logged_while(1, lambda: ours.load(target, tmp_path / "ck"))
    if dist.get_rank() == 0:
        assert [message.partition(" (")[0] for message in messages] == [
            "still waiting for rank 1; does every rank call load?"
        ]
    assert target["n"] == 1.0


@pytest.mark.one_of
@pytest.mark.parametrize("meets", [True, False])
@pytest.mark.parametrize("absent", [0, 1])
@on_ranks(2)
def test_the_error_at_the_timeout_has_the_same_sentence(tmp_path: Path, absent: int, meets: bool) -> None:
    ours = dcp.Checkpointer(timeout=1 if meets else TIMEOUT)
    gave_up = RankGate("the other has given up")
    if not meets:
        ours.save(_state(), tmp_path / "first")
        Internals(ours).ranks._timeout = 1
    if dist.get_rank() == absent:
        gave_up()
        dist.barrier()
        return
    with pytest.raises(dcp.RankFailure) as caught:
        ours.save(_state(), tmp_path / "ck")
    assert f"still waiting for rank {absent}; does every rank call save? " in str(caught.value)
    gave_up.open()
    dist.barrier()  # rank 0 hosts the store
    assert not (tmp_path / "ck").exists()


@on_ranks(2)
def test_a_rank_that_takes_long_to_write_is_not_asked_whether_it_saves(tmp_path: Path) -> None:
    ours, gate = dcp.Checkpointer(timeout=TIMEOUT), RankGate("rank 0 has waited")
    log = _Log(RankGate("never"))
    logging.getLogger("dcp_plugin").addHandler(log)
    wait_for = rank_group.RankGroup._wait_for

    def written(event: events.Event) -> None:
        if isinstance(event, events.SaveStarted):
            collectives.REPORT_AFTER = 0.05  # all ranks have met: a slow machine may take longer than that to meet
            if dist.get_rank() == 1:
                gate()

    def and_open(self: rank_group.RankGroup, works: Any, call: collectives.Call, missing: Any) -> None:
        if call.has_met and self.rank == 0:  # rank 0 waits for what rank 1 has written
            with suppress(RuntimeError):
                threading.Timer(0.5, gate.open).start()
        wait_for(self, works, call, missing)

    events.subscribe(written)
    rank_group.RankGroup._wait_for = and_open  # type: ignore[method-assign]
    dist.barrier()  # as in _logged_while
    ours.save(_state(), tmp_path / "ck")
    collectives.REPORT_AFTER = 30.0
    ours.close()
    assert log.messages == []


@on_ranks(3, killed=[1])
def test_a_rank_that_was_killed_is_no_rank_that_forgot_to_call(tmp_path: Path) -> None:
    ours = dcp.Checkpointer(timeout=TIMEOUT)
    ours.save(_state(), tmp_path / "first")
    lose(1)
    with pytest.raises(dcp.RankFailure) as caught:
        ours.save(_state(), tmp_path / "ck")
    assert "does every rank" not in str(caught.value)
    assert "rank 1: " in str(caught.value) or dist.get_rank() == 2


# What a repeated save sends


@on_ranks(2)
def test_a_rank_sends_96_bytes_at_most_before_the_plan_of_a_repeated_save_is_agreed_on(tmp_path: Path) -> None:
    ours = dcp.Checkpointer()
    state = {f"layer{number}": torch.zeros(4, 4) for number in range(300)}
    ours.save(state, tmp_path / "a", step=1)
    sent: list[int] = []
    isend, send, combine = dist.isend, dist.send, rank_group.RankGroup.combine

    def counted(pass_on: Any) -> Any:
        def send(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            sent.append(tensor.nbytes)
            return pass_on(tensor, *args, **kwargs)

        return send

    dist.isend, dist.send = counted(isend), counted(send)
    rank_group.RankGroup.combine = lambda *args: (combine(*args), sent.append(0))[0]  # type: ignore[method-assign]
    ours.save(state, tmp_path / "b", step=2)
    dist.isend, dist.send, rank_group.RankGroup.combine = isend, send, combine  # type: ignore[method-assign]
    ours.close()
    if dist.get_rank() == 1:
        assert sent.count(0) == 2, "two exchanges: the plan, and what was written"
        assert 0 < sum(sent[: sent.index(0)]) <= 96, sent


@on_ranks(2)
def test_a_load_has_four_exchanges_if_no_rank_asks_about_a_key(tmp_path: Path) -> None:
    """Open, compare, read, apply."""
    ours, exchanges, combine = dcp.Checkpointer(), list[str](), rank_group.RankGroup.combine

    def counted(self: Any, step: str, *args: Any) -> Any:
        exchanges.append(step.split()[0])
        return combine(self, step, *args)

    ours.save({"t": torch.ones(3), "n": 1}, tmp_path / "ck")
    rank_group.RankGroup.combine = counted  # type: ignore[method-assign]
    ours.load({"t": torch.zeros(3), "n": 0}, tmp_path / "ck")
    rank_group.RankGroup.combine = combine  # type: ignore[method-assign]
    ours.close()
    assert exchanges == ["open", "compare", "read", "apply"]


class Counted:
    count = 0

    def __init__(self) -> None:
        self.number = 5

    def __setstate__(self, state: dict[str, int]) -> None:
        Counted.count += 1


@on_ranks(2)
def test_a_load_unpickles_a_value_once_on_a_rank_without_and_on_one_with_questions(tmp_path: Path) -> None:
    def begin(names: str) -> dict[str, Any]:
        return {"model": nn.ModuleDict({name: nn.Linear(1, 1) for name in names}), "x": Counted()}

    with closing(dcp.Checkpointer(allow_pickle=["x"])) as checkpointer:
        checkpointer.save(begin("ab"), tmp_path / "ck")
        Counted.count = 0
        checkpointer.load(begin("ab" if dist.get_rank() == 0 else "a"), tmp_path / "ck")
    assert Counted.count == 1


@on_ranks(2)
def test_the_error_of_a_load_has_the_misfits_of_ranks_with_and_without_questions(tmp_path: Path) -> None:
    dcp.save({"t": torch.ones(3), "u": torch.ones(3)}, tmp_path / "ck")
    of_rank_0 = {"t": torch.ones(4), "u": torch.ones(3, dtype=torch.float64)}
    state = of_rank_0 if dist.get_rank() == 0 else {"t": torch.ones(3), "absent": torch.ones(3)}
    error = str(_refused(lambda: dcp.load(state, tmp_path / "ck", dcp.PartialLoad(cast=False))))
    assert "t has shape (4,) here and (3,) in the checkpoint" in error and "absent" in error
    assert error.count("u is torch.float64 here and torch.float32 in the checkpoint") == 1


def test_a_group_that_is_closed_while_the_interpreter_ends_does_not_wait_for_a_thread() -> None:
    code = """if True:
        import builtins, torch.distributed as dist
        from dcp_plugin.core.ranks.rank_group import RankGroup
        class Last:
            def __del__(self):
                self.group.close()
                print("closed")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        builtins.last = Last()  # deleted last
        builtins.last.group = RankGroup.joined(60, None)
    """
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=HANG, check=True)
    assert ended.stdout == b"closed\n"
