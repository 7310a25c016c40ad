"""What a resumed training ends with, compared with one that was not interrupted: the zoo's own judge.

It needs neither ``verify_resume`` nor ``prove``, and says which cases are bugs.
"""

from __future__ import annotations

from pathlib import Path

import dcp_plugin as dcp
from tests import programs
from tests.campaigns.case import Case

IMPORTED = {
    "plain": programs.PACKAGE,
    "ranks": programs.PACKAGE,
    "lightning": (*programs.PACKAGE, "dcp_plugin.lightning"),
    "accelerate": (*programs.PACKAGE, "dcp_plugin.accelerate"),
    "trainer": (*programs.PACKAGE, "dcp_plugin.transformers"),
    "fabric": (*programs.PACKAGE, "dcp_plugin.fabric"),
    "examples": (*programs.HYDRA, "dcp_plugin.lightning"),
    "tutorials": (*programs.PACKAGE, "dcp_plugin.lightning"),
}


def differences(case: Case, folder: Path) -> list[str]:
    """Return the keys of the last checkpoint that differ after a resume, and are equal in two undisturbed runs."""
    path = folder / "run"  # checkpoints of frameworks have the path of the run, so all runs have the same one
    run(case, path)
    last = checkpoints(path)[-1]
    assert len(checkpoints(path)) > 1, f"{case.name} has one checkpoint only"
    first = path.rename(folder / "first")
    run(case, path)
    second = path.rename(folder / "second")
    run(case, path, "--saves", "1")
    assert len(checkpoints(path)) == 1, f"{case.name} has not ended after its first save"
    run(case, path)
    return sorted({*_changed(first / last, path / last)} - {*_changed(first / last, second / last)})


def _changed(a: Path, b: Path) -> list[str]:
    found = dcp.diff(a, b)
    other = (*found.reshaped, *found.retyped, *found.changed, *found.values)
    return [*(item.key for item in other), *found.added, *found.removed, *found.renamed]


def checkpoints(root: Path) -> list[str]:
    """Return the checkpoints below a root, from the oldest to the newest."""
    found = [path.parent for path in root.rglob(".metadata") if ".dcp_plugin" not in path.parts]
    return [str(path.relative_to(root)) for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)]


def run(case: Case, out: Path, *arguments: str) -> str:
    """Run a case; return its output, with that of the log."""
    ended = programs.run(*case.arguments(str(out)), *arguments, imported=IMPORTED[case.framework])
    assert ended.returncode == 0, f"{case.name} failed:\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout + ended.stderr
