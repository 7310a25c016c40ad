"""``torch.distributed.checkpoint`` drives our writer and reader: with its planner's cache, with planners of users, with
what it returns and what it noted in the past."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as TensorPropertiesBefore23
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_plugin as dcp
from tests import launch
from tests.compare import assert_same, full_state
from tests.launch import on_ranks


def _state(step: int, rows: int = 6) -> dict[str, Any]:
    sharded = torch.arange(rows * 2.0).reshape(rows, 2) + step
    if torch.distributed.is_initialized():
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        sharded = distribute_tensor(sharded, mesh, [Shard(0)])
    return {"sharded": sharded, "whole": torch.full((3,), step, dtype=torch.int8), "step": step}


def _saves_with_cached_plans(root: Path) -> None:
    """One writer or a new one for each save; other shapes, the same path again, in the background."""
    warnings.simplefilter("ignore")
    reused = dcp.ShardedWriter(root / "unused")

    def save(path: Path, step: int, rows: int, background: bool) -> None:
        writer = reused if step % 2 else dcp.ShardedWriter(path)
        planner = stock.DefaultSavePlanner(enable_plan_caching=True)
        arguments: dict[str, Any] = {"checkpoint_id": path, "storage_writer": writer, "planner": planner}
        if background:
            stock.async_save(_state(step, rows), **arguments).result()
        else:
            stock.save(_state(step, rows), **arguments)

    paths = [root / name for name in ("a", "b", "c", "d", "d", "e", "f", "g", "h")]
    for step, path in enumerate(paths):
        rows = 6 if step < 6 else 8
        save(path, step, rows, background=torch.distributed.is_initialized() and step in (3, 4, 7))
        found = _state(0, rows)
        dcp.load(found, path)
        assert_same(full_state(found), full_state(_state(step, rows)))
        found = _state(0, rows)
        stock.load(found, checkpoint_id=path)
        assert_same(full_state(found), full_state(_state(step, rows)))
    assert not list(root.glob(".dcp_plugin/*"))


def _saves_with_a_plan_of_stock_s_writer(root: Path) -> None:
    warnings.simplefilter("ignore")
    for writer in (stock.FileSystemWriter(root / "stock"), dcp.ShardedWriter(root / "ours")):
        planner = stock.DefaultSavePlanner(enable_plan_caching=True)
        stock.save(_state(1, 6), storage_writer=writer, planner=planner)
    found = _state(0, 6)
    dcp.load(found, root / "ours")
    assert_same(full_state(found), full_state(_state(1, 6)))


def test_plans_that_stock_caches_are_written_where_each_save_belongs(tmp_path: Path) -> None:
    for world_size in (1, 2):
        launch.run(_saves_with_cached_plans, world_size, tmp_path / str(world_size))
        launch.run(_saves_with_a_plan_of_stock_s_writer, world_size, tmp_path / f"after-stock-{world_size}")


def test_plans_are_cached_without_a_process_group_too(tmp_path: Path) -> None:
    try:
        _saves_with_cached_plans(tmp_path)
        _clear_cached_plans()
        _saves_with_a_plan_of_stock_s_writer(tmp_path / "after-stock")
    finally:
        _clear_cached_plans()


def _clear_cached_plans() -> None:
    for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        getattr(SavePlanner, f"_cached_{name}").clear()


@on_ranks(2)
def test_a_save_after_one_that_failed_goes_to_its_own_directory(tmp_path: Path) -> None:
    """A save of stock's that fails after the plans are out leaves nothing behind that a later one takes for its own."""
    warnings.simplefilter("ignore")

    class Fails(stock.DefaultSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            raise ValueError("it fails")

    for _ in range(2):
        with pytest.raises(BaseException, match="it fails"):
            stock.save(_state(1), storage_writer=dcp.ShardedWriter(tmp_path / "failed"), planner=Fails())
        dcp.save(_state(2), tmp_path / "ours")
        stock.save(_state(3), storage_writer=dcp.ShardedWriter(tmp_path / "stock"))
    for name, step in (("ours", 2), ("stock", 3)):
        found = _state(0)
        dcp.load(found, tmp_path / name)
        assert_same(full_state(found), full_state(_state(step)))


class _Extra(stock.DefaultSavePlanner):
    """As torch's documentation has it: the planner puts data of its own into the metadata."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data=self.extra)


@pytest.mark.parametrize("extra", [["of rank 0"], "text", {"some": 3}, {"sharded": 1}, None, 7, torch.ones(2)])
def test_planner_data_of_any_kind_is_kept(tmp_path: Path, extra: Any) -> None:
    for name, save in (
        ("ours", lambda path: stock.save(_state(1), storage_writer=dcp.ShardedWriter(path), planner=_Extra(extra))),
        ("stock", lambda path: stock.save(_state(1), checkpoint_id=path, planner=_Extra(extra))),
    ):
        path = tmp_path / name
        save(path)
        readers: list[Callable[[Path], Any]] = [stock.FileSystemReader, dcp.ShardedReader]
        for reader in readers:
            if name == "stock" and isinstance(extra, torch.Tensor) and reader is dcp.ShardedReader:
                continue  # a tensor is no part of DCP's metadata: test_planner_data_that_needs_code_is_refused
            found = reader(path).read_metadata().planner_data
            assert type(found) is type(extra) and str(found) == str(extra)
            state = _state(0)
            stock.load(state, storage_reader=reader(path))
            assert_same(state, _state(1))
        if not (name == "stock" and isinstance(extra, torch.Tensor)):
            state = _state(0)
            dcp.load(state, path)
            assert_same(state, _state(1))
            assert dcp.verify(path).ok


class _NeedsCode:
    pass


def test_planner_data_that_needs_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BaseException, match="the planner_data that the planner has put into the metadata is"):
        stock.save(_state(1), storage_writer=dcp.ShardedWriter(tmp_path / "ours"), planner=_Extra(_NeedsCode()))
    assert not (tmp_path / "ours").exists()
    stock.save(_state(1), checkpoint_id=tmp_path / "stock", planner=_Extra(_NeedsCode()))
    with pytest.raises(dcp.UnsafeCheckpoint, match="_NeedsCode"):
        dcp.load(_state(0), tmp_path / "stock")


def test_what_save_returns_and_what_is_read_say_where_and_which_save(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    writer, reader = dcp.ShardedWriter(path), dcp.ShardedReader(path)
    returned = stock.save(_state(1), storage_writer=writer)
    read = reader.read_metadata()
    theirs = stock.FileSystemReader(path).read_metadata()
    assert returned.storage_data.keys() == read.storage_data.keys() == theirs.storage_data.keys()
    assert returned.storage_data == theirs.storage_data
    for metadata in (returned, read, theirs):
        assert metadata.storage_meta is not None
        assert (metadata.storage_meta.checkpoint_id, metadata.storage_meta.save_id) == (str(path), writer.save_id)
    assert read.storage_meta is not None and read.storage_meta.load_id == reader.load_id
    before = writer.save_id, reader.load_id
    writer.reset()
    reader.reset()
    assert writer.save_id != before[0] and reader.load_id != before[1]

    stock.save(_state(1), checkpoint_id=tmp_path / "stock")
    theirs, ours = (one(tmp_path / "stock").read_metadata() for one in (stock.FileSystemReader, dcp.ShardedReader))
    assert ours.storage_meta is not None and theirs.storage_meta is not None
    assert ours.storage_meta.save_id == theirs.storage_meta.save_id is not None
    assert str(ours.storage_meta.checkpoint_id) == str(theirs.storage_meta.checkpoint_id)


@pytest.mark.parametrize("version", ["1.0.0", "1.2.3", None])
def test_the_version_of_a_stock_checkpoint_is_kept(tmp_path: Path, version: str | None) -> None:
    stock.save(_state(1), checkpoint_id=tmp_path / "stock")
    metadata = stock.FileSystemReader(tmp_path / "stock").read_metadata()
    metadata.version = version
    (tmp_path / "stock" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert dcp.ShardedReader(tmp_path / "stock").read_metadata().version == version


def test_our_checkpoints_name_the_version_that_stock_names(tmp_path: Path) -> None:
    stock.save(_state(1), checkpoint_id=tmp_path / "stock")
    stock.save(_state(1), storage_writer=dcp.ShardedWriter(tmp_path / "driven"))
    dcp.save(_state(1), tmp_path / "ours")
    versions = {stock.FileSystemReader(tmp_path / name).read_metadata().version for name in ("stock", "driven", "ours")}
    assert len(versions) == 1
    assert dcp.ShardedReader(tmp_path / "ours").read_metadata().version in versions


def test_a_load_planner_has_the_metadata_as_that_of_stock_has(tmp_path: Path) -> None:
    stock.save(_state(1), checkpoint_id=tmp_path / "stock")
    planner = dcp.ShardedLoadPlanner()
    stock.load(_state(0), checkpoint_id=tmp_path / "stock", planner=planner)
    assert planner.metadata.state_dict_metadata.keys() == _state(0).keys()


def test_metadata_of_torch_before_2_3_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensor properties were another class; there were no storage_meta, save_id and transforms."""
    path = tmp_path / "checkpoint"
    with monkeypatch.context() as then:
        then.setattr("torch.distributed.checkpoint.planner_helpers.TensorProperties", TensorPropertiesBefore23)
        then.setattr(
            "torch.distributed.checkpoint.filesystem._StorageInfo.__getstate__",
            lambda self: {key: value for key, value in vars(self).items() if key != "transform_descriptors"},
        )
        then.setattr(
            "torch.distributed.checkpoint.metadata.Metadata.__getstate__",
            lambda self: {key: vars(self)[key] for key in ("state_dict_metadata", "planner_data", "storage_data")},
            raising=False,
        )
        stock.save(_state(1), checkpoint_id=path)
    assert b"sharded_tensor.metadata" in (path / ".metadata").read_bytes()
    assert b"storage_meta" not in (path / ".metadata").read_bytes()
    for load in (stock.load, lambda state, checkpoint_id: dcp.load(state, checkpoint_id)):
        found = _state(0)
        load(found, checkpoint_id=path)
        assert_same(found, _state(1))
    found = _state(0)
    stock.load(found, storage_reader=dcp.ShardedReader(path))
    assert_same(found, _state(1))


@on_ranks(2)
def test_a_checkpoint_is_only_overwritten_if_that_is_allowed(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    path = tmp_path / "checkpoint"
    stock.save(_state(1), storage_writer=dcp.ShardedWriter(path, overwrite=False))
    with pytest.raises(BaseException, match=r"Checkpoint already exists and self\.overwrite=False\."):
        stock.save(_state(2), storage_writer=dcp.ShardedWriter(path, overwrite=False))
    found = _state(0)
    dcp.load(found, path)
    assert_same(full_state(found), full_state(_state(1)))
    stock.save(_state(2), storage_writer=dcp.ShardedWriter(path))
    dcp.load(found, path)
    assert_same(full_state(found), full_state(_state(2)))
    assert not list(tmp_path.glob(".dcp_plugin/*"))


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
@pytest.mark.parametrize("saved", ["stock, stock", "stock, ours", "ours, stock", "ours, ours"])
def test_a_reader_that_is_used_again_sees_the_save_that_came_between(tmp_path: Path, saved: str) -> None:
    path = tmp_path / "checkpoint"
    reader = dcp.ShardedReader(path)
    for step, writer in enumerate(saved.split(", "), 1):
        made = stock.FileSystemWriter(path) if writer == "stock" else dcp.ShardedWriter(path)
        stock.save(_state(step, rows=step), storage_writer=made)
        for planner in (None, dcp.ShardedLoadPlanner()):
            found = _state(0, rows=step)
            stock.load(found, storage_reader=reader, planner=planner)
            assert_same(found, _state(step, rows=step))


def test_a_checkpoint_without_a_coordinator_says_so(tmp_path: Path) -> None:
    stock.save(_state(1), checkpoint_id=tmp_path, use_collectives=False)
    with pytest.raises(dcp.CheckpointIncomplete, match=r"saved without a coordinator \(use_collectives=False\)"):
        dcp.load(_state(0), tmp_path)


def test_a_file_in_memory_executes_nothing_when_it_is_read(tmp_path: Path) -> None:
    """Nothing but a BytesIO is allowed beside it."""
    stock.save({"f": [io.BytesIO(b"abc"), _NeedsCode()]}, checkpoint_id=tmp_path)
    with pytest.raises(dcp.UnsafeCheckpoint, match="without executing code"):
        dcp.load({"f": None}, tmp_path)
