"""``dcp-plugin prune``: delete the checkpoints that no rule keeps."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from dcp_plugin.cli.list import folder
from dcp_plugin.cli.output import (
    FAILED,
    JsonOption,
    RootArgument,
    StorageOptionsOption,
    echo,
    progress,
    show,
    size,
    table,
    told,
)

if TYPE_CHECKING:
    from dcp_plugin.tools.prune import PruneReport


def prune_command(
    root: RootArgument,
    keep_last: Annotated[int | None, typer.Option(min=1, help="Keep so many of the newest of each run.")] = None,
    keep_every: Annotated[int | None, typer.Option(min=1, help="Keep those whose step is a multiple of this.")] = None,
    best: Annotated[str | None, typer.Option(metavar="METRIC", help="Keep those with the best value of this.")] = None,
    mode: Annotated[str, typer.Option(help="min or max: which value is best.")] = "min",
    keep_best: Annotated[int, typer.Option(min=1, help="How many of the best to keep.")] = 1,
    younger_than: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Keep those saved less than so many seconds ago.")
    ] = None,
    damaged: Annotated[bool, typer.Option("--damaged", help="Delete what is damaged, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing; say what would go, and why not.")] = False,
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> None:
    """Delete, at once, the checkpoints that no rule keeps, and garbage of interrupted saves.

    The rules apply to each folder of checkpoints separately. These stay under any rule: the newest complete
    checkpoint, a base that another one needs, the target of a link, a save in flight, damaged checkpoints, and
    checkpoints of other tools.
    """
    with told(as_json):
        from dcp_plugin.tools.prune import prune

        at = folder(root, storage_option)
        try:
            with progress("deleting") as bar:
                report = prune(
                    at,
                    keep_last,
                    keep_every,
                    best,
                    mode,  # type: ignore[arg-type]
                    keep_best,
                    damaged,
                    dry_run,
                    progress=bar,
                    younger_than=younger_than,
                )
        except ValueError as error:
            options = ". Options: --keep-last, --keep-every, --best METRIC, --younger-than SECONDS."
            raise typer.BadParameter(f"{error}{options if best is None else '.'}") from error
    if as_json:
        show(asdict(report))
    else:
        _print(report)
    if report.failed:
        raise typer.Exit(FAILED)


def _print(report: PruneReport) -> None:
    would = "would go" if report.dry_run else "deleted"
    rows = []
    for checkpoint in report.checkpoints:
        outcome = would if checkpoint.deleted else "FAILED" if checkpoint.failed else "kept"
        step = "" if checkpoint.step is None else str(checkpoint.step)
        rows.append((str(checkpoint.path), step, size(checkpoint.nbytes), outcome, "; ".join(checkpoint.reasons)))
    for leftover in report.leftovers:
        nbytes = "" if leftover.nbytes is None else size(leftover.nbytes)
        rows.append((str(leftover.path), "", nbytes, would if leftover.deleted else "kept", leftover.what))
    if rows:
        table(("path", "step", "size", "", "why"), rows, numbers=("step", "size"))
    echo(str(report))
