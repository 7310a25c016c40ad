"""A background save holds the state of its call, whatever training does meanwhile."""

from __future__ import annotations

import copy
import errno
import gc
import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_plugin as dcp
from dcp_plugin.core import events
from dcp_plugin.core.media import uncommitted_reason
from dcp_plugin.core.media.disk.local_disk import LocalDisk
from dcp_plugin.core.paths import Where
from dcp_plugin.core.saving import queue
from tests import programs
from tests.compare import assert_same, assert_saved
from tests.damage import bad_disk, raising
from tests.launch import on_ranks
from tests.layouts import build, train, whole_state
from tests.limits import HANG
from tests.memory import extra_peak
from tests.places import names_in
from tests.slowness import Gate, slow_writes


@on_ranks(2)
def test_each_background_save_equals_the_state_at_its_call(place: Where) -> None:
    gates = {str(step): threading.Event() for step in range(1, 4)}

    def slow(event: events.Event) -> None:
        if isinstance(event, events.BytesWritten):
            assert gates[event.path.name].wait(HANG)

    unsubscribe = events.subscribe(slow)
    ours = dcp.Checkpointer(async_save=True)
    model, optimizer = build("fsdp2")
    expected = []
    for step in range(1, 4):
        train(model, optimizer, 1, seed=step)
        expected.append(whole_state(model, optimizer))
        handle = ours.save({"model": model, "optim": optimizer, "extra": {"step": step}}, place / str(step), step)
        assert handle.staged() and not handle.done()
        train(model, optimizer, 2, seed=step)  # collectives of the trainer, while the save is held back
        assert uncommitted_reason(place / str(step))
        gates[str(step)].set()
    ours.close()
    unsubscribe()
    for step, state in enumerate(expected, 1):
        other, fresh = build("fsdp2", seed=4)
        extra: dict[str, int] = {}
        dcp.load({"model": other, "optim": fresh, "extra": extra}, place / str(step))
        assert_same(whole_state(other, fresh), state)
        assert extra["step"] == step


def test_the_host_copy_is_reused_grown_shrunk_and_freed_and_ties_are_kept(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(50, 50), "b": torch.nn.Linear(50, 50)})
    model["b"].weight = model["a"].weight
    ours = dcp.Checkpointer(async_save=True)
    pool = ours._writer.pool

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


@on_ranks(2)
def test_events_tell_each_ranks_share(tmp_path: Path) -> None:
    seen: list[events.Event] = []
    events.subscribe(seen.append)
    model, optimizer = build("fsdp2")
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "ck", step=5)
    assert isinstance(seen[0], events.SaveStarted) and seen[0].step == 5
    assert isinstance(seen[-1], events.SaveFinished) and seen[-1].bytes > 0
    written = [event for event in seen if isinstance(event, events.BytesWritten)]
    assert written[-1].written == written[-1].total
    files = [name for name in (tmp_path / "ck").iterdir() if name.name.startswith(f"__{dist.get_rank()}_")]
    assert seen[-1].bytes == sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("fails", [False, True])
def test_a_program_that_does_not_wait_ends_when_the_save_is_on_disk_and_says_so(tmp_path: Path, fails: bool) -> None:
    program = """
        import sys, time, torch, dcp_plugin as dcp
        from dcp_plugin import events

        def slowly(event):
            if isinstance(event, events.SaveStarted):
                time.sleep(1.0)  # the main thread has ended by now

        events.subscribe(slowly)
        if int(sys.argv[2]):
            from tests.damage import fill_disk

            fill_disk(None)
        dcp.Checkpointer(async_save=True).save({"w": torch.ones(1 << 20)}, sys.argv[1])
    """
    ended = programs.run("-c", program, tmp_path / "ck", int(fails))
    assert ended.returncode == 0
    assert f"the program ends while {tmp_path / 'ck'} is being saved" in ended.stderr
    assert ("was NOT saved, and the program ended without waiting for the save" in ended.stderr) == fails
    assert ("disk full" in ended.stderr) == fails
    assert (dcp.latest(tmp_path) is None) == fails
    if not fails:
        assert dcp.verify(tmp_path / "ck").ok


