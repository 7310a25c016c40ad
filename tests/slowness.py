"""Makes the parts of a save take as long as a test wants, so that what may overlap does.

Tests hold a save back with a gate and open it. They wait for no clock: the few delays are made here.
"""

from __future__ import annotations

import os
import random
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dcp_plugin import events
from dcp_plugin.core.staging import snapshot
from tests.limits import HANG


@contextmanager
def slow_copies(before_each: Callable[[], Any]) -> Iterator[None]:
    """Call ``before_each`` before every copy that lazy staging makes later than at the call."""
    copy_later = snapshot._copy_later

    def copy_slowly(copy: torch.Tensor, tensor: torch.Tensor) -> None:
        before_each()
        copy_later(copy, tensor)

    snapshot._copy_later = copy_slowly
    try:
        yield
    finally:
        snapshot._copy_later = copy_later


@contextmanager
def slow_writes(before_each: Callable[[], Any]) -> Iterator[None]:
    """Call ``before_each`` before every piece that is written, in the thread that writes."""

    def wait(event: events.Event) -> None:
        if isinstance(event, (events.SaveStarted, events.BytesWritten)):
            before_each()

    unsubscribe = events.subscribe(wait)
    try:
        yield
    finally:
        unsubscribe()


class Gate:
    """For :func:`slow_writes` and :func:`slow_copies`: holds them back while it is closed."""

    def __init__(self, is_open: bool = True) -> None:
        self._open = threading.Event()
        self.close, self.open = self._open.clear, self._open.set
        if is_open:
            self.open()

    def __call__(self) -> None:
        assert self._open.wait(HANG)

    def open_soon(self) -> None:
        """Open it while the caller waits for what it holds back."""
        threading.Timer(0.2, self.open).start()


class RankGate:
    """Holds a rank until another one opens it. Every rank makes one of the same name."""

    def __init__(self, name: str) -> None:
        self._name = f"gate {name}"
        self._store = dist.distributed_c10d._get_default_store()

    def open(self) -> None:
        self._store.set(self._name, "open")

    def __call__(self) -> None:
        self._store.wait([self._name], timedelta(seconds=HANG))


def has_ended(pid: int) -> None:
    """Wait until a process has ended."""
    descriptor = os.pidfd_open(pid)
    try:
        assert select.select([descriptor], [], [], HANG)[0]
    finally:
        os.close(descriptor)


def pause(seconds: float) -> Callable[..., None]:
    """Sleeps so long, before each save if it is subscribed to events. For what the code under test itself waits for
    in the thread that would have to open a gate, and for code that has none."""

    def wait(event: events.Event | None = None) -> None:
        if event is None or isinstance(event, events.SaveStarted):
            time.sleep(seconds)

    return wait


def at_random(seconds: float, seed: int = 0) -> Callable[[], None]:
    """Sleeps up to so long."""
    generator = random.Random(seed)
    return lambda: time.sleep(generator.random() * seconds)
