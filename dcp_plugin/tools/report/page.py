"""A report as one HTML page that needs nothing else: style, script, library and data are in it.

Texts from a checkpoint or a file beside it are escaped where they are put in. The page's own policy lets the browser
run the two scripts that are named by their hashes, and fetch nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from statistics import median

from dcp_plugin.tools.report.charts import NONE, charts_of, chosen_metrics, size, step_of
from dcp_plugin.tools.report.collect import RunFigures, Save

_MOST_ROWS = 500


def page(run: RunFigures, plotly: str) -> str:
    """The page.

    Args:
        run: What it shows.
        plotly: The text of ``plotly.min.js``.
    """
    charts = charts_of(run)
    style, script = _own("page.css"), _own("page.js")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash_of(plotly)} {_hash_of(script)}",
            "style-src 'unsafe-inline'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    data = json.dumps(charts).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    sections = "\n".join(make(run, charts.get(name)) for name, make in _SECTIONS.items())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{_name(run)}: report</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<main>
{_head(run)}
{_cards(run)}
{sections}
{_table(run)}
{_foot()}
</main>
<script type="application/json" id="charts">{data}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def _own(name: str) -> str:
    return files("dcp_plugin.tools.report").joinpath(name).read_text("utf-8")


def _hash_of(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _name(run: RunFigures) -> str:
    return escape(run.root.rstrip("/").rpartition("/")[2] or run.root)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


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


def _head(run: RunFigures) -> str:
    first, last = run.saves[0], run.saves[-1]
    begin, end, day = _date(first.time), _date(last.time), "%d %b %Y"
    if _date(first.time, day) == _date(last.time, day):
        end = _date(last.time, "%H:%M UTC")
    when = begin if first is last else f"{begin.removesuffix(' UTC')} to {end}"
    ranks = max((len(save.ranks.get("bytes", [])) for save in run.saves), default=0)
    of = f", {_count(ranks, 'rank')}" if ranks else ""
    return f"""<header>
