"""``dcp-plugin export`` and ``import``: conversion of checkpoints to formats of other tools, and back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any

import typer

from dcp_plugin.cli.output import (
    ExcludeOption,
    IncludeOption,
    JsonOption,
    PathArgument,
    StorageOptionsOption,
    echo,
    pair,
    progress,
    show,
    storage_options,
    told,
    where,
)


class Format(StrEnum):
    """Values of ``--format``."""

    HF = "hf"
    SAFETENSORS = "safetensors"
    TORCH = "torch"
    LIGHTNING = "lightning"
    DCP = "dcp"


_Out = Annotated[str, typer.Argument(metavar="OUT", help="What is made; nothing may be there.")]
_Rename = Annotated[
    list[str] | None,
    typer.Option("--rename", help="CHECKPOINT_PREFIX=OUTPUT_PREFIX: 'model.=' takes the prefix away. Repeatable."),
]
_Dtype = Annotated[str | None, typer.Option(help="Convert floating-point tensors: bfloat16, float16, float32, …")]
_Ranks = Annotated[int, typer.Option(help="For dcp: for how many ranks it is laid out.", min=1)]
_Base = Annotated[str | None, typer.Option(help="Where the checkpoint's base is now, if that was moved.")]


def export_command(
    path: PathArgument,
    out: _Out,
    made_as: Annotated[Format, typer.Option("--format", help="What is made of it.")] = Format.HF,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    rename: _Rename = None,
    dtype: _Dtype = None,
    max_shard_size: Annotated[str | None, typer.Option(help="Of hf and safetensors folders: 5GB, 512MiB.")] = None,
    config: Annotated[
        str | None,
        typer.Option(help="For hf: a folder with config.json and tokenizer, if the checkpoint has none."),
    ] = None,
    ranks: _Ranks = 1,
    base: _Base = None,
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> None:
    """Write a checkpoint in another format: hf (a folder for from_pretrained), safetensors, torch (one file for
    torch.load), lightning (a .ckpt), dcp (for another number of ranks). Under torchrun all ranks take part."""
    options: dict[str, Any] = {
        "include": include or (),
        "exclude": exclude or (),
        "dtype": dtype,
        "max_shard_size": max_shard_size,
    }
    _export(
        path, out, made_as, rename, {**options, "config": config, "ranks": ranks, "base": base}, as_json, storage_option
    )


def import_command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A file or folder of another tool, or a checkpoint.")],
    out: _Out,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    rename: _Rename = None,
    dtype: _Dtype = None,
    ranks: _Ranks = 1,
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> None:
    """Make a checkpoint of a file or folder of another tool: safetensors, torch.save, Lightning, Accelerate, DCP."""
    options: dict[str, Any] = {"include": include or (), "exclude": exclude or (), "dtype": dtype, "ranks": ranks}
    _export(source, out, Format.DCP, rename, options, as_json, storage_option)


def _export(
    path: str,
    out: str,
    made_as: Format,
    rename: list[str] | None,
    options: dict[str, Any],
    as_json: bool,
    storage_option: list[str] | None,
) -> None:
    with told(as_json):
        from dcp_plugin.tools.export import export

        renames = dict(pair("--rename", text, "CHECKPOINT_PREFIX=OUTPUT_PREFIX") for text in rename) if rename else None
        source, target = where(path, storage_option), where(out, storage_option)
        with _ranks() as first, progress("exporting") as advance:
            try:
                report = export(
                    *(source, target, made_as.value),
                    rename=renames,
                    progress=advance if first else None,
                    storage_options=storage_options(storage_option),
                    **options,
                )
            except ValueError as error:
                if type(error) is not ValueError:
                    raise
                raise typer.BadParameter(str(error)) from error
        if not first:
            return
        if as_json:
            show({"export": report})
        else:
            for line in str(report).split("\n"):
                echo(line)


@contextmanager
def _ranks() -> Iterator[bool]:
    """Join the processes that torchrun started, if any. Yield whether this process is the first or the only one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()
