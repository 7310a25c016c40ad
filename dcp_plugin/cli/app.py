"""The commands of ``dcp-plugin``, each in a module of its own.

Nothing here or at the top of these modules imports torch or the library: ``--help`` and completion answer at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_plugin.cli import export, inspect, load_plan, read, report, verify
from dcp_plugin.cli import list as list_
from dcp_plugin.types import VERSION

app = typer.Typer(
    help="Look into checkpoints, check and compare them, and take them out: on a disk or in an object store, of this "
    "package, of stock torch.distributed.checkpoint and of other tools. Exit status: 0 done; 1 the answer is no "
    "(damage, a difference, a load that would fail); 2 wrong usage; 3 it could not be done; 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text: readable in a pipe, too
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dcp-plugin {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of all commands."""


app.command("list")(list_.list_command)
app.command("ls", hidden=True)(list_.list_command)
app.command("inspect")(inspect.inspect_command)
app.command("verify")(verify.verify_command)
app.command("read")(read.read_command)
app.command("cat", hidden=True)(read.read_command)
app.command("export")(export.export_command)
app.command("import")(export.import_command)
app.command("report")(report.report_command)
app.command("load-plan")(load_plan.load_plan_command)
