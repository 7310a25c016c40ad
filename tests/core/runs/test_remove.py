"""``Checkpointer.remove`` deletes checkpoints, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import dcp_plugin as dcp
from dcp_plugin.core.media.objects.client import client_of
from dcp_plugin.core.paths import ObjectPath, Where, as_path
from tests.foreign import LIGHTNING
from tests.object_server import Bucket
from tests.places import delete_file, names_in, save_file

STATE = {"w": torch.arange(4.0)}


def _refused(path: object, match: str = "is no checkpoint, and is not deleted") -> None:
    with pytest.raises(dcp.CheckpointError, match=match):
        dcp.Checkpointer().remove(path)  # type: ignore[arg-type]


def _put(path: Where) -> Where:
    save_file({"data": torch.zeros(2)}, path)
    return path


def _there(path: Where) -> list[str]:
    if isinstance(path, Path):
        return sorted(one.relative_to(path).as_posix() for one in path.rglob("*") if one.is_file())
    return sorted(one.key.removeprefix(f"{path.key}/") for one in client_of(path).below(path.key))


def test_data_and_a_run_are_not_deleted(place: Where) -> None:
    if isinstance(place, Path):
        (place / "data").mkdir()
    _put(place / "data" / "train.bin")
    dcp.save(STATE, place / "run" / "step-1")
    _put(place / "run" / "model.safetensors")
    before = _there(place)
    for path in (place / "data", place / "data" / "train.bin", place / "run", place):
        _refused(path)
    assert _there(place) == before


def test_checkpoints_of_all_kinds_are_deleted(place: Where) -> None:
    dcp.save(STATE, place / "ours")
    dcp.save(STATE, place / "torn")
    delete_file(place / "torn" / ".metadata")
    folders = {"trainer": ["trainer_state.json", "optimizer.pt"], "accelerate": ["random_states_0.pkl"]}
    for name, files in {**folders, "checkpoint-7": ["model.safetensors"]}.items():
        if isinstance(place, Path):
            (place / name).mkdir()
        for file in files:
            _put(place / name / file)
    save_file(LIGHTNING, place / "last.ckpt")
    ours = dcp.Checkpointer()
    for name in ("ours", "torn", "trainer", "accelerate", "checkpoint-7", "last.ckpt", "nothing"):
        ours.remove(place / name)
    assert [name for name in _there(place) if not name.startswith(".dcp_plugin/")] == []


def test_a_data_folder_that_is_numbered_like_a_checkpoint_is_not_deleted(place: Where) -> None:
    for name in ("checkpoint-7", "checkpoint_8"):
        if isinstance(place, Path):
            (place / name).mkdir()
        _put(place / name / "train.npy")
        _refused(place / name)
        assert _there(place / name) == ["train.npy"]


def test_in_a_bucket_only_the_objects_of_another_tool_s_checkpoint_go(bucket: Bucket) -> None:
    root = as_path(bucket.url)
    folders = ("run", "checkpoint-7")
    for folder in folders:
        for name in ("trainer_state.json", "optimizer.pt", "notes.txt", "data/train.bin", "optimizer_0/0.bin"):
            _put(root / folder / name)
        dcp.save(STATE, root / folder / "step-1")
        dcp.Checkpointer().remove(root / folder)
        assert dcp.verify(root / folder / "step-1").ok
    left = [
        [name for name in _there(root / folder) if not name.startswith((".dcp_plugin", "step-1"))] for folder in folders
    ]
    assert left == [["data/train.bin", "notes.txt"], []], "a numbered folder is rotated as a whole"


def test_of_a_link_the_link_alone_goes(tmp_path: Path) -> None:
    dcp.save(STATE, tmp_path / "ck")
    (tmp_path / "data").mkdir()
    for name, target in (("last", "ck"), ("lost", "nowhere"), ("to-data", "data")):
        (tmp_path / name).symlink_to(target)
    dcp.Checkpointer().remove(tmp_path / "last")
    dcp.Checkpointer().remove(tmp_path / "lost")
    _refused(tmp_path / "to-data")
    assert names_in(tmp_path) == ["ck", "data", "to-data"]


def test_the_working_directory_and_what_is_above_it_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save(STATE, tmp_path / "ck")
    (tmp_path / "ck" / "below").mkdir()
    for here in (tmp_path / "ck", tmp_path / "ck" / "below"):
        monkeypatch.chdir(here)
        _refused(tmp_path / "ck", "working directory")
    monkeypatch.chdir(tmp_path)
    _refused("")
    assert os.getcwd() == str(tmp_path) and dcp.verify("ck").ok


def test_in_a_bucket_only_the_checkpoint_goes(bucket: Bucket) -> None:
    root = as_path(bucket.url)
    assert isinstance(root, ObjectPath)
    dcp.save(STATE, root / "run")
    dcp.save(STATE, root / "run" / "step-1")
    dcp.save(STATE, root / "run-2")
    _put(root / "run" / "log.txt")
    _refused(ObjectPath(root.store, root.options), "whole bucket|is no checkpoint")
    dcp.Checkpointer().remove(root / "run")
    assert dcp.verify(root / "run" / "step-1").ok and dcp.verify(root / "run-2").ok
    assert [name for name in _there(root / "run") if "/" not in name] == ["log.txt"]
