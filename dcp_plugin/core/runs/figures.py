"""Figures of the saves of a run: JSON lines in the workspace next to its checkpoints.

The rule: no save depends on figures. Errors are logged, and lines that cannot be read are ignored.

Rank 0, or its keeper, records each save that is published or has failed. A line has the fields of the event
(:mod:`dcp_plugin.core.events`; ``bytes`` and ``bytes_reused`` of all ranks), the metrics, the run, the save, and a
column for each figure of the ranks. The newest lines stay when checkpoints are deleted.

On a disk, a save appends a line to one file. A store cannot append: each save puts an object, and :func:`compact` joins
the objects. Their names do not end like those of the records of saves, which saves delete.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import astuple
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dcp_plugin.core import events
from dcp_plugin.core.errors import logger
from dcp_plugin.core.format import json_object
from dcp_plugin.core.media import Readable, medium_of, workspace_in, workspace_of, workspaces_in
from dcp_plugin.core.media.disk import posix
from dcp_plugin.core.paths import Where, on_file_system, place_of

if TYPE_CHECKING:
    from dcp_plugin.core.records import WrittenPart

SUFFIX = ".figures"
NAME = f"saves{SUFFIX}"
MOST_SAVES = 2000
_SLACK = 200
"""Lines above :data:`MOST_SAVES` at which a save shortens the file: one save in so many rewrites it."""
_MOST_BYTES = 8 << 20
_STREAMS = 16
_AT_END = os.O_WRONLY | os.O_APPEND | os.O_CREAT
COLUMNS = ("blocked_seconds", "staging_seconds", "write_seconds", "bytes", "bytes_reused")
"""Names of the figures of each rank: the fields of :class:`~dcp_plugin.core.records.Spent`, then bytes."""

_LOADED = uuid.uuid4().hex[:12]
_lines: dict[Path, int] = {}
"""Numbers of lines of the files that this process has written."""


def this_run() -> str:
    """Return the identity of this process's run. A forked process is another run."""
    return f"{_LOADED}-{os.getpid()}"


def costs_of(parts: Sequence[WrittenPart]) -> dict[str, list[float | None]]:
    """Return the costs of a save on each rank, a column for each of :data:`COLUMNS`."""
    costs = [(*astuple(part.spent), part.nbytes, part.bytes_reused) for part in parts]
    return {name: [cost[number] for cost in costs] for number, name in enumerate(COLUMNS)}


@functools.cache
def subscribe() -> None:
    """Record the saves of this process from now on."""
    events.subscribe(note)


def note(event: events.Event) -> None:
    """Record the figures of a save that has ended. Log errors.

    A failed save is recorded only if the workspace has figures already.
    """
    if not isinstance(event, events.SaveFinished | events.SaveAborted) or (record := event.record) is None:
        return
    workspace: Where = workspace_of(cast(Path, event.path))
    if isinstance(event, events.SaveAborted) and not _read(workspace):
        return
    line = _line(_values(event, record))
    try:
        if (folder := on_file_system(workspace)) is not None:
            _append(folder, line)
        else:
            medium_of(workspace).note(workspace / f"{record.save}{SUFFIX}", line)
    except OSError as error:
        logger.debug("figures cannot be noted in %s: %s", workspace, error)


def _values(event: events.SaveFinished | events.SaveAborted, record: events.SaveRecord) -> dict[str, Any]:
    values = events.as_json(event)
    values |= {"path": event.path.name, "run": record.run, "save": record.save, "place": place_of(event.path)}
    values["metrics"] = {name: value if isfinite(value) else str(value) for name, value in record.metrics.items()}
    if isinstance(event, events.SaveFinished):
        ranks = {
            name: [round(event.blocked_seconds if value is None else value, 4) for value in column]
            for name, column in record.ranks.items()
        }
        values |= {"ranks": ranks, "bytes": sum(ranks["bytes"]), "bytes_reused": sum(ranks["bytes_reused"])}
    return values


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _append(workspace: Path, line: bytes) -> None:
    posix.make_directories(workspace)
    file = workspace / NAME
    if file not in _lines:
        data = _read(workspace).get(NAME, b"")
        _lines[file] = data.count(b"\n")
        # A process that died during a write has left a line without an end: this line must not be joined to it.
        line = b"\n" + line if data and not data.endswith(b"\n") else line
    with posix.OwnFolder(workspace) as folder, open(folder.open(NAME, _AT_END), "ab") as end:
        end.write(line)  # a single write: lines of other processes do not mix with it
        nbytes = end.tell()
    _lines[file] += 1
    if _lines[file] > MOST_SAVES + _SLACK or nbytes > _MOST_BYTES:
        newest = newest_lines(_read(workspace).get(NAME, b""), _MOST_BYTES // 2)
        medium_of(file).note(file, newest)
        _lines[file] = newest.count(b"\n")


def newest_lines(data: bytes, most_bytes: int) -> bytes:
    """Return at most the last :data:`MOST_SAVES` lines that fit into ``most_bytes``; the last line in any case."""
    lines = data.splitlines(keepends=True)[-MOST_SAVES:]
    sizes = itertools.accumulate(len(line) for line in reversed(lines))
    count = sum(size <= most_bytes for size in sizes)
    return b"".join(lines[-max(1, count) :])


def compact(folder: Where) -> None:
    """Join the objects that saves have written for the checkpoints in a folder of a store. Log errors.

    The joined object has a new name, and only the objects that were read are deleted. Two processes may therefore
    compact at the same time: no object of the other, and none that a save has written since, is deleted.
    """
    workspace = workspace_in(folder)
    objects = _read(workspace)
    if len(objects) < 2:
        return
    joined = newest_lines(b"".join(map(_line, _parsed(objects.values()))), _MOST_BYTES)
    try:
        medium_of(workspace).note(workspace / f"{uuid.uuid4()}{SUFFIX}", joined, [workspace / name for name in objects])
    except OSError as error:
        logger.debug("figures in %s cannot be compacted: %s", workspace, error)


def read(*folders: Where) -> list[dict[str, Any]]:
    """Return the lines about the saves of the checkpoints in folders, oldest first. Their values are not validated.

    The newest of several lines about the same save counts.
    """
    return _parsed(data for folder in folders for place in workspaces_in(folder) for data in _read(place).values())


def _parsed(contents: Iterable[bytes]) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for line in b"\n".join(contents).splitlines():
        with suppress(ValueError):
            lines.append(json_object(line, _MOST_BYTES))
    lines.sort(key=lambda values: time if isinstance(time := values.get("time"), int | float) else 0.0)
    by_save: dict[object, dict[str, Any]] = {}
    for number, values in enumerate(lines):
        save = values.get("save")
        by_save[save if isinstance(save, str) and save else number] = values
    return list(by_save.values())


def _read(workspace: Where) -> dict[str, bytes]:
    """Return the contents of the files with figures, by name; without unreadable files."""
    with suppress(OSError), closing(medium_of(workspace).open(workspace, pin=True)) as files:
        names = [name for name in files.names() if name.endswith(SUFFIX)]
        with ThreadPoolExecutor(_STREAMS, thread_name_prefix="dcp-figures") as pool:
            contents = pool.map(lambda name: _content(files, name), names)
            return {name: data for name, data in zip(names, contents, strict=True) if data}
    return {}


def _content(files: Readable, name: str) -> bytes:
    with suppress(OSError), files.open(name) as file:
        return file.read(2 * _MOST_BYTES)
    return b""
