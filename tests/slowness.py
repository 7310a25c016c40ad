"""Makes the parts of a save take as long as a test wants, so that what may overlap does."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dcp_plugin import events
from dcp_plugin.staging import snapshot


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
    """For :func:`slow_writes`: holds them back while it is closed."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.close, self.open = self._open.clear, self._open.set

    def __call__(self) -> None:
        assert self._open.wait(30)


def at_random(seconds: float, seed: int = 0) -> Callable[[], None]:
    """Sleeps up to so long."""
    generator = random.Random(seed)
    return lambda: time.sleep(generator.random() * seconds)
