"""The pages of figures: what is found in the benchmarks' files, who has won, and that the pages say what they say."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from benchmarks import names
from benchmarks.report import __main__ as report
from benchmarks.report import chart, page
from benchmarks.report.cells import CELLS, OURS, README, Cell, standing
from benchmarks.report.figures import Table, tables_of
from benchmarks.report.sections import SECTIONS

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return json.loads((BENCHMARKS / "results.json").read_text())  # type: ignore[no-any-return]


def test_the_page_of_results_says_what_the_figures_say(results: dict[str, Any]) -> None:
    assert (BENCHMARKS / "RESULTS.md").read_text() == page.page(results), "run: make bench-report ARGS=--from-json"


def test_the_readme_says_what_the_figures_say(results: dict[str, Any]) -> None:
    text = (ROOT / "README.md").read_text()
    assert text == page.readme(results, text), "run: make bench-report ARGS=--from-json"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_chart_shows_every_cell_that_has_a_peer(results: dict[str, Any], theme: str) -> None:
    drawn = ElementTree.parse(BENCHMARKS / f"speed-{theme}.svg")
    texts = {"".join(element.itertext()).strip() for element in drawn.iter("{http://www.w3.org/2000/svg}text")}
    for one in page.standings(results):
        if one.ratio is not None:
            assert {one.cell.name, f"{one.ratio:.2f}  {one.peer}"} <= texts


def test_the_same_figures_draw_the_same_chart(results: dict[str, Any], tmp_path: Path) -> None:
    found = page.standings(results)[:1]
    first = [path.read_bytes() for path in chart.draw(found, tmp_path)]
    assert [path.read_bytes() for path in chart.draw(found, tmp_path)] == first


def test_sections_cells_and_notes_belong_together() -> None:
    assert {cell.section for cell in CELLS} <= set(SECTIONS)
    assert {cell.name for cell in CELLS} >= README
    assert {note.stem for note in (BENCHMARKS / "notes").iterdir()} == set(SECTIONS)
    assert {run.split()[0] for section in SECTIONS.values() for run in section.runs} <= set(names())
    assert len({cell.name for cell in CELLS}) == len(CELLS)


def _table(**rows: list[float]) -> Table:
    return Table("save, 1 MiB", {name.replace("_", " "): {"seconds": values} for name, values in rows.items()})


OF_STOCK = Cell("save", "save", "MiB", ours="ours", ceiling="raw", of_ceiling=1.1)


@pytest.mark.parametrize(
    ("seconds", "verdict", "reached"),
    [
        ({"ours": [1.0, 1.1], "stock": [2.0, 2.2], "raw": [1.0, 1.1]}, "won", "yes"),
        ({"ours": [1.0, 2.1], "stock": [2.0, 2.2], "raw": [1.5]}, "won, within the spread", "yes"),
        ({"ours": [2.0], "stock": [1.0], "raw": [1.0]}, "**lost**", "**no**: 0.50 x stock, 2.00 of the ceiling"),
        ({"ours": [1.0], "stock": [1.5]}, "won", "as far as measured"),
        ({"ours": [2.0, 2.0, 0.5], "stock": [1.0]}, "**lost**, within the spread", "**no**: 0.50 x stock"),
        ({"ours": [2.0], "raw": [2.0]}, "no peer", "as far as measured"),
        ({"stock": [2.0]}, "not measured", ""),
    ],
)
def test_won_and_lost(seconds: dict[str, list[float]], verdict: str, reached: str) -> None:
    tables = [Table("load, 1 MiB", {}), _table(**seconds)]
    found = standing(OF_STOCK, tables, tables)
    assert (found.verdict, found.reached) == (verdict, reached)


@pytest.mark.parametrize(
    ("before", "reached"),
    [([], "once"), ([1.0], "yes"), ([3.0], "in one of two runs: 0.67 x stock, 3.00 of the ceiling")],
)
def test_an_aim_is_reached_if_two_runs_reach_it(before: list[float], reached: str) -> None:
    now, then = ([_table(ours=ours, stock=[2.0], raw=[1.0])] for ours in ([1.0], before))
    assert standing(OF_STOCK, now, then).reached == reached


def test_the_spread_of_a_ratio_is_that_of_neighbouring_repetitions() -> None:
    ours, raw = [2.0, 4.0, 6.0, 8.0, 10.0], [1.0, 2.0, 2.0, 8.0, 10.0]
    assert standing(OF_STOCK, [_table(ours=ours, raw=raw)]).each_of_ceiling == [2.0, 2.0, 3.0, 1.0, 1.0]
    assert standing(OF_STOCK, [_table(ours=ours[:3], raw=raw[:3])]).each_of_ceiling == []


def test_the_best_peer_counts_and_each_may_have_an_aim_of_its_own() -> None:
    cell = Cell("load", "load", "MiB", ours="ours", leads={"files": 0.5})
    tables = [_table(ours=[1.0], stock=[3.0], files=[0.6], ceiling=[0.5], raw_bytes=[0.1])]
    found = standing(cell, tables, tables)
    assert (found.peer, found.ratio, found.of_ceiling, found.stock) == ("files", 0.6, 2.0, [3.0])
    assert (found.verdict, found.reached) == ("**lost**", "yes")


def test_a_row_may_hold_both_sides_of_a_comparison() -> None:
    table = Table("", {"DDP": {"seconds on": [2.0], "seconds off": [1.0]}})
    found = standing(Cell("broadcast", "hsdp", ours="DDP", column="seconds on", theirs="seconds off"), [table])
    assert (found.peer, found.ratio, found.verdict) == ("off", 0.5, "**lost**")


@pytest.mark.parametrize(
    ("said", "rows"),
    [
        (
            {"tables": [{"title": "save", "rows": [{"peer": OURS, "seconds": [1.0, 2.0], "median": 1.5, "cpu": 3}]}]},
            {OURS: {"seconds": [1.0, 2.0], "CPU s": [3.0]}},
        ),
        ({"tables": [{"title": "t", "figures": {"x": {"a": [1.0], "b": 2}}}]}, {"x": {"a": [1.0], "b": [2.0]}}),
        (
            {"tables": [{"where": "outputs", "case": "c", "seconds": 2.0, "min": 1.0, "max": 3.0, "took": 9.0}]},
            {"outputs, c": {"seconds": [1.0, 2.0, 3.0]}},
        ),
        (
            {"rows": [{"wrapper": "DDP", "ranks": 4, "seconds on": 2.0, "spread on": [1.0, 3.0], "MiB": 7}]},
            {"DDP, 4 ranks": {"seconds on": [1.0, 2.0, 3.0], "MiB": [7.0]}},
        ),
        (
            {"load": 1.0, "rows": [{"mesh": "fsdp", "ranks": 8, "repeats": 3, "stock": {"seconds": {"plan": 3.0}},
             "ours": {"seconds": {"plan": 1.0, "commit": 2.0}, "spread": {"plan": (0.5, 4.0)}, "gathered": 5}}]},
            {OURS: {"plan, s": [0.5, 1.0, 4.0], "commit, s": [2.0], "plan + commit, s": [3.0], "gathered": [5.0]},
             "stock": {"plan, s": [3.0]}},
        ),
        ([{"wrapper": "plain", "ranks": 1, "ours": 0.123456}], {"plain, 1 ranks": {"ours": [0.12346]}}),
        ({"mib": 8.0, "figures": {OURS: {"blocked": [1.0]}}}, {OURS: {"blocked": [1.0]}}),
    ],
)  # fmt: skip
def test_files_of_any_benchmark_have_one_form(said: Any, rows: Any) -> None:
    (table,) = tables_of(said)
    assert table.rows == rows


def test_a_file_without_figures_is_refused() -> None:
    with pytest.raises(ValueError, match="no figures"):
        tables_of({"tables": []})


def test_pages_are_made_of_files_that_are_there_and_keep_the_other_sections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("save", [1.0, 2.0, 3.0]), ("load", [0.0021])):
        rows = [{"peer": OURS, "seconds": seconds}, {"peer": "stock", "seconds": [4.0]}]
        said = {"load_before": 7.0, "tables": [{"title": f"{name}, 1 rank | 1 MiB", "rows": rows}]}
        (tmp_path / f"{name}-0.json").write_text(json.dumps(said))
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results.json").write_text('{"plan": {"runs": []}}')
    options = ["--from-json", str(tmp_path), "--to", str(tmp_path), "--readme", str(readme), "--only", "save", "load"]
    monkeypatch.setattr("sys.argv", ["report", *options])
    report.main()
    assert list(json.loads((tmp_path / "results.json").read_text())) == ["save", "load", "plan"]
    report.main()
    assert json.loads((tmp_path / "results.json").read_text())["save"]["before"] == [], "the same files are one run"
    text = (tmp_path / "RESULTS.md").read_text()
    assert f"| **{OURS}** | 2.00 (1.00 to 3.00) | 1.00 |" in text and "| stock | 4.00 | 2.00 |" in text
    assert f"| **{OURS}** | 0.00210 | 1.00 |" in text and "1 rank \\| 1 MiB" in text
    assert text.count("THE MACHINE WAS BUSY") == 2 and "Not measured yet." in text
    assert readme.read_text().startswith(f"before\n{page.BEGIN}\n") and "\nold\n" not in readme.read_text()
    assert readme.read_text().endswith(f"{page.END}\nafter\n")


def test_a_readme_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks the lines"):
        page.readme({}, "text")
