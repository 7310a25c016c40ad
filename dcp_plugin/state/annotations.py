"""What nobody can tell from a tensor alone: whether DDP keeps it equal on all ranks, and whether it is trained.

Of a plain tensor nobody can tell whether the other ranks have the same. Parameters under DDP, and state of their shape
of an optimizer of torch's own, are known to be equal, so that ranks can share the writing of them. Buffers are not:
between two forward passes each rank has its own. Other optimizers may round at random, each rank in its own way: shared
writing would mix the ranks' rows, so rank 0's state counts. Parameters that are not trained are worth looking at before
they are written again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dcp_plugin._torch import DTensor, ShardedTensor, is_tensor, own_parameters, sharded_value
from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.state.fsdp1 import flat_parameter_names
from dcp_plugin.state.names import CleanNames, is_ddp, named_modules, parameters_by_name
from dcp_plugin.tensors import EXACTLY_TENSORS
from dcp_plugin.types import ShardedValue


def mark_parameters(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The state of a module with the replicated and the frozen parameters marked."""
    shapes, frozen = _replicated(module), frozen_names(module)
    if shapes:
        state = {key: _marked(value) if _is_replica(value, shapes.get(key)) else value for key, value in state.items()}
    if frozen:
        state = {key: _as_frozen(value) if key in frozen else value for key, value in state.items()}
    return state


def frozen_names(module: nn.Module) -> set[str]:
    """The clean FQNs of the parameters that are not trained, tied ones under each of their names."""
    if all(parameter.requires_grad for _, child in named_modules(module) for _, parameter in own_parameters(child)):
        return set()
    names = flat_parameter_names(module)
    clean = CleanNames(module)
    frozen: set[str] = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            frozen.update((clean(name), *names[id(parameter)]))
    return frozen


def layout_of(leaf: Any) -> str:
    """How a tensor is distributed, in words."""
    if isinstance(leaf, DTensor):
        mesh = f"{tuple(leaf.device_mesh.shape)} {leaf.device_mesh.mesh_dim_names or ''}".strip()
        return f"DTensor on mesh {mesh}, {', '.join(map(str, leaf.placements))}"
    if isinstance(leaf, ShardedTensor):
        return "ShardedTensor (FSDP1)"
    return leaf.layout if isinstance(leaf, ShardedValue) else "replicated or single"


def _as_frozen(value: Any) -> Any:
    if isinstance(value, ShardedValue):
        return replace(value, frozen=True)
    try:
        return replace(sharded_value(value), frozen=True, layout=layout_of(value)) if is_tensor(value) else value
    except CheckpointMismatch:  # refused later, together with all others
        return value


def mark_slots(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The flat state of an optimizer with the slots of replicated parameters marked."""
    shapes = _replicated(module) if _is_of_torch(optimizer) else {}
    if not shapes:
        return state
    marked = {}
    for key, value in state.items():
        if key.startswith("state.") and _is_replica(value, shapes.get(key[6:].rpartition(".")[0])):
            value = _marked(value)
        marked[key] = value
    return marked


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether equal gradients give equal state on all ranks; of a subclass nobody knows."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def _replicated(module: nn.Module) -> dict[str, torch.Size]:
    if not any(is_ddp(child) for _, child in named_modules(module)):
        return {}
    clean = CleanNames(module)
    inside = {
        clean(f"{prefix}.{name}" if prefix else name)
        for prefix, child in named_modules(module)
        if is_ddp(child)
        for name, _ in child.named_parameters(remove_duplicate=False)
    }
    return {name: p.shape for name, p in parameters_by_name(module).items() if name in inside}


def _is_replica(value: Any, shape: torch.Size | None) -> bool:
    return type(value) in EXACTLY_TENSORS and not value.is_nested and value.shape == shape


def _marked(value: Any) -> Any:
    try:
        return replace(sharded_value(value, any_rank=True), whole=value)
    except CheckpointMismatch:
        return value
