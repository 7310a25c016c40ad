"""The charts of a report: their numbers, names and hover texts. ``page.js`` says how they look.

Texts from files are escaped: plotly understands some HTML in its labels. Colours are names of the page's style sheet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import isfinite
from typing import Any

from dcp_plugin.errors import size
from dcp_plugin.tools.report.collect import RunFigures, Save, heat_saves

_METRICS = ("--blue", "--orange", "--green", "--purple")
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


def _hover(save: Save) -> str:
    return f"<b>{plain(save.name)}</b><br>step {step_of(save)}"


def chosen_metrics(run: RunFigures) -> list[str]:
    """Return the metrics of the one chart: the losses, or the first few metrics if no name has a loss in it."""
    names = list(dict.fromkeys(name for save in run.published for name, v in save.metrics.items() if isfinite(v)))
    losses = [name for name in names if "loss" in name.lower()]
    return (losses or names)[: len(_METRICS)]


def _x(save: Save, number: int) -> int:
    return number if save.step is None else save.step


def metrics(run: RunFigures) -> Chart:
    """Return the chart of metrics over steps. A line ends with its training."""
    traces: list[Chart] = []
    numbered = list(enumerate(run.saves, 1))
    for name, colour in zip(chosen_metrics(run), _METRICS, strict=False):
        lines: dict[int, list[tuple[int, Save]]] = {}
        for number, save in numbered:
            if not save.error and isfinite(save.metrics.get(name, float("nan"))):
                lines.setdefault(save.training, []).append((_x(save, number), save))
        for line in lines.values():
            x, y = [x for x, _ in line], [save.metrics[name] for _, save in line]
            hover = [f"{_hover(save)}<br>{plain(name)} {save.metrics[name]:.5g}<extra></extra>" for _, save in line]
            is_first = line is next(iter(lines.values()))
            traces.append({**_points(plain(name), x, y, hover, colour, "line"), "group": name, "is_first": is_first})
    title = "step" if any(save.step is not None for save in run.saves) else "save"
    return {"traces": traces, "x": title, "y": "metric", "marks": _marks(numbered), "height": 340}


def _points(name: str, x: Sequence[int], y: Sequence[float | None], hover: list[str], colour: str, look: str) -> Chart:
    points = {"type": "scatter", "name": name, "x": x, "y": y, "hovertemplate": hover}
    return {**points, "colour": colour, "look": look}


def _marks(numbered: Sequence[tuple[int, Save]]) -> list[Chart]:
    """Return the places of the failed saves and of the first saves of later trainings."""
    marks: list[Chart] = []
    before = 0
    for number, save in numbered:
        again = bool(before and save.training and save.training != before)
        before = save.training or before
        if save.error or again:
            marks.append({"x": _x(save, number), "failed": bool(save.error)})
    return marks


def _over_saves(saves: Sequence[Save], traces: list[Chart], title: str, height: int) -> Chart:
    """Return a chart with a column for each save, named by steps."""
    return {"traces": traces, "saves": [step_of(save) for save in saves], "y": title, "height": height}


def seconds(run: RunFigures) -> Chart:
    """Return the chart of the seconds of each save, by stage, with the seconds for which the training waited."""
    saves = [save for save in run.saves if save.error or save.seconds is not None]
    written = "Upload" if all(save.to_store for save in run.timed) else "Write"
    stages = [
        ("Copy to host memory", "--sky"),
        (written, "--blue"),
        ("Upload from local_dir", "--purple"),
        ("Plan, publish, queue", "--grey"),
    ]
    columns = zip(*map(_stages, saves), strict=True)
    traces = []
    for (name, colour), values in zip(stages, columns, strict=True):
        if max(values) >= 0.0005:
            traces.append(_bars(saves, name, colour, values, list(map(_short, values))))
    numbers = range(len(saves))
    hover = [f"{_hover(save)}<br>training waited {_short(save.blocked_seconds)}<extra></extra>" for save in saves]
    waited = [None if save.error else save.blocked_seconds for save in saves]
    traces.append(_points("Training waited", [*numbers], waited, hover, "--orange", "diamond"))
    if failed := [number for number in numbers if saves[number].error]:
        hover = [f"{_hover(saves[number])}<br>{_cut(saves[number].error)}<extra></extra>" for number in failed]
        traces.append(_points("Failed", failed, [0] * len(failed), hover, "--red", "x"))
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


def _bars(
    saves: Sequence[Save], name: str, colour: str, values: Sequence[float], texts: list[str], divisor: float = 1
) -> Chart:
    heights = [value / divisor for value in values]
    hover = [f"{_hover(s)}<br>{name.lower()}: {text}<extra></extra>" for s, text in zip(saves, texts, strict=True)]
    bars = {"type": "bar", "name": name, "x": [*range(len(saves))], "y": heights, "hovertemplate": hover}
    return {**bars, "colour": colour}


def ranks(run: RunFigures) -> Chart:
    """Return a heat map with a row for each rank and a column for each save."""
    saves = heat_saves(run.saves)
    most = max(len(save.ranks["write_seconds"]) for save in saves)
    traces = []
    for column, name in _CHOICES:
        columns: Iterable[list[float | None]] = (
            [*save.ranks[column], *[None] * (most - len(save.ranks[column]))] for save in saves
        )
        hover = f"rank %{{y}}<br>{name.lower()} %{{z:.3f}} s<extra></extra>"
        traces.append({"type": "heatmap", "z": [*map(list, zip(*columns, strict=True))], "hovertemplate": hover})
    return {
        **_over_saves(saves, traces, "rank", min(560, 150 + 26 * most)),
        "rows": most,
        "choice": [name for _, name in _CHOICES],
    }


def modules(run: RunFigures) -> Chart:
    """Return the newest checkpoint as areas."""
    root = run.modules[0].id
    tops = [module.id for module in run.modules if module.parent == root]
    if len(tops) < 3:  # with few modules at the top, their parts get the colours
        tops = [module.id for module in run.modules if module.parent in tops]
    colour_of: dict[str, str] = {}
    for module in run.modules[1:]:  # each module follows its parent
        own = _MODULES[tops.index(module.id) % len(_MODULES)] if module.id in tops else "--m0"
        colour_of[module.id] = own if module.id in tops else colour_of.get(module.parent, own)
    trace = {
        "type": "treemap",
        "ids": [module.id for module in run.modules],
        "parents": [module.parent for module in run.modules],
        "labels": [plain(module.label) for module in run.modules],
        "values": [module.nbytes for module in run.modules],
        "customdata": [size(module.nbytes) for module in run.modules],
        "colours": ["--card", *(colour_of[module.id] for module in run.modules[1:])],
    }
    return {"traces": [trace], "height": 420}


_UNITS = [("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0)]


def reuse(run: RunFigures) -> Chart:
    """Return the chart of bytes written and bytes linked by each save."""
    saves = run.timed
    largest = max((save.bytes or 0) + (save.bytes_reused or 0) for save in saves)
    unit, divisor = next((pair for pair in _UNITS if largest >= pair[1]), _UNITS[-1])
    traces = []
    for name, colour, values in (
        ("Written", "--blue", [save.bytes or 0 for save in saves]),
        ("Linked from the checkpoint before", "--green", [save.bytes_reused or 0 for save in saves]),
    ):
        traces.append(_bars(saves, name, colour, values, list(map(size, values)), divisor))
    return _over_saves(saves, traces, unit, 320)
