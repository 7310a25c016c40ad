"""``dcp-plugin verify``: every byte against its checksum."""

from __future__ import annotations

import typer

from dcp_plugin.cli.output import NO, JsonOption, PathArgument, StorageOptionsOption, show, told, where


def verify_command(
    path: PathArgument, as_json: JsonOption = False, storage_option: StorageOptionsOption = None
) -> None:
    """Read every byte and compare it with its checksum. Exits with 1 if one differs."""
    with told(as_json):
        from dcp_plugin.runs.catalog import verify

        report = verify(where(path, storage_option))
    if as_json:
        show({"checkpoint": report})
    else:
        typer.echo(str(report))
    if not report.ok:
        raise typer.Exit(NO)
