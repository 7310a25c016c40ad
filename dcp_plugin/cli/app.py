"""The commands of ``dcp-plugin``. Each asks the library, prints, and says by its exit status whether all is well."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from dcp_plugin.errors import CheckpointError
from dcp_plugin.format.columns import dtype_named
from dcp_plugin.loading.load import plan_load
from dcp_plugin.loading.partial import PartialLoad
from dcp_plugin.paths import as_path
from dcp_plugin.runs.catalog import inspect, list_checkpoints, verify
from dcp_plugin.types import PlannedLoad

app = typer.Typer(
    help="Look into checkpoints, check them, and plan loads of parts of them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _path(text: str) -> Path:
    """What was typed, before a ``Path`` has made a directory of a URL."""
    try:
        return as_path(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


_PATH = Annotated[
    Path, typer.Argument(parser=_path, metavar="PATH", help="A checkpoint: its directory, or a file of another tool.")
]
_ROOT = Annotated[Path, typer.Argument(parser=_path, metavar="ROOT", help="Where to look, at any depth.")]


@app.command("inspect")
def inspect_command(
    path: _PATH, values: Annotated[bool, typer.Option("--values", help="List what is no tensor, too.")] = False
) -> None:
    """What is in a checkpoint."""
    with _told():
        info = inspect(path)
    table = Table("key", "shape", "dtype", "bytes")
    for tensor in info.tensors:
        table.add_row(tensor.key, _shape(tensor.shape), tensor.dtype, f"{tensor.nbytes:,}")
    for key in info.values if values else ():
        table.add_row(key, "", "", "")
    _console().print(table)
    typer.echo(str(info))


@app.command("verify")
def verify_command(path: _PATH) -> None:
    """Read every byte and compare it with its checksum. Exits with 1 if one differs."""
    with _told():
        report = verify(path)
    typer.echo(str(report))
    if not report.ok:
        raise typer.Exit(1)


@app.command("list")
def list_command(root: _ROOT) -> None:
    """The checkpoints at or below a directory, oldest first."""
    if not root.is_dir():
        _fail(f"{root} is a file; inspect looks into one." if root.exists() else f"{root}: nothing is there.")
    with _told():
        found = list_checkpoints(root)
    if not found:
        typer.echo(f"{root}: no checkpoint is there, or below.")
        return
    table = Table("checkpoint", "step", "state")
    for state in found:
        step = "" if state.step is None else str(state.step)
        table.add_row(str(state.path), step, "committed" if state.committed else state.reason)
    _console().print(table)


@app.command("load-plan")
def load_plan(
    path: _PATH,
    into: Annotated[
        str,
        typer.Option(
            help="The target: package.module:factory, which is IMPORTED AND CALLED, on the meta device, and returns a "
            "torch.nn.Module; or another checkpoint; or a safetensors file."
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
    name: Annotated[str, typer.Option(help="What the target is called in the state.")] = "model",
) -> None:
    """What a partial load would take. No tensor is read; exits with 1, and the load's own error, if it would fail."""
    try:
        partial = PartialLoad(
            include=tuple(include or ("*",)),
            exclude=tuple(exclude or ()),
            rename=dict(_rename(text) for text in rename or ()),
            missing=missing,  # type: ignore[arg-type]  # checked there
            unexpected=unexpected,  # type: ignore[arg-type]
            cast=cast,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with _told():
        plan = plan_load({name: module_of(into, name)}, path, partial)
    _print_plan(plan)
    if plan.error:
        _fail(plan.error)


def _rename(text: str) -> tuple[str, str]:
    here, equals, there = text.rpartition("=")  # a pattern may have one
    if not equals:
        raise typer.BadParameter(f"--rename {text}: it is TARGET_PREFIX=CHECKPOINT_PREFIX")
    return here, there


def _print_plan(plan: PlannedLoad) -> None:
    table = Table("target", "checkpoint", "shape", "dtype", "bytes")
    for item in plan.items:
        there = item.stored if item.stored != item.key else "="
        converted = item.target_dtype and item.target_dtype != item.dtype
        dtype = f"{item.dtype} -> {item.target_dtype}" if converted else item.dtype
        table.add_row(item.key, there, _shape(item.shape), dtype, f"{item.nbytes:,}")
    _console().print(table)
    told = set(" ".join([plan.error, *plan.warnings]).replace(",", " ").split())
    for label, keys in (("missing", plan.report.missing), ("unexpected", plan.report.unexpected)):
        if not told.issuperset(keys):  # all of them here, or all of them there
            for key in keys:
                typer.echo(f"{label}: {key}")
    for warning in plan.warnings:
        typer.echo(f"warning: {warning}")
    left_out = f"; {len(plan.report.left_out)} left out" if plan.report.left_out else ""
    size = f"{plan.nbytes:,} bytes ({plan.nbytes / 2**20:.1f} MiB)"
    typer.echo(f"{len(plan.items)} items, {size} of {plan.path}{left_out}")


def _shape(shape: tuple[int, ...] | None) -> str:
    return "" if shape is None else " x ".join(map(str, shape)) or "scalar"


def _console() -> Console:
    """As wide as the terminal; in a pipe, wide enough for any key."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=400)


def _fail(message: str) -> None:
    typer.echo(message, err=True)
    raise typer.Exit(1)


@contextmanager
def _told() -> Iterator[None]:
    """What the library raises on purpose is a message and an exit status, not a traceback."""
    try:
        yield
    except CheckpointError as error:
        _fail(str(error))


class NoTarget(CheckpointError):
    """``--into`` names nothing that could be loaded into; the message says what it may be."""


class _Header(nn.Module):
    """A module of which only names, shapes and dtypes are known."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return dict(self._tensors)


def module_of(into: str, name: str) -> nn.Module:
    """The module that ``--into`` names, on the meta device.

    Args:
        into: ``package.module:factory``, a checkpoint, or a file of another tool.
        name: Which module of a checkpoint; a safetensors file has only one.

    Raises:
        NoTarget: It is none of these.
        CheckpointError: It is a checkpoint that cannot be opened.
    """
    try:
        path = as_path(into)
    except ValueError as error:
        raise NoTarget(f"--into {error}") from error
    if path.exists():
        return _of_checkpoint(path, name)
    if ":" in into:
        return _of_factory(into)
    raise NoTarget(f"--into {into}: no such file, and no package.module:factory either")


def _of_factory(into: str) -> nn.Module:
    """Runs code of the user's, from the current directory like ``python -m``."""
    where, _, factory = into.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make: Any = importlib.import_module(where)
        for attribute in factory.split("."):
            make = getattr(make, attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise NoTarget(f"--into {into}: {error}") from error
    try:
        signature(make).bind()
    except TypeError as error:
        raise NoTarget(f"--into {into} needs arguments ({error}): name a function that makes the module.") from error
    except ValueError:  # it does not tell what it needs
        pass
    with torch.device("meta"):
        module = make()
    if not isinstance(module, nn.Module):
        raise NoTarget(f"--into {into} gives a {type(module).__name__}, not a torch.nn.Module")
    return module


def _of_checkpoint(path: Path, name: str) -> nn.Module:
    info = inspect(path)
    prefix = "model." if info.format == "safetensors" else f"{name}."  # a safetensors file has no names of modules
    tensors = {
        tensor.key.removeprefix(prefix): torch.empty(tensor.shape, dtype=dtype_named(tensor.dtype), device="meta")
        for tensor in info.tensors
        if tensor.key.startswith(prefix)
    }
    if not tensors:
        raise NoTarget(f"--into {path} has nothing called {name!r}; --name says which module is meant")
    return _Header(tensors)
