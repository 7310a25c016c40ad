"""Users who save beside each other in one folder, such as ``/tmp`` or the scratch folder of a group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import dcp_plugin as dcp
from dcp_plugin.core.media.disk import commit
from dcp_plugin.core.runs import figures
from tests.users import as_another_user

FIRST, SECOND = 12345, 23456


def _save(path: Path, step: int) -> None:
    dcp.save({"step": step}, path, step=step)


def test_a_second_user_saves_beside_the_first(shared: Path) -> None:
    for step in (1, 2):
        assert as_another_user(_save, shared / "first", step, user=FIRST) == "None"
        assert as_another_user(_save, shared / "second", step, user=SECOND) == "None"
    assert [dcp.inspect(shared / name).step for name in ("first", "second")] == [2, 2]
    assert sorted(os.listdir(shared)) == [".dcp_plugin", f".dcp_plugin-{SECOND}", "first", "second"]
    assert [line["path"] for line in figures.read(shared)] == ["first", "second", "first", "second"]
    assert [state.path.name for state in dcp.list_checkpoints(shared)] == ["first", "second"]


def test_a_workspace_in_which_nothing_is_left_is_removed(shared: Path) -> None:
    assert as_another_user(lambda: commit.discard(commit.reserve(shared / "first")), user=FIRST) == "None"
    assert os.listdir(shared) == []


def test_what_the_second_user_has_moved_aside_is_found(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between the two renames of a file system that cannot exchange names."""
    as_another_user(_save, shared / "first", 1, user=FIRST)
    as_another_user(_save, shared / "second", 1, user=SECOND)
    as_another_user(_die_between_the_renames, shared / "second", user=SECOND)
    assert not (shared / "second").exists()
    assert dcp.inspect(shared / "second").step == 1
    latest = dcp.latest(shared)
    assert isinstance(latest, Path) and latest.parent.name == f".dcp_plugin-{SECOND}"
    assert as_another_user(_save, shared / "third", 1, user=SECOND) == "None"
    assert dcp.inspect(shared / "second").step == 1 and (shared / "second").exists()


def _die_between_the_renames(path: Path) -> None:
    rename = os.rename

    def rename_and_die(source: Path, target: Path, **folders: int) -> None:
        if target == path:
            os._exit(1)
        rename(source, target, **folders)

    commit.posix.exchange = lambda *names: False
    os.rename = rename_and_die  # type: ignore[assignment]
    _save(path, 2)