def test_a_second_thread_is_told_and_changes_nothing(tmp_path: Path) -> None:
    ours = dcp.Checkpointer(async_save=True)
    entered, go_on = threading.Event(), threading.Event()

    def hold(directory: Path) -> None:
        entered.set()
        assert go_on.wait(HANG)

    first = threading.Thread(target=ours.save, args=({"n": 1}, tmp_path / "first"), kwargs={"files": hold})
    first.start()
    assert entered.wait(HANG)
    for call in (lambda: ours.save({"n": 2}, tmp_path / "second"), ours.wait, ours.close):
        with pytest.raises(dcp.CheckpointError, match="another thread is in a call of the same Checkpointer"):
            call()
    go_on.set()
    first.join()
    ours.save({"n": 3}, tmp_path / "third")
    ours.close()
    assert names_in(tmp_path) == ["first", "third"]


def test_a_save_from_within_a_save_is_refused_and_fails_that_one(tmp_path: Path) -> None:
    ours = dcp.Checkpointer()
    with pytest.raises(dcp.CheckpointError, match=r"inner during the save of .*outer"):
        ours.save({"n": 1}, tmp_path / "outer", files=lambda directory: ours.save({"n": 2}, tmp_path / "inner"))
    ours.save({"n": 1}, tmp_path / "after")
    assert names_in(tmp_path) == ["after"]


def test_a_subscriber_that_would_wait_for_its_own_save_is_refused(tmp_path: Path) -> None:
    ours = dcp.Checkpointer(async_save=True)
    dcp.save({"n": 0}, tmp_path / "old")
    begun = threading.Event()
    refused: list[str] = []

    def call_back(event: events.Event) -> None:
        assert begun.wait(HANG)
        calls = {
            "save": lambda: ours.save({"n": 2}, tmp_path / "inner"),
            "load": lambda: ours.load({"n": 0}, tmp_path / "old"),
            "remove": lambda: ours.remove(tmp_path / "ck"),
            "handle": lambda: handle.wait(),
            "wait": ours.wait,
            "close": ours.close,
        }
        for name, call in calls.items():
            with pytest.raises(dcp.CheckpointError, match="this is a subscriber of events"):
                call()
            refused.append(name)

    unsubscribe = events.subscribe(call_back)
    handle = ours.save({"t": torch.ones(10)}, tmp_path / "ck")
    begun.set()
    handle.wait(HANG)
    unsubscribe()
    ours.close()
    assert len(refused) == 3 * 6, "at the start, at the bytes and at the end"
    assert names_in(tmp_path) == ["ck", "old"]


def test_a_save_interrupted_as_its_thread_starts_keeps_its_host_copy(tmp_path: Path, monkeypatch: Any) -> None:
    start = threading.Thread.start
    gate = Gate()
    gate.close()

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == queue.THREAD:
            assert begun.wait(HANG)
            raise KeyboardInterrupt

    begun = threading.Event()

    def hold() -> None:
        begun.set()
        gate()

    ours = dcp.Checkpointer(async_save=True, reuse=False)
    tensor = torch.ones(1000)
    with slow_writes(hold):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ours.save({"t": tensor}, tmp_path / "interrupted")
        gate.open_soon()
        tensor.zero_()
        ours.save({"t": tensor}, tmp_path / "next")  # waits for the one that goes on, and takes its host copy then
    ours.close()
    assert_saved(tmp_path / "interrupted", {"t": torch.ones(1000)})
    assert_saved(tmp_path / "next", {"t": torch.zeros(1000)})


