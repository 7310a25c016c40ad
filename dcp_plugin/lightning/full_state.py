"""State whose tensors are whole, into models and optimizers of any strategy.

This is what a file of Lightning's has, and what a hook may put into a checkpoint. Its optimizer states have numbers
instead of the names of parameters, and what a number counts depends on who saved it:

- one device and DDP: the parameters of the optimizer, in the order of its groups;
- FSDP and ModelParallel, saving "full": the parameters of the model, frozen ones included.

Lightning's sharded strategies take the second for both, and give one parameter the state of another as soon as there
is a frozen one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dcp_plugin._torch import is_tensor, sharded_value
from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.format.index import Entry, Location, StoredTensor, StoredValue
from dcp_plugin.messages import some
from dcp_plugin.state import flatten_optimizer, gather_module
from dcp_plugin.state.module import flat_parameter_names
from dcp_plugin.state.names import contains_fsdp1, parameter_names
from dcp_plugin.state.optimizer import Nested, group_names
from dcp_plugin.state.optimizer_load import OptimizerLoad


def fill(key: str, target: Any, source: Any) -> None:
    """Copy ``source``, whole or distributed like ``target``, into this rank's part of ``target``.

    Raises:
        CheckpointMismatch: They have different shapes.
    """
    mine, given = sharded_value(target), sharded_value(source)
    if mine.shape != given.shape:
        raise CheckpointMismatch(f"{key} has shape {mine.shape} here and {given.shape} in the checkpoint")
    for number, chunk in enumerate(mine.chunks):
        if len(given.chunks) == 1 and given.chunks[0].sizes == given.shape:
            box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            chunk.tensor.copy_(given.chunks[0].tensor[box])
        else:
            chunk.tensor.copy_(given.chunks[number].tensor)


def load_optimizer(model: nn.Module, optimizer: Optimizer, state: Nested, *, strict: bool) -> None:
    """Give an optimizer a state, keyed by the names or the numbers of parameters. Collective if there is FSDP1.

    Raises:
        CheckpointMismatch: It does not fit the optimizer, or is that of other parameters. Nothing has changed then.
    """
    nested = by_name(model, optimizer, state)
    flat = flatten_optimizer(nested)
    load = OptimizerLoad(model, optimizer, {key: _entry(value) for key, value in flat.items()})
    if strict and (load.missing or load.unexpected):
        raise CheckpointMismatch(
            f"the checkpoint's {type(optimizer).__name__} has other parameters: only here {some(load.missing)}; only "
            f"in the checkpoint {some(load.unexpected)}. strict_loading=False loads what fits."
        )
    _refuse_state_of_others(nested["state"], gather_module(model))
    targets = load.targets()
    load.check({key: flat[key] for key in targets if not is_tensor(flat[key])})
    for key, target in targets.items():
        if is_tensor(target):
            fill(key, target, flat[key])
    load.commit({key: flat[key] if target is None else target for key, target in targets.items()})


def by_name(model: nn.Module, optimizer: Optimizer, state: Nested) -> Nested:
    """The state with names of parameters where it has numbers."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if all(isinstance(number, str) for number in numbers):
        return state
    of_optimizer = numbers == list(range(len(numbers)))
    names = _names_in_optimizer(model, optimizer) if of_optimizer else _names_in_model(model)
    if len(names) < len(numbers) or max(numbers) >= len(names) or (of_optimizer and len(names) > len(numbers)):
        raise CheckpointMismatch(
            f"the checkpoint's {type(optimizer).__name__} has the state of {len(numbers)} parameters, up to number "
            f"{max(numbers)}; this {'optimizer' if of_optimizer else 'model'} has {len(names)}. Make it with the "
            "parameters that it was saved with."
        )
    return {
        "state": {names[number]: slots for number, slots in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]
        ],
    }


def _names_in_optimizer(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """In the order in which an optimizer of the unwrapped model has them. A flat parameter of FSDP1 lists those of
    its unit; a group of such is taken to be in the order of the model, which is how it is mostly made."""
    order = {name: number for number, name in enumerate(gather_module(model))}
    names = []
    for group, of_group in zip(optimizer.param_groups, group_names(model, optimizer), strict=True):
        flat = len(of_group) != len(group["params"])
        names += sorted(of_group, key=order.__getitem__) if flat else of_group
    return names


def _names_in_model(model: nn.Module) -> list[str]:
    if not contains_fsdp1(model):
        return list(parameter_names(model).values())
    known = {name for names in flat_parameter_names(model).values() for name in names}
    return [name for name in gather_module(model) if name in known]


def _refuse_state_of_others(state: dict[str, dict[str, Any]], model: dict[str, Any]) -> None:
    """Slots have the shape of their parameter, or are made of its sizes (factored ones). If none is, they are
    another's."""
    for name, slots in state.items():
        if name not in model:
            continue
        shape = sharded_value(model[name]).shape
        shapes = [tuple(slot.shape) for slot in slots.values() if is_tensor(slot) and slot.ndim > 0]
        if shapes and not any(set(of_slot) <= {1, *shape} for of_slot in shapes):
            raise CheckpointMismatch(
                f"the checkpoint's optimizer state for {name} has shape {shapes[0]}, the parameter {shape}: it is that "
                "of another parameter. Make the optimizer with the parameters, groups and order it was saved with."
            )


def _entry(value: Any) -> Entry:
    if isinstance(value, torch.Tensor):
        return StoredTensor(value.dtype, tuple(value.shape), ())
    return StoredValue(Location("", 0, 0, None, 0))
