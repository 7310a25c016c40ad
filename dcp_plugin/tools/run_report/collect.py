"""The figures of a run: from its saves and its checkpoints.

The figures and the checkpoints are untrusted. An entry without a number where a number belongs is left out, texts are
cut, and the numbers of ranks, modules and saves are bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, cast

from dcp_plugin.core.errors import CheckpointError, CheckpointNotFound
from dcp_plugin.core.format.summary import decode_metrics
from dcp_plugin.core.media import workspace_of
from dcp_plugin.core.paths import PathLike, StorageOptions, as_path
from dcp_plugin.core.runs import figures
from dcp_plugin.core.runs.catalog import list_checkpoints
from dcp_plugin.core.types import CheckpointState
from dcp_plugin.tools.contents import TensorInfo, inspect

_MOST_NUMBER = 1e18
_LONGEST = 300
"""Characters of a text from a file."""
_MOST_CELLS = 200_000
"""The most ranks times saves in a heat map."""
_SMALLEST_SHARE, _DEEPEST = 0.002, 6
"""The smallest share of all bytes that gives a module an area of its own, and the most levels of modules."""
_COSTS = ("seconds", "blocked_seconds", "staging_seconds", "write_seconds")
_STRAGGLES = 1.5
"""A rank is a straggler from this multiple of the median of all ranks on."""
_NO_METRICS = "No checkpoint has a metric: save(…, metrics={…}) records them; Lightning and Trainers do."
_NO_RANKS = "The figures that are kept say nothing of single ranks."
_NO_FIGURES = (
    "No figures of these saves are kept beside the checkpoints: they were saved by another tool, or the "
    "folder was copied without its .dcp_plugin."
)


@dataclass(frozen=True)
class Save:
    """One save. Seconds and bytes are None for a save of another tool."""

    name: str
    time: float
    """Seconds since the epoch."""
    step: int | None
    training: int
    """The number of the training in the run, from 1 on; 0: unknown."""
    metrics: dict[str, float]
    error: str = ""
    """The reason of a failure; empty if the save was published."""
    seconds: float | None = None
    """Seconds from the call to the publication."""
    blocked_seconds: float | None = None
    staging_seconds: float | None = None
    """The slowest rank's, as is ``write_seconds``."""
    write_seconds: float | None = None
    upload_seconds: float | None = None
    """Seconds of the upload from ``keeper.dir`` to the path."""
    bytes: int | None = None
    bytes_reused: int | None = None
    to_store: bool = False
    """True if the save wrote to a store."""
    ranks: dict[str, list[float]] = field(default_factory=dict)
    """The columns of :data:`dcp_plugin.core.runs.figures.COLUMNS`, with a value for each rank."""


@dataclass(frozen=True)
class Module:
    """A module of the newest checkpoint."""

    id: str
    parent: str
    """The ID of the module that contains it; empty for the root."""
    label: str
    nbytes: int
    """Bytes of the module with all its parts."""


@dataclass(frozen=True)
class Straggler:
    """A rank that writes more slowly than the others."""

    rank: int
    times: float
    """The median of the rank as a multiple of the median of all ranks."""
    slowest: int
    """The number of saves in which it was the slowest rank."""
    of: int
    """The number of all saves."""


@dataclass(frozen=True)
class Trainings:
    """The restarts of a run, and the time that they and the saves took."""

    count: int
    restarts: int
    elapsed_seconds: float
    """Seconds between the first and the last save."""
    waited_seconds: float
    """Seconds of this time that the training waited for saves."""
    lost_seconds: float
    """Seconds between the saves before and after each restart, beyond the usual interval of saves."""

    @property
    def goodput(self) -> float | None:
        """The share of the time in which the training made lasting progress."""
        if self.elapsed_seconds <= 0:
            return None
        return max(0.0, 1.0 - (self.waited_seconds + self.lost_seconds) / self.elapsed_seconds)


@dataclass(frozen=True)
class RunFigures:
    """The contents of a report."""

    root: str
    saves: list[Save]
    """Published and failed ones, oldest first."""
    checkpoints: int
    """The number of complete checkpoints."""
    newest: str
    newest_bytes: int | None
    modules: list[Module]
    stragglers: list[Straggler]
    trainings: Trainings
    missing: dict[str, str] = field(default_factory=dict)
    """The parts of the report without data, with the reasons."""

    @property
    def published(self) -> list[Save]:
        return [save for save in self.saves if not save.error]

    @property
    def timed(self) -> list[Save]:
        """The published saves whose seconds are known."""
        return [save for save in self.published if save.seconds is not None]


