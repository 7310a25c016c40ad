"""The charts of a report, as plotly.js takes them: plain data. Colours are names of the page's style sheet.

Texts from files are escaped: plotly understands some HTML in its labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import isfinite
from typing import Any

from dcp_plugin.errors import size
from dcp_plugin.tools.report.collect import RunFigures, Save, heat_saves

_METRICS = ("--blue", "--orange", "--green", "--purple")
_MODULES = ("--m1", "--m2", "--m3", "--m4", "--m5", "--m6")
_TICKS = 10
_HEAT = [[0.0, "#fcf3dc"], [0.25, "#f4c16a"], [0.5, "#dd7f3c"], [0.75, "#a8433f"], [1.0, "#5a1e4d"]]
_HEAT_ON_DARK = [[at, colour] for (at, _), (_, colour) in zip(_HEAT, _HEAT[::-1], strict=True)]
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
    trainings = list(dict.fromkeys(save.training for save in run.published))
    numbered = list(enumerate(run.saves, 1))
    for name, colour in zip(chosen_metrics(run), _METRICS, strict=False):
        for training in trainings:
            points = [(n, s) for n, s in numbered if not s.error and s.training == training]
            points = [(n, s) for n, s in points if isfinite(s.metrics.get(name, float("nan")))]
            if not points:
                continue
            hover = [f"{_hover(s)}<br>{plain(name)} {s.metrics[name]:.5g}<extra></extra>" for _, s in points]
            trace = _points(plain(name), [_x(save, number) for number, save in points], hover, colour, 6, "circle")
            trace |= {"mode": "lines+markers", "line": {"color": colour, "width": 2}, "legendgroup": name}
            trace |= {"showlegend": not any(other["legendgroup"] == name for other in traces)}
            traces.append({**trace, "y": [save.metrics[name] for _, save in points]})
    marks, labels = _marks(run, numbered)
    title = "step" if any(save.step is not None for save in run.saves) else "save"
    axes = {"xaxis": {"title": title, "nticks": _TICKS, "tickformat": ",d"}, "yaxis": {"title": "metric"}}
    return {"traces": traces, "layout": {**axes, "shapes": marks, "annotations": labels}, "height": 340}


def _points(name: str, x: list[int], hover: list[str], colour: str, size: int, symbol: str) -> Chart:
    """Return a trace of points, without their heights."""
    marker = {"color": colour, "size": size, "symbol": symbol}
    return {"type": "scatter", "mode": "markers", "name": name, "x": x, "marker": marker, "hovertemplate": hover}


def _marks(run: RunFigures, numbered: Sequence[tuple[int, Save]]) -> tuple[list[Chart], list[Chart]]:
    """Return lines and labels at the failed saves and at the first saves of later trainings."""
    marks: list[Chart] = []
    labels: list[Chart] = []
    before = 0
    for number, save in numbered:
        again = bool(before and save.training and save.training != before)
        before = save.training or before
        if not save.error and not again:
            continue
        colour, at = "--red" if save.error else "--faint", _x(save, number)
        line = {"color": colour, "width": 1.3, "dash": "dot" if save.error else "dash"}
        marks.append(
            {"type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1, "line": line, "layer": "below"}
        )
        if len(labels) < 12:
            text = "failed save" if save.error else "restart"
            place = {"xanchor": "left", "yanchor": "top", "xshift": 3, "font": {"size": 11.5, "color": colour}}
            labels.append(
                {"x": at, "yref": "paper", "y": 1 - 0.07 * (len(labels) % 2), "text": text, "showarrow": False, **place}
            )
    return marks, labels


def _over_saves(saves: Sequence[Save]) -> Chart:
    """Return an axis with a place for each save, named by steps."""
    at = list(range(0, len(saves), max(1, -(-len(saves) // _TICKS))))
    labels = [step_of(saves[number]) for number in at]
    ends = [-0.6, len(saves) - 0.4]
    return {"title": "saves, by step", "tickvals": at, "ticktext": labels, "range": ends, "showgrid": False}


def _stacked(saves: Sequence[Save], traces: list[Chart], title: str, height: int) -> Chart:
    """Return a chart with a column for each save."""
    axes = {"xaxis": _over_saves(saves), "yaxis": {"title": title, "rangemode": "tozero"}}
    return {"traces": traces, "layout": {"barmode": "stack", "bargap": 0.25, **axes}, "height": height}


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
    numbers = list(range(len(saves)))
    hover = [f"{_hover(save)}<br>training waited {_short(save.blocked_seconds)}<extra></extra>" for save in saves]
    waited = _points("Training waited", numbers, hover, "--orange", 9, "diamond")
    waited["marker"] |= {"line": {"width": 1.2, "color": "--card"}}
    traces.append({**waited, "y": [None if save.error else save.blocked_seconds for save in saves]})
    if failed := [number for number in numbers if saves[number].error]:
        hover = [f"{_hover(saves[number])}<br>{_cut(saves[number].error)}<extra></extra>" for number in failed]
        crosses = _points("Failed", failed, hover, "--red", 11, "x")
        traces.append({**crosses, "y": [0] * len(failed), "cliponaxis": False})
    return _stacked(saves, traces, "seconds", 340)


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
    bar = {"type": "bar", "name": name, "x": list(range(len(saves))), "y": heights}
    return {**bar, "marker": {"color": colour, "line": {"width": 0}}, "hovertemplate": hover}


def ranks(run: RunFigures) -> Chart:
    """Return a heat map with a row for each rank and a column for each save."""
    saves = heat_saves(run.saves)
    most = max(len(save.ranks["write_seconds"]) for save in saves)
    traces = []
    for column, name in _CHOICES:
        rows: list[list[float | None]] = [
            [save.ranks[column][rank] if rank < len(save.ranks[column]) else None for save in saves]
            for rank in range(most)
        ]
        hover = f"rank %{{y}}<br>{name.lower()} %{{z:.3f}} s<extra></extra>"
        gaps = {"xgap": 1 if len(saves) < 120 else 0, "ygap": 1 if most < 40 else 0}
        bar = {"thickness": 10, "len": 1, "outlinewidth": 0, "ticksuffix": " s", "nticks": 5}
        colours = {"colorscale": {"light": _HEAT, "dark": _HEAT_ON_DARK}, "colorbar": bar}
        traces.append({"type": "heatmap", "z": rows, **colours, "zmin": 0, **gaps, "hovertemplate": hover})
    rows_at = {"tickvals": list(range(most))} if most <= 16 else {"nticks": 12, "tickformat": "d"}
    rank_axis = {"title": "rank", "autorange": "reversed", "showgrid": False, **rows_at}
    layout = {"xaxis": _over_saves(saves), "yaxis": rank_axis}
    choice = [name for _, name in _CHOICES]
    return {"traces": traces, "layout": layout, "height": min(560, 150 + 26 * most), "choice": choice}


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
    colours = ["--card", *(colour_of[module.id] for module in run.modules[1:])]
    trace = {
        "type": "treemap",
        "ids": [module.id for module in run.modules],
        "parents": [module.parent for module in run.modules],
        "labels": [plain(module.label) for module in run.modules],
        "values": [module.nbytes for module in run.modules],
        "branchvalues": "total",
        "marker": {
            "colors": colours,
            "line": {"width": 1.5, "color": "--card"},
            "pad": {"t": 20, "l": 2, "r": 2, "b": 2},
        },
        "tiling": {"pad": 1},
        "maxdepth": 4,
        "root": {"color": "rgba(0,0,0,0)"},
        "pathbar": {"visible": True, "thickness": 20},
        "textfont": {"size": 12.5},
        "texttemplate": "%{label}<br>%{customdata}",
        "customdata": [size(module.nbytes) for module in run.modules],
        "hovertemplate": "<b>%{label}</b><br>%{customdata}<br>%{percentRoot:.1%} of all<extra></extra>",
    }
    return {"traces": [trace], "layout": {"margin": {"l": 0, "r": 0, "t": 4, "b": 4}}, "height": 420}


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
    return _stacked(saves, traces, unit, 320)
