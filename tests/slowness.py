"""Makes the parts of a save take as long as a test wants, so that what may overlap does."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dcp_plugin import progress
from dcp_plugin.staging import snapshot
from dcp_plugin.types import Flat


@contextmanager
def slow_copies(before_each: Callable[[], Any]) -> Iterator[None]:
    """Call ``before_each`` before every copy that lazy staging makes later than at the call."""
    copy_one, finish = snapshot._copy_one, snapshot.Snapshot.finish
    later = threading.local()

    def copy_slowly(copy: torch.Tensor, tensor: torch.Tensor) -> None:
        if getattr(later, "copies", False):
            before_each()
        copy_one(copy, tensor)

    def finish_slowly(self: snapshot.Snapshot) -> Flat:
        later.copies = not self.complete
        try:
            return finish(self)
        finally:
            later.copies = False

    snapshot._copy_one, snapshot.Snapshot.finish = copy_slowly, finish_slowly  # type: ignore[method-assign]
    try:
        yield
    finally:
        snapshot._copy_one, snapshot.Snapshot.finish = copy_one, finish  # type: ignore[method-assign]


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
