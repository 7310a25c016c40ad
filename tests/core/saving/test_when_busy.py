"""A save while another one is in flight: it waits or is skipped; on every rank alike."""

from __future__ import annotations

import json
import os
import signal
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_plugin as dcp
from dcp_plugin import events
from dcp_plugin.lightning import DCPCheckpointIO
from tests.compare import assert_same
from tests.damage import bad_disk, raising
from tests.launch import on_ranks
from tests.layouts import build, train, whole_state
from tests.limits import HANG
from tests.messages import logged
from tests.places import names_in
from tests.programs import Program
from tests.slowness import Gate, pause, slow_copies, slow_writes


def _restored(path: Path) -> dict[str, Any]:
    model, optimizer = build("fsdp2", seed=7)
    dcp.load({"model": model, "optim": optimizer}, path)
    return whole_state(model, optimizer)


@on_ranks(2)
def test_every_rank_waits_alike(tmp_path: Path) -> None:
    ours = dcp.Checkpointer(async_save=True)
    gate = Gate()
    with slow_writes(gate):
        gate.close()
        first = ours.save({"t": torch.ones(3)}, tmp_path / "1")
        gate.open_soon()
        second = ours.save({"t": torch.ones(3)}, tmp_path / "2")
        assert first.done()
        second.wait()
    ours.close()


@on_ranks(2)
def test_ranks_that_have_heard_different_things_skip_or_save_alike(tmp_path: Path) -> None:
    """Rank 0 has heard of the end of a save and rank 1 has not yet: both save, as rank 0 decides."""
    ours = dcp.Checkpointer(async_save=True, when_busy="skip", timeout=20)
    gate = Gate()

    def end_late(event: events.Event) -> None:
        if isinstance(event, events.SaveFinished) and dist.get_rank() == 1:
            gate()

    unsubscribe = events.subscribe(end_late)
    gate.close()
    first = ours.save({"n": 1}, tmp_path / "a")
    if dist.get_rank() == 0:
        first.wait_done(20)
    dist.barrier()
    assert first.done() == (dist.get_rank() == 0)
    gate.open_soon()
    second = ours.save({"n": 1}, tmp_path / "b")
    assert not second.skipped
    ours.close()
    unsubscribe()
    assert names_in(tmp_path) == ["a", "b"]


@on_ranks(2)
def test_every_rank_skips_alike(tmp_path: Path) -> None:
    model, optimizer = build("fsdp2")
    ours = dcp.Checkpointer(async_save=True, when_busy="skip")
    told = logged()
    gate = Gate()
    with slow_writes(gate if dist.get_rank() == 0 else lambda: None):
        gate.close()
        first = ours.save({"model": model, "optim": optimizer}, tmp_path / "a")
        expected = whole_state(model, optimizer)
        train(model, optimizer, 1)
        skipped = ours.save({"model": model, "optim": optimizer}, tmp_path / "b")
        assert skipped.skipped and skipped.done() and skipped.staged() and not first.done()
        skipped.wait()
        gate.open()
        ours.wait()
        assert not first.skipped and not ours.save({"model": model, "optim": optimizer}, tmp_path / "c").skipped
    ours.close()
    assert names_in(tmp_path) == ["a", "c"]
    assert ("b is NOT saved" in "".join(told)) == (dist.get_rank() == 0)
    assert_same(_restored(tmp_path / "a"), expected)


@on_ranks(2)
def test_rank_0_logs_the_events_of_saves(tmp_path: Path) -> None:
    model, optimizer = build("fsdp2")
    log = tmp_path / "logs" / "saves.jsonl"
    ours = dcp.Checkpointer(async_save=True, events=str(log))
    ours.save({"model": model, "optim": optimizer}, tmp_path / "ck", step=7)
    ours.wait()
    ours.save({"bad": Path if dist.get_rank() == 1 else 1}, tmp_path / "bad", step=8)
    with pytest.raises(dcp.UnsafeCheckpoint):
        ours.wait()
    ours.close()
    dist.barrier()
    saved, failed = map(json.loads, log.read_text().splitlines())
    assert (saved["event"], saved["step"], saved["path"], saved["rank"]) == ("saved", 7, str(tmp_path / "ck"), 0)
    assert saved["bytes"] > 0 and saved["gb_per_second"] > 0
    assert saved["seconds"] >= saved["write_seconds"] > 0
    assert saved["seconds"] >= saved["blocked_seconds"] >= saved["staging_seconds"] > 0
    assert (failed["event"], failed["step"]) == ("failed", 8) and "bad" in failed["error"]


