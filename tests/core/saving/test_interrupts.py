"""Ctrl-C at any moment of a save: it is raised, and no thread, lock or folder of the save stays."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

import dcp_plugin as dcp
from dcp_plugin.core.interrupts import interrupts_held
from dcp_plugin.core.media import lease
from dcp_plugin.core.media.disk import commit, local_files, posix
from dcp_plugin.core.media.objects import commit as objects
from dcp_plugin.core.media.objects.client import client_of
from dcp_plugin.core.paths import as_path
from dcp_plugin.core.saving.queue import SaveQueue
from dcp_plugin.core.staging.snapshot import HostPool
from dcp_plugin.tiers import locks
from tests.limits import HANG
from tests.places import is_tidy


def test_an_interrupt_is_held_back_and_delivered_to_the_handler_of_the_user() -> None:
    seen: list[str] = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("delivered"))
    handler = signal.getsignal(signal.SIGINT)
    with interrupts_held():
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
        seen.append("the end of the block")
    assert seen == ["the end of the block", "delivered"] and signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, before)


def test_another_thread_holds_nothing_back() -> None:
    def hold() -> None:
        with interrupts_held():
            handlers.append(signal.getsignal(signal.SIGINT))

    handlers: list[Any] = []
    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


@pytest.mark.parametrize("kind", [posix.Folder, local_files.PinnedFiles])
def test_a_closed_directory_is_deleted_without_code_that_would_lose_an_interrupt(kind: Any, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    directory, calls = kind(tmp_path), []
    directory.close()
    assert len(os.listdir("/proc/self/fd")) == before
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code) if event == "call" else None)
    del directory
    sys.setprofile(None)
    assert calls == []


@pytest.mark.parametrize("kind", [posix.Folder, local_files.PinnedFiles])
def test_an_abandoned_directory_is_closed(kind: Any, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    kind(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("is_freed", [True, False])
def test_pinned_memory_is_unregistered_once_when_it_is_freed_or_dropped(
    is_freed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: the calls of CUDA are noted."""
    noted: list[str] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *_: noted.append("register"), cudaHostUnregister=lambda _: noted.append("unregister")
    )
    for name, value in {"cudart": runtime, "check_error": None, "is_initialized": True}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    pool, calls = HostPool(), []
    pool._slabs[False, True].of_size(4096)
    if is_freed:
        pool.free()
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code) if event == "call" else None)
    del pool
    sys.setprofile(None)
    assert noted == ["register", "unregister"] and bool(calls) is not is_freed


MOMENTS: dict[str, tuple[Any, str]] = {
    "the heartbeat starts": (lease, "start_heartbeat"),
    "others are swept": (commit, "_records"),
    "the directory is made": (os, "mkdir"),
    "the record is written": (commit, "_note_in_record"),
    "the name is taken": (commit, "_take_name"),
    "the files are deleted": (posix.NamedFolder, "delete"),
    "the descriptor is closed": (posix.Folder, "close"),
}


def _interrupted_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool) -> None:
    """Ctrl-C before or after the next call of a function."""
    real: Callable[..., Any] = getattr(owner, name)

    def interrupted(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        if not after:
            signal.raise_signal(signal.SIGINT)
        try:
            return real(*args, **options)
        finally:
            if after:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_leaves_no_thread_no_descriptor_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, after: bool
) -> None:
    state = {"t": torch.ones(1000)}
    dcp.save(state, tmp_path / "ck")
    descriptors, threads = os.listdir("/proc/self/fd"), threading.active_count()
    _interrupted_once(monkeypatch, *MOMENTS[moment], after)
    with pytest.raises(KeyboardInterrupt):
        dcp.save(state, tmp_path / "ck")
    dcp.save(state, tmp_path / "ck")
    gc.collect()  # the error has the frames in which it was raised
    assert is_tidy(tmp_path) and dcp.verify(tmp_path / "ck").ok
    assert threading.active_count() == threads and len(os.listdir("/proc/self/fd")) == len(descriptors)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (lease, "start_heartbeat"),
        *((objects, name) for name in ("_begin", "_put_record", "_sweep_beside", "_clean", "_commit", "_let_go")),
    ],
)
def test_ctrl_c_leaves_no_thread_and_no_object_in_a_store(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool
) -> None:
    path = as_path(f"memory://interrupted/{name}-{after}/ck")
    dcp.save({"t": torch.ones(1000)}, path)
    client, threads = client_of(path), threading.active_count()
    _interrupted_once(monkeypatch, owner, name, after)
    with pytest.raises(KeyboardInterrupt):
        dcp.save({"t": torch.ones(1000)}, path)
    dcp.save({"t": torch.ones(1000)}, path)
    gc.collect()  # the error has the frames in which it was raised
    assert threading.active_count() == threads and dcp.verify(path).ok
    keys = [item.key for item in client.below(path.parent.key)]
    assert not [key for key in keys if "/.dcp_plugin/" in key and key.endswith(".json")]


@contextmanager
def _ctrl_c_at(function: Any, number: int) -> Iterator[None]:
    """Ctrl-C as a function comes to its line of this number, in the order of their execution."""
    lines: list[int] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code is not function.__wrapped__.__code__:
            return None
        if event == "line" and frame.f_lineno not in lines:
            lines.append(frame.f_lineno)
            if len(lines) == number:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("number", range(1, 10))
@pytest.mark.parametrize("lock", ["of journals", "of calls"])
def test_ctrl_c_while_a_lock_is_taken_gives_it_back(tmp_path: Path, lock: str, number: int) -> None:
    queue = SaveQueue()
    enter = partial(locks.exclusive, tmp_path) if lock == "of journals" else partial(queue.call, "save")
    with suppress(KeyboardInterrupt), ExitStack() as stack, _ctrl_c_at(enter.func, number):
        stack.enter_context(enter())
    taken: list[bool] = []

    def take() -> None:
        with enter():
            taken.append(True)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join(HANG)
    assert taken


def test_a_forked_process_takes_a_lock_that_a_thread_of_its_parent_has(tmp_path: Path) -> None:
    def take(base: Path) -> None:
        with locks.exclusive(base):
            pass

    with locks.exclusive(tmp_path):
        child = multiprocessing.get_context("fork").Process(target=take, args=(tmp_path / "other",))
        (tmp_path / "other").mkdir()
        child.start()
        child.join(HANG)
    assert child.exitcode == 0
