"""``dcp-plugin list``: the checkpoints below a directory or URL."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_plugin.cli.output import JsonOption, RootArgument, StorageOptionsOption, fail, show, table, told, where


def list_command(
    root: RootArgument,
    local_dir: Annotated[
        str | None, typer.Option(help="As the runs have it: what is in this host's alone is listed, too.")
    ] = None,
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> None:
    """The checkpoints at or below a directory or URL, oldest first."""
    with told(as_json):
        from dcp_plugin.errors import damage_in
        from dcp_plugin.media import medium_of
        from dcp_plugin.runs.catalog import list_checkpoints

        at = where(root, storage_option)
        with damage_in(at):
            kind = medium_of(at).kind(at)
        if kind != "folder" and (kind or local_dir is None):
            fail(f"{at} is a file; inspect looks into one." if kind else f"{at}: nothing is there.")
        found = list_checkpoints(at, local_dir=local_dir)
    if as_json:
        show({"checkpoints": found})
        return
    if not found:
        typer.echo(f"{at}: no checkpoint is there, or below.")
        return
    rows = []
    for state in found:
        step = "" if state.step is None else str(state.step)
        committed = "committed" if state.tier == "durable" else "in local_dir alone"
        rows.append((str(state.path), step, committed if state.committed else state.reason))
    table(("checkpoint", "step", "state"), rows, numbers=("step",))
