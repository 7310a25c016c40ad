"""``dcp-plugin list``: the runs and checkpoints below a directory or URL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from dcp_plugin.cli.output import (
    JsonOption,
    RootArgument,
    StorageOptionsOption,
    echo,
    show,
    size,
    table,
    told,
    where,
)

if TYPE_CHECKING:
    from dcp_plugin.paths import Where
    from dcp_plugin.tools.listing import ListedCheckpoint, Run

_AUTO = "*"
_MOST_METRICS = 3


def list_command(
    root: RootArgument,
    local_dir: Annotated[
        str | None, typer.Option(help="The local_dir of the runs: saves that only this host has in it are listed, too.")
    ] = None,
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> None:
    """List every run and checkpoint at or below a directory or URL, oldest first, with sizes and states."""
    with told(as_json):
        from dcp_plugin.tools.listing import list_runs

        at = folder(root, storage_option, local_dir is not None)
        runs = list_runs(at, local_dir=local_dir)
    if as_json:
        show({"root": at, "runs": [_document(run) for run in runs]})
        return
    if not runs:
        echo(f"{at}: no checkpoint is there, or below.")
        return
    for number, run in enumerate(runs):
        if number:
            echo()
        echo(f"{run.folder}: {len(run.checkpoints)} checkpoint(s), {size(run.nbytes)}")
        _print(run)
    if any(run.resumes for run in runs):
        echo()
        echo(f"{_AUTO} is what an automatic resume of its run loads.")


def folder(root: str, storage_option: list[str] | None, may_be_nowhere: bool = False) -> Where:
    """Return the directory or prefix that was typed.

    Raises:
        FileNotFoundError: The path does not exist, or is a file.
    """
    from dcp_plugin.errors import damage_in
    from dcp_plugin.media import medium_of

    at = where(root, storage_option)
    with damage_in(at):
        kind = medium_of(at).kind(at)
    if kind != "folder" and (kind or not may_be_nowhere):
        raise FileNotFoundError(f"{at} is a file; inspect looks into one." if kind else f"{at}: nothing is there.")
    return at


def _print(run: Run) -> None:
    now = time.time()
    columns: dict[str, Callable[[ListedCheckpoint], str]] = {
        "": lambda listed: _AUTO if listed.resumes else "",
        "checkpoint": lambda listed: _name(run, listed),
        "step": lambda listed: "" if listed.step is None else str(listed.step),
        "age": lambda listed: _age(now - listed.time),
        "size": lambda listed: size(listed.nbytes),
        "own": lambda listed: size(listed.own_bytes),
        "ranks": lambda listed: "" if listed.world_size is None else str(listed.world_size),
        "layout": lambda listed: ", ".join(listed.layouts[:2]) + (", …" if len(listed.layouts) > 2 else ""),
        "state": _state,
        "metrics": _metrics,
    }
    rows = [[text_of(listed) for text_of in columns.values()] for listed in run.checkpoints]
    shown = [number for number, name in enumerate(columns) if name != "metrics" or any(row[number] for row in rows)]
    names = list(columns)
    table(
        [names[number] for number in shown],
        [[row[number] for number in shown] for row in rows],
        numbers=("step", "age", "size", "own", "ranks"),
    )
    for line in _notes(run):
        echo(f"  {line}")


def _name(run: Run, listed: ListedCheckpoint) -> str:
    return str(listed.path)[len(str(run.folder)) :].lstrip("/")


def _metrics(listed: ListedCheckpoint) -> str:
    metrics = [f"{name} {value:g}" for name, value in listed.metrics.items()]
    more = len(metrics) - _MOST_METRICS
    return ", ".join(metrics[:_MOST_METRICS]) + (f", and {more} more" if more > 0 else "")


def _state(listed: ListedCheckpoint) -> str:
    by = {"dcp_plugin": "", "": "", "stock": "stock DCP"}.get(listed.format, listed.format)
    state = f"foreign: {by}" if listed.state == "foreign" else f"{listed.state} ({by})" if by else listed.state
    return f"{state}, only in local_dir" if listed.tier == "local" else state


def _notes(run: Run) -> Iterator[str]:
    for listed in run.checkpoints:
        if listed.reason:
            yield f"{_name(run, listed)}: {listed.reason}"
        if listed.base is not None:
            yield f"{_name(run, listed)}: what it leaves out is in {listed.base}"


def _age(seconds: float) -> str:
    for unit, most in (("s", 60), ("min", 60), ("h", 48)):
        if seconds < most:
            return f"{max(0, seconds):.0f} {unit}"
        seconds /= 60
    return f"{seconds / 24:.0f} d"


def _document(run: Run) -> dict[str, object]:
    resumes = run.resumes.path if run.resumes else None
    return {"folder": run.folder, "nbytes": run.nbytes, "resumes": resumes, "checkpoints": run.checkpoints}
