"""Blocks of code without interruptions: SIGINT is held back, or the garbage collector is paused.

No other module holds SIGINT back or pauses the collector.
"""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold SIGINT back in the main thread, and deliver it to the handler of the user when the block ends.

    The block must not wait: no collective, no start of a process, no file on a network. In another thread this has no
    effect, since Python raises KeyboardInterrupt only in the main thread.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    arrived: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector.

    Saves and loads make many small objects, none of which is garbage. Repeated collections would take most of the time
    of a checkpoint with small tensors. A background thread may use this only for about as long as it takes to open a
    checkpoint, since training makes garbage meanwhile.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
