"""States of parallel trainings: what each of four ranks has of pipelines, replicas, experts, actor and critic.

The weights of a part tell which part it is, and the state of its optimizer tells the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.layouts import Net, wrap

State = dict[str, Any]


class Layer(nn.Linear):
    """A layer whose weights tell its number."""

    def __init__(self, number: int, width: int = 4) -> None:
        super().__init__(width, width)
        nn.init.constant_(self.weight, number + 1)
        nn.init.constant_(self.bias, -number - 1)


def stage(*numbers: int) -> nn.Module:
    """Layers that keep the names that they have in the complete model, as torch's pipelines and torchtitan split it."""
    return nn.Sequential(OrderedDict((f"layer{number}", Layer(number)) for number in numbers))


def cut(*numbers: int) -> nn.Module:
    """Layers that are numbered from 0 on each rank, as slices of an ``nn.Sequential`` are."""
    return nn.Sequential(*map(Layer, numbers))


def trained(model: nn.Module, number: int = 0) -> torch.optim.Optimizer:
    """Return AdamW for the model. Its moments follow from the weights and this number; the weights do not move."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().abs() + number + 1
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held(state: State) -> dict[str, torch.Tensor]:
    """Return the tensors that this rank holds: parameters, and optimizer state by the place of the parameter."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, nn.Module):
            tensors |= {f"{name}.{key}": local(parameter) for key, parameter in value.named_parameters()}
        elif isinstance(value, torch.optim.Optimizer):
            for at, slots in enumerate(value.state.values()):
                tensors |= {f"{name}.{at}.{slot}": local(each) for slot, each in slots.items()}
    return tensors


def add(state: State, number: float, *, to: str = "", without: str = "step") -> None:
    """Add a number to all that this rank holds under names with these words."""
    for name, tensor in held(state).items():
        if to in name and without not in name:
            tensor.add_(number)


def _whole(layout: str) -> State:
    model = wrap(layout, Net())
    return {"model": model, "optim": trained(model)}


def _mesh(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def _one(model: nn.Module, name: str = "model", optim: str = "optim") -> State:
    return {name: model, optim: trained(model)}


def _tp() -> State:
    from tests.layouts import _tp as parallelize

    model = parallelize(Net(), "block", _mesh("dp", "tp"))
    return {"model": model, "optim": trained(model)}


def _pipeline_of_two(inside: str) -> State:
    """Two stages on two ranks each, which shard it or have it whole."""
    mesh = _mesh("stage", "dp")
    at = mesh.get_local_rank("stage")
    part = stage(2 * at, 2 * at + 1)
    return _one(fully_shard(part, mesh=mesh["dp"]) if inside == "sharded" else part)


def _actor_and_critic() -> State:
    """The actor on ranks 0 and 1, the critic on ranks 2 and 3, each with FSDP2 on its own part of the mesh."""
    mesh = _mesh("role", "dp")
    at = mesh.get_local_rank("role")
    model = fully_shard(cut(at), mesh=mesh["dp"])
    name = ("actor", "critic")[at]
    return _one(model, name, f"{name}_optim")


def _experts(make: Callable[..., nn.Module]) -> State:
    """A layer that all ranks have, and an expert of each rank."""
    model = nn.ModuleDict({"router": Layer(9), "experts": make(dist.get_rank())})
    return _one(model)


LAYOUTS: dict[str, Callable[[], State]] = {
    "hybrid sharded": lambda: _whole("hsdp"),
    "tensor parallel, two replicas": _tp,
    "sharded and tensor parallel": lambda: _whole("fsdp2_tp"),
    "pipeline of four": lambda: _one(stage(dist.get_rank())),
    "pipeline of two, sharded": lambda: _pipeline_of_two("sharded"),
    "pipeline of two, replicas": lambda: _pipeline_of_two("whole"),
    "stages with names": lambda: _one(cut(dist.get_rank()), f"stage{dist.get_rank()}", f"optim{dist.get_rank()}"),
    "stages numbered from 0": lambda: _one(cut(dist.get_rank())),
    "actor and critic": _actor_and_critic,
    "experts": lambda: _experts(stage),
    "experts numbered from 0": lambda: _experts(cut),
    "data parallel": lambda: _one(stage(0)),
}
EQUAL_NAMES = ("stages numbered from 0", "experts numbered from 0")
"""Layouts in which ranks hold different tensors under one name, which a checkpoint cannot have."""
REPLICATED = (
    "hybrid sharded", "tensor parallel, two replicas", "pipeline of two, replicas", "experts", "data parallel",
)  # fmt: skip
"""Layouts in which rank 3 has tensors that another rank has too."""


def build(layout: str) -> State:
    """Return what this rank holds in a layout: the same for each call."""
    torch.manual_seed(0)
    return LAYOUTS[layout]()
