"""``dcp-plugin copy``: copies of checkpoints between disks and buckets, in all directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dcp_plugin.cli.output import FAILED, JsonOption, StorageOptionsOption, echo, progress, show, told, where

if TYPE_CHECKING:
    from dcp_plugin.tools.copy import CopyReport

_MOST_SHOWN = 5


def copy_command(
    src: Annotated[
        str,
        typer.Argument(metavar="SRC", help="A checkpoint: its directory, file or URL. Or what has some below it."),
    ],
    dst: Annotated[
        str, typer.Argument(metavar="DST", help="Its new path or URL; of several, what they will be below.")
    ],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another checkpoint that is there.")] = False,
    io_threads: Annotated[int, typer.Option(min=1, help="Files that are copied at the same time.")] = 4,
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> None:
    """Copy a checkpoint, or all below a directory or URL, and compare checksums. Each appears complete or not at all.

    Run the same command again to finish an interrupted copy, or to copy new checkpoints. Checkpoints that share files
    by hard links share them at DST, too.
    """
    with told(as_json):
        from dcp_plugin.tools.copy import copy

        source, target = where(src, storage_option), where(dst, storage_option)
        with progress("copy") as tell:
            report = copy(source, target, overwrite=overwrite, io_threads=io_threads, progress=tell)
    if as_json:
        show({"copy": report})
    else:
        _print(report)
    if report.unreadable:
        raise typer.Exit(FAILED)


def _print(report: CopyReport) -> None:
    for path in report.copied:
        echo(f"copied  {path}")
    for path in report.skipped:
        echo(f"there   {path}")
    for path in report.links:
        echo(f"linked  {path}")
    echo(str(report))
    for title, lines in (("not verified", report.unverified), ("passed over", report.passed_over)):
        for line in lines[:_MOST_SHOWN]:
            echo(f"{title}: {line}")
        if len(lines) > _MOST_SHOWN:
            echo(f"{title}: and {len(lines) - _MOST_SHOWN} more (--json lists them)")
    for line in report.needs:
        echo(f"NEEDED: {line}", err=True)
    for line in report.unreadable:
        echo(f"NOT COPIED: {line}", err=True)
