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

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from dcp_plugin.core.state.names import is_list_of, named_modules
from dcp_plugin.core.tensors._torch import DTensor, is_tensor
from dcp_plugin.core.tensors._torch_modules import own_buffers, own_parameters
from dcp_plugin.core.types import ShardedValue


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
        # A slot is stable unless it shares memory with unstable tensors. Any other leaf has to be a trained parameter.
        memory_addresses = iter(_addresses([tensor for tensors in memory for tensor in tensors]))
        return [
            self._unstable.isdisjoint(addresses)
            if id(leaf.origin if isinstance(leaf, ShardedValue) else leaf) in self._slots
            else self._stable.issuperset(addresses)
            for leaf, addresses in zip(
                leaves, (list(itertools.islice(memory_addresses, len(tensors))) for tensors in memory), strict=True
            )
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


def _tensors(slots: Any) -> Iterator[torch.Tensor]:
    return (slot for slot in slots.values() if is_tensor(slot)) if isinstance(slots, Mapping) else iter(())


def _memory(tensors: Iterable[Any]) -> list[int]:
    with torch.no_grad():  # to_local() then returns the memory of a DTensor itself, without a view
        return _addresses([tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors])


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the addresses of the storages; 0 for a tensor without memory, which is copied during the call anyway."""
    try:
        return [tensor.untyped_storage().data_ptr() for tensor in tensors]
    except Exception:  # each kind of tensor without memory raises its own type
        return [address for tensor in tensors for address in _addresses([tensor])] if len(tensors) > 1 else [0]
