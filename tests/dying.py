"""``python tests/dying.py HOW RANK STEP SCRIPT ...``: runs a script, of which one process dies in its first life.

It is of that local rank, and dies in the step after the one that is named, when the checkpoint of that is complete. HOW
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

from torch.optim.optimizer import register_optimizer_step_post_hook

from dcp_plugin import events
from tests.limits import HANG


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
