"""The commands about the checkpoints below a root: ``list``, ``prune`` and ``report``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dcp_plugin.core.errors import damage_in, size
from dcp_plugin.tools.cli.terminal import (
    FAILED,
    Answer,
    JsonOption,
    RootArgument,
    StorageOptionsOption,
    echo,
    progress,
    table,
    where,
)

if TYPE_CHECKING:
    from dcp_plugin.core.paths import Where
    from dcp_plugin.tools.listing import ListedCheckpoint, Run
    from dcp_plugin.tools.prune import PruneReport
    from dcp_plugin.tools.run_report.collect import RunFigures

_AUTO = "*"
_ORDERS: dict[str, Callable[[ListedCheckpoint], Any]] = {
    "step": lambda listed: -1 if listed.step is None else listed.step,
    "size": lambda listed: listed.nbytes,
    "name": lambda listed: str(listed.path),
}
_MAX_METRICS, _MAX_LAYOUTS = 3, 2


def list_command(
    root: RootArgument,
    local_dir: Annotated[
        str | None, typer.Option(help="The keeper.dir of the runs: also list the saves that only this host has in it.")
    ] = None,
    sort: Annotated[Literal["time", "step", "size", "name"], typer.Option(help="Order in each run.")] = "time",
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> Answer:
    """List every run and checkpoint at or below a directory or URL, oldest first, with sizes and states."""
    from dcp_plugin.tools.listing import list_runs

    at = _folder(root, storage_option, local_dir is not None)
    runs = list_runs(at, local_dir=local_dir)
    for run in runs if sort != "time" else ():
        run.checkpoints.sort(key=_ORDERS[sort])
    documents = [{**vars(run), "resumes": run.resumes.path if run.resumes else None} for run in runs]
    return Answer({"root": at, "runs": documents}, partial(_print_runs, at, runs))


def _folder(root: str, storage_option: list[str] | None, may_be_absent: bool = False) -> Where:
    """Return the directory or prefix that was typed.

    Raises:
        FileNotFoundError: The path does not exist, or is a file.
    """
    from dcp_plugin.core.media import medium_of

    at = where(root, storage_option)
    with damage_in(at):
        kind = medium_of(at).kind(at)
    if kind != "folder" and (kind or not may_be_absent):
        raise FileNotFoundError(f"{at} is a file; inspect looks into one." if kind else f"{at}: nothing is there.")
    return at


def _print_runs(at: Where, runs: list[Run]) -> None:
    if not runs:
        echo(f"{at}: no checkpoint is there, or below.")
    for run in runs:
        echo(f"{run.folder}: {len(run.checkpoints)} checkpoint(s), {size(run.nbytes)}")
        _print_checkpoints(run)
        if run is not runs[-1]:
            echo()
    if any(run.resumes for run in runs):
        echo()
        echo(f"{_AUTO} is what an automatic resume of its run loads.")


def _print_checkpoints(run: Run) -> None:
    now = time.time()
    table(
        ("", "checkpoint", "step", "age", "size", "own", "ranks", "layout", "state", "metrics"),
        [
            (
                _AUTO if listed.resumes else "",
                _name(run, listed),
                listed.step,
                _age(now - listed.time),
                size(listed.nbytes),
                size(listed.own_bytes),
                listed.world_size,
                _first(listed.layouts, _MAX_LAYOUTS, ", …"),
                _state(listed),
                _metrics(listed),
            )
            for listed in run.checkpoints
        ],
        numbers=("step", "age", "size", "own", "ranks"),
        optional=("layout", "own", "ranks"),
    )
    for line in _notes(run):
        echo(f"  {line}")


def _first(texts: list[str], limit: int, more: str) -> str:
    return ", ".join(texts[:limit]) + (more if len(texts) > limit else "")


def _name(run: Run, listed: ListedCheckpoint) -> str:
    return str(listed.path)[len(str(run.folder)) :].lstrip("/")


def _metrics(listed: ListedCheckpoint) -> str:
    metrics = [f"{name} {value:g}" for name, value in listed.metrics.items()]
    return _first(metrics, _MAX_METRICS, f", and {len(metrics) - _MAX_METRICS} more")


def _state(listed: ListedCheckpoint) -> str:
    tool = {"dcp_plugin": "", "stock": "stock DCP"}.get(listed.format, listed.format)
    state = f"foreign: {tool}" if listed.state == "foreign" else f"{listed.state} ({tool})" if tool else listed.state
    return f"{state}, only in keeper.dir" if listed.tier == "local" else state


def _notes(run: Run) -> Iterator[str]:
    for listed in run.checkpoints:
        if listed.reason:
            yield f"{_name(run, listed)}: {listed.reason}"
        if listed.base is not None:
            yield f"{_name(run, listed)}: it leaves out parameters of {listed.base}"


def _age(seconds: float) -> str:
    for unit, length, limit in (("s", 1, 60), ("min", 60, 3600), ("h", 3600, 48 * 3600)):
        if seconds < limit:
            return f"{max(0.0, seconds / length):.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def prune_command(
    root: RootArgument,
    keep_last: Annotated[int | None, typer.Option(min=1, help="Keep this number of the newest of each run.")] = None,
    keep_every: Annotated[int | None, typer.Option(min=1, help="Keep steps that are multiples of this number.")] = None,
    best: Annotated[str | None, typer.Option(metavar="METRIC", help="Keep the best values of this metric.")] = None,
    mode: Annotated[str, typer.Option(help="min or max: the best value.")] = "min",
    keep_best: Annotated[int, typer.Option(min=1, help="The number of the best to keep.")] = 1,
    younger_than: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Keep those saved less than this number of seconds ago.")
    ] = None,
    damaged: Annotated[bool, typer.Option("--damaged", help="Also delete damaged checkpoints.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing; show what would be deleted.")] = False,
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> Answer:
    """Delete, without a question, the checkpoints that no rule keeps, and garbage of interrupted saves.

    The rules apply to each folder of checkpoints separately. No rule deletes: the newest complete checkpoint, the
    target of a link, a save in flight, damaged checkpoints, and checkpoints of other tools.
    """
    from dcp_plugin.tools.prune import prune

    if keep_last is None and keep_every is None and best is None and younger_than is None:
        raise typer.BadParameter("give a rule: --keep-last, --keep-every, --best METRIC, --younger-than SECONDS")
    at = _folder(root, storage_option)
    with progress("deleting") as bar:
        report = prune(
            at,
            keep_last,
            keep_every,
            best,
            mode,  # type: ignore[arg-type]  # prune checks it
            keep_best,
            damaged,
            dry_run,
            progress=bar,
            younger_than=younger_than,
        )
    return Answer(vars(report), partial(_print_pruned, report), FAILED if report.failed else 0)


def _print_pruned(report: PruneReport) -> None:
    would = "would go" if report.dry_run else "deleted"
    rows: list[tuple[object, ...]] = []
    for checkpoint in report.checkpoints:
        outcome = would if checkpoint.deleted else "FAILED" if checkpoint.failed else "kept"
        reasons = "; ".join(checkpoint.reasons)
        rows.append((checkpoint.path, checkpoint.step, size(checkpoint.nbytes), outcome, reasons))
    for leftover in report.leftovers:
        nbytes = None if leftover.nbytes is None else size(leftover.nbytes)
        rows.append((leftover.path, None, nbytes, would if leftover.deleted else "kept", leftover.what))
    if rows:
        table(("path", "step", "size", "", "why"), rows, numbers=("step", "size"))
    echo(str(report))


def report_command(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The directory or URL of the checkpoints of a run, or one above it.")
    ],
    out: Annotated[Path | None, typer.Option("--out", help="The page to write; default: report.html.")] = None,
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> Answer:
    """Write one page about a run: metrics, seconds, ranks, sizes, reuse, failures and restarts.

    With --json the figures are printed, and a page is written only to a given --out.
    """
    from dcp_plugin.tools.run_report.collect import collect
    from dcp_plugin.tools.run_report.page import write

    figures = collect(where(run, storage_option))
    page = write(figures, out or "report.html") if out is not None or not as_json else None
    trainings = {**vars(figures.trainings), "goodput": figures.trainings.goodput}
    document = {"report": {**vars(figures), "trainings": trainings}, "out": page}
    return Answer(document, partial(_print_report, page, figures))


def _print_report(page: Path | None, figures: RunFigures) -> None:
    echo(f"{page}: {len(figures.published)} saves of {figures.root}")
    for why in dict.fromkeys(figures.missing.values()):
        echo(why)
