"""Ctrl-C at any moment of a save: it is raised, and no thread, lock or folder of the save stays."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_plugin as dcp
from dcp_plugin.interrupts import interrupts_held
from dcp_plugin.media import lease
from dcp_plugin.media.disk import commit, posix
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


MOMENTS: dict[str, tuple[Any, str]] = {
    "the heartbeat starts": (lease, "start_heartbeat"),
    "others are swept": (commit, "_records"),
    "the directory is made": (os, "mkdir"),
    "the record is written": (commit, "_note_in_record"),
    "the name is taken": (commit, "_take_name"),
    "the files are deleted": (posix.NamedFolder, "delete"),
    "the descriptor is closed": (posix.Folder, "close"),
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_leaves_no_thread_no_descriptor_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, after: bool
) -> None:
    owner, name = MOMENTS[moment]
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

    state = {"t": torch.ones(1000)}
    dcp.save(state, tmp_path / "ck")
    descriptors, threads = os.listdir("/proc/self/fd"), threading.active_count()
    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        dcp.save(state, tmp_path / "ck")
    dcp.save(state, tmp_path / "ck")
    gc.collect()  # the error has the frames in which it was raised
    assert is_tidy(tmp_path) and dcp.verify(tmp_path / "ck").ok
    assert threading.active_count() == threads and len(os.listdir("/proc/self/fd")) == len(descriptors)
