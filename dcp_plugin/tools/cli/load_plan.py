"""The command ``load-plan``: the keys that a partial load would take."""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp_plugin.core.errors import CheckpointError, damage_in, size
from dcp_plugin.tools.cli.terminal import (
    NO,
    Answer,
    JsonOption,
    PathArgument,
    StorageOptionsOption,
    echo,
    renames,
    shape,
    table,
    where,
)

if TYPE_CHECKING:
    from torch import nn

    from dcp_plugin.core.loading.forecast import PlannedLoad
    from dcp_plugin.core.paths import Where


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