def collect(run: PathLike, storage_options: StorageOptions | None = None) -> RunFigures:
    """Return the figures of the run whose checkpoints are at or below ``run``.

    Raises:
        CheckpointNotFound: There is no checkpoint, and no figure of one.
        OSError: The store of a URL cannot be reached.
    """
    root = as_path(run, storage_options)
    states = [state for state in list_checkpoints(root, storage_options) if state.committed]
    folders = {root, *(workspace_of(cast(Path, state.path)).parent for state in states)}
    for folder in folders:
        figures.compact(folder)
    saves = _saves(figures.read(*folders), states)
    if not saves:
        raise CheckpointNotFound(f"there is no checkpoint at or below {root}, and no figure of one")
    newest, nbytes, modules, why = _newest(states, storage_options)
    result = RunFigures(str(root), saves, len(states), newest, nbytes, modules, _stragglers(saves), _trainings(saves))
    return replace(result, missing=_missing(result, why))


def _saves(records: Sequence[dict[str, Any]], states: Iterable[CheckpointState]) -> list[Save]:
    trainings: dict[str, int] = {}
    saves = [save for record in records if (save := _save(record, trainings)) is not None]
    published = {(save.name, save.step) for save in saves if not save.error}
    saves += [
        Save(_text(state.path.name), state.time, state.step, 0, dict(state.metrics))
        for state in states
        if (state.path.name, state.step) not in published
    ]
    return sorted(saves, key=lambda save: save.time)


def _save(record: dict[str, Any], trainings: dict[str, int]) -> Save | None:
    """Return the save of a record; None if the record is of something else."""
    time, failed = _number(record.get("time")), record.get("event") == "failed"
    if time is None or not (failed or record.get("event") == "saved"):
        return None
    run, step = _text(record.get("run")), record.get("step")
    try:
        metrics = decode_metrics(record.get("metrics", {}))
    except ValueError:
        metrics = {}
    ranks = {} if failed else _ranks(record.get("ranks"))
    costs = {name: _number(record.get(name)) for name in _COSTS}
    costs |= {name: max(column) for name, column in ranks.items() if name in _COSTS}
    total, local = costs["seconds"], _number(record.get("local_seconds"))
    was_uploaded = record.get("tier") == "durable"
    return Save(
        name=_text(record.get("path")),
        time=time,
        step=step if type(step) is int and abs(step) < _MOST_NUMBER else None,
        training=trainings.setdefault(run, len(trainings) + 1) if run else 0,
        metrics=metrics,
        error=(_text(record.get("error")) or "unknown") if failed else "",
        **costs,
        upload_seconds=None if total is None or local is None or not was_uploaded else max(0.0, total - local),
        bytes=_count(record.get("bytes")),
        bytes_reused=_count(record.get("bytes_reused")),
        to_store=record.get("place") == "store",
        ranks=ranks,
    )


def _ranks(value: object) -> dict[str, list[float]]:
    """Return the columns of ranks; nothing if they are malformed."""
    columns = {name: _numbers(value.get(name)) for name in figures.COLUMNS} if isinstance(value, dict) else {}
    return columns if len(set(map(len, columns.values()))) == 1 and all(columns.values()) else {}


def _numbers(values: object) -> list[float]:
    numbers = list(map(_number, values)) if isinstance(values, list) else []
    return [] if None in numbers else cast(list[float], numbers)


def _number(value: object) -> float | None:
    if type(value) not in (int, float) or not 0 <= value < _MOST_NUMBER:  # type: ignore[operator]
        return None
    return float(value)  # type: ignore[arg-type]


def _count(value: object) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _text(value: object) -> str:
    """Return the first characters of a text, without the characters that turn or hide the text around them."""
    text = value if isinstance(value, str) else ""
    shown = "".join(character if character.isprintable() else " " for character in text[: _LONGEST + 1])
    return shown if len(shown) <= _LONGEST else shown[:_LONGEST] + "…"


