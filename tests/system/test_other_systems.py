"""What works on macOS and Windows: as far as Linux can tell with what these do not have taken away.

docs/reference/versions.md says the same. The tests do not run on these systems: their file systems and their torch are
not here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dcp_plugin as dcp
from tests import programs

PROGRAM = """
import sys, torch
import dcp_plugin as dcp

for module in (dcp, dcp.tools):
    for name in module.__all__:
        getattr(module, name)

def tried(call, *given, **options):
    try:
        call(*given, **options)
    except Exception as error:
        print(type(error).__name__, error)
    else:
        print("done")

def load(path):
    found = {"w": torch.zeros(3_000_000), "n": 0}
    dcp.load(found, path)
    assert torch.equal(found["w"], state["w"]) and found["n"] == 7 and dcp.verify(path).ok

def later(path, **options):
    checkpointer = dcp.Checkpointer(async_save=True, **options)
    try:
        checkpointer.save(state, path)
        checkpointer.wait()
    finally:
        checkpointer.close()

state, here = {"w": torch.arange(3_000_000.0), "n": 7}, sys.argv[1]
"""


def on(system: str, folder: Path, *calls: str) -> tuple[list[str], str]:
    """What each call says, on a system that is not this one: ``done``, or its error; and what was logged."""
    code = PROGRAM.replace("sys.argv[1]", repr(str(folder))) + "\n".join(f"tried({call})" for call in calls)
    ended = programs.run("-m", "tests.other_systems", system, code)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == len(calls), ended.stdout
    return lines, ended.stderr


def test_macos_saves_and_loads(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(3_000_000.0), "n": 7}, tmp_path / "linux")
    (*done, direct), logged = on(
        "darwin",
        tmp_path,
        "load, here + '/linux'",
        "dcp.save, state, here + '/mac'",
        "dcp.save, state, here + '/mac'",  # over it
        "load, here + '/mac'",
        "later, here + '/later', finish_on_sigterm=True, staging='lazy'",
        "load, here + '/later'",
        "later, here + '/process', keeper={}",
        "dcp.save, state, here + '/direct', io={'direct': True}",
    )
    assert done == ["done"] * 7
    assert direct.startswith("SaveFailed") and "darwin has no O_DIRECT" in direct
    assert "is saved without a keeper: a keeper needs Linux: this platform (darwin)" in logged
    found = {"w": torch.zeros(3_000_000), "n": 0}
    dcp.load(found, tmp_path / "mac")  # what was saved there is an ordinary checkpoint
    assert found["n"] == 7


@pytest.mark.parametrize("call", ["dcp.save, state, here + '/windows'", "later, here + '/windows'"])
def test_windows_loads_and_a_save_says_in_one_line_where_it_works(tmp_path: Path, call: str) -> None:
    dcp.save({"w": torch.arange(3_000_000.0), "n": 7}, tmp_path / "linux")
    (loaded, saved), _ = on("win32", tmp_path, "load, here + '/linux'", call)
    assert loaded == "done"
    assert saved.startswith("SaveFailed this platform (win32) has no POSIX file locks")
    assert saved.endswith("Save on Linux, or in WSL on Windows.")
    assert not (tmp_path / "windows").exists()
