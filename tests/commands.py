"""Commands of ``dcp-plugin`` in the process of the test, and the documents that they print with ``--json``."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from typer.testing import CliRunner, Result

from dcp_plugin.tools.cli.app import app
from tests.programs import ROOT


def invoke(*arguments: object) -> Result:
    """Run ``dcp-plugin *arguments``."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def document_of(result: Result, schema: str) -> Any:
    """Return the document that a command has printed, which is valid by a schema of ``docs/schemas``."""
    document = json.loads(result.stdout)
    rules = json.loads((ROOT / f"docs/schemas/{schema}.json").read_text())
    jsonschema.validate(document, rules, jsonschema.Draft202012Validator)
    return document


def json_of(name: str, *arguments: object, status: int = 0) -> Any:
    """Run a command with ``--json``, which ends with this status. Return its document."""
    result = invoke(name, *arguments, "--json")
    assert result.exit_code == status, result.output
    return document_of(result, name)
