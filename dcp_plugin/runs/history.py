"""Ends of the trainings of a run, as lines in the files of figures in the workspace. Rank 0 writes the lines.

The line of a training has the duration until its last save, and the kind of its end. If the line is still open when
another training begins, and no live process owns it, the training has failed. Lines that cannot be read or written are
ignored: only the proposed interval between saves depends on them.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import Any, cast

from dcp_plugin.media import workspace_of
from dcp_plugin.media.disk import posix
from dcp_plugin.paths import Where
from dcp_plugin.runs import figures
from dcp_plugin.runs.interval import Failures

EVENT = "training"
_OPEN, _CLEAN, LOST = "open", "clean", "lost"

_open_here: set[str] = set()
"""Trainings of this process that have not ended."""


class RunHistory:
    """Trainings that saved to the folder of a checkpoint: earlier ones, and the current one.

    Args:
        checkpoint: A checkpoint of this training.
    """

    def __init__(self, checkpoint: Where) -> None:
        self._workspace: Where = workspace_of(cast(Path, checkpoint))
        self._run = uuid.uuid4().hex
        earlier = trainings_in(figures.read(self._workspace.parent))
        self._earlier = Failures(sum(line["seconds"] for line in earlier), ends_of(earlier).count(LOST))
        _open_here.add(self._run)

    def note(self, seconds: float) -> Failures:
        """Record the duration of this training until now, and return the failures of all trainings."""
        return self._write(seconds, _OPEN)

    def end(self, seconds: float, clean: bool) -> None:
        """Record the end of this training; ``clean``: without an error."""
        self._write(seconds, _CLEAN if clean else LOST)
        _open_here.discard(self._run)

    def _write(self, seconds: float, end: str) -> Failures:
        line = {"event": EVENT, "time": time.time(), "save": f"{EVENT}-{self._run}", "run": self._run}
        line |= {"seconds": seconds, "end": end, "machine": _machine(), "pid": os.getpid()}
        figures.write(self._workspace, self._run, line)
        return Failures(self._earlier.seconds + seconds, self._earlier.count + (end == LOST))


def trainings_in(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the valid lines about trainings."""
    return [line for line in lines if line.get("event") == EVENT and _is_training(line)]


def ends_of(trainings: Iterable[dict[str, Any]]) -> list[str]:
    """Return the kind of the end of each training; :data:`LOST` is a failure."""
    return [_end_of(line) for line in trainings]


def _is_training(line: dict[str, Any]) -> bool:
    seconds = line.get("seconds")
    if type(seconds) not in (int, float) or not isfinite(seconds) or seconds < 0:  # type: ignore[arg-type,operator]
        return False
    return isinstance(line.get("run"), str) and line.get("end") in (_OPEN, _CLEAN, LOST)


def _end_of(line: dict[str, Any]) -> str:
    """Return the kind of the end of a training. An open training has failed if its process has ended."""
    end: str = line["end"]
    if end != _OPEN or line["run"] in _open_here:
        return end
    pid, machine = line.get("pid"), line.get("machine")
    is_elsewhere = not machine or machine != _machine() or pid == os.getpid()
    return LOST if is_elsewhere or posix.has_ended(posix.machine(), pid) else end


def _machine() -> str:
    """Return an identity of this machine that does not reveal its name: users may upload the file."""
    return hashlib.sha256(posix.machine().encode()).hexdigest()[:16] if posix.machine() else ""