def test_doors_that_delete_old_checkpoints_take_only_waiting(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ModelCheckpoint decides"):
        DCPCheckpointIO(when_busy="skip")
    for wrong in ({"when_busy": "queue"}, {"staging": "eager"}):
        with pytest.raises(ValueError, match="must be"):
            dcp.CheckpointConfig(**wrong)


@pytest.mark.parametrize(("handler", "staging"), [("none", "lazy"), ("own", "blocking"), ("not asked", "blocking")])
def test_sigterm_finishes_the_save_in_flight_and_then_ends_the_process_as_before(
    tmp_path: Path, handler: str, staging: str
) -> None:
    process = Program("-c", _PREEMPTED, tmp_path / "ck", handler, staging)
    began = {process.stdout.readline() for _ in range(2)}
    assert began == {"saving\n", "worker 7\n" if handler == "own" else "worker -15\n"}
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=HANG)
    finished = handler != "not asked"
    said = [line for line in err.splitlines() if "SIGTERM" in line or "the program ends" in line]
    first, last = f"finishing the save of {tmp_path / 'ck'} first, for at most 1800 s", f"{tmp_path / 'ck'} is saved"
    assert said == [f"SIGTERM: {first}", f"SIGTERM: {last}"] * finished, "nothing from the worker"
    assert process.returncode == (7 if handler == "own" else -signal.SIGTERM), err
    assert (dcp.latest(tmp_path) is not None) == finished
    assert "trained on" not in out
    if finished:
        assert dcp.verify(tmp_path / "ck").ok


_PREEMPTED = """
import multiprocessing, os, signal, sys, time, torch, dcp_plugin as dcp
from dcp_plugin import events
from dcp_plugin.lightning import DCPCheckpointIO
from dcp_plugin.core.saving import sigterm

def say(what):  # whole lines, whichever thread
    os.write(1, (what + chr(10)).encode())

def until_sigterm(event):
    if isinstance(event, events.SaveStarted):
        say("saving")
        while not sigterm._stage:
            time.sleep(0.01)

path, handler, staging = sys.argv[1:]
if handler == "own":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
events.subscribe(until_sigterm)
model = torch.nn.Linear(100, 100)
ours = dcp.Checkpointer(async_save=True, staging=staging, finish_on_sigterm=handler != "not asked")
ours.save({"model": model}, path)
def work(ready):
    ready.set()
    time.sleep(60)

fork = multiprocessing.get_context("fork")
worker = fork.Process(target=work, args=(ready := fork.Event(),))
worker.start()
ready.wait()
worker.terminate()  # it has inherited the handler, and a copy of what is in flight
worker.join()
say(f"worker {worker.exitcode}")
for _ in range(300):
    time.sleep(0.1)
say("trained on")
"""


def _end_by_sigterm(root: Path, script: str, signals: int = 1, **how: Any) -> tuple[int, str, str]:
    """Run a script that says "now" and expects SIGTERM then; how it ends, and what it says."""
    process = Program("-c", _SIGTERM_ARRIVES + textwrap.dedent(script), root / "ck", stderr=how.get("stderr"))
    assert process.stdout.readline() == "now\n"
    if process.stderr is None:
        os.close(how["reader"])
    for _ in range(signals):
        process.send_signal(signal.SIGTERM)
        pause(0.1)()  # two that arrive at once are one
    out, err = process.communicate()
    return process.returncode, out, err


