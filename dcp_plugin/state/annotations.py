"""Marks tensors as replicated, frozen or step-stable: what a tensor itself does not tell.

Replicated: parameters under DDP, and state of their shape in an optimizer of torch's own, are equal on all ranks, so
ranks share the writing of them. Buffers are not: between two forward passes each rank has its own. Other optimizers may
round at random, each rank in its own way; shared writing would mix the rows of several ranks, so rank 0's state counts.

Frozen: parameters that are not trained are expected to be the same at the next save.

Step-stable: memory that stays as it is until the next step of an optimizer, so that a lazy save may copy it later. That
is what is trained (parameters that require gradients), and the optimizers' tensors for it. Everything else may change
at any moment and is copied during the call: buffers (running statistics change in the forward pass), parameters that do
not require gradients (target networks and averages are written by hand), weights that torch averages, what shares
memory with any of these, and what belongs to no module or optimizer. Under FSDP1 nothing is step-stable: its state
dicts are fresh copies already.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.state.module import flat_parameter_names
from dcp_plugin.state.names import CleanNames, ddp_names, is_ddp, named_modules, parameters_by_name
from dcp_plugin.tensors._torch import DTensor, ShardedTensor, is_tensor, sharded_value
from dcp_plugin.tensors._torch_modules import is_of_torch, own_buffers, own_parameters
from dcp_plugin.tensors.kinds import EXACTLY_TENSORS
from dcp_plugin.types import ShardedValue


def mark_parameters(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The state of a module with the replicated and the frozen parameters marked."""
    shapes, frozen = _replicated(module), frozen_names(module)
    state = state | {key: _marked(state[key]) for key in shapes if _is_replica(state.get(key), shapes[key])}
    return state | {key: _as_frozen(state[key]) for key in frozen & state.keys()}


def frozen_names(module: nn.Module) -> set[str]:
    """The clean FQNs of the parameters that are not trained, tied ones under each of their names."""
    if all(parameter.requires_grad for _, child in named_modules(module) for _, parameter in own_parameters(child)):
        return set()
    names, clean = flat_parameter_names(module), CleanNames(module)
    named = module.named_parameters(remove_duplicate=False)
    return {one for name, p in named if not p.requires_grad for one in (clean(name), *names[id(p)])}


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
    except CheckpointMismatch:  # raised when it is described, with all others that are
        return value


def mark_slots(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The flat state of an optimizer with the slots of replicated parameters marked."""
    shapes = _replicated(module) if is_of_torch(optimizer) else {}
    if not shapes:
        return state
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


class StepStableMemory:
    """Knows the memory of trained parameters and optimizer state.

    Args:
        objects: Modules and optimizers; anything else is ignored.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self.modules: list[nn.Module] = []
        """Those with parameters of their own: a load into one of them changes step-stable memory."""
        self._slots: dict[int, torch.Tensor] = {}
        trained: set[int] = set()
        self._unstable: set[int] = set()
        for one in objects:
            if isinstance(one, nn.Module):
                children = [child for _, child in named_modules(one)]
                self.modules += [child for child in children if next(own_parameters(child), None) is not None]
                parameters = [parameter for child in children for _, parameter in own_parameters(child)]
                trained.update(_memory(parameter for parameter in parameters if parameter.requires_grad))
                unstable = [parameter for parameter in parameters if not parameter.requires_grad]
                unstable += [
                    parameter for c in children if isinstance(c, AveragedModel) for parameter in c.parameters()
                ]
                self._unstable.update(_memory((*unstable, *(b for child in children for _, b in own_buffers(child)))))
            elif isinstance(one, torch.optim.Optimizer):
                slots = (slot for slots in one.state.values() for slot in _tensors(slots))
                self._slots.update((id(slot), slot) for slot in slots)
        self._unstable.add(0)  # where nothing is
        self._stable = trained - self._unstable

    def __call__(self, leaves: Sequence[Any], memory: Sequence[tuple[torch.Tensor, ...]]) -> list[bool]:
        """Which leaves of the state, with their memory on this rank, are step-stable."""
        if not self._stable and not self._slots:
            return [False] * len(leaves)
        places = iter(_places([tensor for tensors in memory for tensor in tensors]))
        return [
            self._unstable.isdisjoint(mine) if self._is_slot(leaf) else self._stable.issuperset(mine)
            for leaf, mine in zip(leaves, (list(itertools.islice(places, len(one))) for one in memory), strict=True)
        ]

    def _is_slot(self, leaf: Any) -> bool:
        if type(leaf) in EXACTLY_TENSORS or not isinstance(leaf, ShardedValue):
            return id(leaf) in self._slots
        return id(leaf.origin) in self._slots


def live_objects(state: Mapping[Any, Any]) -> Iterator[Any]:
    """The modules and optimizers in a state mapping, at any depth."""
    for value in state.values():
        if isinstance(value, (nn.Module, torch.optim.Optimizer)):
            yield value
        elif isinstance(value, Mapping):
            yield from live_objects(value)


def _tensors(slots: Any) -> Iterator[torch.Tensor]:
    return (slot for slot in slots.values() if is_tensor(slot)) if isinstance(slots, Mapping) else iter(())


def _memory(tensors: Iterable[Any]) -> list[int]:
    with torch.no_grad():  # to_local() then returns the memory of a DTensor itself, without a view
        return _places([tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors])


def _places(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where the storages begin; 0 for a tensor without, which is copied during the call in any case."""
    try:
        return [tensor.untyped_storage().data_ptr() for tensor in tensors]
    except Exception:  # each kind without memory has its own
        return [place for tensor in tensors for place in _places([tensor])] if len(tensors) > 1 else [0]
