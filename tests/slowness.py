"""Makes the parts of a save take as long as a test wants, so that what may overlap does."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dcp_plugin import progress
from dcp_plugin.staging import snapshot


@contextmanager
def slow_copies(before_each: Callable[[], Any]) -> Iterator[None]:
    """Call ``before_each`` before every copy that lazy staging makes later than at the call."""
    copy = snapshot._Copy
    start = copy.start

    def start_late(self: snapshot._Copy) -> None:
        if self.version is not None:
            before_each()
        start(self)

    copy.start = start_late  # type: ignore[method-assign]
    try:
        yield
    finally:
        copy.start = start  # type: ignore[method-assign]


@contextmanager
def slow_writes(before_each: Callable[[], Any]) -> Iterator[None]:
    """Call ``before_each`` before every piece that is written, in the thread that writes."""

    def wait(event: progress.Event) -> None:
        if isinstance(event, (progress.SaveStarted, progress.BytesWritten)):
            before_each()

    unsubscribe = progress.subscribe(wait)
    try:
        yield
    finally:
        unsubscribe()


def at_random(seconds: float, seed: int = 0) -> Callable[[], None]:
    """Sleeps up to so long."""
    generator = random.Random(seed)
    return lambda: time.sleep(generator.random() * seconds)
