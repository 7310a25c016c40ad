"""What is known of a run: from the figures of its saves, its checkpoints, and how its trainings have ended.

Files beside checkpoints are as little to be trusted as checkpoints: what is no number where one is to be is left out,
texts are cut, and there are never more ranks, modules and saves than a page can show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, cast

from dcp_plugin.errors import CheckpointError, CheckpointNotFound
from dcp_plugin.format.summary import decode_metrics
from dcp_plugin.media import workspace_of
from dcp_plugin.paths import PathLike, StorageOptions, as_path
from dcp_plugin.runs import figures, history
from dcp_plugin.runs.catalog import list_checkpoints
from dcp_plugin.tools.inspect import inspect
from dcp_plugin.types import CheckpointState, TensorInfo

_MOST_NUMBER = 1e18
_LONGEST = 300
"""Characters of a text that somebody else has written."""
_MOST_CELLS = 200_000
"""Ranks times saves that a heat map has."""
_SMALLEST_SHARE, _DEEPEST = 0.002, 6
"""Of a module that is shown by itself; levels of modules."""
_STRAGGLES = 1.5
"""How many times the median of all ranks a straggler takes."""


@dataclass(frozen=True)
class Save:
    """One save. Seconds and bytes are None where nobody has noted them: another tool, or an earlier version."""

    name: str
    time: float
    """Seconds since the epoch."""
    step: int | None
    training: int
    """Which training of the run, from 1 on; 0 if that is not known."""
    metrics: dict[str, float]
    error: str = ""
    """Why it failed; empty if it was published."""
    seconds: float | None = None
    """From the call until it was published."""
    blocked_seconds: float | None = None
    staging_seconds: float | None = None
    """Of the slowest rank, as is the next one."""
    write_seconds: float | None = None
    upload_seconds: float | None = None
    """From ``local_dir`` to the path."""
    bytes: int | None = None
    bytes_reused: int | None = None
    to_store: bool = False
    """Whether to write was to upload."""
    ranks: dict[str, list[float]] = field(default_factory=dict)
    """A column for each of :data:`dcp_plugin.runs.figures.COLUMNS`."""


@dataclass(frozen=True)
class Module:
    """A part of the newest checkpoint, or what is left of one where parts of it are shown by themselves."""

    id: str
    parent: str
    """The ID of what it is a part of; empty for the whole."""
    label: str
    nbytes: int
    """With all its parts."""


@dataclass(frozen=True)
class Straggler:
    """A rank that writes more slowly than the others."""

    rank: int
    times: float
    """Its median, of that of all ranks."""
    slowest: int
    """Saves in which it was the slowest."""
    of: int
    """Saves in all."""


@dataclass(frozen=True)
class Trainings:
    """How the trainings of the run went on."""

    count: int
    restarts: int
    elapsed_seconds: float
    """From the first save to the last."""
    waited_seconds: float
    """In saves, in this time."""
    lost_seconds: float
    """Around restarts: the time between the saves before and after, beyond the usual time between two."""
    ended_badly: int | None
    """Trainings that ended without saying goodbye, as far as they have kept a history; None without one."""

    @property
    def goodput(self) -> float | None:
        """The share of the time in which the training made progress that lasted."""
        if self.elapsed_seconds <= 0:
            return None
        return max(0.0, 1.0 - (self.waited_seconds + self.lost_seconds) / self.elapsed_seconds)


@dataclass(frozen=True)
class RunFigures:
    """What a report shows of a run."""

    root: str
    saves: list[Save]
    """Published and failed ones, oldest first."""
    checkpoints: int
    """That are there, and whole."""
    newest: str
    newest_bytes: int | None
    modules: list[Module]
    stragglers: list[Straggler]
    trainings: Trainings
    missing: dict[str, str]
    """What cannot be shown, and why."""

    @property
    def published(self) -> list[Save]:
        return [save for save in self.saves if not save.error]

    @property
    def timed(self) -> list[Save]:
        """Published saves of which is known what they have cost."""
        return [save for save in self.published if save.seconds is not None]


def collect(run: PathLike, storage_options: StorageOptions | None = None) -> RunFigures:
    """What is known of the run whose checkpoints are at or below ``run``.

    Raises:
        CheckpointNotFound: There is no checkpoint, and no figure of one.
        OSError: The store of a URL cannot be reached.
    """
    root = as_path(run, storage_options)
    states = [state for state in list_checkpoints(root, storage_options) if state.committed]
    folders = {root, *(workspace_of(cast(Path, state.path)).parent for state in states)}
    for folder in folders:
        figures.compact(folder)
    noted = sorted((told for folder in folders for told in figures.read(folder)), key=_time)
    saves = _saves(noted, states)
    if not saves:
        raise CheckpointNotFound(f"there is no checkpoint at or below {root}, and no figure of one")
    ends = history.ends_of(history.trainings_in(noted))
    newest, nbytes, modules, why = _newest(states, storage_options)
    stragglers = _stragglers(saves)
    known = RunFigures(str(root), saves, len(states), newest, nbytes, modules, stragglers, _trainings(saves, ends), {})
    return RunFigures(**{**vars(known), "missing": _missing(known, why)})


def _time(told: dict[str, Any]) -> float:
    return _number(told.get("time")) or 0.0


def _saves(noted: Sequence[dict[str, Any]], states: Iterable[CheckpointState]) -> list[Save]:
    trainings: dict[str, int] = {}
    saves = [save for told in noted if (save := _save(told, trainings)) is not None]
    known = {(save.name, save.step) for save in saves if not save.error}
    saves += [
        Save(_text(state.path.name), state.time, state.step, 0, dict(state.metrics))
        for state in states
        if (state.path.name, state.step) not in known
    ]
    return sorted(saves, key=lambda save: save.time)


def _save(told: dict[str, Any], trainings: dict[str, int]) -> Save | None:
    """One line of figures; None if it is of no save."""
    if told.get("event") not in ("saved", "failed") or (time := _number(told.get("time"))) is None:
        return None
    run, step = _text(told.get("run")), told.get("step")
    failed = told["event"] == "failed"
    try:
        metrics = decode_metrics(told.get("metrics", {}))
    except ValueError:
        metrics = {}
    ranks = {} if failed else _ranks(told.get("ranks"))
    whole, local = _number(told.get("seconds")), _number(told.get("local_seconds"))
    uploaded = whole is not None and local is not None and told.get("tier") == "durable"
    return Save(
        name=_text(told.get("path")),
        time=time,
        step=step if type(step) is int and abs(step) < _MOST_NUMBER else None,
        training=trainings.setdefault(run, len(trainings) + 1) if run else 0,
        metrics=metrics,
        error=(_text(told.get("error")) or "it is not known why") if failed else "",
        seconds=whole,
        blocked_seconds=max(ranks.get("blocked_seconds", []), default=_number(told.get("blocked_seconds"))),
        staging_seconds=max(ranks.get("staging_seconds", []), default=_number(told.get("staging_seconds"))),
        write_seconds=max(ranks.get("write_seconds", []), default=_number(told.get("write_seconds"))),
        upload_seconds=max(0.0, (whole or 0.0) - (local or 0.0)) if uploaded else None,
        bytes=_count(told.get("bytes")),
        bytes_reused=_count(told.get("bytes_reused")),
        to_store=told.get("place") == "store",
        ranks=ranks,
    )


def _ranks(said: object) -> dict[str, list[float]]:
    """The columns of ranks, if these are what they are to be."""
    columns = [said.get(name) for name in figures.COLUMNS] if isinstance(said, dict) else []
    lengths = {len(column) for column in columns if isinstance(column, list)}
    if not columns or len(lengths) != 1 or not all(isinstance(column, list) for column in columns):
        return {}
    numbers = [[_number(value) for value in column] for column in columns if isinstance(column, list)]
    if lengths == {0} or any(value is None for column in numbers for value in column):
        return {}
    return {name: [value or 0.0 for value in column] for name, column in zip(figures.COLUMNS, numbers, strict=True)}


def _number(said: object) -> float | None:
    if type(said) not in (int, float) or not 0 <= said < _MOST_NUMBER:  # type: ignore[operator]
        return None
    return float(said)  # type: ignore[arg-type]


def _count(said: object) -> int | None:
    number = _number(said)
    return None if number is None else int(number)


def _text(said: object) -> str:
    """As much of a text as is shown, without what would turn or hide the text around it."""
    text = said if isinstance(said, str) else ""
    shown = "".join(one if one.isprintable() else " " for one in text[: _LONGEST + 1])
    return shown if len(shown) <= _LONGEST else shown[:_LONGEST] + "…"


def heat_saves(saves: Sequence[Save]) -> list[Save]:
    """The newest saves whose ranks are known and fit into one heat map."""
    shown: list[Save] = []
    cells = 0
    for save in reversed(saves):
        if save.error or not save.ranks:
            continue
        cells += len(save.ranks["write_seconds"])
        if cells > _MOST_CELLS and shown:
            break
        shown.append(save)
    return shown[::-1]


def _stragglers(saves: Sequence[Save]) -> list[Straggler]:
    """Ranks that take long for their bytes again and again, the slowest first; none if they are too few to tell."""
    columns = [save.ranks["write_seconds"] for save in heat_saves(saves)]
    columns = [column for column in columns if len(column) == len(columns[-1])]
    if len(columns) < 3 or len(columns[0]) < 2:
        return []
    medians = [median(column[rank] for column in columns) for rank in range(len(columns[0]))]
    usual, found = median(medians), []
    for rank, own in enumerate(medians):
        if own > _STRAGGLES * usual > 0:
            slowest = sum(column[rank] == max(column) for column in columns)
            found.append(Straggler(rank, own / usual, slowest, len(columns)))
    return sorted(found, key=lambda one: -one.times)[:5]


def _trainings(saves: Sequence[Save], ends: Sequence[str]) -> Trainings:
    published = [save for save in saves if not save.error]
    bad = sum(end == history.LOST for end in ends) if ends else None
    pairs = list(pairwise(published))
    usual = [after.time - before.time for before, after in pairs if before.training == after.training]
    lost = 0.0
    restarts = 0
    for before, after in pairs:
        if before.training != after.training and before.training and after.training:
            restarts += 1
            lost += max(0.0, after.time - before.time - (median(usual) if usual else 0.0))
    elapsed = published[-1].time - published[0].time if published else 0.0
    waited = sum(save.blocked_seconds or 0.0 for save in published[1:])
    return Trainings(len({save.training for save in saves} - {0}), restarts, elapsed, waited, lost, bad)


def _newest(
    states: Sequence[CheckpointState], storage_options: StorageOptions | None
) -> tuple[str, int | None, list[Module], str]:
    """The newest checkpoint that can be opened: its name, its bytes, its modules; and why there is none."""
    why = "there is no whole checkpoint any more"
    for state in sorted(states, key=lambda one: -one.time)[:3]:
        try:
            info = inspect(state.path, storage_options)
        except (CheckpointError, OSError) as error:
            why = f"the newest checkpoint cannot be opened: {_text(str(error))}"
            continue
        modules = modules_of(info.tensors)
        return _text(as_path(state.path).name), info.nbytes, modules, "" if modules else "it has no tensors"
    return "", None, [], why


def modules_of(tensors: Iterable[TensorInfo]) -> list[Module]:
    """Tensors folded into modules, by the dots in their keys: what is too small to be seen is part of what it is in."""
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


def _missing(known: RunFigures, why_no_modules: str) -> dict[str, str]:
    """Which parts of a report have nothing to show, and why."""
    missing = {}
    unnoted = (
        "No figures of these saves are kept beside the checkpoints: they were saved by another tool or by an earlier "
        "version of dcp-plugin, or the folder was copied without its .dcp_plugin."
    )
    if not any(isfinite(value) for save in known.published for value in save.metrics.values()):
        missing["metrics"] = "No checkpoint has a metric: save(…, metrics={…}) records them; Lightning and Trainers do."
    if not known.timed:
        missing |= dict.fromkeys(("seconds", "ranks", "reuse"), unnoted)
    elif not heat_saves(known.saves):
        missing["ranks"] = "The figures that are kept say nothing of single ranks."
    if known.timed and not any(save.bytes is not None for save in known.timed):
        missing["reuse"] = unnoted
    if not known.modules:
        missing["modules"] = f"Nothing can be shown of the newest checkpoint: {why_no_modules}."
    if not known.trainings.count:
        missing["trainings"] = unnoted
    return missing
