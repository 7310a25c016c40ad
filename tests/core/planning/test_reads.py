"""Which reads of a plan need no conversion, and so cost no objects beyond their tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Shard, distribute_tensor

import dcp_plugin as dcp
from dcp_plugin.core.planning.reads import ReadPlanner
from dcp_plugin.core.storage.reader import CheckpointReader
from dcp_plugin.core.tensors._torch import sharded_value
from tests.launch import on_ranks


@pytest.mark.parametrize("shape", [(8, 6), (7, 5)], ids=["even", "uneven"])
@pytest.mark.parametrize(
    "placements", [(Shard(0),), (Shard(1),), (Shard(0), Shard(1))], ids=["rows", "columns", "grid"]
)
@on_ranks(4)
def test_small_shards_are_read_as_they_are_stored(
    tmp_path: Path, placements: tuple[Placement, ...], shape: tuple[int, int]
) -> None:
    mesh = init_device_mesh("cpu", (4,) if len(placements) == 1 else (2, 2))
    saved = distribute_tensor(torch.arange(48.0)[: shape[0] * shape[1]].view(shape), mesh, placements)
    target = distribute_tensor(torch.zeros(shape), mesh, placements)
    dcp.save({"w": saved}, tmp_path / "a")
    with CheckpointReader(tmp_path / "a") as reader:
        plan = ReadPlanner({"w": sharded_value(target)}, reader.index, {"w": "w"}).plan()
        reader.read(plan)
    assert (len(plan.boxes), len(plan.chunks)) == (0, 1 if target.to_local().numel() else 0)
    assert torch.equal(target.to_local(), saved.to_local())
