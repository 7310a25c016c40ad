"""Threads of this package use the CUDA device of their caller. A thread starts on device 0, where CUDA takes memory."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

import dcp_plugin as dcp


def test_threads_of_saves_and_loads_take_the_device_of_their_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = set()

    def take(device: int) -> None:
        taken.add((threading.current_thread().name.partition("_")[0], device))

    state = {str(number): torch.randn(1 << 19) for number in range(4)}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", take)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})  # two threads write beside the training
    with dcp.Checkpointer(async_save=True, io={"threads": 2}) as ours:
        for number in range(3):  # from the second on, hashes tell what can be linked
            ours.save(state, tmp_path / str(number)).wait()
    dcp.load(state, tmp_path / "0", io={"threads": 2})
    assert taken == {(name, 3) for name in ("dcp-save", "dcp-write", "dcp-hash", "dcp-read")}
