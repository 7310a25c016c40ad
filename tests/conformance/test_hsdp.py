"""HSDP on a 2x2 mesh: layers that divide evenly and that do not; and HSDP to FSDP, compared after replicating."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

import dcp_plugin as dcp
from tests.compare import assert_same
from tests.launch import on_ranks


def _model(rows: int, mesh_shape: tuple[int, ...], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    names = ("replicate", "shard")[-len(mesh_shape) :]
    model = nn.Sequential(nn.Linear(rows, rows), nn.ReLU(), nn.Linear(rows, rows))
    return fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))


def _replicated(model: nn.Module) -> dict[str, torch.Tensor]:
    whole = {}
    for key, value in model.state_dict().items():
        assert isinstance(value, DTensor)
        whole[key] = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim).to_local()
    return whole


MESHES = [((2, 2), (2, 2)), ((2, 2), (4,)), ((4,), (2, 2))]


@pytest.mark.one_of
@pytest.mark.parametrize("rows", [8, 7, 1], ids=["even", "uneven", "fewer rows than shards"])
@on_ranks(4)
def test_hsdp_to_hsdp_to_fsdp_and_back(tmp_path: Path, rows: int) -> None:
    for number, (source, target) in enumerate(MESHES):
        model = _model(rows, source, seed=0)
        dcp.save({"model": model}, tmp_path / str(number))
        other = _model(rows, target, seed=1)
        dcp.load({"model": other}, tmp_path / str(number))
        assert_same(_replicated(other), _replicated(model))
