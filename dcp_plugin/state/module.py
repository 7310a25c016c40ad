"""Module state by clean FQN, for any wrapper; sharded views, no copies where the wrapper allows.

Parameters of a plain module, DDP, FSDP2 and tensor parallelism are what they seem: ``state_dict()`` gives views of
them (DTensors where they are sharded), and filling a view loads the parameter. FSDP1 is the exception, see
:mod:`dcp_plugin.state.fsdp1`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dcp_plugin import _torch
from dcp_plugin._torch import (
    DTensor,
    checkpointable_parameters,
    laid_out_like,
    overrides_load_state_dict,
    sharded_value,
)
from dcp_plugin.state.fsdp1 import apply_fsdp1_module, gather_fsdp1_module, same_flat_parameter
from dcp_plugin.state.names import CleanNames, contains_fsdp1, named_modules
from dcp_plugin.types import memory_of


def reshard(module: nn.Module) -> None:
    """Have FSDP2 put its sharded parameters back where a forward has left whole ones, as ``state_dict()`` does.

    Under ``no_grad`` no backward does that for the root, and optimizers hold the sharded ones.
    """
    for _, child in named_modules(module):
        if child._state_dict_pre_hooks:
            _torch.reshard(child)


def gather_module(module: nn.Module) -> dict[str, Any]:
    """The state of a module: parameters, persistent buffers and extra state by clean FQN.

    Tensors have the global shape of the parameter and hold this rank's part of it (Tensor, DTensor or ShardedTensor).
    Collective if the module contains FSDP1.
    """
    return ModuleState.of(module).values


@dataclass(frozen=True)
class ModuleState:
    """The state dict of a module."""

    values: dict[str, Any]
    """By clean FQN."""
    raw: dict[str, str]
    """The key in ``state_dict()`` of each clean FQN; under FSDP1, where nobody needs it, the FQN itself."""
    metadata: dict[str, Any]
    """What ``state_dict()`` says of each submodule: the version of its class."""
    clean: CleanNames

    @classmethod
    def of(cls, module: nn.Module) -> ModuleState:
        """Collective if the module contains FSDP1."""
        clean = CleanNames(module)
        if contains_fsdp1(module):
            values = gather_fsdp1_module(module)
            return cls(values, {key: key for key in values}, {}, clean)
        state = module.state_dict()
        for name, own in checkpointable_parameters(named_modules(module)):
            if name in state:
                state[name] = laid_out_like(state[name], own)
        raw = {clean(name): name for name in state}
        return cls({key: state[name] for key, name in raw.items()}, raw, getattr(state, "_metadata", None) or {}, clean)

    def clean_prefix(self, prefix: str) -> str:
        """The prefix of the clean FQNs below a submodule, of which ``prefix`` is the one in the wrapped module."""
        inner = self.clean(prefix.removesuffix("."))
        return f"{inner}." if inner else ""


def apply_module(module: nn.Module, state: dict[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
    """``load_state_dict`` by clean FQN, for any wrapper; the keys that were missing and unexpected.

    Collective if the module contains FSDP1.

    Args:
        strict: What a ``load_state_dict`` of the module's own is told. Nothing else raises for the keys.

    Raises:
        RuntimeError: As ``nn.Module.load_state_dict``: a tensor has another shape.
    """
    if contains_fsdp1(module):
        return apply_fsdp1_module(module, state)
    clean = CleanNames(module)
    wrapped = {clean(name): name for name in module.state_dict()}
    given = {wrapped.get(name, name): value for name, value in state.items()}
    kwargs = {} if strict and overrides_load_state_dict(module) else {"strict": False}
    found = module.load_state_dict(given, **kwargs)
    return clean_keys(clean, found)


def clean_keys(clean: CleanNames, found: Any) -> tuple[list[str], list[str]]:
    """The missing and the unexpected keys of what ``load_state_dict`` returned; an override may return anything."""
    missing, unexpected = getattr(found, "missing_keys", ()), getattr(found, "unexpected_keys", ())
    return list(dict.fromkeys(map(clean, missing))), list(dict.fromkeys(map(clean, unexpected)))


def materialise(module: nn.Module) -> list[str]:
    """Give memory to what is on the meta device, so that a load can fill it. Parameters stay the same objects, for
    optimizers that hold them and for modules that share them.

    Returns the clean names of what has memory now, and waits for values; a tied parameter has its first name.

    The memory is on the device of a DTensor's mesh, else torch's default device. Buffers that are not persistent are
    in no checkpoint: they get memory without values, and a warning names them.
    """
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return []  # before state_dict, which under FSDP1 would gather the whole model
    clean = CleanNames(module)
    in_checkpoints = set(module.state_dict())
    lost = [clean(name) for name, b in module.named_buffers() if b.is_meta and name not in in_checkpoints]
    waiting = [
        clean(name)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if tensor.is_meta and name in in_checkpoints
    ]
    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for child in module.modules():
            for tensor in (*child.parameters(recurse=False), *child.buffers(recurse=False)):
                if tensor.is_meta:
                    value: Any = tensor
                    sharded = isinstance(value, DTensor)
                    device = value.device_mesh.device_type if sharded else torch.get_default_device()
                    child.to_empty(device=device, recurse=False)
                    break
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)
    if lost:
        warnings.warn(
            f"buffers that were on the meta device and are in no checkpoint: {', '.join(lost)}; initialise them",
            stacklevel=2,
        )
    return waiting


def same_parameter(module: nn.Module) -> dict[str, str]:
    """For each name of a parameter that has several (tied weights), the first of them. All by clean FQN."""
    first: dict[int, str] = {}
    named = [(name, first.setdefault(id(tensor), name)) for name, tensor in own_tensors(module).items()]
    same = {name: other for name, other in named if other != name}
    same.update(same_flat_parameter(module))
    return same | {name: name for name in same.values()}


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by clean FQN, tied ones under each of their names."""
    clean = CleanNames(module)
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return {clean(name): tensor for name, tensor in (*parameters, *buffers)}


def same_memory(one: Any, other: Any) -> bool:
    """Whether two tensors are the same memory on this rank, seen in the same way."""
    mine, others = sharded_value(one).chunks, sharded_value(other).chunks
    return [memory_of(chunk.tensor) for chunk in mine] == [memory_of(chunk.tensor) for chunk in others]
