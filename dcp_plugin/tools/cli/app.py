"""The application ``dcp-plugin``: the list of its commands, ``--version`` and ``explain``.

No import at the top of the modules of commands loads torch or the library, so that ``--help`` and completion answer at
once.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from importlib.resources import files
from typing import Annotated, Any
from urllib.parse import urljoin

import typer
from typer.core import TyperGroup

from dcp_plugin.core.errors import EXPLAINED
from dcp_plugin.core.types import VERSION
from dcp_plugin.tools.cli import compare, inspection, probing, runs, transfers
from dcp_plugin.tools.cli.terminal import Answer, reported

_OTHER_NAMES = {"info": "inspect", "show": "inspect", "convert": "export", "rm": "prune", "delete": "prune"}


class _Commands(TyperGroup):
    """The commands, with a hint for a name that no command has, nor a similar one."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and not get_close_matches(cmd_name, self.commands):
            meant = _OTHER_NAMES.get(cmd_name)
            hint = f"Did you mean {meant!r}?" if meant else f"The commands are {', '.join(COMMANDS)}."
            ctx.fail(f"No such command {cmd_name!r}. {hint}")
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    help="Inspect, check, compare, copy, convert and delete checkpoints, on a disk or in an object store: those of "
    "this package, of stock torch.distributed.checkpoint and of other tools. Exit status: 0 done; 1 the answer is no "
    "(damage, a difference, a load or save that would fail); 2 wrong usage; 3 an error; 4 the answer lacks what is "
    "damaged; 5 prove comes to no answer; 130 interrupted.",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text is also readable in a pipe
    context_settings={"help_option_names": ["-h", "--help"]},
)


_PACKAGES = ("torch", "lightning", "pytorch-lightning", "accelerate", "transformers", "peft", "torchdata", "obstore")


def _show_version(is_wanted: bool) -> None:
    """Print the versions that a bug report needs, and exit."""
    if is_wanted:
        typer.echo(f"dcp-plugin {VERSION}")
        typer.echo(f"Python {platform.python_version()}, {platform.platform()}")
        typer.echo(", ".join(f"{name} {version}" for name in _PACKAGES if (version := _version_of(name))))
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


def explain_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The class of an error, such as CheckpointMismatch.")],
) -> Answer:
    """Print the section about an error of the page on troubleshooting. No network is needed."""
    page = files("dcp_plugin.tools.cli").joinpath("troubleshooting.md").read_text("utf-8")
    page = re.sub(r"\]\((.*?)\)", lambda link: f"]({urljoin(EXPLAINED, link[1].replace('.md', '.html'))})", page)
    sections = {heading: section for section, heading in re.findall(r"^(### (\w+)\n(?:(?!##).*\n)*)", page, re.M)}
    heading = next((heading for heading in sections if heading.lower() == name.lower()), None)
    if heading is None:
        raise typer.BadParameter(f"{name} is not a class of errors. These are: {', '.join(sections)}")
    return Answer({}, partial(_print_markdown, sections[heading]))


def _print_markdown(text: str) -> None:
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text, hyperlinks=False))


COMMANDS: dict[str, tuple[Callable[..., Answer | None], str, str]] = {
    "list": (runs.list_command, "ls", "List the runs and checkpoints below a root."),
    "inspect": (inspection.inspect_command, "", "Show the contents of a checkpoint."),
    "verify": (compare.verify_command, "", "Compare every byte with its checksum."),
    "diff": (compare.diff_command, "", "Show the differences of two checkpoints."),
    "read": (inspection.read_command, "cat", "Print tensors and values."),
    "export": (transfers.export_command, "", "Write a checkpoint in another format."),
    "import": (transfers.import_command, "", "Make a checkpoint of another tool's file."),
    "prune": (runs.prune_command, "", "Delete the checkpoints that no rule keeps."),
    "copy": (transfers.copy_command, "cp", "Copy checkpoints between disks and buckets."),
    "report": (runs.report_command, "", "Write one page about a run."),
    "load-plan": (inspection.load_plan_command, "", "Show what a partial load would take."),
    "doctor": (probing.doctor_command, "", "Probe what a save will find in a place."),
    "prove": (probing.prove_command, "", "Try whether a training resumes exactly."),
    "explain": (explain_command, "", "Explain an error."),
}
"""Commands, with alias and description in the list of commands."""

for name, (command, alias, description) in COMMANDS.items():
    app.command(name, short_help=f"{description} Also: {alias}." if alias else description)(reported(command))
    if alias:
        app.command(alias, hidden=True)(reported(command))