def test_a_copied_checkpointer_has_no_saves_in_flight(tmp_path: Path) -> None:
    ours = dcp.Checkpointer(async_save=True)
    handle = ours.save({"n": 1}, tmp_path / "ck")
    handle.wait(HANG)
    copied = copy.deepcopy(dcp.Checkpointer(async_save=True))
    copied.save({"n": 1}, tmp_path / "copied")
    copied.close()
    assert copy.deepcopy(ours._queue).handles == []
    ours.close()


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Ctrl-C again and again, each of which counts once the event is set: one that comes just before a wait begins is
    not seen by it."""
    armed, stop = threading.Event(), threading.Event()

    def interrupt(*_: object) -> None:
        if armed.is_set():
            armed.clear()
            raise KeyboardInterrupt

    def send() -> None:
        while not stop.wait(0.05):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before, sender = signal.signal(signal.SIGINT, interrupt), threading.Thread(target=send)
    sender.start()
    try:
        yield armed
    finally:
        stop.set()
        sender.join()
        signal.signal(signal.SIGINT, before)


def test_an_interrupted_wait_does_not_take_the_save_for_ended(tmp_path: Path) -> None:
    gate = Gate()
    gate.close()
    ours = dcp.Checkpointer(async_save=True, reuse=False)
    tensor = torch.ones(1000)
    with slow_writes(gate), _interrupts() as armed:
        handle = ours.save({"t": tensor}, tmp_path / "first")

        def wait() -> None:
            armed.set()
            ours.wait()

        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                wait()
        gate.open_soon()
        tensor.zero_()
        ours.save({"t": tensor}, tmp_path / "second")
        assert handle.done()
    ours.close()
    assert_saved(tmp_path / "first", {"t": torch.ones(1000)})
    assert_saved(tmp_path / "second", {"t": torch.zeros(1000)})


def test_a_forked_process_is_told_that_the_save_is_its_parents(tmp_path: Path) -> None:
    gate = Gate()
    gate.close()
    ours = dcp.Checkpointer(async_save=True)
    with slow_writes(gate):
        handle = ours.save({"n": 1}, tmp_path / "ck")
        fork = multiprocessing.get_context("fork")
        said = fork.SimpleQueue()

        def wait_and_save() -> None:
            events._subscribers.clear()
            try:
                handle.wait()
            except dcp.SaveFailed as error:
                said.put(str(error))
            with closing(dcp.Checkpointer(async_save=True)) as own:
                own.save({"n": 2}, tmp_path / "child")

        child = fork.Process(target=wait_and_save)
        child.start()
        child.join(HANG)
        child.kill()
        gate.open()
        ours.close()
    parent = f"the process from which this process was forked is saving {tmp_path / 'ck'}"
    assert said.get() == f"{parent}; only that process can wait for the save"
    assert dcp.verify(tmp_path / "ck").ok and dcp.verify(tmp_path / "child").ok


@on_ranks(2)
def test_a_checkpointer_that_a_fork_inherits_refuses_to_save_and_closes_at_once(tmp_path: Path) -> None:
    ours = dcp.Checkpointer(async_save=True)
    ours.save({"n": 1}, tmp_path / "ck").wait()
    fork = multiprocessing.get_context("fork")
    said = fork.SimpleQueue()

    def save_and_close() -> None:
        try:
            ours.save({"n": 3}, tmp_path / "child")
        except dcp.CheckpointError as error:
            said.put(str(error))
        ours.close()

    child = fork.Process(target=save_and_close)
    child.start()
    child.join(HANG)
    child.kill()
    assert child.exitcode == 0
    assert f"belongs to process {os.getpid()}" in said.get()
    ours.save({"n": 2}, tmp_path / "ck").wait()
    ours.close()


def test_ctrl_c_in_a_blocking_save_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(event: events.Event) -> None:
        raise KeyboardInterrupt

    unsubscribe = events.subscribe(interrupt)
    ours = dcp.Checkpointer()
    with pytest.raises(KeyboardInterrupt):
        ours.save({"n": 1}, tmp_path / "ck")
    unsubscribe()
    assert list(tmp_path.iterdir()) == []
    ours.save({"n": 1}, tmp_path / "ck")


def test_a_checkpointer_that_is_not_closed_is_told_of_as_an_open_file_is(tmp_path: Path) -> None:
    def save_in_the_background() -> dcp.Checkpointer:
        ours = dcp.Checkpointer(async_save=True)
        ours.save({"w": torch.ones(1000)}, tmp_path / "ck")
        ours.wait()
        return ours

    save_in_the_background().close()
    dcp.Checkpointer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match=r"io\.threads"):
            dcp.Checkpointer(io={"threads": 0})
        save_in_the_background()
        gc.collect()
    mine = [one.category for one in caught if "Checkpointer" in str(one.message)]  # not what other tests have left
    assert mine == [ResourceWarning], [str(one.message) for one in caught]
    assert "bytes of host memory: close()" in str(caught[0].message)


@on_ranks(2)
def test_a_checkpointer_that_is_not_closed_is_told_of_on_every_rank(tmp_path: Path) -> None:
    for close in (True, False):
        ours = dcp.Checkpointer()
        ours.save({"w": torch.ones(3)}, tmp_path / "ck")
        if close:
            ours.close()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del ours
            gc.collect()
        assert ["process group" in str(warning.message) for warning in caught] == [True] * (not close)
    dcp.save({"w": torch.ones(3)}, tmp_path / "ck")  # on all ranks still


def test_callbacks_of_a_handle_follow_the_publish_in_order_and_come_before_the_end(tmp_path: Path) -> None:
    gate = Gate()
    gate.close()
    ours = dcp.Checkpointer(async_save=True)
    told: list[str] = []

    def note(name: str) -> Callable[[events.SaveFinished], None]:
        return lambda event: told.append(f"{name} {event.step} {handle.done()} {dcp.latest(tmp_path) == event.path}")

    def wait_for_it(event: events.SaveFinished) -> None:
        handle.wait()

    with slow_writes(gate):
        handle = ours.save({"t": torch.ones(1000)}, tmp_path / "ck", 5)
        for callback in (note("second"), wait_for_it, note("third")):
            handle.on_published(callback)
        handle.on_published(note("first"), first=True)
        assert handle.finished is None and told == []
        gate.open()
        handle.wait()
    assert told == [f"{name} 5 False True" for name in ("first", "second", "third")]
    assert handle.finished is not None and handle.finished.step == 5
    handle.on_published(note("at once"))
    assert told[-1] == "at once 5 True True"
    ours.close()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("a fault")], ids=str)
def test_the_traceback_of_a_failed_save_shows_where_it_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail_to_create(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(LocalDisk, "create", fail_to_create)
    with closing(dcp.Checkpointer(async_save=True)) as checkpointer:
        checkpointer.save({"x": torch.ones(3)}, tmp_path / "step-1")
        with pytest.raises(dcp.CheckpointError) as raised:
            checkpointer.wait()
    shown = "".join(traceback.format_exception(raised.value))
    assert "test_the_traceback_of_a_failed_save" in shown
    assert "saving/job.py" not in "".join(traceback.format_tb(raised.value.__traceback__))
    assert "fail_to_create" in shown, "what failed is in it"
    assert ("in _create" in shown or "job.py" in shown) == isinstance(error, RuntimeError), "a fault has all its frames"


def test_nothing_follows_a_save_that_failed(tmp_path: Path) -> None:
    def disk_full() -> None:
        gate()
        raise OSError("disk full")

    gate = Gate()
    gate.close()
    ours = dcp.Checkpointer(async_save=True)
    told: list[events.SaveFinished] = []
    with bad_disk(disk_full):
        handle = ours.save({"t": torch.ones(1000)}, tmp_path / "ck")
        handle.on_published(told.append)
        gate.open()
        with pytest.raises(dcp.SaveFailed, match="disk full"):
            handle.wait()
    handle.on_published(told.append)
    assert told == [] and handle.finished is None
    ours.close()


def test_a_with_block_ends_when_its_saves_are_published(tmp_path: Path) -> None:
    gate = Gate(is_open=False)
    with slow_writes(gate), dcp.Checkpointer(async_save=True) as ours:
        handle = ours.save({"t": torch.ones(1000)}, tmp_path / "ck")
        gate.open_soon()
    assert handle.done() and dcp.verify(tmp_path / "ck").ok and not ours._writer.holdings()


@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt()])
@pytest.mark.parametrize("disk", ["good", "bad"])
def test_the_exception_of_a_with_block_stays_the_exception(tmp_path: Path, error: BaseException, disk: str) -> None:
    fail = raising(OSError("disk full")) if disk == "bad" else lambda: None

    def train() -> None:
        with bad_disk(fail), dcp.Checkpointer(async_save=True) as ours:
            ours.save({"t": torch.ones(1000)}, tmp_path / "ck")
            raise error

    with pytest.raises(type(error)) as caught:
        train()
    notes = caught.value.__dict__.pop("__notes__", [])
    assert ["disk full" in note for note in notes] == [True] * (disk == "bad")
    assert (tmp_path / "ck").exists() == (disk == "good")


def test_a_with_block_raises_the_failure_of_its_save(tmp_path: Path) -> None:
    def train() -> None:
        with bad_disk(raising(OSError("disk full"))), dcp.Checkpointer(async_save=True) as ours:
            ours.save({"t": torch.ones(1000)}, tmp_path / "ck")

    with pytest.raises(dcp.SaveFailed, match="disk full"):
        train()


@pytest.mark.parametrize(("in_background", "cores", "files"), [(True, 1, 1), (True, 2, 1), (True, 4, 3), (False, 2, 3)])
def test_a_background_save_leaves_a_core_to_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool, cores: int, files: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    with dcp.Checkpointer(async_save=in_background, io={"threads": 3}) as checkpointer:
        checkpointer.save({str(number): torch.randn(1 << 19) for number in range(6)}, tmp_path / "step")
    assert len(list((tmp_path / "step").glob("*.distcp"))) == files  # each thread writes one file
