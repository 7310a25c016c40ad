"""``dcp-plugin report``: one page about a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dcp_plugin.cli.output import JsonOption, StorageOptionsOption, echo, show, told, where

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="The folder of a run's checkpoints, or one above it: a directory or a URL.")
]


def report_command(
    run: RunArgument,
    out: Annotated[Path | None, typer.Option("--out", help="The page to write; report.html if not said.")] = None,
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> None:
    """Write one page about a run: metrics, seconds, ranks, sizes, reuse, failures and restarts.

    With --json the figures are printed, and a page is written only to a given --out.
    """
    root = where(run, storage_option)
    with told(as_json):
        from dcp_plugin.tools.report import collect, write

        figures = collect(root)
        page = write(figures, out or "report.html") if out is not None or not as_json else None
    if not as_json:
        echo(f"{page}: {len(figures.published)} saves of {figures.root}")
        for why in dict.fromkeys(figures.missing.values()):
            echo(why)
        return
    trainings = {**asdict(figures.trainings), "goodput": figures.trainings.goodput}
    show({"report": {**asdict(figures), "trainings": trainings}, "out": page})
