"""The commands that write a checkpoint to another place or in another format: ``copy``, ``export`` and ``import``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dcp_plugin.tools.cli.terminal import (
    FAILED,
    Answer,
    ExcludeOption,
    IncludeOption,
    JsonOption,
    PathArgument,
    StorageOptionsOption,
    echo,
    echo_lines,
    progress,
    renames,
    storage_options,
    where,
)

if TYPE_CHECKING:
    from dcp_plugin.tools.copy import CopyReport

_MAX_LISTED = 5


def copy_command(
    src: Annotated[
        str,
        typer.Argument(metavar="SRC", help="A checkpoint (directory, file or URL), or a directory or URL above some."),
    ],
    dst: Annotated[
        str, typer.Argument(metavar="DST", help="The new path or URL of the checkpoint, or of the directory.")
    ],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another checkpoint at DST.")] = False,
    io_threads: Annotated[int, typer.Option(min=1, help="Files to copy at the same time.")] = 4,
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> Answer:
    """Copy a checkpoint, or all below a directory or URL, and compare checksums. Each appears complete or not at all.

    Run the same command again to finish an interrupted copy, or to copy new checkpoints. Checkpoints that share files
    by hard links also share them at DST.
    """
    from dcp_plugin.tools.copy import copy

    source, target = where(src, storage_option), where(dst, storage_option)
    with progress("copy") as bar:
        report = copy(source, target, overwrite=overwrite, io_threads=io_threads, progress=bar)
    return Answer({"copy": report}, partial(_print_copied, report), FAILED if report.unreadable else 0)


def _print_copied(report: CopyReport) -> None:
    for word, paths in (("copied ", report.copied), ("there  ", report.skipped), ("linked ", report.links)):
        for path in paths:
            echo(f"{word} {path}")
    echo(str(report))
    for title, lines in (("not verified", report.unverified), ("passed over", report.passed_over)):
        for line in lines[:_MAX_LISTED]:
            echo(f"{title}: {line}")
        if len(lines) > _MAX_LISTED:
            echo(f"{title}: and {len(lines) - _MAX_LISTED} more (--json lists them)")
    for line in report.needs:
        echo(f"NOT COMPLETE: {line}", err=True)
    for line in report.unreadable:
        echo(f"NOT COPIED: {line}", err=True)


_Format = Literal["hf", "safetensors", "torch", "lightning", "dcp"]
_Out = Annotated[str, typer.Argument(metavar="OUT", help="The path or URL to write. It must not exist.")]
_Rename = Annotated[
    list[str] | None,
    typer.Option("--rename", help="CHECKPOINT_PREFIX=OUTPUT_PREFIX: 'model.=' removes the prefix. Repeatable."),
]
_Dtype = Annotated[
    str | None, typer.Option(help="Convert floating-point tensors: bfloat16 or bf16, float16, float32, …")
]
_Ranks = Annotated[int, typer.Option(help="For dcp: the number of ranks to lay it out for.", min=1)]


def export_command(
    path: PathArgument,
    out: _Out,
    made_as: Annotated[
        _Format | None, typer.Option("--format", help="The format to write; default: by the suffix of OUT, or hf.")
    ] = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    rename: _Rename = None,
    dtype: _Dtype = None,
    max_shard_size: Annotated[str | None, typer.Option(help="For hf and safetensors folders: 5GB, 512MiB.")] = None,
    config: Annotated[
        str | None,
        typer.Option(help="For hf: a folder with config.json and tokenizer, if the checkpoint has none."),
    ] = None,
    ranks: _Ranks = 1,
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> Answer | None:
    """Write a checkpoint in another format: hf (a folder for from_pretrained), safetensors, torch (one file for
    torch.load), lightning (a .ckpt), dcp (for another number of ranks). Under torchrun all ranks take part."""
    from dcp_plugin.tools.export import export

    source, target = where(path, storage_option), where(out, storage_option)
    prefixes = renames(rename, "CHECKPOINT_PREFIX=OUTPUT_PREFIX")
    with _ranks() as first, progress("exporting") as bar:
        report = export(
            source,
            target,
            made_as,
            include=include or (),
            exclude=exclude or (),
            rename=prefixes or None,
            dtype=dtype,
            max_shard_size=max_shard_size,
            config=config,
            ranks=ranks,
            storage_options=storage_options(storage_option),
            progress=bar if first else None,
        )
    return Answer({"export": report}, partial(echo_lines, str(report))) if first else None


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
) -> Answer | None:
    """Make a checkpoint of a file or folder of another tool: safetensors, torch.save, Lightning, Accelerate, DCP."""
    selection: dict[str, Any] = {"include": include, "exclude": exclude, "rename": rename, "dtype": dtype}
    return export_command(source, out, "dcp", **selection, ranks=ranks, storage_option=storage_option)


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
