"""The command line, ``dcp-plugin``.

Enters: paths and options. Leaves: tables, JSON, messages and an exit status. The rule: a command asks the library and
prints; typer and rich are imported only when it runs, torch only when it has something to do.
"""

from __future__ import annotations


def main() -> None:
    """The entry point of ``dcp-plugin``."""
    try:
        from dcp_plugin.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        raise SystemExit(f"dcp-plugin needs {error.name}: pip install 'dcp-plugin[cli]'") from None
    app(prog_name="dcp-plugin")
