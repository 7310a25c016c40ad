"""``dcp-plugin inspect``: the contents of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp_plugin.cli.output import (
    ExcludeOption,
    IncludeOption,
    JsonOption,
    PathArgument,
    StorageOptionsOption,
    echo,
    progress,
    shape,
    show,
    size,
    table,
    told,
    where,
)

if TYPE_CHECKING:
    from dcp_plugin.paths import Where
    from dcp_plugin.tools.contents import Node, TensorStats
    from dcp_plugin.types import CheckpointInfo

_DEPTH = 4


def inspect_command(
    path: PathArgument,
    depth: Annotated[int, typer.Option(min=1, help="How many levels of modules to show.")] = _DEPTH,
    everything: Annotated[bool, typer.Option("--all", help="List every tensor by its key; fold nothing.")] = False,
    values: Annotated[bool, typer.Option("--values", help="With --all: what is no tensor, too.")] = False,
    key: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="GLOB", help="Where the bytes of these keys are, with checksums. Repeatable."),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read the tensors: min, max, mean, norm, NaN and Inf counts.")
    ] = False,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> None:
    """Show the modules of a checkpoint with their sizes. Layers that are alike are folded into one line."""
    with told(as_json):
        at = where(path, storage_option)
        if key:
            _show_chunks(at, key, as_json)
        elif stats:
            _show_stats(at, include or (), exclude or (), as_json)
        else:
            from dcp_plugin.tools.contents import inspect

            info = inspect(at)
            if as_json:
                show({"checkpoint": _document(info)})
                return
            _print_all(info, values) if everything else _print_tree(info, depth)
            _print_summary(info)


def _document(info: CheckpointInfo) -> dict[str, Any]:
    """Return the JSON document. ``dataclasses.asdict`` would take a second for 100 000 tensors."""
    return vars(info) | {"tensors": [vars(tensor) for tensor in info.tensors]}


def _print_all(info: CheckpointInfo, values: bool) -> None:
    for tensor in info.tensors:
        echo(f"{tensor.nbytes:>16,}  {tensor.dtype:<14}  {shape(tensor.shape):<20}  {tensor.key}")
    for key in info.values if values else ():
        echo(f"{'':>16}  {'value':<14}  {'':<20}  {key}")


def _print_tree(info: CheckpointInfo, depth: int) -> None:
    from dcp_plugin.tools.contents import tree

    rows = [row for node in tree(info) for row in _rows(node, depth, 0)]
    table(("size", "tensors", "key"), rows, numbers=("size", "tensors"))


def _rows(node: Node, depth: int, level: int) -> Iterator[tuple[str, str, str]]:
    name = "  " * level + node.name
    if node.times > 1:
        name += f" … {node.last}  {node.times} x {size(node.nbytes)}"
    if node.tensor is not None:
        name += f"  {shape(node.tensor.shape)} {node.tensor.dtype}"
    only_values = f"  {node.times * node.values} value(s)" if not node.tensors else ""
    yield size(node.times * node.nbytes), f"{node.times * node.tensors:,}", name + only_values
    if level + 1 < depth and node.tensors:
        for child in node.children:
            yield from _rows(child, depth, level + 1)


def _print_summary(info: CheckpointInfo) -> None:
    echo(str(info))
    if info.versions:
        echo(", ".join(f"{name} {version}" for name, version in info.versions.items()))


def _show_chunks(at: Where, globs: list[str], as_json: bool) -> None:
    from dcp_plugin.tools.contents import chunks

    listed = chunks(at, globs)
    if as_json:
        show({"path": at, "chunks": listed})
        return
    rows: list[tuple[str, ...]] = []
    for chunk in listed:
        box = ", ".join(f"{a}:{a + n}" for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
        rows.append(
            (chunk.key, f"[{box}]", chunk.file, f"{chunk.offset:,}", f"{chunk.length:,}", chunk.crc32, chunk.xxh3)
        )
    if not any(row[-1] for row in rows):
        rows = [row[:-1] for row in rows]
    columns = ("key", "box", "file", "offset", "bytes", "crc32", "xxh3")[: len(rows[0])] if rows else ("key",)
    table(columns, rows, numbers=("offset", "bytes"))


def _show_stats(at: Where, include: Iterable[str], exclude: Iterable[str], as_json: bool) -> None:
    from dcp_plugin.tools.contents import statistics

    with progress("reading") as bar:
        listed = statistics(at, include, exclude, progress=bar)
    if as_json:
        show({"path": at, "stats": listed})
        return
    numbers = ("min", "max", "mean", "norm", "NaN", "Inf")
    table(("key", "shape", "dtype", *numbers), [_numbers_of(stats) for stats in listed], numbers=numbers)
    broken = [stats.key for stats in listed if stats.nans or stats.infs]
    echo(f"{at}: {len(listed)} tensors, {len(broken)} of them with NaN or Inf")


def _numbers_of(stats: TensorStats) -> tuple[str, ...]:
    means = ("" if number is None else f"{number:.4g}" for number in (stats.low, stats.high, stats.mean, stats.norm))
    counts = ("" if count is None else f"{count:,}" for count in (stats.nans, stats.infs))
    return (
        stats.key,
        shape(stats.shape),
        f"{stats.dtype} ({stats.why_not})" if stats.why_not else stats.dtype,
        *means,
        *counts,
    )
