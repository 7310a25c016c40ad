"""Names of this package in strings, configurations, comments and pages exist: when code moves, nothing else fails."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests import programs

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"(?<![\w.])dcp_plugin(?:\.[A-Za-z_]\w*)+(?::\w+)?")
OTHERS = re.compile(r"dcp_plugin\.(json|index|damaged|node|aside|base|(checkpoint|resume)(\.\w+)*|seen|x)")
"""Files of a checkpoint, and packages of Hydra's configuration; the last two are made up by tests."""

RESOLVE = """
import dataclasses, pkgutil, sys

for name in sys.argv[1:]:
    owner, _, field = name.rpartition(".")
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        if field not in getattr(pkgutil.resolve_name(owner), "__dataclass_fields__", ()):
            print(name)
"""


def test_every_dotted_name_in_the_repository_exists() -> None:
    listed = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True).stdout
    names: set[str] = set()
    for name in listed.splitlines():
        path = ROOT / name
        if path.is_file() and path.name != "CHANGELOG.md" and not name.startswith("tests/fixtures/"):
            names.update(NAME.findall(path.read_text(errors="ignore")))
    ended = programs.run("-c", RESOLVE, *sorted(name for name in names if not OTHERS.fullmatch(name)))
    assert (ended.stdout, ended.returncode) == ("", 0), ended.stderr
    assert {"dcp_plugin.tools.cli:main", "dcp_plugin.CheckpointConfig", "dcp_plugin.lightning.callback"} <= names
