"""Ranks and scripts that die at a chosen moment.

``python tests/dying.py HOW RANK STEP SCRIPT ...`` runs a script, of which one process dies in its first life. It is of
that local rank, and dies in the step after the one that is named, when the checkpoint of that is complete. HOW
is ``killed``, as by ``kill -9``; or the path of a pipe: then it tells the test there, which is going to kill it.
"""

from __future__ import annotations

import itertools
import os
import runpy
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from dcp_plugin import events
from tests.limits import HANG
from tests.slowness import has_ended


def lose(rank: int) -> None:
    """Kill a rank. The others go on when it is dead. Collective."""
    from tests.launch import gathered  # not needed by the script that this module is, too

    pid = gathered(os.getpid())[rank]
    if dist.get_rank() == rank:
        os.kill(pid, signal.SIGKILL)
    has_ended(pid)


def die_at(owner: Any, name: str, after: bool = False) -> None:
    """Have a function kill this process when it is called, before or after it has done its work."""
    real = getattr(owner, name)

    def die(*args: Any, **kwargs: Any) -> None:
        if after:
            real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, die)


def die_when_half_is_written() -> None:
    """Have the next save kill this process when half of its bytes are written."""

    def die(event: events.Event) -> None:
        if isinstance(event, events.BytesWritten) and event.written * 2 >= event.total:
            os.kill(os.getpid(), signal.SIGKILL)

    events.subscribe(die)


def die_after(step: int, how: str) -> None:
    saved = threading.Event()
    steps = itertools.count(1)

    def note(event: events.Event) -> None:
        if isinstance(event, (events.SavedLocally, events.SaveFinished)) and event.step == step:
            saved.set()

    def die(*_: Any) -> None:
        if next(steps) > step:
            assert saved.wait(HANG)
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            Path(how).write_text("now")
            signal.pause()

    events.subscribe(note)
    register_optimizer_step_post_hook(die)


if __name__ == "__main__":
    _, how, rank, step, script, *_ = sys.argv
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["LOCAL_RANK"] == rank:
        die_after(int(step), how)
    sys.argv = sys.argv[4:]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
