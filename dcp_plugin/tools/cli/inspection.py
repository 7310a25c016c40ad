"""The commands about the contents of a checkpoint: ``inspect``, ``read``, and ``load-plan``, the keys of a load."""

from __future__ import annotations

import glob
import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp_plugin.core.errors import CheckpointError, damage_in, size
from dcp_plugin.tools.cli.terminal import (
    NO,
    PARTLY,
    Answer,
    ExcludeOption,
    IncludeOption,
    JsonOption,
    PathArgument,
    StorageOptionsOption,
    echo,
    progress,
    renames,
    shape,
    table,
    where,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dcp_plugin.core.loading.forecast import PlannedLoad
    from dcp_plugin.core.paths import Where
    from dcp_plugin.tools.contents import CheckpointInfo, ChunkInfo, Node, TensorStats

_EDGE = 3
"""Number of elements of a long tensor that are printed at each end."""
_MAX_LISTED = 1000
"""Most elements of a tensor in a document of ``read`` without ``--full``."""


def inspect_command(
    path: PathArgument,
    depth: Annotated[int, typer.Option(min=1, help="Levels of modules to show.")] = 4,
    everything: Annotated[bool, typer.Option("--all", help="List every tensor by its key; fold nothing.")] = False,
    values: Annotated[bool, typer.Option("--values", help="With --all: also list values that are no tensor.")] = False,
    key: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="GLOB", help="Show the places and checksums of the bytes of keys. Repeatable."),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read the tensors: min, max, mean, norm, NaN and Inf counts.")
    ] = False,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> Answer:
    """Show the modules of a checkpoint with their sizes. Layers that are alike are folded into one line."""
    from dcp_plugin.tools import contents

    at = where(path, storage_option)
    if key:
        places = contents.chunks(at, key)
        return Answer({"path": at, "chunks": places}, partial(_print_chunks, places))
    if stats:
        with progress("reading") as bar:
            listed = contents.statistics(at, include or (), exclude or (), progress=bar)
        return Answer({"path": at, "stats": listed}, partial(_print_stats, at, listed))
    info = contents.inspect(at)
    print_keys = partial(_print_all, info, values) if everything else partial(_print_tree, info, depth)
    return _partly(info, Answer({"checkpoint": info}, print_keys))


def _partly(info: CheckpointInfo | None, answer: Answer) -> Answer:
    """Return the answer with the status and the reasons of damage or loss, if there is any."""
    reasons = dict.fromkeys(filter(None, (info.lacks, *info.damaged.values()))) if info is not None else {}
    return replace(answer, status=PARTLY, error="\n".join(reasons)) if reasons else answer


def _print_all(info: CheckpointInfo, values: bool) -> None:
    rows = [(f"{tensor.nbytes:,}", tensor.dtype, shape(tensor.shape), tensor.key) for tensor in info.tensors]
    if values:
        rows += [("", "value", "", key) for key in info.values]
    table(("bytes", "dtype", "shape", "key"), rows, numbers=("bytes",))
    _print_summary(info)


def _print_tree(info: CheckpointInfo, depth: int) -> None:
    from dcp_plugin.tools.contents import tree

    rows = [row for node in tree(info) for row in _rows(node, depth, 0)]
    table(("size", "tensors", "key"), rows, numbers=("size", "tensors"))
    _print_summary(info)


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


def _print_chunks(places: list[ChunkInfo]) -> None:
    rows = []
    for place in places:
        box = ", ".join(f"{begin}:{begin + n}" for begin, n in zip(place.offsets, place.sizes, strict=True))
        numbers = f"{place.offset:,}", f"{place.length:,}"
        rows.append((place.key, f"[{box}]", place.file, *numbers, place.xxh3))
    columns = ("key", "box", "file", "offset", "bytes", "xxh3")
    table(columns, rows, numbers=("offset", "bytes"), optional=("xxh3",))


