"""A report as one HTML page with its style, scripts, library and data.

The template escapes every text from a checkpoint or from the figures of a run. The page's own policy lets the browser
run the two scripts that are named by their hashes, and fetch nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.resources import files
from statistics import median

from jinja2 import Environment, StrictUndefined

from dcp_plugin.errors import size
from dcp_plugin.tools.report.charts import NONE, charts_of, chosen_metrics, step_of
from dcp_plugin.tools.report.collect import RunFigures

_MOST_ROWS = 500
_POLICY = (
    "default-src 'none'; script-src {} {}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


def page(run: RunFigures, plotly: str) -> str:
    """Return the page.

    Args:
        run: The figures that it shows.
        plotly: The text of ``plotly.min.js``.
    """
    charts, style, script = charts_of(run), _own("page.css"), _own("page.js")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"count": _count, "date": _date, "seconds": _seconds, "step": step_of}
    environment.filters["size"] = lambda nbytes: NONE if nbytes is None else size(nbytes)
    names = chosen_metrics(run)
    metric = next((name for name in names if "val" in name.lower()), names[0] if names else "")
    with_metric = [save for save in run.published if metric in save.metrics]
    is_loss = "metrics" not in run.missing and "loss" in metric.lower()
    return environment.from_string(_own("page.html")).render(
        run=run,
        charts=charts,
        name=run.root.rstrip("/").rpartition("/")[2] or run.root,
        policy=_POLICY.format(_hash_of(plotly), _hash_of(script)),
        period=_period(run),
        rank_count=max((len(save.ranks.get("bytes", [])) for save in run.saves), default=0),
        cards=[(label, value.partition(" ")[::2], note) for label, value, note in _cards(run)],
        metric=metric,
        metrics=names[:2],
        newest=with_metric[-1] if is_loss else None,
        best=min(with_metric, key=lambda save: save.metrics[metric]) if is_loss else None,
        trainings=[
            [save for save in run.saves if save.training == number] for number in range(1, run.trainings.count + 1)
        ],
        none_known=NONE,
        most_rows=_MOST_ROWS,
        style=style,
        script=script,
        plotly=plotly,
        data=json.dumps(charts).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
    )


def _own(name: str) -> str:
    return files("dcp_plugin.tools.report").joinpath(name).read_text("utf-8")


def _hash_of(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _date(seconds: float, form: str = "%d %b %Y, %H:%M UTC") -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return NONE


def _seconds(value: float | None, long: bool = False) -> str:
    if value is None:
        return NONE
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 120 or not long:
        return f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def _period(run: RunFigures) -> str:
    first, last = run.saves[0], run.saves[-1]
    begin, end, day = _date(first.time), _date(last.time), "%d %b %Y"
    if _date(first.time, day) == _date(last.time, day):
        end = _date(last.time, "%H:%M UTC")
    return begin if first is last else f"{begin.removesuffix(' UTC')} to {end}"


def _cards(run: RunFigures) -> Iterator[tuple[str, str, str]]:
    """Yield label, value with its unit, and note of each card."""
    timed, failed = run.timed, len(run.saves) - len(run.published)
    trainings, steps = run.trainings, [save.step for save in run.published if save.step is not None]
    newest_step = f", step {max(steps):,}" if steps else ""
    yield "Saves", f"{len(run.published):,}", f"{failed or 'none'} failed{newest_step}"
    if timed:
        waited = [save.blocked_seconds or 0.0 for save in timed]
        yield "Training waited", _seconds(median(waited)), f"per save; {_seconds(sum(waited), True)} in all"
        took = [save.seconds or 0.0 for save in timed]
        yield "Until published", _seconds(median(took)), f"median; longest {_seconds(max(took))}"
    if trainings.goodput is not None and trainings.count:
        elapsed, restarts = _seconds(trainings.elapsed_seconds, True), _count(trainings.restarts, "restart")
        yield "Goodput", f"{100 * trainings.goodput:.1f} %", f"of {elapsed}; {restarts}"
    if run.newest_bytes is not None:
        yield "Newest checkpoint", size(run.newest_bytes), run.newest
    linked, written = sum(save.bytes_reused or 0 for save in timed), sum(save.bytes or 0 for save in timed)
    if linked + written:
        yield "Reused", f"{100 * linked / (linked + written):.0f} %", f"{size(linked)} not written again"
