"""The command line, ``dcp-plugin``.

Enters: paths and options. Leaves: tables, JSON, messages and an exit status. The rule: a command calls the library and
prints the result. It imports typer and rich when it runs, and torch only for work that needs it.
"""

from __future__ import annotations


def main() -> None:
    """Run ``dcp-plugin``."""
    try:
        from dcp_plugin.tools.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        raise SystemExit(f"dcp-plugin needs {error.name}: pip install 'dcp-plugin[cli]'") from None
    app(prog_name="dcp-plugin")
