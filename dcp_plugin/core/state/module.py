"""Module state by clean FQN, for any wrapper: sharded views, and copies only where the wrapper allows no views.

For a plain module, DDP, FSDP2 and tensor parallelism, ``state_dict()`` returns views of the parameters (DTensors if
they are sharded). Filling a view loads the parameter. FSDP1 is saved and loaded through state dicts of its own
(:mod:`~dcp_plugin.core.state.fsdp1`).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dcp_plugin.core.errors import warn
from dcp_plugin.core.state.names import CleanNames, OwnNames, contains_fsdp1, is_ddp, named_modules
from dcp_plugin.core.tensors import _torch_modules
from dcp_plugin.core.tensors._torch import DTensor, laid_out_like, sharded_value
from dcp_plugin.core.tensors._torch_modules import (
    Incompatible,
    checkpointable_parameters,
    overrides_load_state_dict,
    overrides_state_dict,
    takes_argument,
    unpatched,
)
from dcp_plugin.core.tensors.kinds import EXACTLY_TENSORS, memory_of


def reshard(module: nn.Module) -> None:
    """Have FSDP2 restore its sharded parameters if a forward pass has left gathered ones, as ``state_dict()`` does.

    The root keeps gathered parameters until the backward pass, which a forward under ``no_grad`` does not have.
    Optimizers hold the sharded parameters.
    """
    _torch_modules.reshard(child for _, child in named_modules(module))


def inside_ddp(module: nn.Module) -> nn.Module:
    """Return the module that DDP wraps if it overrides ``state_dict`` or ``load_state_dict``, else ``module``.

    DDP ignores the result of its module's ``state_dict`` and never calls its ``load_state_dict``, so an override would
    have no effect. Frameworks that add DDP call both on the module inside.
    """
    inner: Any = module.module if is_ddp(module) else module
    return inner if overrides_state_dict(inner) else module


def gather_module(module: nn.Module) -> dict[str, Any]:
    """Return the state of a module: parameters, persistent buffers and extra state by clean FQN.

    Tensors have the global shape of the parameter and hold this rank's part of it (Tensor, DTensor or ShardedTensor).
    Collective if the module contains FSDP1.
    """
    return ModuleState.of(module).values


def gather_with_names(module: nn.Module) -> tuple[dict[str, Any], OwnNames]:
    """Return :func:`gather_module`, and the module's own names in its ``state_dict()``. For DDP, the names are those of
    the module inside."""
    state, front = ModuleState.of(module), "module." if is_ddp(module) else ""
    return state.values, OwnNames.of({clean: own.removeprefix(front) for clean, own in state.raw.items()})


@dataclass(frozen=True)
class ModuleState:
    """State dict of a module."""

    values: dict[str, Any]
    """Values by clean FQN."""
    raw: dict[str, str]
    """Clean FQN -> key in ``state_dict()``. Under FSDP1 it is the FQN itself, since no ``state_dict()`` is loaded."""
    metadata: dict[str, Any]
    """Metadata in ``state_dict()`` of each submodule: the version of its class."""
    clean: CleanNames

    @classmethod
    def of(cls, module: nn.Module) -> ModuleState:
        """Return the state dict of a module. Collective if the module contains FSDP1."""
        clean = CleanNames(module)
        if contains_fsdp1(module):
            from dcp_plugin.core.state import fsdp1  # only such modules need it

            values = fsdp1.gather_module(module)
            return cls(values, {key: key for key in values}, {}, clean)
        state = unpatched(module, "state_dict")()
        # state_dict() detaches parameters, and a detached CheckpointableTensor has lost its place in the global tensor.
        for name, own in checkpointable_parameters(named_modules(module)):
            if name in state:
                state[name] = laid_out_like(state[name], own)
        raw = dict(zip(clean.of_each(list(state)), state, strict=True))
        return cls({key: state[name] for key, name in raw.items()}, raw, getattr(state, "_metadata", None) or {}, clean)

    def clean_prefix(self, prefix: str) -> str:
        """Return the prefix of the clean FQNs below a submodule, given its prefix in the wrapped module."""
        inner = self.clean(prefix.removesuffix("."))
        return f"{inner}." if inner else ""


def apply_module(module: nn.Module, state: dict[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
    """Load a state dict by clean FQN, for any wrapper; return the missing and the unexpected keys.

    Collective if the module contains FSDP1.

    Args:
        strict: The argument for an overridden ``load_state_dict``. Torch's own collects the keys, and does not raise.

    Raises:
        RuntimeError: As ``nn.Module.load_state_dict``: a tensor has another shape.
    """
    clean = CleanNames(module)
    if contains_fsdp1(module):
        from dcp_plugin.core.state import fsdp1  # only such modules need it

        report = fsdp1.apply_module(module, state)
    else:
        wrapped = {clean(name): name for name in unpatched(module, "state_dict")()}
        raw_state = {wrapped.get(name, name): value for name, value in state.items()}
        report = call_load_state_dict(module, raw_state, wrapped.values(), strict) or Incompatible()
    return list(dict.fromkeys(map(clean, report.missing))), list(dict.fromkeys(map(clean, report.unexpected)))


def call_load_state_dict(
    module: nn.Module, state: Mapping[str, Any], own: Collection[str], strict: bool
) -> Incompatible | None:
    """Call ``module.load_state_dict``.

    An override gets a dict as its ``state_dict`` returned it, and decides which entries to load. Mostly it calls
    ``nn.Module.load_state_dict`` in turn. Torch reports parameters as missing if the override's ``state_dict`` leaves
    them out, and entries as unexpected if the override's ``state_dict`` adds them. Neither is an error.

    Args:
        own: The keys of ``module.state_dict()``.
        strict: The argument for an override that takes it. Torch's own collects the keys, and does not raise for them.

    Returns:
        The missing and the unexpected keys; None if an override does not return them.
    """
    load_state_dict, is_override = unpatched(module, "load_state_dict"), overrides_load_state_dict(module)
    lenient = (not strict or not is_override) and takes_argument(load_state_dict, "strict")
    result: Any = load_state_dict(state, **({"strict": False} if lenient else {}))
    if not hasattr(result, "missing_keys"):
        return None
    missing, unexpected = list(result.missing_keys), list(getattr(result, "unexpected_keys", ()))
    if is_override:
        missing = [key for key in missing if key in own and key not in state]
        unexpected = [key for key in unexpected if key not in own]
    return Incompatible(missing, unexpected)


def materialise(module: nn.Module) -> list[str]:
    """Allocate memory for parameters and buffers on the meta device, so that a load can fill them.

    Parameters stay the same objects, for optimizers that hold them and for modules that share them.

    The memory is on the device of a DTensor's mesh, else on torch's default device. No checkpoint has buffers that are
    not persistent: they get memory without values, and a warning names them.

    Returns:
        The clean names of the tensors that now have memory and need values; a tied parameter has its first name.
    """
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return []  # before state_dict, which under FSDP1 would gather the complete model
    clean = CleanNames(module)
    in_checkpoints = set(unpatched(module, "state_dict")())
    lost = [clean(name) for name, b in module.named_buffers() if b.is_meta and name not in in_checkpoints]
    waiting = [
        clean(name)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if tensor.is_meta and name in in_checkpoints
    ]
    # With swapping, to_empty() gives the parameters memory. Without it, it would make new parameters.
    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for child in module.modules():
            own: Iterator[Any] = itertools.chain(child.parameters(recurse=False), child.buffers(recurse=False))
            if (meta := next((tensor for tensor in own if tensor.is_meta), None)) is not None:
                sharded = isinstance(meta, DTensor)
                device = meta.device_mesh.device_type if sharded else torch.get_default_device()
                child.to_empty(device=device, recurse=False)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)
    if lost:
        message = f"buffers that were on the meta device and are in no checkpoint: {', '.join(lost)}; initialise them"
        warn(message)
    return waiting


def same_parameter(module: nn.Module, own: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the first name of each parameter that has several names (tied weights). All are clean FQNs.

    Args:
        own: The :func:`own_tensors` of the module.
    """
    first: dict[int, str] = {}
    named = [(name, first.setdefault(id(tensor), name)) for name, tensor in own.items()]
    same = {name: other for name, other in named if other != name} | same_flat_parameter(module)
    return same | {name: name for name in same.values()}


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by clean FQN, tied ones under each of their names."""
    clean = CleanNames(module)
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return {clean(name): tensor for name, tensor in (*parameters, *buffers)}


def same_memory(first: Any, second: Any) -> bool:
    """Return whether two tensors are the same view of the same memory on this rank.

    Every load asks this for every tensor, so plain tensors are compared without a description.
    """
    if type(first) in EXACTLY_TENSORS and type(second) in EXACTLY_TENSORS:
        return memory_of(first) == memory_of(second)
    first_chunks, second_chunks = sharded_value(first).chunks, sharded_value(second).chunks
    return [memory_of(chunk.tensor) for chunk in first_chunks] == [memory_of(chunk.tensor) for chunk in second_chunks]


def same_flat_parameter(module: nn.Module) -> dict[str, str]:
    """Return the other names of tied weights in flat parameters, and the name under which each is flattened."""
    clean = CleanNames(module)
    same = {}
    for name, parameter in module.named_parameters():
        owner = name.removesuffix("_flat_param")
        for tied in getattr(parameter, "_shared_param_infos", ()):  # also relative to the flat parameter's module
            again, first = (tied.module_name, tied.param_name), (tied.prim_module_name, tied.prim_param_name)
            same[clean(owner + ".".join(filter(None, again)))] = clean(owner + ".".join(filter(None, first)))
    return same
