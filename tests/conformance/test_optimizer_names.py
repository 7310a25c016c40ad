"""The optimizer state of ``fully_shard`` has the names, groups and values of an FSDP1-wrapped copy's, and moves."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import dcp_plugin as dcp
from dcp_plugin.core.state import flatten_optimizer, gather_optimizer
from tests.compare import assert_same, full_state
from tests.launch import on_ranks
from tests.layouts import Net, train


def _fsdp1() -> nn.Module:
    model = Net()
    model.block = FullyShardedDataParallel(model.block, device_id=torch.device("cpu"), use_orig_params=True)
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def _fsdp2(submodules: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    model = Net()
    if submodules:
        fully_shard(model.block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


KINDS = {"fsdp1": _fsdp1, "whole": lambda: _fsdp2(False), "submodules": lambda: _fsdp2(True)}


def _make(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = KINDS[kind]()
    matrices = [p for name, p in model.named_parameters() if name.endswith("weight")]
    vectors = [p for name, p in model.named_parameters() if not name.endswith("weight")]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.01 * (seed + 1))


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return full_state(flatten_optimizer(gather_optimizer(model, optimizer)))


@on_ranks(2)
def test_names_groups_and_values_agree_and_reload_into_either_kind(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    trained = {}
    for kind in KINDS:
        model, optimizer = _make(kind, 0)
        train(model, optimizer, 3)
        trained[kind] = _state(model, optimizer)
        dcp.save({"model": model, "optim": optimizer}, tmp_path / kind)
        nested = gather_optimizer(model, optimizer)
        assert [group["weight_decay"] for group in nested["param_groups"]] == [0.1, 0.0]
    reference = trained["fsdp1"]
    for kind, state in trained.items():
        assert state.keys() == reference.keys(), kind
        for key, value in state.items():  # the order of reductions is the framework's: close, not equal
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, reference[key], rtol=1e-4, atol=1e-6)
            else:
                assert value == reference[key], key
    for kind in KINDS:
        for source in KINDS:
            model, optimizer = _make(kind, 1)
            dcp.load({"model": model, "optim": optimizer}, tmp_path / source)
            assert_same(_state(model, optimizer), trained[source])
