"""The one place for what is private in Python itself, with the reason. ``tests/test_torch_canary.py`` watches it."""

from __future__ import annotations

import threading
from collections.abc import Callable


def before_threads_end(work: Callable[[], None]) -> None:
    """Call ``work`` when the program ends, while threads can still be started.

    ``atexit`` comes too late for a save in the background: by then no pool starts a thread any more, and it fails.
    """
    threading._register_atexit(work)  # type: ignore[attr-defined]
