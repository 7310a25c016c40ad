"""The commands of ``dcp-plugin``. Each asks the library, prints, and says by its exit status whether all is well."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from dcp_plugin.errors import CheckpointError, damage_in
from dcp_plugin.format.columns import dtype_named
from dcp_plugin.loading.load import plan_load
from dcp_plugin.loading.partial import PartialLoad
from dcp_plugin.media import medium_of
from dcp_plugin.paths import StorageOptions, Where, as_path
from dcp_plugin.runs.catalog import inspect, list_checkpoints, verify
from dcp_plugin.types import PlannedLoad

app = typer.Typer(
    help="Look into checkpoints, check them, and plan loads of parts of them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


_PATH = Annotated[
    str, typer.Argument(metavar="PATH", help="A checkpoint: its directory or URL, or a file of another tool.")
]
_ROOT = Annotated[str, typer.Argument(metavar="ROOT", help="Where to look, at any depth: a directory or a URL.")]
_OPTIONS = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="How the store of a URL is reached, where the environment does not say that: region=eu-west-1, "
        "skip_signature=true, client_options.timeout=30s. Others see what is typed: keys belong into the environment. "
        "Repeatable.",
    ),
]


def _where(text: str, options: list[str] | None) -> Where:
    try:
        path = as_path(text, _storage_options(options or []))
        medium_of(path)  # which may not take the options
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return path


def _kind(path: Where) -> str:
    with damage_in(path):
        return medium_of(path).kind(path)


def _storage_options(typed: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for text in typed:
        name, equals, value = text.partition("=")
        *above, last = name.split(".")
        if not equals or not all((*above, last)):
            raise typer.BadParameter(f"--storage-option {name}: it is KEY=VALUE")
        inner: Any = options
        for one in above:
            inner = inner.setdefault(one, {}) if isinstance(inner, dict) else None
        if not isinstance(inner, dict):
            raise typer.BadParameter(f"--storage-option {name}: a part of it has a value of its own")
        inner[last] = value
    return options


@app.command("inspect")
def inspect_command(
    path: _PATH,
    values: Annotated[bool, typer.Option("--values", help="List what is no tensor, too.")] = False,
    storage_option: _OPTIONS = None,
) -> None:
    """What is in a checkpoint."""
    with _told():
        info = inspect(_where(path, storage_option))
    table = Table("key", "shape", "dtype", "bytes")
    for tensor in info.tensors:
        table.add_row(tensor.key, _shape(tensor.shape), tensor.dtype, f"{tensor.nbytes:,}")
    for key in info.values if values else ():
        table.add_row(key, "", "", "")
    _console().print(table)
    typer.echo(str(info))


@app.command("verify")
def verify_command(path: _PATH, storage_option: _OPTIONS = None) -> None:
    """Read every byte and compare it with its checksum. Exits with 1 if one differs."""
    with _told():
        report = verify(_where(path, storage_option))
    typer.echo(str(report))
    if not report.ok:
        raise typer.Exit(1)


@app.command("list")
def list_command(
    root: _ROOT,
    local_dir: Annotated[
        str | None, typer.Option(help="As the runs have it: what is in this host's alone is listed, too.")
    ] = None,
    storage_option: _OPTIONS = None,
) -> None:
    """The checkpoints at or below a directory or URL, oldest first."""
    with _told():
        where = _where(root, storage_option)
        kind = _kind(where)
        if kind != "folder" and (kind or local_dir is None):
            _fail(f"{where} is a file; inspect looks into one." if kind else f"{where}: nothing is there.")
        found = list_checkpoints(where, local_dir=local_dir)
    if not found:
        typer.echo(f"{where}: no checkpoint is there, or below.")
        return
    table = Table("checkpoint", "step", "state")
    for state in found:
        step = "" if state.step is None else str(state.step)
        committed = "committed" if state.tier == "durable" else "in local_dir alone"
        table.add_row(str(state.path), step, committed if state.committed else state.reason)
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
    storage_option: _OPTIONS = None,
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
        options = _storage_options(storage_option or [])
        plan = plan_load({name: module_of(into, name, options)}, _where(path, storage_option), partial)
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


def module_of(into: str, name: str, storage_options: StorageOptions | None = None) -> nn.Module:
    """The module that ``--into`` names, on the meta device.

    Args:
        into: ``package.module:factory``, a checkpoint, or a file of another tool.
        name: Which module of a checkpoint; a safetensors file has only one.
        storage_options: How the store of a URL is reached.

    Raises:
        NoTarget: It is none of these.
        CheckpointError: It is a checkpoint that cannot be opened.
    """
    try:
        path = as_path(into, storage_options)
    except ValueError as error:
        raise NoTarget(f"--into {error}") from error
    if _kind(path):
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


def _of_checkpoint(path: Where, name: str) -> nn.Module:
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
