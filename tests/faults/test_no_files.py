"""Named pipes, sockets, devices and directories in place of files: nobody waits for one, nothing else is opened."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_plugin as dcp
from tests.launch import on_ranks
from tests.places import is_tidy

KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": lambda path: _socket(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "directory": lambda path: path.mkdir(),
    "link to nothing": lambda path: path.symlink_to("nothing"),
}


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(path.parent, os.O_RDONLY)
        made.bind(f"/proc/self/fd/{here}/{path.name}")  # a path may be longer than an address
        os.close(here)


def _attach(directory: Path) -> None:
    (directory / "deep").mkdir()
    (directory / "deep" / "note.txt").write_text("a note")


def _state(number: int) -> dict[str, Any]:
    return {"t": {"w": torch.full((70_000,), float(number)), "n": number}}


def _save(path: Path, number: int, **options: Any) -> None:
    ours = dcp.Checkpointer(**options)
    ours.save(_state(number), path, step=number, files=_attach)
    ours.close()


def _replaced(root: Path, kind: str) -> Iterator[tuple[Path, str]]:
    """A run of two checkpoints, with each file of the newer one replaced in turn."""
    _save(root / "made" / "1", 1)
    _save(root / "made" / "2", 2)
    for file in sorted(path for path in (root / "made" / "2").rglob("*") if path.is_file()):
        name = file.relative_to(root / "made" / "2").as_posix()
        run = root / name.replace("/", "-")
        shutil.copytree(root / "made", run)
        (run / "2" / name).unlink()
        KINDS[kind](run / "2" / name)
        yield run, name


@pytest.mark.one_of(count=2)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("link")])
@on_ranks(1)
def test_in_place_of_a_file_of_a_checkpoint(tmp_path: Path, kind: str) -> None:
    found = list(_replaced(tmp_path, kind))
    assert len(found) == 5
    for run, name in found:
        damaged = run / "2"
        beside = name == "deep/note.txt"
        assert dcp.latest(run) == (damaged if beside else run / "1"), name
        assert len(dcp.list_checkpoints(run)) == 2
        with suppress(dcp.CheckpointError):
            info = dcp.inspect(damaged)  # lists the keys of lost data files
            assert info.step == 2 and beside != bool(info.damaged)
        with suppress(dcp.CheckpointError):
            assert not dcp.verify(damaged).ok
        with suppress(dcp.CheckpointError):
            state = _state(0)
            dcp.load(state, damaged)
            assert beside and state["t"]["n"] == 2
        ours = dcp.Checkpointer()
        with suppress(dcp.CheckpointError):
            ours.load(_state(0), damaged)
        ours.save(_state(3), run / "3", step=3)
        ours.close()
        _save(damaged, 4, keep_last=2)
        assert dcp.verify(damaged).ok and dcp.latest(run) == damaged
        assert is_tidy(run)


@pytest.mark.one_of(count=2)
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1)
def test_among_the_files_of_the_user(tmp_path: Path, kind: str) -> None:
    """In the checkpoint that is saved over, among what a framework attaches, and beside checkpoints."""

    def attach(directory: Path) -> None:
        KINDS[kind](directory / "attached")

    _save(tmp_path / "1", 1)
    KINDS[kind](tmp_path / "beside")
    KINDS[kind](tmp_path / "1" / "mine")
    ours = dcp.Checkpointer(keep_last=1)
    for path in (tmp_path / "1", tmp_path / "2"):
        ours.save(_state(2), path, files=attach)
    ours.close()
    assert dcp.latest(tmp_path) == tmp_path / "2" and dcp.verify(tmp_path / "2").ok
    assert not (tmp_path / "1").exists() and os.path.lexists(tmp_path / "beside")
    if kind not in ("directory", "device", "terminal", "link to nothing"):
        with pytest.raises(dcp.SaveFailed, match="no checkpoint"):
            dcp.save(_state(3), tmp_path / "beside")


@pytest.mark.one_of(count=2)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "directory"])
@on_ranks(1)
def test_in_what_other_tools_and_a_crash_have_left(tmp_path: Path, kind: str) -> None:
    _save(tmp_path / "1", 1)
    for name in (
        "trainer_state.json",
        "optimizer.pt",
        "random_states_0.pkl",
        "model.safetensors",
        "meta.pt",
        "pytorch_model.bin",
    ):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": 9}))
        (folder / name).unlink(missing_ok=True)
        KINDS[kind](folder / name)
        for look in (dcp.inspect, dcp.verify):
            with pytest.raises(dcp.CheckpointError):
                look(folder)
    KINDS[kind](tmp_path / "epoch=1.ckpt")
    KINDS[kind](tmp_path / "weights.safetensors")
    (tmp_path / ".dcp_plugin").mkdir(exist_ok=True)
    KINDS[kind](tmp_path / ".dcp_plugin" / "0123.json")
    (tmp_path / ".dcp_plugin" / "0123.saving").mkdir()
    assert dcp.latest(tmp_path) == tmp_path / "1"
    assert {state.path.name for state in dcp.list_checkpoints(tmp_path)} >= {"1"}
    with pytest.raises(dcp.CheckpointNotFound):
        dcp.inspect(tmp_path / "nothing at all")
    _save(tmp_path / "2", 2)
    assert dcp.latest(tmp_path) == tmp_path / "2"


def _link_in_place_of(path: Path, target: Path) -> list[str]:
    """Files of the user's that look like ours, and a link to them."""
    target.mkdir()
    for name in ("package.json", "package.lock", "0123.json", "0123.saving", "saves.figures"):
        (target / name).write_text('{"target": "1"}')
    path.symlink_to(target)
    return sorted(os.listdir(target))


