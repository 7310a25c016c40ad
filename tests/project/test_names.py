"""Names of this package in strings, configurations, comments and pages exist: when code moves, nothing else fails."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path

from tests import programs

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"(?<![\w.])dcp_plugin(?:\.[A-Za-z_]\w*)+(?::\w+)?")
IN_TWO_STRINGS = re.compile(r"\(['\"](dcp_plugin\.[\w.]+)['\"], ['\"]([A-Za-z_]\w*)['\"]")
"""A module and a name in it, as ``_HARMLESS_HOOKS`` has them."""
RUN = re.compile(r"-m[\"', ]+(dcp_plugin[\w.]*)\b")
FILE = re.compile(r"(?<![\w./<{}*-])(?:[a-z_]\w*/)+\w+\.py\b")
APART = {
    "json|index|damaged": "files of a checkpoint",
    "node": "file of a node in its local_dir",
    r"(checkpoint|resume)(\.\w+)*": "groups and keys of Hydra's configuration",
    "seen|x": "made up by tests",
}
"""What follows ``dcp_plugin.`` in texts that are no names of Python, and the reason."""
TOPS = ("", "dcp_plugin", "dcp_plugin/core", "dcp_plugin/core/media", "tests")
"""Folders at which a path may begin, besides that of the file which names it."""
FILES_APART = {"torch/serialization.py", "hydra_plugins/__init__.py"}
"""A file of torch, and one that a test of the wheel looks for."""

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


def _texts() -> dict[str, str]:
    """The text of each file in the repository, by its path."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.splitlines() if name != "CHANGELOG.md" and not name.startswith("tests/fixtures/")]
    return {name: (ROOT / name).read_text(errors="ignore") for name in names if (ROOT / name).is_file()}


def test_every_dotted_name_in_the_repository_exists() -> None:
    files: dict[str, set[str]] = defaultdict(set)
    for file, text in _texts().items():
        for name in [*NAME.findall(text), *(":".join(pair) for pair in IN_TWO_STRINGS.findall(text))]:
            files[name].add(file)
    apart = {name: why for name in files for why in APART if re.fullmatch(rf"dcp_plugin\.({why})", name)}
    ended = programs.run("-c", RESOLVE, *sorted(files.keys() - apart.keys()))
    assert ended.returncode == 0, ended.stderr
    assert {name: files[name] for name in ended.stdout.splitlines()} == {}
    assert {"dcp_plugin.tools.cli:main", "dcp_plugin.CheckpointConfig", "dcp_plugin.lightning.callback"} <= files.keys()
    assert "dcp_plugin.core.staging.guard:_before_load" in files
    assert set(apart.values()) == APART.keys(), "an exception that no file needs"


def test_every_module_that_is_run_can_be_run() -> None:
    run = {name: file for file, text in _texts().items() for name in RUN.findall(text)}
    places = {name: ROOT.joinpath(*name.split(".")) for name in run}
    assert {"dcp_plugin", "dcp_plugin.tiers"} <= run.keys()
    assert [
        (run[name], name)
        for name, place in places.items()
        if not (place / "__main__.py").exists() and not place.with_suffix(".py").exists()
    ] == []


def test_every_module_that_comments_and_pages_mention_by_its_path_exists() -> None:
    missing = [
        (file, name)
        for file, text in _texts().items()
        if file.endswith((".py", ".md")) and file != "docs/comparison.md"  # which names files of other projects
        for name in FILE.findall(text)
        if name not in FILES_APART and not any((ROOT / top / name).exists() for top in (*TOPS, Path(file).parent))
    ]
    assert missing == []
