"""``dcp-plugin inspect``: what is in a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_plugin.cli.output import JsonOption, PathArgument, StorageOptionsOption, shape, show, table, told, where


def inspect_command(
    path: PathArgument,
    values: Annotated[bool, typer.Option("--values", help="List what is no tensor, too.")] = False,
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> None:
    """What is in a checkpoint."""
    with told(as_json):
        from dcp_plugin.runs.catalog import inspect

        info = inspect(where(path, storage_option))
    if as_json:
        show({"checkpoint": info})
        return
    rows = [(tensor.key, shape(tensor.shape), tensor.dtype, f"{tensor.nbytes:,}") for tensor in info.tensors]
    rows += [(key, "", "", "") for key in info.values if values]
    table(("key", "shape", "dtype", "bytes"), rows, numbers=("bytes",))
    typer.echo(str(info))
