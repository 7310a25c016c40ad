"""Marks of tensors as replicated or frozen: properties that a tensor itself does not have.

Replicated tensors are equal on all ranks, so ranks share the writing of them. These are the parameters under DDP, and
state of their shape in an optimizer of torch. Buffers are not replicated, since each rank has its own between two
forward passes. Neither is the state of other optimizers, which may round randomly on each rank: shared writing would
mix the rows of several ranks, so rank 0's state is stored.

Frozen tensors are untrained parameters. They are expected to be the same at the next save.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dcp_plugin.core.errors import CheckpointMismatch
from dcp_plugin.core.state.names import (
    CleanNames,
    ddp_names,
    is_ddp,
    named_modules,
    parameter_names,
    parameters_by_name,
)
from dcp_plugin.core.tensors._torch import DTensor, ShardedTensor, is_tensor, sharded_value
from dcp_plugin.core.tensors._torch_modules import is_of_torch, own_parameters
from dcp_plugin.core.tensors.kinds import EXACTLY_TENSORS
from dcp_plugin.core.types import ShardedValue


def mark_parameters(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a module with the replicated and the frozen parameters marked."""
    shapes, frozen = _replicated(module), frozen_names(module)
    state = state | {key: _marked(state[key]) for key in shapes if _is_replica(state.get(key), shapes[key])}
    return state | {key: _as_frozen(state[key]) for key in frozen & state.keys()}


def frozen_names(module: nn.Module) -> set[str]:
    """Return the clean FQNs of the parameters that are not trained, tied ones under each of their names."""
    if all(parameter.requires_grad for _, child in named_modules(module) for _, parameter in own_parameters(child)):
        return set()
    names, clean = parameter_names(module), CleanNames(module)
    named = module.named_parameters(remove_duplicate=False)
    return {fqn for name, p in named if not p.requires_grad for fqn in (clean(name), *names[id(p)])}


def layout_of(leaf: Any) -> str:
    """Return how a tensor is distributed, in words."""
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
    except CheckpointMismatch:  # raised later, when the save describes all tensors
        return value


def mark_slots(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return the flat state of an optimizer with the slots of replicated parameters marked."""
    shapes = _replicated(module) if is_of_torch(optimizer) else {}
    if not shapes:
        return state
    # Keys are ``state.<FQN>.<slot>``.
    fqn_of = {key: key[6:].rpartition(".")[0] for key in state if key.startswith("state.")}
    replicas = (key for key, fqn in fqn_of.items() if _is_replica(state[key], shapes.get(fqn)))
    return state | {key: _marked(state[key]) for key in replicas}


def _replicated(module: nn.Module) -> dict[str, torch.Size]:
    if not ddp_names(module):
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
        return replace(sharded_value(value, any_rank=True), origin=value)
    except CheckpointMismatch:
        return value