<p class="kind">Checkpoint report</p>
<h1>{_name(run)}</h1>
<p class="lead">{when}{of}. {_count(run.checkpoints, "checkpoint")} there now.</p>
</header>"""


def _card(label: str, value: str, note: str) -> str:
    number, _, unit = value.partition(" ")
    shown = f'{number} <span class="unit">{unit}</span>' if unit else number
    return f'<div><dt>{label}</dt><dd><span class="value">{shown}</span><br><span class="note">{note}</span></dd></div>'


def _cards(run: RunFigures) -> str:
    timed, failed = run.timed, len(run.saves) - len(run.published)
    trainings, steps = run.trainings, [save.step for save in run.published if save.step is not None]
    cards = [
        _card(
            "Saves",
            f"{len(run.published):,}",
            f"{failed or 'none'} failed" + (f", step {max(steps):,}" if steps else ""),
        )
    ]
    if timed:
        waited = [save.blocked_seconds or 0.0 for save in timed]
        cards.append(
            _card("Training waited", _seconds(median(waited)), f"per save; {_seconds(sum(waited), True)} in all")
        )
        took = [save.seconds or 0.0 for save in timed]
        cards.append(_card("Until published", _seconds(median(took)), f"median; longest {_seconds(max(took))}"))
    if trainings.goodput is not None and trainings.count:
        of = _seconds(trainings.elapsed_seconds, True)
        cards.append(
            _card("Goodput", f"{100 * trainings.goodput:.1f} %", f"of {of}; {_count(trainings.restarts, 'restart')}")
        )
    if run.newest_bytes is not None:
        cards.append(_card("Newest checkpoint", size(run.newest_bytes), f"{escape(run.newest)}"))
    linked, written = sum(save.bytes_reused or 0 for save in timed), sum(save.bytes or 0 for save in timed)
    if linked + written:
        cards.append(
            _card(
                "Reused",
                f"{100 * linked / (linked + written):.0f} %",
                f"{size(linked)} not written again",
            )
        )
    return f'<dl class="cards">{"".join(cards)}</dl>'


def _section(title: str, said: str, body: str) -> str:
    told = f'<p class="said">{said}</p>' if said else ""
    return f"<section><h2>{title}</h2>{told}{body}</section>"


def _chart_or_why(run: RunFigures, name: str, chart: dict[str, object] | None) -> str:
    if chart is None:
        return f'<div class="empty">{escape(run.missing.get(name, ""))}</div>'
    return f'<div class="chart" id="{name}"></div>'


def _metrics(run: RunFigures, chart: dict[str, object] | None) -> str:
    said = ""
    if chart is not None and (name := _told_metric(run)):
        known = [save for save in run.published if name in save.metrics]
        best = min(known, key=lambda save: save.metrics[name])
        newest = known[-1]
        if "loss" in name.lower():
            said = (
                f"Each point is a checkpoint. <strong>{escape(name)}</strong> is {newest.metrics[name]:.4g} in the "
                f"newest, and lowest, {best.metrics[name]:.4g}, at step {step_of(best)}."
            )
    return _section("Metrics at the saves", said or "Each point is a checkpoint.", _chart_or_why(run, "metrics", chart))


def _told_metric(run: RunFigures) -> str:
    """The one that is told in words: of a validation, if there is one."""
    names = chosen_metrics(run)
    return next((name for name in names if "val" in name.lower()), names[0])


def _seconds_section(run: RunFigures, chart: dict[str, object] | None) -> str:
    said = ""
    if chart is not None:
        said = (
            "A bar is one save, from the call until it is published, for the slowest rank. What is above the "
            "orange diamond went on in the background."
        )
    return _section("Seconds per save", said, _chart_or_why(run, "seconds", chart))


def _ranks(run: RunFigures, chart: dict[str, object] | None) -> str:
    said, choice = "", ""
    if chart is not None:
        names = [("Writing", 0), ("Copying", 1), ("Waiting", 2)]
        buttons = (
            f'<button type="button" data-chart="ranks" data-trace="{number}" '
            f'aria-pressed="{str(not number).lower()}">{name}</button>'
            for name, number in names
        )
        choice = f'<div class="choice" role="group" aria-label="What the colours show">{"".join(buttons)}</div>'
        said = (
            "A row is a rank, a column is a save: a straggler stands out as a row, a slow moment of the storage as "
            "a column."
        )
    body = "".join(
        f'<p class="told"><strong>Rank {one.rank} is slow</strong>: its writing takes {one.times:.1f} times the '
        f"median of all ranks, and it was the slowest in {one.slowest} of {one.of} saves.</p>"
        for one in run.stragglers
    )
    return _section("Ranks", said, body + choice + _chart_or_why(run, "ranks", chart))


def _modules(run: RunFigures, chart: dict[str, object] | None) -> str:
    said = f"Of <strong>{escape(run.newest)}</strong>. A click opens a module." if chart is not None else ""
    return _section("Size by module", said, _chart_or_why(run, "modules", chart))


def _reuse(run: RunFigures, chart: dict[str, object] | None) -> str:
    said = "What a checkpoint shares with the one before is linked and not written." if chart is not None else ""
    return _section("Written and reused", said, _chart_or_why(run, "reuse", chart))


def _trainings(run: RunFigures, chart: object) -> str:
    title = "Failures and restarts"
    if "trainings" in run.missing:
        return _section(title, "", f'<div class="empty">{escape(run.missing["trainings"])}</div>')
    known, goodput = run.trainings, run.trainings.goodput
    said = ""
    if goodput is not None:
        said = (
            f"<strong>Goodput {100 * goodput:.1f} %</strong>: of {_seconds(known.elapsed_seconds, True)} between the "
            f"first save and the last, saves held the training up for {_seconds(known.waited_seconds, True)}, and "
            f"{_count(known.restarts, 'restart')} took {_seconds(known.lost_seconds, True)}: the time between "
            "the saves before and after, beyond the usual one."
        )
    if known.ended_badly is not None:
        said += f" {_count(known.ended_badly, 'training')} ended without saying goodbye."
    rows = "".join(_row_of_training(run, number) for number in range(1, known.count + 1))
    head = (
        "<tr><th>Training</th><th>First save</th><th>Last save</th><th class=number>Saves</th>"
        "<th class=number>Steps</th><th>Failed saves</th></tr>"
    )
    return _section(title, said, f'<div class="scroll"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>')


def _row_of_training(run: RunFigures, number: int) -> str:
    mine = [save for save in run.saves if save.training == number]
    done = [save for save in mine if not save.error]
    steps = [save.step for save in done if save.step is not None]
    failed = "<br>".join(
        f'<span class="failed">step {step_of(save)}</span> {escape(save.error)}' for save in mine if save.error
    )
    times = (_date(mine[0].time), _date(mine[-1].time, "%H:%M:%S"))
    reached = f"{min(steps):,} to {max(steps):,}" if steps else NONE
    return (
        f"<tr><td>{number}</td><td>{times[0]}</td><td>{times[1]}</td><td class=number>{len(done)}</td>"
        f'<td class=number>{reached}</td><td class="wide">{failed or "none"}</td></tr>'
    )


_SECTIONS: dict[str, Callable[[RunFigures, dict[str, object] | None], str]] = {
    "metrics": _metrics,
    "seconds": _seconds_section,
    "ranks": _ranks,
    "reuse": _reuse,
    "modules": _modules,
    "trainings": _trainings,
}


def _table(run: RunFigures) -> str:
    names = chosen_metrics(run)[:2]
    numbers = ["Step", *map(escape, names), "Waited", "Published after", "Written", "Linked"]
    head = "<th>Save</th><th>Time</th>" + "".join(f"<th class=number>{name}</th>" for name in numbers)
    rows = "".join(_row_of_save(save, names) for save in run.saves[: -_MOST_ROWS - 1 : -1])
    left = len(run.saves) - _MOST_ROWS
    more = f'<p class="said">The newest {_MOST_ROWS}; {left} more are in the files.</p>' if left > 0 else ""
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    return f"<section><details><summary>All saves</summary>{more}{table}</details></section>"


def _row_of_save(save: Save, names: list[str]) -> str:
    metrics = [f"{save.metrics[name]:.5g}" if name in save.metrics else NONE for name in names]
    sizes = [NONE if value is None else size(value) for value in (save.bytes, save.bytes_reused)]
    waits = [_seconds(save.blocked_seconds), _seconds(save.seconds)]
    if save.error:
        metrics, sizes, waits = [NONE] * len(names), [NONE, NONE], [NONE, '<span class="failed">failed</span>']
    cells = "".join(f"<td class=number>{one}</td>" for one in (step_of(save), *metrics, *waits, *sizes))
    return f"<tr><td>{escape(save.name)}</td><td>{_date(save.time, '%d %b, %H:%M:%S')}</td>{cells}</tr>"


def _foot() -> str:
    return """<footer>
<p>Seconds are of the clocks of the ranks: copying is the copy to host memory; writing is this rank's data files, on
their way to the disk or the store; waiting is how long the training stood still. Goodput does not count what a
restart loses before the first save of a run, nor after its last.</p>
<p>Made by dcp-plugin from what is kept beside the checkpoints. This page contains all that it shows, and
fetches nothing.</p>
</footer>"""
