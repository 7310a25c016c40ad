"""Figures of several kinds for each case: taken in turn, and printed as medians with their span."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TypeVar

from benchmarks._harness import Report, shuffled

Case = TypeVar("Case")
Figures = dict[str, dict[str, list[float]]]
"""Of a case, by what was measured: one for each repetition."""


def no_figures() -> Figures:
    return defaultdict(lambda: defaultdict(list))


def in_turn(cases: list[Case], repeats: int, run: Callable[[int, Case], None]) -> None:
    """``run(repetition, case)`` of all cases, in another order for each repetition."""
    for repetition in range(repeats):
        for case in shuffled(cases, repetition):
            run(repetition, case)


def show(report: Report, title: str, found: Figures) -> None:
    """Print a table, and keep what is in it for the JSON file."""
    print_table(title, found)
    report.note({"title": title, "figures": {name: dict(figures) for name, figures in found.items()}})


def print_table(title: str, found: Figures) -> None:
    columns = list(dict.fromkeys(column for figures in found.values() for column in figures))
    rows = [["", *columns]]
    rows += [[name, *(_spread(figures.get(column, [])) for column in columns)] for name, figures in found.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"\n{title}; median (least to most)")
    for name, *cells in rows:
        print(
            f"{name:{widths[0]}}"
            + "".join(f"   {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        )


def markdown(tables: Mapping[str, Figures]) -> str:
    """Return one table in Markdown with a row for each figure of all tables."""
    lines = ["| measured | case | figure | median (least to most) | times |", "|---|---|---|---|---|"]
    for title, found in tables.items():
        for case, figures in found.items():
            for column, values in figures.items():
                lines.append(f"| {title} | {case} | {column} | {_spread(values)} | {len(values)} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def ratios(found: Figures, column: str, over: str) -> None:
    """Print how many times one case's median each of the others took."""
    if over in found:
        least = statistics.median(found[over][column])
        said = (f"{name} {statistics.median(of[column]) / least:.2f}" for name, of in found.items() if name != over)
        print(f"{column}, ÷ {over}: {'; '.join(said)}")