_SIGTERM_ARRIVES = """
import logging, os, signal, sys, threading, time, torch, dcp_plugin as dcp
from dcp_plugin import events
from dcp_plugin.lightning import DCPCheckpointIO
path = sys.argv[1]

def say(what):
    os.write(1, (what + chr(10)).encode())

def slowly(event):
    if isinstance(event, events.SaveStarted):
        time.sleep(1.0)

def train(seconds):
    for _ in range(int(seconds * 20)):
        time.sleep(0.05)

events.subscribe(slowly)
"""

_WHILE_THE_MAIN_THREAD_HOLDS_A_LOCK = """
lock = threading.Lock()
def log(event):
    with lock:
        pass
events.subscribe(log)
ours = dcp.Checkpointer(async_save=True, finish_on_sigterm=True)
ours.save({"n": 1}, path)
with lock:
    say("now")
    train(0.5)
train(100)
"""

_IN_THE_MIDDLE_OF_SAVE = """
def files(directory):
    say("now")
    train(0.5)
ours = dcp.Checkpointer(async_save=ASYNC, finish_on_sigterm=True)
ours.save({"n": 1}, path, files=files)
train(100)
"""

_WAITS_FOR_THE_SAVE = """
ours = dcp.Checkpointer(async_save=True, finish_on_sigterm=True)
handle = ours.save({"n": 1}, path)
say("now")
handle.wait()
train(100)
"""


@pytest.mark.parametrize("script", [
    _WHILE_THE_MAIN_THREAD_HOLDS_A_LOCK, _IN_THE_MIDDLE_OF_SAVE.replace("ASYNC", "True"),
    _IN_THE_MIDDLE_OF_SAVE.replace("ASYNC", "False"), _WAITS_FOR_THE_SAVE,
], ids=["lock", "in save", "in blocking save", "in wait"])  # fmt: skip
def test_sigterm_finishes_the_save_wherever_it_meets_the_main_thread(tmp_path: Path, script: str) -> None:
    code, _, err = _end_by_sigterm(tmp_path, script, signals=2)
    assert code == -signal.SIGTERM and err.count("SIGTERM") == 2, err
    assert dcp.verify(tmp_path / "ck").ok


def test_a_handler_that_notes_sigterm_is_called_once_after_the_save_and_again_for_the_next(tmp_path: Path) -> None:
    program = """
        calls = []
        signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
        ours = dcp.Checkpointer(async_save=True, finish_on_sigterm=True)
        handle = ours.save({"n": 1}, path)
        say("now")
        while not calls:
            time.sleep(0.01)
        say(f"called {len(calls)} times, saved {handle.done()}")
        ours.save({"n": 2}, path + "2")
        os.kill(os.getpid(), signal.SIGTERM)
        while len(calls) < 2:
            time.sleep(0.01)
        ours.close()
    """
    code, out, err = _end_by_sigterm(tmp_path, program, signals=3)
    assert code == 0, err
    assert out == "called 1 times, saved True\n"
    assert err.count("finishing the save") == 2


def test_a_handler_before_ours_finds_the_save_finished(tmp_path: Path) -> None:
    program = """
        ours = dcp.Checkpointer(async_save=True, finish_on_sigterm=True)
        ours.save({"n": 1}, path)
        ours_is = signal.getsignal(signal.SIGTERM)
        def handler(number, frame):
            ours_is(number, frame)
            say("mine")
            os._exit(5)
        signal.signal(signal.SIGTERM, handler)
        say("now")
        train(100)
    """
    code, out, _ = _end_by_sigterm(tmp_path, program)
    assert (code, out) == (5, "mine\n")
    assert dcp.verify(tmp_path / "ck").ok


def test_sigterm_waits_no_longer_than_the_timeout_for_a_save_that_hangs(tmp_path: Path) -> None:
    program = """
        events.subscribe(lambda event: time.sleep(600))
        ours = dcp.Checkpointer(async_save=True, finish_on_sigterm=True, timeout=1.0)
        ours.save({"n": 1}, path)
        say("now")
        train(100)
    """
    code, _, err = _end_by_sigterm(tmp_path, program)
    assert code == -signal.SIGTERM
    assert "ck is not saved yet after 1 s" in err


