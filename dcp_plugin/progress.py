"""Events of a save: what is written, how much of it, how long it took.

Subscribers are called on every rank, in the thread where the event happens, and must be quick. A subscriber that
raises before the checkpoint is published makes the save fail; after that, its error is logged. The progress line for
people (rank 0) is itself a subscriber.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SaveStarted:
    """The state is gathered; this rank starts to write."""

    path: Path
    step: int | None


@dataclass(frozen=True)
class BytesWritten:
    """``written`` of this rank's ``total`` bytes are handed to the file system."""

    path: Path
    written: int
    total: int


@dataclass(frozen=True)
class SaveFinished:
    """The checkpoint is published. ``bytes`` is what this rank wrote, ``bytes_reused`` what it linked instead;
    ``blocked_seconds`` is what the caller waited."""

    path: Path
    step: int | None
    bytes: int
    seconds: float
    blocked_seconds: float
    bytes_reused: int = 0


Event = SaveStarted | BytesWritten | SaveFinished

_subscribers: list[Callable[[Event], None]] = []
_lock = threading.Lock()


def subscribe(callback: Callable[[Event], None]) -> Callable[[], None]:
    """Call ``callback`` with every event of this process from now on. Returns the function that ends it."""
    with _lock:
        _subscribers.append(callback)

    def unsubscribe() -> None:
        with _lock:
            if callback in _subscribers:
                _subscribers.remove(callback)

    return unsubscribe


def emit(event: Event) -> None:
    """Tell all subscribers, also if one of them raises; then raise that."""
    failure: Exception | None = None
    for callback in tuple(_subscribers):
        try:
            callback(event)
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


@contextmanager
def progress_line(path: Path, wanted: bool) -> Iterator[None]:
    """While active, show the bytes, rate and remaining time of the save to ``path`` once it takes over a second."""
    if not wanted:
        yield
        return
    began = time.monotonic()
    shown = 0.0

    def show(event: Event) -> None:
        nonlocal shown
        if not isinstance(event, BytesWritten) or event.path != path:
            return
        now = time.monotonic()
        if now - began < 1.0 or now - shown < 0.5:
            return
        shown = now
        rate = event.written / (now - began)
        left = (event.total - event.written) / rate if rate else 0.0
        sys.stderr.write(
            f"\rsaving {path.name}: {event.written / 2**20:,.0f} of {event.total / 2**20:,.0f} MiB on rank 0, "
            f"{rate / 2**20:,.0f} MiB/s, {left:.0f} s left "
        )
        sys.stderr.flush()

    unsubscribe = subscribe(show)
    try:
        yield
    finally:
        unsubscribe()
        if shown:
            sys.stderr.write("\n")
