"""Low-bit optimizers of torchao in a fresh process. A stand-in has their constructor of state, ``_new_buffer``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

import dcp_plugin as dcp
from tests.compare import same_bytes
from tests.launch import on_ranks


class LowBit(torch.optim.Optimizer):
    """Its state consists of two tensors, as the codes and scales of torchao do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.made: list[bool] = []

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            for slot in ("exp_avg", "exp_avg_sq"):
                self.state[parameter][slot] = buffer = self._new_buffer(parameter, slot == "exp_avg")
                for part in _parts(buffer):
                    part.uniform_()

    def _new_buffer(self, parameter: Any, signed: bool) -> Any:
        self.made.append(signed)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        made = TwoTensor(torch.zeros_like(local).detach(), torch.zeros_like(local).detach())
        if not isinstance(parameter, DTensor):
            return made
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(made, parameter.device_mesh, parameter.placements, shape=shape, stride=stride)


class Torchao(LowBit):
    __module__ = "torchao.optim.adam"


def _parts(buffer: Any) -> list[torch.Tensor]:
    local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
    return [local.a, local.b]


def _made(cls: type[LowBit]) -> tuple[nn.Module, LowBit]:
    model = nn.Linear(4, 8)
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, cls(model.parameters())


@on_ranks(1, 2)
def test_a_load_makes_the_state_by_the_constructor_of_the_optimizer(tmp_path: Path, world_size: int) -> None:
    model, optimizer = _made(Torchao)
    optimizer.step()
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "c")
    other, fresh = _made(Torchao)
    dcp.load({"model": other, "optim": fresh}, tmp_path / "c")
    assert fresh.made == [True, False] * 2  # signed averages, and unsigned averages of squares
    for one, two in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert one.keys() == two.keys()
        for slot in one:
            assert all(map(same_bytes, _parts(one[slot]), _parts(two[slot])))


def test_a_class_without_one_is_refused_before_anything_is_overwritten(tmp_path: Path) -> None:
    model, optimizer = _made(LowBit)
    optimizer.step()
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "c")
    other, fresh = _made(LowBit)
    before = other.weight.detach().clone()
    with pytest.raises(dcp.CheckpointMismatch, match="take one step first"):
        dcp.load({"model": other, "optim": fresh}, tmp_path / "c")
    assert torch.equal(other.weight, before)
    assert not fresh.state
