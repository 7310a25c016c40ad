"""One form for the figures of all benchmarks: tables of rows, columns and the value of each repetition.

The files that benchmarks write have the shape that suits each of them; any of these is understood:

- ``tables`` of :class:`benchmarks._harness.Report`: rows of peers, figures of several kinds, or loose notes;
- ``rows`` that are flat, with ``spread X`` beside ``seconds X``, or that have a part ``ours`` and a part ``stock``;
- ``figures`` by case and column, and plain lists of rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Rows = dict[str, dict[str, list[float]]]
"""By name of the row and of the column: a value of each repetition, or least, median and most of them."""
NAMING = ("replicas", "ranks", "tensors", "hosts", "keys", "chunks")
"""Numbers that tell rows from each other, as texts do."""
_NO_FIGURE = {"repeats", "took", "min", "max", "over_ours", "cpu_over_ours", "median"}
_CALLED = {"cpu": "CPU s", "extra_mib": "extra MiB"}
SIDES = ("ours", "stock")


@dataclass(frozen=True)
class Table:
    title: str
    rows: Rows


def tables_of(said: Any) -> list[Table]:
    """The tables of a benchmark's JSON file, whatever its shape.

    Raises:
        ValueError: If there is no figure in it.
    """
    if isinstance(said, list):
        found = _flat("", said)
    elif "tables" in said:
        found = _reported(said["tables"])
    elif "rows" in said:
        found = [table for row in said["rows"] if "ours" in row for table in _two_sides(row)]
        found += _flat("", [row for row in said["rows"] if "ours" not in row])
    else:
        about = "; ".join(f"{key} {value:.4g}" for key, value in said.items() if isinstance(value, float | int))
        found = [Table(about, _of_cases(said["figures"]))]
    if not any(table.rows for table in found):
        raise ValueError("no figures")
    return found


def _reported(tables: Iterable[Mapping[str, Any]]) -> list[Table]:
    found: list[Table] = []
    loose: list[Mapping[str, Any]] = []
    for table in tables:
        if "rows" in table:
            found.append(Table(table["title"], {row["peer"]: _columns(row) for row in table["rows"]}))
        elif "figures" in table:
            found.append(Table(table["title"], _of_cases(table["figures"])))
        else:
            loose.append(table)
    return _flat("", loose) + found


def _of_cases(figures: Mapping[str, Mapping[str, Any]]) -> Rows:
    return {name: {column: _numbers(value) for column, value in of.items()} for name, of in figures.items()}


def _flat(title: str, rows: Iterable[Mapping[str, Any]]) -> list[Table]:
    """Tables of those rows that have the same columns."""
    found: dict[tuple[str, ...], Rows] = {}
    for row in rows:
        columns = _columns(row)
        named = [
            str(value) if isinstance(value, str) else f"{value} {key}"
            for key, value in row.items()
            if isinstance(value, str) or key in NAMING
        ]
        found.setdefault(tuple(columns), {})[", ".join(named)] = columns
    return [Table(title, rows) for rows in found.values()]


def _two_sides(row: Mapping[str, Any]) -> list[Table]:
    """Of a row with a part for us and one for stock: seconds by step, with their spread, and other numbers."""
    rows: Rows = {}
    for side in (side for side in SIDES if side in row):
        part = row[side]
        steps, spread = part.get("seconds", {}), part.get("spread", {})
        columns = {f"{step}, s": _spread(value, spread.get(step)) for step, value in steps.items()}
        if {"plan", "commit"} <= set(steps):
            columns["plan + commit, s"] = [steps["plan"] + steps["commit"]]
        numbers = {key: value for key, value in part.items() if key not in ("seconds", "spread")}
        rows[{"ours": "dcp_plugin"}.get(side, side)] = columns | _columns(numbers)
    about = [str(value) if isinstance(value, str) else f"{value} {key}" for key, value in row.items() if key in NAMING]
    texts = [value for value in row.values() if isinstance(value, str)]
    return [Table(", ".join(texts + about), rows)]


def _columns(row: Mapping[str, Any]) -> dict[str, list[float]]:
    found = {}
    for key, value in row.items():
        if key in NAMING or (key in _NO_FIGURE and not (key in ("min", "max") and "seconds" not in row)):
            continue
        if key.startswith("spread ") or not _numbers(value):
            continue
        span = row.get(f"spread {key.removeprefix('seconds ')}") if key.startswith("seconds ") else None
        if key == "seconds" and {"min", "max"} <= set(row) and not isinstance(value, list):
            span = (row["min"], row["max"])
        found[_CALLED.get(key, key)] = _spread(value, span)
    return found


def _spread(value: Any, span: Any) -> list[float]:
    return _numbers([span[0], value, span[1]] if span else value)


def _numbers(value: Any) -> list[float]:
    """Five digits of each, which is more than repeats agree in."""
    values = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(one, bool) or not isinstance(one, int | float) for one in values):
        return []
    return [float(f"{one:.5g}") for one in values]


def median(values: list[float]) -> float:
    return statistics.median(values)
