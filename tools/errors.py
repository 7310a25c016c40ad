"""Text of every error, warning and log message: ``tools/errors.txt``, written by ``python -m tools.errors``.

The file shows messages as a reader of a terminal meets them, so that a change of the text is reviewed as text. A value
is shown as ``{expression}``. Messages that are put together in several places are not in it.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

import dcp_plugin
import dcp_plugin.errors

FILE = Path(__file__).with_suffix(".txt")
PACKAGE = Path(dcp_plugin.__file__).parent
ERRORS = {
    name
    for module in (builtins, dcp_plugin.errors)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, BaseException)
} | {"BadParameter", "OtherFormat", "NoSharedMemory", "Refused"}
LEVELS = {"debug", "info", "warning", "error", "exception"}


def written() -> str:
    """Return the messages by file, in the order of the source."""
    lines = ["# Written by: python -m tools.errors"]
    for path in sorted(PACKAGE.rglob("*.py")):
        if messages := list(_messages(ast.parse(path.read_text()))):
            lines += ["", f"## {path.relative_to(PACKAGE)}", *messages]
    return "\n".join(lines) + "\n"


def _messages(tree: ast.Module) -> Iterator[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    for call in sorted(calls, key=lambda call: call.lineno):
        kind = _kind(call.func)
        text = _text(call.args[0])
        if kind and " " in text:
            yield f"{kind}: {text}"


def _kind(function: ast.expr) -> str:
    """Return the class of an error, ``warning`` or the level of a log message; empty for another function."""
    match function:
        case ast.Name(name) | ast.Attribute(attr=name) if name in ERRORS:
            return name
        case ast.Attribute(ast.Name("warnings"), "warn") | ast.Name("warn"):
            return "warning"
        case ast.Attribute(ast.Name("logger"), level) if level in LEVELS:
            return f"log {level}"
    return ""


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(str(text)):
            return text.replace("\n", "\\n")
        case ast.JoinedStr(parts):
            return "".join(map(_text, parts))
        case ast.FormattedValue(value):
            return f"{{{ast.unparse(value)}}}"
        case ast.BinOp(left, ast.Add(), right):
            return _text(left) + _text(right)
    return f"{{{ast.unparse(node)}}}"


if __name__ == "__main__":
    FILE.write_text(written())
