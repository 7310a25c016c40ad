"""Helpers of all commands: typed paths and options, tables, JSON, progress, errors and exit statuses.

The rule: output for people is a table on a terminal, and plain aligned text in a pipe. Output for programs is one JSON
document on stdout. Progress and errors go to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dcp_plugin.errors import one_line, printable

if TYPE_CHECKING:
    from dcp_plugin.paths import Where

NO, FAILED, INTERRUPTED = 1, 3, 130
"""Exit statuses: the answer is no, the command failed, and Ctrl-C. 0 is success, and typer exits with 2."""

PathArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="A checkpoint: its directory or URL, or a file of another tool.")
]
RootArgument = Annotated[str, typer.Argument(metavar="ROOT", help="Where to look, at any depth: a directory or a URL.")]
StorageOptionsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="How the store of a URL is reached, where the environment does not say that: region=eu-west-1, "
        "skip_signature=true, client_options.timeout=30s. Others see what is typed: keys belong into the environment. "
        "Repeatable.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document, see docs/schemas.")]
IncludeOption = Annotated[list[str] | None, typer.Option("--include", help="Globs of keys. Repeatable.")]
ExcludeOption = Annotated[list[str] | None, typer.Option("--exclude", help="Globs of keys to leave out. Repeatable.")]


def where(text: str, options: list[str] | None) -> Where:
    """Return the path or URL that the user typed. Raise BadParameter if it is invalid."""
    from dcp_plugin.media import medium_of
    from dcp_plugin.paths import as_path

    try:
        path = as_path(text, storage_options(options))
        medium_of(path)  # the store may refuse the options
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return path


def storage_options(typed: list[str] | None) -> dict[str, Any]:
    """Return the options of ``--storage-option``, with a nested mapping for each dot in a key."""
    options: dict[str, Any] = {}
    for text in typed or []:
        name, equals, value = text.partition("=")
        *above, last = name.split(".")
        if not equals or not all((*above, last)):
            raise typer.BadParameter(f"--storage-option {name}: it is KEY=VALUE")
        inner: Any = options
        for part in above:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else None
        if not isinstance(inner, dict):
            raise typer.BadParameter(f"--storage-option {name}: a part of it has a value of its own")
        inner[last] = value
    return options


def pair(option: str, text: str, what: str) -> tuple[str, str]:
    """Return the two sides of ``A=B``. The left side may be a pattern that contains ``=``."""
    key, equals, value = text.rpartition("=")
    if not equals:
        raise typer.BadParameter(f"{option} {text}: it is {what}")
    return key, value


def echo(text: str = "", err: bool = False) -> None:
    """Print one line. Names from an untrusted checkpoint cannot control the terminal or add a line."""
    typer.echo(one_line(text), err=err)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()) -> None:
    """Print a table.

    Args:
        numbers: The columns that are aligned to the right.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = [[one_line(cell) for cell in row] for row in rows]
    console = Console(highlight=False, markup=False)
    if console.is_terminal:
        shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    else:  # no key is wrapped in a pipe
        width = sum(max(map(len, column)) + 2 for column in zip(columns, *rows, strict=True))
        console = Console(highlight=False, markup=False, width=max(80, width))
        shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        shown.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        shown.add_row(*row)
    with console.capture() as captured:
        console.print(shown)
    for line in captured.get().rstrip("\n").split("\n"):
        echo(line.rstrip())


def show(document: dict[str, Any]) -> None:
    """Print the JSON document of a command. Values that JSON lacks become text or null."""
    typer.echo(printable(json.dumps(_plain(document), indent=2, ensure_ascii=False)))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def size(nbytes: float) -> str:
    """Return a number of bytes with its unit, for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def shape(sizes: tuple[int, ...] | None) -> str:
    """Return the shape of a tensor as text; empty for None."""
    return "" if sizes is None else " x ".join(map(str, sizes)) or "scalar"


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar on a terminal. Yield its callback for the bytes done and the bytes in all; else None."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    bar = Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    with bar:
        task = bar.add_task(printable(title), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def fail(message: str, status: int = FAILED) -> NoReturn:
    """End with a message on stderr."""
    typer.echo(printable(message), err=True)
    raise typer.Exit(status)


@contextmanager
def told(as_json: bool = False) -> Iterator[None]:
    """Report errors with a message and an exit status instead of a traceback; with ``--json`` also as a document."""
    from dcp_plugin.errors import CheckpointError

    try:
        yield
    except (CheckpointError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        if as_json:
            show({"error": {"type": type(error).__name__, "message": str(error)}})
        message = str(error) if isinstance(error, CheckpointError) else one_line(str(error))
        fail("\n".join([message, *getattr(error, "__notes__", [])]))
    except KeyboardInterrupt:
        fail("interrupted", INTERRUPTED)
