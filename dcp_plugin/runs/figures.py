"""What each save of a run has cost: a small file of JSON lines in the workspace beside its checkpoints.

Rank 0 appends a line when a save is published or has failed; the keeper does where there is one. A line has the fields
of the event (:mod:`dcp_plugin.events`; ``bytes`` and ``bytes_reused`` are those of all ranks), the metrics, the run and
the save that it is of, and a column for each figure that ranks have. Only the newest are kept, whatever becomes of the
checkpoints. What cannot be written is left: no save depends on it. A line that cannot be read counts as not being
there. The file's name does not end as those of the records of saves do, which are swept.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, cast

from dcp_plugin import events
from dcp_plugin.media import medium_of, workspace_of, workspaces_of
from dcp_plugin.media.disk import posix
from dcp_plugin.paths import ObjectPath, Where
from dcp_plugin.storage.writer import Spent, WrittenPart

logger = logging.getLogger("dcp_plugin")

NAME = "saves.figures"
MOST_SAVES = 2000
_SLACK = 200
"""Lines that may be more, so that the file need not be written anew with every save."""
_MOST_BYTES = 8 << 20
_MOST_IN_STORE = 256 << 10
"""Bytes: there it is written anew with every save."""
COLUMNS = ("blocked_seconds", "staging_seconds", "write_seconds", "bytes", "bytes_reused")
"""Of each rank."""

_sizes: dict[Path, tuple[int, int]] = {}
"""Lines and bytes of the files that this process has written."""


@functools.cache
def run_of(process: int) -> str:
    """Stands for the run of this process.

    Args:
        process: Its ID: one that was forked is another run.
    """
    return uuid.uuid4().hex[:12]


@dataclass(frozen=True)
class SaveFigures:
    """What is noted of one save."""

    event: events.SaveFinished | events.SaveAborted
    """As rank 0 tells it."""
    save: str
    """Stands for it: a later line about the same save counts."""
    run: str
    metrics: Mapping[str, float]
    ranks: Sequence[tuple[Spent, int, int]] = ()
    """Of each: what it has spent, the bytes that it has written, and those that it has linked instead."""

    @classmethod
    def of_parts(
        cls, event: events.SaveFinished, save: str, run: str, metrics: Mapping[str, float], parts: Sequence[WrittenPart]
    ) -> SaveFigures:
        """Of a save that is published; the event's bytes become those of all ranks."""
        ranks = [(part.spent, part.nbytes, part.bytes_reused) for part in parts]
        written, reused = sum(part.nbytes for part in parts), sum(part.bytes_reused for part in parts)
        return cls(replace(event, bytes=written, bytes_reused=reused), save, run, metrics, ranks)

    def line(self) -> bytes:
        told = events.as_json(self.event)
        told |= {"path": self.event.path.name, "run": self.run, "save": self.save}
        told["place"] = "store" if isinstance(self.event.path, ObjectPath) else "disk"
        told["metrics"] = {name: value if isfinite(value) else str(value) for name, value in self.metrics.items()}
        if isinstance(self.event, events.SaveFinished):
            told["ranks"] = self._columns(self.event)
        return json.dumps(told).encode() + b"\n"

    def _columns(self, event: events.SaveFinished) -> dict[str, list[float]]:
        rows = [
            (
                round(event.blocked_seconds if spent.blocked_seconds is None else spent.blocked_seconds, 4),
                round(spent.staging_seconds, 4),
                round(spent.write_seconds, 4),
                written,
                reused,
            )
            for spent, written, reused in self.ranks
        ]
        return dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))


def note(figures: SaveFigures) -> None:
    """Append the line of a save; of one that failed, where there are lines already.

    What goes wrong with that is not the save's failure.
    """
    file: Where = workspace_of(cast(Path, figures.event.path)) / NAME
    try:
        if isinstance(figures.event, events.SaveAborted) and not _read(file):
            return  # a save that fails leaves nothing where nothing was
        if isinstance(file, Path):
            _append(file, figures.line())
        else:
            _put(file, figures.line())
    except OSError as error:
        logger.debug("figures of %s cannot be noted in %s: %s", figures.event.path, file, error)


def _append(file: Path, line: bytes) -> None:
    posix.make_directories(file.parent)
    posix.refuse_link(file.parent)
    if file not in _sizes or len(_sizes) > 64:
        _sizes.clear()
        there = _read(file)
        _sizes[file] = there.count(b"\n"), len(there)
        line = b"\n" + line if there and not there.endswith(b"\n") else line  # somebody died while writing
    with open(posix.open_own(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as end:
        end.write(line)  # one write: who shares the file does not cut a line
    lines, nbytes = _sizes[file]
    _sizes[file] = lines + 1, nbytes + len(line)
    if lines + 1 > MOST_SAVES + _SLACK or nbytes + len(line) > _MOST_BYTES:
        kept = newest_lines(_read(file), _MOST_BYTES // 2)
        medium_of(file).note(file, kept)
        _sizes[file] = kept.count(b"\n"), len(kept)


def _put(file: Where, line: bytes) -> None:
    medium_of(file).note(file, newest_lines(_read(file) + line, _MOST_IN_STORE))


def newest_lines(data: bytes, most_bytes: int) -> bytes:
    """The last lines of these: as many as are to be kept, and within so many bytes."""
    lines = data.splitlines(keepends=True)[-MOST_SAVES:]
    left = len(lines)
    while left and most_bytes >= len(lines[left - 1]):
        left -= 1
        most_bytes -= len(lines[left])
    return b"".join(lines[left:] or lines[-1:])


def _read(file: Where) -> bytes:
    try:
        with medium_of(file).open(file.parent).open(NAME) as found:
            data: bytes = found.read(2 * _MOST_BYTES)
            return data
    except OSError:
        return b""


def read(folder: Where) -> list[dict[str, Any]]:
    """What was noted of the saves of the checkpoints in a folder, oldest first; nothing of it is validated.

    Of several lines about one save the last counts.
    """
    found: dict[object, dict[str, Any]] = {}
    data = b"\n".join(_read(workspace / NAME) for workspace in workspaces_of(cast(Path, folder / NAME)))
    for number, line in enumerate(data.splitlines()):
        with suppress(ValueError, RecursionError):
            told = json.loads(line)
            if isinstance(told, dict):
                save = told.get("save")
                found[save if isinstance(save, str) and save else number] = told
    return list(found.values())


def this_run() -> str:
    """Stands for the run of this process."""
    return run_of(os.getpid())
