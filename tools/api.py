"""Every public name and its signature, as text: ``tools/api.txt``, written anew by ``python -m tools.api``.

A change of that file in a commit is a change of what users call: ``CHANGELOG.md`` says so, and
``docs/reference/versions.md`` has the rules for what may change when.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".txt")
MODULES = (
    "dcp_plugin",
    "dcp_plugin.tools",
    "dcp_plugin.lightning",
    "dcp_plugin.fabric",
    "dcp_plugin.accelerate",
    "dcp_plugin.transformers",
)


class _Unquoted(str):
    """An annotation as it is written in the source."""

    def __repr__(self) -> str:
        return str(self)


def _signature(function: Any) -> str:
    try:
        found = inspect.signature(function)
    except ValueError:
        return "(...)"
    given = {name: one.replace(annotation=_said(one.annotation)) for name, one in found.parameters.items()}
    found = found.replace(parameters=list(given.values()), return_annotation=_said(found.return_annotation))
    return re.sub(r" at 0x[0-9a-f]+", "", str(found))


def _said(annotation: Any) -> Any:
    return _Unquoted(annotation) if isinstance(annotation, str) else annotation


def _members(of: type) -> Iterator[str]:
    """The public members that a class has from this package: what it inherits from a framework is not ours to keep."""
    ours = [one for one in of.__mro__ if one.__module__.partition(".")[0] == "dcp_plugin"]
    found: dict[str, Any] = {}
    for one in reversed(ours):
        found |= {name: value for name, value in vars(one).items() if not name.startswith("_")}
        found |= dict.fromkeys((name for name in inspect.get_annotations(one) if not name.startswith("_")), None)
    for name, value in sorted(found.items()):
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        yield f"  {name}{_signature(function) if inspect.isfunction(function) else ''}"


def _entry(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        bases = ", ".join(one.__name__ for one in value.__bases__ if one is not object)
        plain = issubclass(value, BaseException) and not dataclasses.is_dataclass(value)
        yield f"class {name}({bases}){'' if plain else ': ' + _signature(value)}"
        yield from _members(value)
    elif callable(value):
        yield f"def {name}{_signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def current() -> str:
    """What the package has now."""
    lines = ["# Written by: python -m tools.api"]
    for module in MODULES:
        found = importlib.import_module(module)
        lines += ["", f"[{module}]"]
        for name in sorted(found.__all__):
            lines += _entry(name, getattr(found, name))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(current())
