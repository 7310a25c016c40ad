"""``benchmarks/RESULTS.md`` and the table of ``README.md``, as texts made of figures and of the notes beside them."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

from benchmarks._machine import busy
from benchmarks.report.cells import CELLS, OURS, README, Standing, standing
from benchmarks.report.figures import Table, median
from benchmarks.report.sections import SECTIONS

NOTES = Path(__file__).parent.parent / "notes"
BEGIN, END = "<!-- speed: made by `make bench-report` -->", "<!-- end of speed -->"
_INTRODUCTION = """\
Made by `make bench-report` out of `benchmarks/results.json` and `benchmarks/notes/`: change those, not this page.
Figures are medians, in brackets the least and the most of the repetitions; peers ran in turn, each time in another
order, and everything was compared byte for byte. Each section says when it was measured, and what else was running."""
_LEGEND = """\
*Peer ÷ ours*: below 1 we are slower than the best of the others. *Within the spread*: the repetitions of both overlap.
The ceiling is the same bytes, by as many ranks, with plain system calls, or what the section names; in brackets are the
least and the most of the repetitions, each compared with the ceiling of the same repetition. CPU seconds are those of
all ranks, extra MiB those of the rank that takes the most. An aim is reached if two runs reach it, between which all
other benchmarks ran; *once*: the run before was not measured."""
Results = dict[str, Any]
"""Of ``benchmarks/results.json``: by section, its ``runs`` with their tables, and those of the time ``before``."""


def tables_of_section(results: Results, name: str, time: str = "runs") -> list[Table]:
    runs = results.get(name, {}).get(time, [])
    return [Table(table["title"], table["rows"]) for run in runs for table in run["tables"]]


def standings(results: Results) -> list[Standing]:
    """Of all cells, in the order of the page."""
    return [
        standing(cell, tables_of_section(results, cell.section), tables_of_section(results, cell.section, "before"))
        for cell in CELLS
    ]


def page(results: Results) -> str:
    """The whole of ``benchmarks/RESULTS.md``."""
    parts = [
        "# Results",
        _INTRODUCTION,
        _about(results),
        "## Won and lost",
        _overview(standings(results)),
        _LEGEND,
        _chart(),
        *(section(results, name) for name in SECTIONS),
    ]
    return "\n\n".join(parts) + "\n"


def _chart() -> str:
    return (
        '<picture><source media="(prefers-color-scheme: dark)" srcset="speed-dark.svg">\n'
        '<img alt="Best peer ÷ ours, for each cell of the table" src="speed-light.svg"></picture>'
    )


def _machines(results: Results) -> list[dict[str, Any]]:
    return [run["machine"] for name in SECTIONS for run in results.get(name, {}).get("runs", [])]


def _about(results: Results) -> str:
    said = dict.fromkeys(_machine(machine) for machine in _machines(results))
    return "\n".join(f"- {line}" for line in said) or "Nothing has been measured yet."


def _machine(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items() if number[0].isdigit())
    return f"{machine['cpu']}; {machine['system']}; {versions}"


def _overview(found: list[Standing]) -> str:
    head = ["cell", "ours", "best peer", "", "peer ÷ ours", "ours ÷ ceiling", "CPU s", "extra MiB", "aimed at", "",
            "reached"]  # fmt: skip
    rows = [
        [
            one.cell.name,
            _value(one.ours, one.cell.unit),
            _value(one.theirs, one.cell.unit),
            one.peer,
            _ratio(one.ratio),
            _spread(one.of_ceiling, one.each_of_ceiling),
            _value(_one(one.cpu)),
            _value(_one(one.extra)),
            one.cell.target,
            one.verdict,
            one.reached,
        ]
        for one in found
    ]
    return _markdown(head, rows)


def section(results: Results, name: str) -> str:
    """A section of the page: its note, and a table for each that was measured."""
    parts = [f"## {SECTIONS[name].title}"]
    note = NOTES / f"{name}.md"
    if note.exists():
        parts.append(note.read_text().strip())
    runs = results.get(name, {}).get("runs", [])
    several = len({_machine(machine) for machine in _machines(results)}) > 1
    for run in runs:
        load = f"{run['load_before']:.1f} cores busy with other work before and {run['load_after']:.1f} after"
        warning = busy(run["load_before"])
        where = f" On {_machine(run['machine'])}." if several else ""
        parts.append(
            f"`python -m benchmarks {run['command']}`, {run['date']}, {load}.{where} {run.get('note', '')}".strip()
        )
        if warning:
            parts.append(f"**{warning}**")
        parts += [_table(Table(table["title"], table["rows"])) for table in run["tables"]]
    if not runs:
        parts.append("Not measured yet.")
    return "\n\n".join(parts)


def _table(table: Table) -> str:
    columns = list(dict.fromkeys(column for row in table.rows.values() for column in row))
    bounds = {"÷ ours": OURS, "÷ ceiling": next((name for name in table.rows if name.startswith("ceiling")), "")}
    over = {
        title: median(table.rows[name]["seconds"])
        for title, name in bounds.items()
        if table.rows.get(name, {}).get("seconds")
    }
    head = [table.title, *columns[:1], *over, *columns[1:]]
    rows = []
    for name, row in table.rows.items():
        seconds = row.get("seconds")
        ratios = [_ratio(median(seconds) / least if seconds and least else None) for least in over.values()]
        cells = [_value(row.get(column, [])) for column in columns]
        rows.append([f"**{name}**" if name == OURS else name, *cells[:1], *ratios, *cells[1:]])
    return _markdown(head, rows)


def readme(results: Results, text: str) -> str:
    """``README.md`` with its table of figures made anew.

    Raises:
        ValueError: If the two lines between which the table stands are not in it.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md lacks the lines {BEGIN.strip()!r} and {END.strip()!r}")
    return f"{before}{begin}\n{_readme_part(results)}\n{end}{after}"