def _print_stats(at: Where, listed: list[TensorStats]) -> None:
    numbers = ("min", "max", "mean", "norm", "NaN", "Inf")
    rows = [_numbers_of(stats) for stats in listed]
    table(("key", "shape", "dtype", *numbers), rows, numbers=numbers, optional=("shape", "dtype"))
    broken = [stats.key for stats in listed if stats.nans or stats.infs]
    echo(f"{at}: {len(listed)} tensors, {len(broken)} of them with NaN or Inf")


def _numbers_of(stats: TensorStats) -> tuple[str, ...]:
    dtype = f"{stats.dtype} ({stats.why_not})" if stats.why_not else stats.dtype
    means = ("" if number is None else f"{number:.4g}" for number in (stats.low, stats.high, stats.mean, stats.norm))
    counts = ("" if count is None else f"{count:,}" for count in (stats.nans, stats.infs))
    return (stats.key, shape(stats.shape), dtype, *means, *counts)


def read_command(
    path: PathArgument,
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY]...", help="Globs of keys; default: all.")] = None,
    exclude: ExcludeOption = None,
    full: Annotated[bool, typer.Option("--full", help="Print all elements of each tensor.")] = False,
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> Answer:
    """Print tensors and values of a checkpoint. Long tensors are shortened, unless --full is given."""
    from dcp_plugin.tools.contents import inspect
    from dcp_plugin.tools.stream import read

    at, without = where(path, storage_option), exclude or []
    info = None if keys else inspect(at)  # keys that are named are read, or fail
    with progress("reading") as bar:
        values = read(at, keys or (), [*without, *map(glob.escape, info.damaged if info else ())], progress=bar)
    documents = {key: _document(value, full) for key, value in values.items()} if as_json else {}
    return _partly(info, Answer({"items": documents}, partial(_print_values, values, full)))


def _print_values(values: dict[str, Any], full: bool) -> None:
    import torch

    for key, value in values.items():
        if not isinstance(value, torch.Tensor):
            echo(f"{key}: {value!r}")
            continue
        head = f"{key}: {str(value.dtype).removeprefix('torch.')} {shape(tuple(value.shape))}"
        if full:
            echo(head)
            typer.echo(str(value.tolist()))
        else:
            echo(f"{head}  {_short(value)}")


def _short(tensor: torch.Tensor) -> str:
    flat = tensor.detach().reshape(-1)
    if flat.numel() <= 2 * _EDGE:
        return str(flat.tolist())
    first, last = flat[:_EDGE].tolist(), flat[-_EDGE:].tolist()
    return f"[{', '.join(map(_number, first))}, …, {', '.join(map(_number, last))}]"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _document(value: Any, full: bool) -> dict[str, Any]:
    """Return the document of a value; of a tensor with its elements if they are few, or with ``full``."""
    import torch

    if not isinstance(value, torch.Tensor):
        return {"value": value}
    document: dict[str, Any] = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if full or value.numel() <= _MAX_LISTED:
        document["data"] = (torch.view_as_real(value) if value.is_complex() else value).tolist()
    return document


