"""``make bench-report``: run the benchmarks of all sections, and make the pages from their figures.

``benchmarks/results.json`` holds the figures of all sections; a section that is run, or read with ``--from-json``,
takes the place of what it had there, and the others stay. So a run that was interrupted goes on with ``--only`` and
the names that are missing.

All sections run in turn, and then once more: a figure counts if it holds in two runs with other runs between them.
``results.json`` keeps both.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import _machine
from benchmarks.report import chart, page
from benchmarks.report.figures import tables_of
from benchmarks.report.sections import LARGE, SECTIONS

FOLDER = Path(__file__).parent.parent
KEPT = Path("outputs/report")
"""Where the benchmarks' own JSON files are left."""


def taken(command: str, file: Path, loads: tuple[float, float] | None = None) -> dict[str, Any]:
    """What ``results.json`` keeps of the JSON file of one run."""
    said = json.loads(file.read_text())
    about: dict[str, Any] = said if isinstance(said, dict) else {}
    before = about.get("load_before", about.get("load", 0.0))
    loads = loads or (before, about.get("load_after", before))
    return {
        "command": command,
        "date": datetime.date.fromtimestamp(file.stat().st_mtime).isoformat(),
        "machine": about.get("machine", _machine.describe()),
        "load_before": round(loads[0], 2),
        "load_after": round(loads[1], 2),
        "tables": [{"title": table.title, "rows": table.rows} for table in tables_of(said)],
    }


def _file(name: str, number: int, folder: Path) -> Path:
    return folder / f"{name}-{number}.json"


def _run(name: str, smallest: bool, more: list[str], folder: Path) -> list[dict[str, Any]]:
    """Run the command lines of a section, one after another."""
    runs = []
    for number, command in enumerate(SECTIONS[name].runs):
        file = _file(name, number, folder)
        benchmark, *options = shlex.split(command)
        options += [*(importlib.import_module(f"benchmarks.{benchmark}").SMALLEST if smallest else []), *more]
        print(f"\n== {name}: {shlex.join([benchmark, *options])}", flush=True)
        before = _machine.busy_cores()
        subprocess.run([sys.executable, "-m", "benchmarks", benchmark, *options, "--json", file], check=True)
        runs.append(taken(shlex.join([benchmark, *options]), file, (before, _machine.busy_cores())))
    return runs


def _read(name: str, folder: Path) -> list[dict[str, Any]]:
    """Those runs of a section whose JSON files are in the folder."""
    files = {_file(name, number, folder): command for number, command in enumerate(SECTIONS[name].runs)}
    return [taken(command, file) for file, command in files.items() if file.exists()]


def write_pages(results: page.Results, folder: Path, readme: Path) -> None:
    """``RESULTS.md`` and the charts in the folder, and the table of the README."""
    (folder / "RESULTS.md").write_text(page.page(results))
    chart.draw(page.standings(results), folder)
    readme.write_text(page.readme(results, readme.read_text()))


def _compact(results: page.Results) -> str:
    """A line for each row of a table, so that changes can be read."""
    text = json.dumps(results, ensure_ascii=False, indent=1)
    depth = " " * 8  # of a row's columns: section, runs, run, tables, table, rows, row
    lines = []
    for line in text.splitlines():
        if lines and line.startswith(depth):
            lines[-1] += line.strip() if lines[-1].endswith(("{", "[")) else " " + line.strip()
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> None:
    made = argparse.ArgumentParser(prog="python -m benchmarks.report", description=(__doc__ or "").splitlines()[0])
    made.add_argument("--only", nargs="+", choices=SECTIONS, help="sections (default all but llama)")
    made.add_argument(
        "--from-json", nargs="?", type=Path, const=KEPT, help=f"run nothing: read these files (default {KEPT})"
    )
    made.add_argument("--smallest", action="store_true", help="seconds instead of minutes; the figures mean nothing")
    made.add_argument("--rounds", type=int, default=2, help="times that all sections are run (default %(default)s)")
    made.add_argument("--more", default="", help="options for every benchmark, say '--repeats 2'")
    made.add_argument("--to", type=Path, default=FOLDER, help="where the page goes (default %(default)s)")
    made.add_argument("--readme", type=Path, default=FOLDER.parent / "README.md", help="(default %(default)s)")
    options = made.parse_args()
    file = options.to / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    more = shlex.split(options.more)
    began = time.monotonic()
    KEPT.mkdir(parents=True, exist_ok=True)
    chosen = options.only or [name for name in SECTIONS if options.from_json or name not in LARGE]
    for name in chosen if options.from_json else chosen * options.rounds:
        runs = _read(name, options.from_json) if options.from_json else _run(name, options.smallest, more, KEPT)
        known = results.get(name, {})
        if runs:
            results[name] = {"runs": runs, "before": known.get("before" if options.from_json else "runs", [])}
        results = {known: results[known] for known in SECTIONS if known in results}
        file.write_text(_compact(results))
    write_pages(results, options.to, options.readme)
    print(f"\n{time.monotonic() - began:.0f} s; written: {options.to / 'RESULTS.md'}, {options.readme}")


if __name__ == "__main__":
    main()
