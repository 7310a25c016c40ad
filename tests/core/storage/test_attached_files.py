"""What a framework keeps beside model and optimizer is published with the checkpoint, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock

import dcp_plugin as dcp
from dcp_plugin.checkpointer import Internals
from dcp_plugin.core.media.disk import posix
from tests import launch
from tests.compare import assert_same, full_state
from tests.dying import die_at
from tests.launch import on_ranks
from tests.layouts import build, train
from tests.places import is_tidy, names_in


@on_ranks(2)
def test_files_of_all_ranks_are_part_of_the_checkpoint_also_in_the_background(tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        (directory / "deep").mkdir(exist_ok=True)
        (directory / "deep" / f"note_{dist.get_rank()}.txt").write_text("hello")

    checkpointer = dcp.Checkpointer(async_save=True)
    checkpointer.save({"n": 1}, tmp_path / "ck", files=write)
    checkpointer.close()
    dist.barrier()  # rank 0 notes the figures of a save after it is published
    assert {path.name for path in (tmp_path / "ck" / "deep").iterdir()} == {"note_0.txt", "note_1.txt"}
    assert is_tidy(tmp_path)


@on_ranks(2)
def test_a_failure_to_add_files_is_raised_on_every_rank_and_leaves_nothing(tmp_path: Path) -> None:
    def add(directory: Path) -> None:
        if dist.get_rank() == 1:
            raise OSError("no room")

    with pytest.raises(dcp.CheckpointError, match="rank 1: OSError: no room"):
        dcp.Checkpointer().save({"n": 1}, tmp_path / "ck", files=add)
    dist.barrier()
    assert names_in(tmp_path) == []


def test_an_overwrite_replaces_attached_files_and_keeps_those_of_others(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    path.mkdir()
    (path / "args.json").write_text("{}")  # before the first save
    checkpointer = dcp.Checkpointer()
    checkpointer.save({"n": 1}, path, files=lambda directory: (directory / "old.bin").write_text("1"))
    (path / "log.txt").write_text("theirs")
    checkpointer.save({"n": 2}, path, files=lambda directory: (directory / "new.bin").write_text("2"))
    assert {"args.json", "log.txt", "new.bin"} < set(os.listdir(path))
    assert not (path / "old.bin").exists()


def _die_after_the_exchange(path: Path) -> None:
    die_at(posix, "exchange", after=True)
    dcp.Checkpointer().save({"n": 2}, path, files=lambda directory: (directory / "new.bin").write_text("2"))


def test_files_of_others_survive_a_kill_in_the_middle_of_an_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    dcp.Checkpointer().save({"n": 1}, path, files=lambda directory: (directory / "old.bin").write_text("1"))
    (path / "log.txt").write_text("theirs")
    launch.run(_die_after_the_exchange, 1, path, killed=[0])
    dcp.save({"n": 3}, tmp_path / "next")
    assert (path / "log.txt").read_text() == "theirs"
    assert (path / "new.bin").exists() and not (path / "old.bin").exists()
    assert is_tidy(tmp_path)


def test_numbered_checkpoints_of_accelerate_are_made_outside_of_their_folder(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "checkpoint_3"
    seen: list[str] = []
    dcp.Checkpointer().save({"n": 1}, path, files=lambda directory: seen.extend(os.listdir(tmp_path / "checkpoints")))
    assert seen == []
    assert names_in(tmp_path / "checkpoints") == ["checkpoint_3"]
    assert names_in(tmp_path) == ["checkpoints"]
    dcp.Checkpointer().remove(path)
    assert names_in(tmp_path / "checkpoints") == []


@on_ranks(2)
def test_stock_loads_model_and_optimizer_through_a_view_of_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    model, optimizer = build("fsdp2")
    train(model, optimizer, 2)
    views = {"weights_0": {"model": "theirs"}, "optimizer_0": {"optim": "optimizer"}}
    Internals(dcp.Checkpointer()).save({"model": model, "optim": optimizer}, path, views=views)
    saved = full_state(model.state_dict())

    other, _ = build("fsdp2", seed=1)
    found = {"theirs": other.state_dict()}
    stock.load(found, storage_reader=stock.FileSystemReader(path / "weights_0"))
    assert_same(saved, full_state(found["theirs"]))

    slots = {f"state.{name}.exp_avg": torch.zeros_like(p) for name, p in other.named_parameters()}
    stock.load({"optimizer": slots}, storage_reader=stock.FileSystemReader(path / "optimizer_0"))
    names = {id(p): name for name, p in model.named_parameters()}
    live = {f"state.{names[id(p)]}.exp_avg": slot["exp_avg"] for p, slot in optimizer.state.items()}
    assert_same(full_state(live), full_state(slots))
