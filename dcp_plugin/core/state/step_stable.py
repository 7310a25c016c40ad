"""Step-stable memory: memory that stays unchanged until the next step of an optimizer.

A lazy save may copy it later. It consists of the trained parameters (those that require gradients) and the optimizers'
tensors for them. All other memory may change at any moment, and is copied during the call:

- buffers, since running statistics change in the forward pass,
- parameters that do not require gradients, since user code writes target networks and averages,
- weights that torch averages,
- memory that is shared with any of these,
- tensors of no module or optimizer.

Under FSDP1 no memory is step-stable, and none needs to be: its state dicts are fresh copies already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from dcp_plugin.core.state.names import is_list_of, named_modules
from dcp_plugin.core.tensors._torch import DTensor
from dcp_plugin.core.tensors._torch_modules import buffers_in, own_parameters, parameters_in
from dcp_plugin.core.types import ShardedValue


class StepStableMemory:
    """Memory of trained parameters and optimizer state.

    Args:
        objects: Modules and optimizers; anything else is ignored.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self.modules: list[nn.Module] = []
        """Modules with parameters of their own: a load into one of them changes step-stable memory."""
        self._slots: dict[int, Any] = {}
        trained: set[int] = set()
        self._unstable: set[int] = set()
        for object_ in objects:
            if isinstance(object_, nn.Module):
                children = [child for _, child in named_modules(object_)]
                self.modules += [child for child in children if own_parameters(child)]
                parameters = parameters_in(children)
                trained.update(_memory([parameter for parameter in parameters if parameter.requires_grad]))
                unstable = [parameter for parameter in parameters if not parameter.requires_grad]
                unstable += [
                    parameter for c in children if isinstance(c, AveragedModel) for parameter in c.parameters()
                ]
                self._unstable.update(_memory([*unstable, *buffers_in(children)]))
            elif isinstance(object_, torch.optim.Optimizer):
                named = [slots for slots in object_.state.values() if isinstance(slots, Mapping)]
                self._slots |= {id(slot): slot for slots in named for slot in slots.values() if slot is not None}
        self._unstable.add(0)  # the address of tensors without memory
        self._stable = trained - self._unstable

    def __call__(self, leaves: Sequence[Any], memory: Sequence[torch.Tensor]) -> list[bool]:
        """Return which tensors are step-stable, given the leaf of the state that each is on this rank."""
        if not self._stable and not self._slots:
            return [False] * len(leaves)
        # A slot is stable unless it shares memory with unstable tensors. Any other leaf has to be a trained parameter.
        return [
            address not in self._unstable
            if id(leaf.origin if type(leaf) is ShardedValue else leaf) in self._slots
            else address in self._stable
            for leaf, address in zip(leaves, _addresses(memory), strict=True)
        ]


def live_objects(state: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield the modules and optimizers in a state mapping, at any depth."""
    for value in state.values():
        if isinstance(value, (nn.Module, torch.optim.Optimizer)):
            yield value
        elif isinstance(value, Mapping):
            yield from live_objects(value)
        elif is_list_of(value, nn.Module, torch.optim.Optimizer):
            yield from value


def _memory(tensors: list[Any]) -> list[int]:
    with torch.no_grad():  # to_local() then returns the memory of a DTensor itself, without a view
        return _addresses([tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors])


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the addresses of the storages; 0 for a tensor without memory, which is copied during the call anyway."""
    try:
        return [tensor.untyped_storage().data_ptr() for tensor in tensors]
    except Exception:  # each kind of tensor without memory raises its own type
        return [address for tensor in tensors for address in _addresses([tensor])] if len(tensors) > 1 else [0]