def _readme_part(results: Results) -> str:
    found = standings(results)
    head = ["", "dcp_plugin", "stock, at its best", "best of all others", ""]
    rows = [
        [one.cell.name, _value(one.ours[:1] and [median(one.ours)], "s"), _value(_one(one.stock), "s"),
         _value(_one(one.theirs), "s"), one.peer]
        for one in found if one.cell.name in README and one.ours
    ]  # fmt: skip
    ratios = {one.cell.name: one.ratio for one in found if one.ratio is not None}
    slower = sorted((ratio, name) for name, ratio in ratios.items() if ratio < 1)
    worst = ", ".join(f"{name} ({ratio:.2f})" for ratio, name in slower[:3])
    beaten = f"in {len(slower)} of {len(ratios)} cells; the worst of them (their time ÷ ours)"
    line = re.sub(r"(?<=\d) (?=\d{3})", "\u00a0", f"*Slower* than the best of the others {beaten}: {worst}.")
    said = [*(part.replace("\u00a0", " ") for part in textwrap.wrap(line, 118)), ""] if slower else []
    lines = ["", *_markdown(head, rows).splitlines(), "", *said]
    return "\n".join(lines)


def _one(values: list[float]) -> list[float]:
    return [median(values)] if values else []


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _value(values: list[float], unit: str = "") -> str:
    if not values:
        return ""
    middle = f"{_digits(median(values))} {unit}".rstrip()
    return middle if min(values) == max(values) else f"{middle} ({_digits(min(values))} to {_digits(max(values))})"


def _spread(ratio: float | None, each: list[float]) -> str:
    return f"{_ratio(ratio)} ({_digits(min(each))} to {_digits(max(each))})" if each else _ratio(ratio)


def _digits(value: float) -> str:
    """Three digits, and no exponent: 0.00401, 12.3, 1023."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.7f}"[: 9 if abs(value) < 0.001 else None].rstrip("0") if abs(value) < 0.0001 else _fixed(value)


def _fixed(value: float) -> str:
    digits = 2
    while abs(value) * 10 ** (digits - 2) < 1:
        digits += 1
    while digits > 0 and abs(value) >= 10 ** (3 - digits) and abs(value) * 10**digits >= 1000:
        digits -= 1
    return f"{value:.{digits}f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else _digits(value)
