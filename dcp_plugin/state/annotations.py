"""Marks of tensors as replicated, frozen or step-stable: properties that a tensor itself does not have.

Replicated: parameters under DDP, and state of their shape in an optimizer of torch's own, are equal on all ranks, so
ranks share the writing of them. Buffers are not replicated: between two forward passes each rank has its own. Other
optimizers may round randomly and differently on each rank; shared writing would mix the rows of several ranks, so only
rank 0's state is stored.

Frozen: untrained parameters, which are expected to be the same at the next save.

Step-stable: memory that stays unchanged until the next step of an optimizer, so that a lazy save may copy it later. It
consists of the trained parameters (those that require gradients) and the optimizers' tensors for them. All other memory
may change at any moment and is copied during the call: buffers (running statistics change in the forward pass),
parameters that do not require gradients (user code writes target networks and averages), weights that torch averages,
memory shared with any of these, and tensors of no module or optimizer. Under FSDP1 no memory is step-stable: its state
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
    """Return the state of a module with the replicated and the frozen parameters marked."""
    shapes, frozen = _replicated(module), frozen_names(module)
    state = state | {key: _marked(state[key]) for key in shapes if _is_replica(state.get(key), shapes[key])}
    return state | {key: _as_frozen(state[key]) for key in frozen & state.keys()}


def frozen_names(module: nn.Module) -> set[str]:
    """Return the clean FQNs of the parameters that are not trained, tied ones under each of their names."""
    if all(parameter.requires_grad for _, child in named_modules(module) for _, parameter in own_parameters(child)):
        return set()
    names, clean = flat_parameter_names(module), CleanNames(module)
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


class StepStableMemory:
    """Memory of trained parameters and optimizer state.

    Args:
        objects: Modules and optimizers; anything else is ignored.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self.modules: list[nn.Module] = []
        """Modules with parameters of their own: a load into one of them changes step-stable memory."""
        self._slots: dict[int, torch.Tensor] = {}
        trained: set[int] = set()
        self._unstable: set[int] = set()
        for object_ in objects:
            if isinstance(object_, nn.Module):
                children = [child for _, child in named_modules(object_)]
                self.modules += [child for child in children if next(own_parameters(child), None) is not None]
                parameters = [parameter for child in children for _, parameter in own_parameters(child)]
                trained.update(_memory(parameter for parameter in parameters if parameter.requires_grad))
                unstable = [parameter for parameter in parameters if not parameter.requires_grad]
                unstable += [
                    parameter for c in children if isinstance(c, AveragedModel) for parameter in c.parameters()
                ]
                self._unstable.update(_memory((*unstable, *(b for child in children for _, b in own_buffers(child)))))
            elif isinstance(object_, torch.optim.Optimizer):
                slots = (slot for slots in object_.state.values() for slot in _tensors(slots))
                self._slots.update((id(slot), slot) for slot in slots)
        self._unstable.add(0)  # the address of tensors without memory
        self._stable = trained - self._unstable

    def __call__(self, leaves: Sequence[Any], memory: Sequence[tuple[torch.Tensor, ...]]) -> list[bool]:
        """Return which leaves of the state, with their memory on this rank, are step-stable."""
        if not self._stable and not self._slots:
            return [False] * len(leaves)
        places = iter(_places([tensor for tensors in memory for tensor in tensors]))
        return [
            self._unstable.isdisjoint(addresses) if self._is_slot(leaf) else self._stable.issuperset(addresses)
            for leaf, addresses in zip(
                leaves, (list(itertools.islice(places, len(tensors))) for tensors in memory), strict=True
            )
        ]

    def _is_slot(self, leaf: Any) -> bool:
        if type(leaf) in EXACTLY_TENSORS or not isinstance(leaf, ShardedValue):
            return id(leaf) in self._slots
        return id(leaf.origin) in self._slots


def live_objects(state: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield the modules and optimizers in a state mapping, at any depth."""
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
    """Return the addresses of the storages; 0 for a tensor without memory, which is copied during the call anyway."""
    try:
        return [tensor.untyped_storage().data_ptr() for tensor in tensors]
    except Exception:  # each kind of tensor without memory raises its own type
        return [place for tensor in tensors for place in _places([tensor])] if len(tensors) > 1 else [0]