def test_sigterm_finishes_the_save_although_nobody_reads_what_is_said(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    try:
        code, *_ = _end_by_sigterm(tmp_path, _WAITS_FOR_THE_SAVE, stderr=writer, reader=reader)
    finally:
        os.close(writer)
    assert code == -signal.SIGTERM
    assert dcp.verify(tmp_path / "ck").ok


def test_a_forked_process_finishes_its_own_save_on_sigterm(tmp_path: Path) -> None:
    program = """
        parent = dcp.Checkpointer(async_save=True, finish_on_sigterm=True)
        parent.save({"n": 1}, path + "-of-parent").wait()
        if os.fork():
            status = os.wait()[1]
            os._exit(99 if os.WTERMSIG(status) == signal.SIGTERM else 1)
        ours = dcp.Checkpointer(async_save=True, finish_on_sigterm=True)
        ours.save({"n": 1}, path)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        say("now")
        train(100)
    """
    code, _, err = _end_by_sigterm(tmp_path, program, signals=0)
    assert code == 99, err
    assert dcp.verify(tmp_path / "ck").ok


def test_sigterm_is_given_back(tmp_path: Path) -> None:
    def mine(number: int, frame: Any) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        one, two = (dcp.Checkpointer(async_save=True, finish_on_sigterm=True) for _ in range(2))
        one.save({"n": 1}, tmp_path / "1")
        two.save({"n": 1}, tmp_path / "2")
        assert signal.getsignal(signal.SIGTERM) is not mine
        one.close()
        assert signal.getsignal(signal.SIGTERM) is not mine
        two.close()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_original_error_of_a_background_save_is_kept(tmp_path: Path) -> None:
    ours = dcp.Checkpointer(async_save=True)
    with bad_disk(raising(OSError("bad disk"))):
        ours.save({"t": torch.ones(3)}, tmp_path / "ck")
        with pytest.raises(dcp.SaveFailed) as raised:
            ours.close()
    assert isinstance(raised.value.__cause__, OSError)
    frames, trace = [], raised.value.__cause__.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert frames[-1] == "fail"


def test_a_background_save_says_where_it_is_in_whole_lines(tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("dcp_plugin.core.saving.progress.NOTE_SECONDS", 0.0)
    ours = dcp.Checkpointer(async_save=True, progress=True, io={"threads": 1})
    ours.save({"t": torch.ones(2 << 20)}, tmp_path / "ck")
    ours.close()
    said = capfd.readouterr().err
    assert "saving ck in the background: " in said and "of 8 MiB on rank 0" in said
    assert said.endswith("s\n") and "\r" not in said.replace("\r\x1b", "")


def test_a_save_that_something_ends_by_an_exit_has_failed_and_is_said_to(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = dcp.Checkpointer(async_save=True, staging="lazy")

    def leave() -> None:
        raise SystemExit(3)

    for slowly in (bad_disk, slow_copies):
        with slowly(leave):
            handle = ours.save({"model": model}, tmp_path / "ck")
            with pytest.raises(dcp.SaveFailed, match="SystemExit"):
                handle.wait(HANG)
        optimizer.step()  # nothing waits for a copy that nobody makes
    ours.save({"model": model}, tmp_path / "ck").wait(HANG)
    ours.close()


def test_a_save_whose_thread_cannot_start_runs_in_the_thread_of_the_call(tmp_path: Path, monkeypatch: Any) -> None:
    ours = dcp.Checkpointer(async_save=True)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        handle = ours.save({"n": 1}, tmp_path / "ck")
        with pytest.raises(dcp.SaveFailed, match="new thread"):
            handle.wait(HANG)
    ours.save({"n": 1}, tmp_path / "ck").wait(HANG)
    ours.close()
