"""Faults inside of a keeper: Python imports this module at the start of each process that has its folder in its path.

``TEST_IN_KEEPER`` names a folder. ``HOST.clock`` in it has the seconds by which the clock of a host is off, and is read
at each look at the clock. ``HOST.stop`` has a number: the keeper stops itself (SIGSTOP) at that call of a function
of the modules of its stages, in the threads that work on saves, and leaves ``HOST.stopped``.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

FOLDER = "TEST_IN_KEEPER"
_STAGES = ("coordinator.py", "node.py", "journal.py", "commit.py", "stream_copy.py")


def set_clock(folder: Path) -> None:
    """Have this process read the time from the clock of its host."""
    right, offset = time.time, folder / f"{socket.gethostname()}.clock"

    def wrong() -> float:
        with suppress(FileNotFoundError, ValueError):  # it is being written
            return right() + float(offset.read_text())
        return right()

    time.time = wrong


def _stop_at(number: int, left: Path) -> None:
    count = itertools.count(1)

    def called(frame: FrameType, event: str, argument: object) -> None:
        file = Path(frame.f_code.co_filename)
        is_at_work = threading.current_thread().name.startswith("keeper-") and file.name in _STAGES
        if event == "call" and is_at_work and next(count) == number:
            left.write_text(f"{file.name}: {frame.f_code.co_name}")
            left.with_suffix(".stop").unlink()  # the keeper that takes its place is not stopped
            os.kill(os.getpid(), signal.SIGSTOP)

    threading.setprofile(called)


if FOLDER in os.environ:
    _folder = Path(os.environ[FOLDER])
    set_clock(_folder)
    with suppress(FileNotFoundError):
        if "dcp_plugin.tiers" in sys.orig_argv:
            _stop = _folder / f"{socket.gethostname()}.stop"
            _stop_at(int(_stop.read_text()), _stop.with_suffix(".stopped"))
