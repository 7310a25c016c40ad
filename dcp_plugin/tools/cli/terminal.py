"""Helpers of all commands: typed paths and options, tables, JSON, progress, errors and exit statuses.

The rule: output for people fits the width of a terminal, and has one line for each row in a pipe. Output for programs
is one JSON document on stdout. Progress and errors go to stderr.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import wraps
from itertools import zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp_plugin.core.errors import CheckpointError, is_terminal, one_line, printable, size

if TYPE_CHECKING:
    from dcp_plugin.core.paths import Where

NO, FAILED, PARTLY, UNDECIDED, INTERRUPTED = 1, 3, 4, 5, 130
"""Exit statuses: the answer is no, the command failed, the answer lacks what is damaged, there is no answer, and
Ctrl-C. 0 is success, and wrong usage exits with 2."""
_ARGUMENT = re.compile(
    r"\b(config|dtype|exclude|format|include|max_shard_size|ranks|rename)=…?(?=(?P<value>[^\s.,;:)…])?)"
)
"""An argument of the library in a message. The command line has an option in its place."""
_NARROWEST = 10
"""Width in characters below which no column of a table is folded."""

PathArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="A checkpoint: a directory, a URL, or a file of another tool.")
]
RootArgument = Annotated[str, typer.Argument(metavar="ROOT", help="The directory or URL to search, at any depth.")]
StorageOptionsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="An option for the store of a URL, if the environment does not have it: region=eu-west-1, "
        "skip_signature=true, client_options.timeout=30s. Put secrets into the environment: other users can see "
        "command lines. Repeatable.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document, see docs/schemas.")]
IncludeOption = Annotated[list[str] | None, typer.Option("--include", help="Globs of keys. Repeatable.")]
ExcludeOption = Annotated[list[str] | None, typer.Option("--exclude", help="Globs of keys to leave out. Repeatable.")]


@dataclass(frozen=True)
class Answer:
    """Result of a command."""

    document: Mapping[str, Any]
    """The document to print with ``--json``."""
    print_text: Callable[[], None]
    """Print the result for people."""
    status: int = 0
    error: str = ""
    """The message of an answer "no", for stderr."""


def reported(command: Callable[..., Answer | None]) -> Callable[..., None]:
    """Print the answer of a command, and exit with its status. Report an error with a message and an exit status.

    With ``--json``, an error is a document on stdout and a message on stderr. A wrong argument is a ``ValueError`` in
    the library, and wrong usage here.
    """

    @wraps(command)
    def run(**arguments: Any) -> None:
        as_json = arguments.get("as_json", False)
        try:
            answer = command(**arguments)
            if answer is None:
                return
            show(answer.document) if as_json else answer.print_text()
            if answer.error:
                echo_lines(answer.error, err=True)
            status = answer.status
        except BrokenPipeError:  # end as other tools do before ``| head``
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.raise_signal(signal.SIGPIPE)
            raise
        except (CheckpointError, OSError) as error:
            if as_json:
                show({"error": {"type": type(error).__name__, "message": str(error)}})
            message = str(error) if isinstance(error, CheckpointError) else one_line(str(error))
            echo_lines("\n".join([message, *getattr(error, "__notes__", [])]), err=True)
            status = FAILED
        except ValueError as error:
            if type(error) is not ValueError:  # a subclass is a fault of this package, and needs its traceback
                raise
            raise typer.BadParameter(as_options(str(error))) from error
        except KeyboardInterrupt:
            echo("interrupted", err=True)
            status = INTERRUPTED
        raise typer.Exit(status)

    return run


def where(text: str, options: list[str] | None) -> Where:
    """Return the path or URL that the user typed.

    Raises:
        ValueError: The URL is invalid, or its store refuses the options.
    """
    from dcp_plugin.core.media import medium_of
    from dcp_plugin.core.paths import as_path

    path = as_path(text, storage_options(options))
    medium_of(path)
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


def renames(typed: list[str] | None, form: str) -> dict[str, str]:
    """Return the two sides of each ``--rename A=B``. The left side may be a pattern that contains ``=``."""
    pairs = {}
    for text in typed or []:
        key, equals, value = text.rpartition("=")
        if not equals:
            raise typer.BadParameter(f"--rename {text}: it is {form}")
        pairs[key] = value
    return pairs


def echo(text: str = "", err: bool = False) -> None:
    """Print one line. A terminal gets several if it is too narrow, folded between words.

    Names from an untrusted checkpoint cannot control the terminal or add a line.
    """
    for line in _folded(one_line(text), _width(err), break_long_words=False, subsequent_indent="  "):
        typer.echo(line, err=err)


def echo_lines(message: str, err: bool = False) -> None:
    """Print a message of the library, of one or more lines."""
    for line in as_options(message).split("\n"):
        echo(line, err)


def as_options(message: str) -> str:
    """Return a message of the library with options in place of arguments: ``--config`` for ``config=…``."""
    message = re.sub(r"rename=\{'([^']*)': '([^']*)'\}", r"rename=\1=\2", message)
    return _ARGUMENT.sub(lambda match: f"--{match[1].replace('_', '-')}{' ' if match['value'] else ''}", message)


def _width(err: bool = False) -> float:
    """Return the number of characters in a line; infinite if the output is no terminal."""
    stream = sys.stderr if err else sys.stdout
    return shutil.get_terminal_size().columns if is_terminal(stream) else math.inf


def _folded(text: str, width: float, **options: Any) -> list[str]:
    return [text] if len(text) <= width else wrap(text, int(width), break_on_hyphens=False, **options)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[str] = (), optional: Sequence[str] = ()
) -> None:
    """Print a table. The cell of None is empty. An empty last column is left out.

    Args:
        numbers: The columns that are aligned to the right.
        optional: The columns that a narrow terminal does not show, in the order in which they are left out. Then the
            texts of the widest columns are folded.
    """
    lines = [list(columns), *([one_line("" if cell is None else str(cell)) for cell in row] for row in rows)]
    cells = dict(zip(columns, zip(*lines, strict=True), strict=True))
    if not any(cells[columns[-1]][1:]):
        del cells[columns[-1]]
    widths = {name: max(map(len, column)) for name, column in cells.items()}
    room = _width()
    hidden = []
    for name in optional:
        if name in widths and sum(widths.values()) + 2 * len(widths) - 2 > room:
            del widths[name]
            hidden.append(name)
    texts = [name for name in widths if name not in numbers]
    while sum(widths.values()) + 2 * len(widths) - 2 > room:
        widest = max(texts, key=widths.__getitem__)
        if widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
    printed = []
    for number in range(len(lines)):
        folded = [_folded(cells[name][number], width) for name, width in widths.items()]
        for parts in zip_longest(*folded, fillvalue=""):
            padded = [
                part.rjust(width) if name in numbers else part.ljust(width)
                for part, (name, width) in zip(parts, widths.items(), strict=True)
            ]
            printed.append("  ".join(padded).rstrip())
    typer.secho(printed[0], bold=True)
    if printed[1:]:
        typer.echo("\n".join(printed[1:]))
    if hidden:
        echo(f"Not shown in {room} columns: {', '.join(hidden)}. A pipe gets all: | cat")


def show(document: Mapping[str, Any]) -> None:
    """Print a JSON document. Values that JSON lacks become text or null."""
    typer.echo(printable(json.dumps(_plain(document), indent=2, ensure_ascii=False)))


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        value = vars(value)
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def shape(sizes: tuple[int, ...] | None) -> str:
    """Return the shape of a tensor as text; empty for None."""
    return "" if sizes is None else " x ".join(map(str, sizes)) or "scalar"


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar on a terminal. Yield its callback for the bytes done and the bytes in all; else None."""
    if not is_terminal(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    rate = TextColumn("{task.fields[rate]}")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), rate)
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(printable(title), total=None, rate="")
        yield lambda done, total: bar.update(
            task, completed=done, total=total, rate=f"{size(bar.tasks[0].speed or 0)}/s"
        )