def heat_saves(saves: Sequence[Save]) -> list[Save]:
    """Return the newest saves with figures of ranks that fit into one heat map; the newest in any case."""
    with_ranks = [save for save in saves if save.ranks]
    cells = accumulate(len(save.ranks["write_seconds"]) for save in reversed(with_ranks))
    return with_ranks[-max(1, sum(count <= _MOST_CELLS for count in cells)) :]


def _stragglers(saves: Sequence[Save]) -> list[Straggler]:
    """Return the ranks that are slow in most saves, the slowest first; none if saves are too few."""
    columns = [save.ranks["write_seconds"] for save in heat_saves(saves)]
    columns = [column for column in columns if len(column) == len(columns[-1])]
    if len(columns) < 3:
        return []
    medians = [median(of_rank) for of_rank in zip(*columns, strict=True)]
    usual = median(medians)
    stragglers = [
        Straggler(rank, own / usual, sum(column[rank] == max(column) for column in columns), len(columns))
        for rank, own in enumerate(medians)
        if own > _STRAGGLES * usual > 0
    ]
    return sorted(stragglers, key=lambda straggler: -straggler.times)[:5]


def _trainings(saves: Sequence[Save]) -> Trainings:
    published = [save for save in saves if not save.error]
    pairs = list(pairwise(published))
    usual = median([after.time - before.time for before, after in pairs if before.training == after.training] or [0.0])
    restarts = [
        after.time - before.time
        for before, after in pairs
        if before.training and after.training and before.training != after.training
    ]
    elapsed = published[-1].time - published[0].time if published else 0.0
    waited = sum(save.blocked_seconds or 0.0 for save in published[1:])
    lost = sum((max(0.0, seconds - usual) for seconds in restarts), 0.0)
    return Trainings(len({save.training for save in saves} - {0}), len(restarts), elapsed, waited, lost)


def _newest(
    states: Sequence[CheckpointState], storage_options: StorageOptions | None
) -> tuple[str, int | None, list[Module], str]:
    """Return name, bytes and modules of the newest checkpoint that can be opened, and the reason if none can."""
    why = "no complete checkpoint is left"
    for state in sorted(states, key=lambda state: -state.time)[:3]:
        try:
            info = inspect(state.path, storage_options)
        except (CheckpointError, OSError) as error:
            why = f"the newest checkpoint cannot be opened: {_text(str(error))}"
            continue
        modules = modules_of(info.tensors)
        return _text(as_path(state.path).name), info.nbytes, modules, "" if modules else "it has no tensors"
    return "", None, [], why


def modules_of(tensors: Iterable[TensorInfo]) -> list[Module]:
    """Fold tensors into modules by the dots in their keys. A module too small to be seen is a part of the one above."""
    sizes: dict[tuple[str, ...], int] = {}
    for tensor in tensors:
        parts = tuple(tensor.key.split("."))[:_DEEPEST]
        for depth in range(len(parts) + 1):
            sizes[parts[:depth]] = sizes.get(parts[:depth], 0) + tensor.nbytes
    total = sizes.get((), 0)
    shown = {parts: nbytes for parts, nbytes in sizes.items() if nbytes >= _SMALLEST_SHARE * total and nbytes}
    numbers = {parts: str(number) for number, parts in enumerate(sorted(shown, key=lambda parts: (len(parts), parts)))}
    return [
        Module(numbers[parts], numbers[parts[:-1]] if parts else "", _text(parts[-1]) if parts else "all", shown[parts])
        for parts in numbers
    ]


def _missing(run: RunFigures, why_no_modules: str) -> dict[str, str]:
    """Return the parts of a report that have no data, with the reasons."""
    has_metrics = any(isfinite(value) for save in run.published for value in save.metrics.values())
    has_ranks = bool(run.timed and heat_saves(run.saves))
    has_bytes = any(save.bytes is not None for save in run.timed)
    parts = {
        "metrics": (has_metrics, _NO_METRICS),
        "seconds": (run.timed, _NO_FIGURES),
        "ranks": (has_ranks, _NO_RANKS if run.timed else _NO_FIGURES),
        "reuse": (has_bytes, _NO_FIGURES),
        "modules": (run.modules, f"Nothing can be shown of the newest checkpoint: {why_no_modules}."),
        "trainings": (run.trainings.count, _NO_FIGURES),
    }
    return {part: why for part, (data, why) in parts.items() if not data}
