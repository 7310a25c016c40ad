"""The commands of ``dcp-plugin``, one per module.

No import at the top of these modules loads torch or the library, so that ``--help`` and completion answer at once.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable
from typing import Annotated

import typer

from dcp_plugin.cli import copy, diff, export, inspect, load_plan, prune, read, report, verify
from dcp_plugin.cli import list as list_
from dcp_plugin.types import VERSION

app = typer.Typer(
    help="Look into checkpoints, check and compare them, and take them out: on a disk or in an object store, of this "
    "package, of stock torch.distributed.checkpoint and of other tools. Exit status: 0 done; 1 the answer is no "
    "(damage, a difference, a load that would fail); 2 wrong usage; 3 it could not be done; 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text is also readable in a pipe
    context_settings={"help_option_names": ["-h", "--help"]},
)


_TOLD = ("torch", "lightning", "pytorch-lightning", "accelerate", "transformers", "peft", "torchdata", "obstore")


def _show_version(asked: bool) -> None:
    """Print the versions that a bug report needs, and exit."""
    if asked:
        typer.echo(f"dcp-plugin {VERSION}")
        typer.echo(f"Python {platform.python_version()}, {platform.platform()}")
        typer.echo(", ".join(f"{name} {version}" for name in _TOLD if (version := _version_of(name))))
        raise typer.Exit


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the versions of this package, Python, torch and the frameworks, and exit.",
        ),
    ] = False,
) -> None:
    """Options of all commands."""


COMMANDS: dict[str, tuple[Callable[..., None], str, str]] = {
    "list": (list_.list_command, "ls", "Every run and checkpoint below a place."),
    "inspect": (inspect.inspect_command, "", "What is in a checkpoint."),
    "verify": (verify.verify_command, "", "Compare every byte with its checksum."),
    "diff": (diff.diff_command, "", "What differs between two checkpoints."),
    "read": (read.read_command, "cat", "Print tensors and values."),
    "export": (export.export_command, "", "Write it in another format."),
    "import": (export.import_command, "", "Make a checkpoint of another tool's file."),
    "prune": (prune.prune_command, "", "Delete what no rule keeps."),
    "copy": (copy.copy_command, "cp", "Copy checkpoints, disk or bucket."),
    "report": (report.report_command, "", "One page about a run, to be opened from disk."),
    "load-plan": (load_plan.load_plan_command, "", "What a partial load would take."),
}
"""Commands, with alias and description in the list of commands."""

for name, (command, alias, said) in COMMANDS.items():
    app.command(name, short_help=f"{said} Also: {alias}." if alias else said)(command)
    if alias:
        app.command(alias, hidden=True)(command)
