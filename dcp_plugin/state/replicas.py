"""What DDP keeps equal on all ranks, so that they can share the writing of it.

Of a plain tensor nobody can tell whether the other ranks have the same. Parameters under DDP, and optimizer state of
their shape, are known to be equal. Buffers are not: between two forward passes each rank has its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dcp_plugin._torch import sharded_value
from dcp_plugin.state.names import CleanNames, parameters_by_name


def mark_parameters(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The state of a module with the replicated parameters marked."""
    shapes = _replicated(module)
    if not shapes:
        return state
    return {key: _marked(value) if _is_replica(value, shapes.get(key)) else value for key, value in state.items()}


def mark_slots(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The flat state of an optimizer with the slots of replicated parameters marked."""
    shapes = _replicated(module)
    if not shapes:
        return state
    marked = {}
    for key, value in state.items():
        fqn = key.removeprefix("state.").rpartition(".")[0]
        marked[key] = _marked(value) if key.startswith("state.") and _is_replica(value, shapes.get(fqn)) else value
    return marked


def _replicated(module: nn.Module) -> dict[str, torch.Size]:
    if not any(isinstance(child, DistributedDataParallel) for child in module.modules()):
        return {}
    clean = CleanNames(module)
    inside = {
        clean(f"{prefix}.{name}" if prefix else name)
        for prefix, child in module.named_modules()
        if isinstance(child, DistributedDataParallel)
        for name, _ in child.named_parameters(remove_duplicate=False)
    }
    return {name: p.shape for name, p in parameters_by_name(module).items() if name in inside}


def _is_replica(value: Any, shape: torch.Size | None) -> bool:
    return type(value) in (torch.Tensor, nn.Parameter) and value.shape == shape


def _marked(value: Any) -> Any:
    return sharded_value(value, any_rank=True)
