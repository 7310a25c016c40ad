"""The charts of a report, as plotly.js takes them: plain data. Colours are names of the page's style sheet.

Texts of others are escaped: plotly understands some HTML in what it draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import isfinite
from typing import Any

from dcp_plugin.tools.report.collect import RunFigures, Save, heat_saves

_METRICS = ("--blue", "--orange", "--green", "--purple")
_MODULES = ("--m1", "--m2", "--m3", "--m4", "--m5", "--m6")
_TICKS = 10
_HEAT = [[0.0, "#fcf3dc"], [0.25, "#f4c16a"], [0.5, "#dd7f3c"], [0.75, "#a8433f"], [1.0, "#5a1e4d"]]
_CHOICES = (("write_seconds", "Writing"), ("staging_seconds", "Copying"), ("blocked_seconds", "Waiting"))

NONE = "\N{EN DASH}"

Chart = dict[str, Any]


def charts_of(run: RunFigures) -> dict[str, Chart]:
    """Each chart for which there is something to show, by the name of its place in the page."""
    makers: dict[str, Callable[[RunFigures], Chart]] = {
        "metrics": metrics,
        "seconds": seconds,
        "ranks": ranks,
        "modules": modules,
        "reuse": reuse,
    }
    return {name: make(run) for name, make in makers.items() if name not in run.missing}


def plain(text: str) -> str:
    """For a place where plotly understands HTML."""
    return escape(text, quote=False)


def step_of(save: Save) -> str:
    return NONE if save.step is None else f"{save.step:,}"


def _hover(save: Save) -> str:
    return f"<b>{plain(save.name)}</b><br>step {step_of(save)}"


def chosen_metrics(run: RunFigures) -> list[str]:
    """Those that share one chart: losses, if there are some; else the first few."""
    names = list(dict.fromkeys(name for save in run.published for name, v in save.metrics.items() if isfinite(v)))
    losses = [name for name in names if "loss" in name.lower()]
    return (losses or names)[: len(_METRICS)]


def _x(save: Save, number: int) -> int:
    return number if save.step is None else save.step


def metrics(run: RunFigures) -> Chart:
    """The metrics over steps; a line ends where a training does."""
    traces: list[Chart] = []
    trainings = list(dict.fromkeys(save.training for save in run.published))
    numbered = list(enumerate(run.saves, 1))
    for name, colour in zip(chosen_metrics(run), _METRICS, strict=False):
        for training in trainings:
            found = [(n, s) for n, s in numbered if not s.error and s.training == training]
            found = [(n, s) for n, s in found if isfinite(s.metrics.get(name, float("nan")))]
            if not found:
                continue
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": plain(name),
                    "legendgroup": name,
                    "showlegend": not any(one["legendgroup"] == name for one in traces),
                    "x": [_x(save, number) for number, save in found],
                    "y": [save.metrics[name] for _, save in found],
                    "line": {"color": colour, "width": 2},
                    "marker": {"color": colour, "size": 6, "symbol": "circle"},
                    "hovertemplate": [
                        f"{_hover(s)}<br>{plain(name)} {s.metrics[name]:.5g}<extra></extra>" for _, s in found
                    ],
                }
            )
    marks, said = _marks(run, numbered)
    shared = {"title": "step" if any(save.step is not None for save in run.saves) else "save", "nticks": _TICKS}
    layout = {
        "xaxis": {**shared, "tickformat": ",d"},
        "yaxis": {"title": "metric"},
        "shapes": marks,
        "annotations": said,
    }
    return {"traces": traces, "layout": layout, "height": 340}


def _marks(run: RunFigures, numbered: Sequence[tuple[int, Save]]) -> tuple[list[Chart], list[Chart]]:
    """Where saves failed and trainings began again."""
    marks: list[Chart] = []
    said: list[Chart] = []
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
        if len(said) < 12:
            text = "failed save" if save.error else "restart"
            place = {"xanchor": "left", "yanchor": "top", "xshift": 3, "font": {"size": 11.5, "color": colour}}
            said.append(
                {"x": at, "yref": "paper", "y": 1 - 0.07 * (len(said) % 2), "text": text, "showarrow": False, **place}
            )
    return marks, said


def _over_saves(saves: Sequence[Save]) -> Chart:
    """An axis with a place for each save, named by steps."""
    every = max(1, -(-len(saves) // _TICKS))
    at = list(range(0, len(saves), every))
    labels = [step_of(saves[number]) for number in at]
    return {
        "title": "saves, by step",
        "tickvals": at,
        "ticktext": labels,
        "range": [-0.6, len(saves) - 0.4],
        "showgrid": False,
    }


def seconds(run: RunFigures) -> Chart:
    """What each save took, in the order of its stages; and what the training waited."""
    saves = [save for save in run.saves if save.error or save.seconds is not None]
    written = "Upload" if all(save.to_store for save in run.timed) else "Write"
    parts: list[tuple[str, str, Callable[[Save], float]]] = [
        ("Copy to host memory", "--sky", lambda save: save.staging_seconds or 0.0),
        (written, "--blue", lambda save: save.write_seconds or 0.0),
        ("Upload from local_dir", "--purple", lambda save: save.upload_seconds or 0.0),
        ("Plan, publish, queue", "--grey", _rest),
    ]
    traces: list[Chart] = [_bars(saves, *part) for part in parts if any(part[2](save) >= 0.0005 for save in saves)]
    blocked = [None if save.error else save.blocked_seconds for save in saves]
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "Training waited",
            "x": list(range(len(saves))),
            "y": blocked,
            "marker": {"color": "--orange", "size": 9, "symbol": "diamond", "line": {"width": 1.2, "color": "--card"}},
            "hovertemplate": [
                f"{_hover(s)}<br>training waited {_short(s.blocked_seconds)}<extra></extra>" for s in saves
            ],
        }
    )
    if failed := [number for number, save in enumerate(saves) if save.error]:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "Failed",
                "x": failed,
                "y": [0] * len(failed),
                "cliponaxis": False,
                "marker": {"color": "--red", "size": 11, "symbol": "x"},
                "hovertemplate": [f"{_hover(saves[n])}<br>{_cut(saves[n].error)}<extra></extra>" for n in failed],
            }
        )
    layout = {
        "barmode": "stack",
        "bargap": 0.25,
        "xaxis": _over_saves(saves),
        "yaxis": {"title": "seconds", "rangemode": "tozero"},
    }
    return {"traces": traces, "layout": layout, "height": 340}


def _cut(text: str) -> str:
    return plain(text[:90] + ("…" if len(text) > 90 else ""))


def _rest(save: Save) -> float:
    parts = (save.staging_seconds or 0.0) + (save.write_seconds or 0.0) + (save.upload_seconds or 0.0)
    return max(0.0, (save.seconds or 0.0) - parts)


def _short(value: float | None) -> str:
    return NONE if value is None else f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def _bars(saves: Sequence[Save], name: str, colour: str, of: Callable[[Save], float]) -> Chart:
    values = [of(save) for save in saves]
    hover = [f"{_hover(s)}<br>{name.lower()}: {_short(v)}<extra></extra>" for s, v in zip(saves, values, strict=True)]
    bar = {"type": "bar", "name": name, "x": list(range(len(saves))), "y": values}
    return {**bar, "marker": {"color": colour, "line": {"width": 0}}, "hovertemplate": hover}


def ranks(run: RunFigures) -> Chart:
    """A row for each rank, a column for each save."""
    saves = heat_saves(run.saves)
    most = max(len(save.ranks["write_seconds"]) for save in saves)
    traces = []
    for column, name in _CHOICES:
        rows: list[list[float | None]] = [
            [save.ranks[column][rank] if rank < len(save.ranks[column]) else None for save in saves]
            for rank in range(most)
        ]
        traces.append(
            {
                "type": "heatmap",
                "z": rows,
                "colorscale": {
                    "light": _HEAT,
                    "dark": [[at, colour] for (at, _), (_, colour) in zip(_HEAT, _HEAT[::-1], strict=True)],
                },
                "zmin": 0,
                "xgap": 1 if len(saves) < 120 else 0,
                "ygap": 1 if most < 40 else 0,
                "hovertemplate": f"rank %{{y}}<br>{name.lower()} %{{z:.3f}} s<extra></extra>",
                "colorbar": {"thickness": 10, "len": 1, "outlinewidth": 0, "ticksuffix": " s", "nticks": 5},
            }
        )
    rows_at = {"tickvals": list(range(most))} if most <= 16 else {"nticks": 12, "tickformat": "d"}
    axes = {
        "xaxis": _over_saves(saves),
        "yaxis": {"title": "rank", "autorange": "reversed", "showgrid": False, **rows_at},
    }
    return {
        "traces": traces,
        "layout": axes,
        "height": min(560, 150 + 26 * most),
        "choice": [name for _, name in _CHOICES],
    }


def modules(run: RunFigures) -> Chart:
    """The newest checkpoint as areas."""
    whole = run.modules[0].id
    tops = [module.id for module in run.modules if module.parent == whole]
    if len(tops) < 3:  # one colour each would be few: their parts have them
        tops = [module.id for module in run.modules if module.parent in tops]
    colour_of: dict[str, str] = {}
    for module in run.modules[1:]:  # parents come before their parts
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


def reuse(run: RunFigures) -> Chart:
    """Bytes that were written, and those that were linked instead."""
    saves = run.timed
    largest = max((save.bytes or 0) + (save.bytes_reused or 0) for save in saves)
    unit, divisor = next((one for one in _UNITS if largest >= one[1]), _UNITS[-1])
    traces = []
    for name, colour, values in (
        ("Written", "--blue", [save.bytes or 0 for save in saves]),
        ("Linked from the checkpoint before", "--green", [save.bytes_reused or 0 for save in saves]),
    ):
        hover = [f"{_hover(s)}<br>{name.lower()}: {size(v)}<extra></extra>" for s, v in zip(saves, values, strict=True)]
        bar = {"type": "bar", "name": name, "x": list(range(len(saves))), "y": [value / divisor for value in values]}
        traces.append({**bar, "marker": {"color": colour, "line": {"width": 0}}, "hovertemplate": hover})
    layout = {
        "barmode": "stack",
        "bargap": 0.25,
        "xaxis": _over_saves(saves),
        "yaxis": {"title": unit, "rangemode": "tozero"},
    }
    return {"traces": traces, "layout": layout, "height": 320}


_UNITS = [("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("bytes", 1.0)]


def size(nbytes: float) -> str:
    """Bytes for people."""
    unit, divisor = next((one for one in _UNITS if nbytes >= one[1]), _UNITS[-1])
    value = nbytes / divisor
    return f"{value:.0f} {unit}" if unit == "bytes" or value >= 100 else f"{value:.1f} {unit}"
