"""Module state by clean FQN, for any wrapper; sharded views, no copies where the wrapper allows.

Parameters of a plain module, DDP, FSDP2 and tensor parallelism are what they seem: ``state_dict()`` gives views of
them (DTensors where they are sharded), and filling a view loads the parameter. FSDP1 is the exception, see
:mod:`dcp_plugin.state.fsdp1`.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from dcp_plugin._torch import DTensor, checkpointable_parameters, is_tensor, laid_out_like, sharded_value
from dcp_plugin.state import fsdp1
from dcp_plugin.state.names import CleanNames
from dcp_plugin.state.walk import named_modules
from dcp_plugin.types import memory_of


def gather_module(module: nn.Module) -> dict[str, Any]:
    """The state of a module: parameters, persistent buffers and extra state by clean FQN.

    Tensors have the global shape of the parameter and hold this rank's part of it (Tensor, DTensor or ShardedTensor).
    Collective if the module contains FSDP1.
    """
    if fsdp1.contains_fsdp1(module):
        return fsdp1.gather_module(module)
    clean = CleanNames(module)
    state = module.state_dict()
    for name, own in checkpointable_parameters(named_modules(module)):
        state[name] = laid_out_like(state[name], own)
    return {clean(name): value for name, value in state.items()}


def apply_module(module: nn.Module, state: dict[str, Any], strict: bool = True) -> None:
    """``load_state_dict`` by clean FQN, for any wrapper.

    Collective if the module contains FSDP1.

    Raises:
        RuntimeError: As ``nn.Module.load_state_dict``: missing or unexpected keys (if strict), or other shapes.
    """
    if fsdp1.contains_fsdp1(module):
        fsdp1.apply_module(module, state, strict)
        return
    clean = CleanNames(module)
    wrapped = {clean(name): name for name in module.state_dict()}
    module.load_state_dict({wrapped.get(name, name): value for name, value in state.items()}, strict=strict)


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


def finish_in_place(module: nn.Module, template: dict[str, Any], values: dict[str, Any]) -> None:
    """Complete a load whose tensors were filled through ``template``, which :func:`gather_module` returned.

    What is not the memory of a parameter or buffer was filled as a copy, and goes through ``load_state_dict``: extra
    state, metrics, and everything under FSDP1. For the rest the load is done, without hooks of ``load_state_dict``.

    Args:
        values: What the template has besides tensors, from the checkpoint.
    """
    if not fsdp1.contains_fsdp1(module):
        own = _own_tensors(module)
        template = {
            key: value
            for key, value in template.items()
            if not (is_tensor(value) and key in own and _memory(own[key]) == _memory(value))
        }
    loaded = {**template, **values}
    if loaded:
        apply_module(module, loaded, strict=False)


def same_parameter(module: nn.Module) -> dict[str, str]:
    """For each name of a parameter that has several (tied weights), the first of them. All by clean FQN."""
    first: dict[int, str] = {}
    named = [(name, first.setdefault(id(tensor), name)) for name, tensor in _own_tensors(module).items()]
    same = {name: other for name, other in named if other != name}
    same.update(fsdp1.same_flat_parameter(module))
    return same | {name: name for name in same.values()}


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by clean FQN, tied ones under each of their names."""
    clean = CleanNames(module)
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return {clean(name): tensor for name, tensor in (*parameters, *buffers)}


def _memory(tensor: Any) -> list[Any]:
    return [memory_of(chunk.tensor) for chunk in sharded_value(tensor).chunks]


def split_tensors(state: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The tensors of a state dict, and the keys of everything else."""
    tensors = {key: value for key, value in state.items() if is_tensor(value)}
    return tensors, [key for key in state if key not in tensors]