def load_plan_command(
    path: PathArgument,
    into: Annotated[
        str,
        typer.Option(
            help="The target: package.module:factory, which is IMPORTED AND CALLED on the meta device and returns a "
            "torch.nn.Module; another checkpoint; or a safetensors file."
        ),
    ],
    include: Annotated[list[str] | None, typer.Option(help="Globs of the target's keys to load. Repeatable.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Globs to leave out. Repeatable.")] = None,
    rename: Annotated[
        list[str] | None, typer.Option(help="TARGET_PREFIX=CHECKPOINT_PREFIX, or re:PATTERN=TEMPLATE. Repeatable.")
    ] = None,
    missing: Annotated[str, typer.Option(help="error, warn or ignore.")] = "error",
    unexpected: Annotated[str, typer.Option(help="error, warn or ignore.")] = "error",
    cast: Annotated[bool, typer.Option("--cast", help="Allow another dtype.")] = False,
    name: Annotated[str, typer.Option(help="The name of the target in the state.")] = "model",
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> Answer:
    """Show what a partial load would take, without reading a tensor. Exits with 1 and its error if it would fail."""
    from dcp_plugin.core.loading.forecast import plan_load
    from dcp_plugin.core.partial import PartialLoad

    selection = PartialLoad(
        include=tuple(include or ("*",)),
        exclude=tuple(exclude or ()),
        rename=renames(rename, "TARGET_PREFIX=CHECKPOINT_PREFIX"),
        missing=missing,  # type: ignore[arg-type]  # PartialLoad checks it
        unexpected=unexpected,  # type: ignore[arg-type]
        cast=cast,
    )
    module = _module(into, where(into, storage_option), name)
    plan = plan_load({name: module}, where(path, storage_option), selection)
    return Answer({"plan": plan}, partial(_print_plan, plan), NO if plan.error else 0, plan.error)


def _print_plan(plan: PlannedLoad) -> None:
    rows = []
    for item in plan.items:
        stored = item.stored if item.stored != item.key else "="
        converted = item.target_dtype and item.target_dtype != item.dtype
        dtype = f"{item.dtype} -> {item.target_dtype}" if converted else item.dtype
        rows.append((item.key, stored, shape(item.shape), dtype, f"{item.nbytes:,}"))
    table(("target", "checkpoint", "shape", "dtype", "bytes"), rows, numbers=("bytes",))
    named = set(" ".join([plan.error, *plan.warnings]).replace(",", " ").split())
    for label, keys in (("missing", plan.report.missing), ("unexpected", plan.report.unexpected)):
        if not named.issuperset(keys):  # else the messages name all of these keys
            for key in keys:
                echo(f"{label}: {key}")
    for warning in plan.warnings:
        echo(f"warning: {warning}")
    left_out = f"; {len(plan.report.left_out)} left out" if plan.report.left_out else ""
    echo(f"{len(plan.items)} items, {plan.nbytes:,} bytes ({size(plan.nbytes)}) of {plan.path}{left_out}")


def _module(into: str, path: Where, name: str) -> nn.Module:
    """Return the module that ``--into`` names, on the meta device.

    Args:
        into: ``package.module:factory``, a checkpoint, or a file of another tool.
        path: ``into`` as a path or URL.
        name: The name of the module in a checkpoint. A safetensors file has only one module.

    Raises:
        CheckpointError: ``into`` is none of these, or a checkpoint that cannot be opened.
    """
    from dcp_plugin.core.media import medium_of

    with damage_in(path):
        kind = medium_of(path).kind(path)
    if kind:
        return _of_checkpoint(path, name)
    if ":" in into:
        return _of_factory(into)
    raise CheckpointError(f"--into {into}: no such file, and no package.module:factory either")


def _of_factory(into: str) -> nn.Module:
    """Call the user's factory. It is imported from the current directory as well, as ``python -m`` does."""
    import torch

    place, _, factory = into.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make: Any = importlib.import_module(place)
        for attribute in factory.split("."):
            make = getattr(make, attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise CheckpointError(f"--into {into}: {error}") from error
    try:
        signature(make).bind()
    except TypeError as error:
        raise CheckpointError(
            f"--into {into} needs arguments ({error}): name a function that makes the module."
        ) from error
    except ValueError:  # the callable has no signature
        pass
    with torch.device("meta"):
        module = make()
    if not isinstance(module, torch.nn.Module):
        raise CheckpointError(f"--into {into} gives a {type(module).__name__}, not a torch.nn.Module")
    return module


def _of_checkpoint(path: Where, name: str) -> nn.Module:
    import torch

    from dcp_plugin.core.format.columns import dtype_named
    from dcp_plugin.tools.contents import inspect

    class Header(torch.nn.Module):
        """Stand-in for a module, with the names, shapes and dtypes of its tensors."""

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return dict(tensors)

    info = inspect(path)
    prefix = "model." if info.format == "safetensors" else f"{name}."  # a safetensors file has no module names
    tensors = {
        tensor.key.removeprefix(prefix): torch.empty(tensor.shape, dtype=dtype_named(tensor.dtype), device="meta")
        for tensor in info.tensors
        if tensor.key.startswith(prefix)
    }
    if not tensors:
        raise CheckpointError(f"--into {path} has nothing called {name!r}; --name says which module is meant")
    return Header()
