"""How the runs of a job have ended: a small file in the workspace beside its checkpoints, kept by rank 0.

Each run has an entry: for how long it has trained, as of its last save, and how it has ended. A run that is still
noted as open when another one begins, and whose process is not known to be alive, has ended without saying goodbye.
What cannot be read counts as not being there, and what cannot be written is left: nothing depends on this but how
often saves are proposed. The file's name does not end as those of the records of saves do, which are swept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import uuid
from pathlib import Path
from typing import Any, cast

from dcp_plugin.media import medium_of, workspace_of
from dcp_plugin.media.disk import posix
from dcp_plugin.paths import Where
from dcp_plugin.runs.interval import Failures

logger = logging.getLogger("dcp_plugin")

NAME = "training.history"
_MOST_RUNS = 64
_MOST_BYTES = 1 << 16
_OPEN, _CLEAN, LOST = "open", "clean", "lost"

_open_here: set[str] = set()
"""The runs of this process that have not ended."""


class RunHistory:
    """The runs that have saved beside one checkpoint, and this one.

    Args:
        checkpoint: One of the run.
    """

    def __init__(self, checkpoint: Where) -> None:
        self._file: Where = workspace_of(cast(Path, checkpoint)) / NAME  # of its own kind, whichever that is
        self._run = uuid.uuid4().hex
        self._begun = self._told = False
        _open_here.add(self._run)

    def note(self, seconds: float) -> Failures:
        """This run has trained for so long.

        Returns:
            What is known of the failures of all runs, this one included.
        """
        return self._write(seconds, _OPEN)

    def end(self, seconds: float, clean: bool) -> None:
        """This run has ended.

        Args:
            clean: Not by an error.
        """
        self._write(seconds, _CLEAN if clean else LOST)
        _open_here.discard(self._run)

    def _write(self, seconds: float, end: str) -> Failures:
        medium = medium_of(self._file)
        mine = {"run": self._run, "seconds": seconds, "end": end, "machine": _machine(), "pid": os.getpid()}
        runs = [run for run in self._read() if run["run"] != self._run][1 - _MOST_RUNS :]
        if not self._begun:  # and not later: then what is open may be another job that saves here, too
            runs, self._begun = [_as_it_ended(run) for run in runs], True
        try:
            medium.note(self._file, json.dumps({"runs": [*runs, mine]}).encode())
        except OSError as error:
            if not self._told:
                logger.warning("how long this run trains cannot be noted in %s: %s", self._file, error)
            self._told = True
        everything = [*runs, mine]
        return Failures(sum(run["seconds"] for run in everything), sum(run["end"] == LOST for run in everything))

    def _read(self) -> list[dict[str, Any]]:
        return _runs_in(self._file.parent)


def ends_beside(workspace: Where) -> list[str]:
    """How the runs in a history have ended; :data:`LOST` is one that did not say goodbye."""
    return [_as_it_ended(run)["end"] for run in _runs_in(workspace)]


def _runs_in(workspace: Where) -> list[dict[str, Any]]:
    try:
        with medium_of(workspace).open(workspace).open(NAME) as file:
            noted = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return []
    runs = noted.get("runs") if isinstance(noted, dict) else None
    return [run for run in runs if _is_run(run)] if isinstance(runs, list) else []


def _is_run(run: object) -> bool:
    if not isinstance(run, dict) or not isinstance(run.get("run"), str):
        return False
    seconds: object = run.get("seconds")
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool):
        return False
    return math.isfinite(seconds) and seconds >= 0 and run.get("end") in (_OPEN, _CLEAN, LOST)


def _as_it_ended(run: dict[str, Any]) -> dict[str, Any]:
    """An entry that another run has left, as lost if its process is not there any more."""
    if run["end"] != _OPEN or run["run"] in _open_here:
        return run
    pid, machine = run.get("pid"), run.get("machine")
    elsewhere = not machine or machine != _machine() or pid == os.getpid()
    return {**run, "end": LOST} if elsewhere or posix.has_ended(posix.machine(), pid) else run


def _machine() -> str:
    """Tells machines apart, and does not name them: the file may be uploaded with what is beside it."""
    return hashlib.sha256(posix.machine().encode()).hexdigest()[:16] if posix.machine() else ""