@on_ranks(1)
def test_a_workspace_that_is_a_link_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "mine"
    _save(run / "1", 1)
    shutil.rmtree(run / ".dcp_plugin")
    before = _link_in_place_of(run / ".dcp_plugin", target)
    for act in (lambda: _save(run / "2", 2), lambda: _save(run / "1", 2), lambda: dcp.Checkpointer().remove(run / "1")):
        with pytest.raises(dcp.CheckpointError, match=re.escape(str(run / ".dcp_plugin"))):
            act()
    dcp.prune(run, keep_last=1)
    dcp.tools.list_runs(run)
    assert dcp.latest(run) == run / "1" and dcp.verify(run / "1").ok
    assert sorted(os.listdir(target)) == before
    assert all((target / name).read_text() == '{"target": "1"}' for name in before)


@on_ranks(1)
def test_a_workspace_that_becomes_a_link_during_a_save_leads_no_deletion_to_its_target(tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "mine"

    def put_a_link(directory: Path) -> None:
        workspace = directory.parent
        target.mkdir()
        for name in os.listdir(workspace):
            (target / name).write_text("mine")
        workspace.rename(tmp_path / "moved")
        workspace.symlink_to(target)
        raise RuntimeError("the disk is full")

    with pytest.raises(dcp.SaveFailed, match="the disk is full"):
        dcp.Checkpointer().save({"n": 1}, run / "1", files=put_a_link)
    names = os.listdir(target)
    assert len(names) >= 2 and all((target / name).read_text() == "mine" for name in names)
    assert list((tmp_path / "moved").glob("*.*")) == []


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
@on_ranks(1)
def test_figures_in_place_of_which_something_else_is_are_left_out(tmp_path: Path, kind: str) -> None:
    (tmp_path / ".dcp_plugin").mkdir()
    (tmp_path / "mine").write_text("mine")
    file = tmp_path / ".dcp_plugin" / "saves.figures"
    file.symlink_to(tmp_path / "mine") if kind == "link" else KINDS[kind](file)
    _save(tmp_path / "1", 1)
    assert dcp.verify(tmp_path / "1").ok
    assert (tmp_path / "mine").read_text() == "mine"


@on_ranks(1)
def test_a_record_that_is_a_link_is_neither_followed_nor_believed(tmp_path: Path) -> None:
    (tmp_path / ".dcp_plugin").mkdir()
    (tmp_path / "mine.json").write_text('{"target": "1"}')
    (tmp_path / ".dcp_plugin" / "0123.json").symlink_to(tmp_path / "mine.json")
    _save(tmp_path / "1", 1)
    _save(tmp_path / "1", 2)
    assert dcp.inspect(tmp_path / "1").step == 2
    assert (tmp_path / "mine.json").read_text() == '{"target": "1"}'
