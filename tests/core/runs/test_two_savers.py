"""Two jobs that save to one path, or delete in one folder, by mistake or on purpose."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dcp_plugin as dcp
from dcp_plugin.core.media.disk import commit
from dcp_plugin.core.media.disk.local_disk import LocalDisk
from dcp_plugin.core.runs import deletion
from tests.programs import Program


@pytest.mark.parametrize("looks", ["listdir", "lstat"])
def test_a_save_to_a_path_that_another_save_is_just_replacing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: str
) -> None:
    """Between the two renames of a file system that cannot exchange names, nothing is at the path."""
    path, aside = tmp_path / "last", tmp_path / "aside"
    dcp.save({"n": 1}, path)
    look = getattr(os, looks)

    def look_and_move(at: Any = ".", **options: Any) -> Any:
        seen = look(at, **options)
        if str(at) == str(path) and not aside.exists():
            path.rename(aside)
        return seen

    monkeypatch.setattr(os, looks, look_and_move)
    dcp.save({"n": 2}, path, step=2)
    assert aside.exists() and dcp.inspect(path).step == 2


MOMENTS: dict[str, tuple[Any, str]] = {
    "examined": (LocalDisk, "kind"),
    "found to be a checkpoint": (deletion, "refuse_other_things"),
    "about to be renamed": (commit, "_open_record"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_checkpoint_that_another_process_has_deleted_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "step-1"
    dcp.save({"n": 1}, path)
    owner, name = MOMENTS[moment]
    look: Callable[..., Any] = getattr(owner, name)

    def look_and_delete(*args: Any) -> Any:
        seen = look(*args)
        shutil.rmtree(path, ignore_errors=True)
        return seen

    monkeypatch.setattr(owner, name, look_and_delete)
    deletion.remove_all([path], deletion.remove)
    assert not path.exists() and not caplog.messages


def test_a_checkpoint_that_was_saved_again_is_not_deleted_as_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save({"n": 1}, tmp_path / "last", step=1)
    dcp.save({"n": 2}, tmp_path / "step-2", step=2)
    remove_all = deletion.remove_all

    def save_again_and_remove(*args: Any) -> None:
        dcp.save({"n": 3}, tmp_path / "last", step=3)
        remove_all(*args)

    monkeypatch.setattr(deletion, "remove_all", save_again_and_remove)
    deletion.prune(tmp_path / "step-2", dcp.Retention(newest=1))
    assert dcp.inspect(tmp_path / "last").step == 3


def test_three_jobs_that_save_and_delete_in_one_folder_warn_of_nothing(tmp_path: Path) -> None:
    program = """
        import logging, sys, dcp_plugin as dcp
        logging.basicConfig()
        for step in range(8):
            dcp.save({"n": step}, f"{sys.argv[1]}/last", step=step)
            dcp.save({"n": step}, f"{sys.argv[1]}/{sys.argv[2]}-{step}", step=step, keep_last=2)
    """
    jobs = [Program("-c", program, tmp_path, name) for name in "abc"]
    assert [job.communicate()[1] for job in jobs] == [""] * 3
    newest = dcp.latest(tmp_path)
    assert newest is not None and dcp.verify(newest).ok and dcp.inspect(newest).step == 7
