"""The charts of a report: their numbers, names and hover texts. ``page.js`` says how they look.

Texts from files are escaped: plotly understands some HTML in its labels. Colours are names of the page's style sheet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from itertools import cycle, zip_longest
from math import isfinite, nan
from typing import Any, NamedTuple

from dcp_plugin.core.errors import size
from dcp_plugin.tools.run_report.collect import RunFigures, Save, heat_saves

_METRICS = ("--blue", "--orange", "--green", "--purple")
_STAGES = ("--sky", "--blue", "--purple", "--grey")
_MODULES = ("--m1", "--m2", "--m3", "--m4", "--m5", "--m6")
_CHOICES = (("write_seconds", "Writing"), ("staging_seconds", "Copying"), ("blocked_seconds", "Waiting"))

NONE = "\N{EN DASH}"

Chart = dict[str, Any]


def charts_of(run: RunFigures) -> dict[str, Chart]:
    """Return the charts that have data, by the IDs of their elements in the page."""
    makers = {"metrics": metrics, "seconds": seconds, "ranks": ranks, "modules": modules, "reuse": reuse}
    return {name: make(run) for name, make in makers.items() if name not in run.missing}


def plain(text: str) -> str:
    """Escape a text for plotly, which understands HTML."""
    return escape(text, quote=False)


def step_of(save: Save) -> str:
    return NONE if save.step is None else f"{save.step:,}"


def chosen_metrics(run: RunFigures) -> list[str]:
    """Return the metrics of the one chart: the losses, or the first few metrics if no name has a loss in it."""
    names = list(dict.fromkeys(name for save in run.published for name, v in save.metrics.items() if isfinite(v)))
    losses = [name for name in names if "loss" in name.lower()]
    return (losses or names)[: len(_METRICS)]


class _Point(NamedTuple):
    """A point or a bar of a chart."""

    save: Save
    x: int
    y: float | None
    text: str
    """The last line of its hover text, below the name and the step of the save."""


def _trace(kind: str, name: str, colour: str, points: Sequence[_Point]) -> Chart:
    x, y = [point.x for point in points], [point.y for point in points]
    hover = [f"<b>{plain(save.name)}</b><br>step {step_of(save)}<br>{text}<extra></extra>" for save, *_, text in points]
    return {"type": kind, "name": plain(name), "x": x, "y": y, "hovertemplate": hover, "colour": colour}


def metrics(run: RunFigures) -> Chart:
    """Return the chart of metrics over steps. A line ends with its training."""
    traces: list[Chart] = []
    for name, colour in zip(chosen_metrics(run), _METRICS, strict=False):
        lines: dict[int, list[_Point]] = {}
        for x, save in _numbered(run):
            if not save.error and isfinite(value := save.metrics.get(name, nan)):
                point = _Point(save, x, value, f"{plain(name)} {value:.5g}")
                lines.setdefault(save.training, []).append(point)
        for training, line in lines.items():
            look = {"look": "line", "group": name, "is_first": training == next(iter(lines))}
            traces.append(_trace("scatter", name, colour, line) | look)
    title = "step" if any(save.step is not None for save in run.saves) else "save"
    return {"traces": traces, "x": title, "y": "metric", "marks": _marks(run), "height": 340}


def _numbered(run: RunFigures) -> list[tuple[int, Save]]:
    """Return the saves with their steps; a save without a step has its number."""
    return [(number if save.step is None else save.step, save) for number, save in enumerate(run.saves, 1)]


def _marks(run: RunFigures) -> list[Chart]:
    """Return the places of the failed saves and of the first saves of later trainings."""
    marks: list[Chart] = []
    before = 0
    for x, save in _numbered(run):
        again = before and save.training and save.training != before
        before = save.training or before
        if save.error or again:
            marks.append({"x": x, "failed": bool(save.error)})
    return marks


def _over_saves(saves: Sequence[Save], traces: list[Chart], title: str, height: int) -> Chart:
    """Return a chart with a column for each save, named by steps."""
    return {"traces": traces, "saves": [step_of(save) for save in saves], "y": title, "height": height}


def _bars(
    name: str, colour: str, saves: Sequence[Save], values: Sequence[float], shown: Callable[[float], str], unit: float
) -> Chart:
    """Return a trace with a bar for each save. Its height is the value in units, its text is the value as shown."""
    pairs = enumerate(zip(saves, values, strict=True))
    points = [_Point(save, x, value / unit, f"{name.lower()}: {shown(value)}") for x, (save, value) in pairs]
    return _trace("bar", name, colour, points)


def seconds(run: RunFigures) -> Chart:
    """Return the chart of the seconds of each save, by stage, with the seconds for which the training waited."""
    saves = [save for save in run.saves if save.error or save.seconds is not None]
    written = "Upload" if all(save.to_store for save in run.timed) else "Write"
    names = ("Copy to host memory", written, "Upload from keeper.dir", "Plan, publish, queue")
    stages = zip(names, _STAGES, zip(*map(_stages, saves), strict=True), strict=True)
    traces = [_bars(name, colour, saves, took, _short, 1) for name, colour, took in stages if max(took) >= 0.0005]
    waited = [
        _Point(save, x, None if save.error else save.blocked_seconds, f"training waited {_short(save.blocked_seconds)}")
        for x, save in enumerate(saves)
    ]
    failed = [_Point(save, x, 0, _cut(save.error)) for x, save in enumerate(saves) if save.error]
    traces.append(_trace("scatter", "Training waited", "--orange", waited) | {"look": "diamond"})
    if failed:
        traces.append(_trace("scatter", "Failed", "--red", failed) | {"look": "x"})
    return _over_saves(saves, traces, "seconds", 340)


def _cut(text: str) -> str:
    return plain(text[:90] + ("…" if len(text) > 90 else ""))


def _stages(save: Save) -> list[float]:
    """Return the seconds of each stage of a save; the last entry is the rest.

    They add up to the seconds of the save. The slowest ranks of two stages may differ, and work at the same time.
    """
    remaining, stages = save.seconds or 0.0, []
    for seconds in (save.staging_seconds, save.write_seconds, save.upload_seconds):
        stages.append(min(seconds or 0.0, remaining))
        remaining -= stages[-1]
    return [*stages, remaining]


def _short(value: float | None) -> str:
    return NONE if value is None else f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def ranks(run: RunFigures) -> Chart:
    """Return a heat map with a row for each rank and a column for each save."""
    saves = heat_saves(run.saves)
    traces: list[Chart] = []
    for column, name in _CHOICES:
        rows = list(zip_longest(*(save.ranks[column] for save in saves)))  # None for the ranks that a save had not
        hover = f"rank %{{y}}<br>{name.lower()} %{{z:.3f}} s<extra></extra>"
        traces.append({"type": "heatmap", "z": rows, "hovertemplate": hover})
    count, names = len(traces[0]["z"]), [name for _, name in _CHOICES]
    return _over_saves(saves, traces, "rank", min(560, 150 + 26 * count)) | {"rows": count, "choice": names}


def modules(run: RunFigures) -> Chart:
    """Return the newest checkpoint as areas."""
    root, *below = run.modules
    coloured = [module.id for module in below if module.parent == root.id]
    if len(coloured) < 3:  # with few modules at the top, their parts get the colours
        coloured = [module.id for module in below if module.parent in coloured]
    colours = dict(zip(coloured, cycle(_MODULES), strict=False))
    for module in below:  # each module follows its parent
        colours.setdefault(module.id, colours.get(module.parent, "--m0"))
    trace = {
        "type": "treemap",
        "ids": [module.id for module in run.modules],
        "parents": [module.parent for module in run.modules],
        "labels": [plain(module.label) for module in run.modules],
        "values": [module.nbytes for module in run.modules],
        "customdata": [size(module.nbytes) for module in run.modules],
        "colours": ["--card", *(colours[module.id] for module in below)],
    }
    return {"traces": [trace], "height": 420}


_UNITS = [("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0)]


def reuse(run: RunFigures) -> Chart:
    """Return the chart of bytes written and bytes linked by each save."""
    saves = run.timed
    written, linked = [save.bytes or 0 for save in saves], [save.bytes_reused or 0 for save in saves]
    largest = max(map(sum, zip(written, linked, strict=True)))
    name, unit = next((pair for pair in _UNITS if largest >= pair[1]), _UNITS[-1])
    bars = [
        _bars("Written", "--blue", saves, written, size, unit),
        _bars("Linked from the checkpoint before", "--green", saves, linked, size, unit),
    ]
    return _over_saves(saves, bars, name, 320)
