"""Which memory stays as it is until the next step of an optimizer, so that a lazy save may copy it later.

That is: what is trained (parameters that require gradients), and the optimizers' tensors for it. Everything else may
change at any moment and is copied at once: buffers (running statistics change in the forward pass), parameters that do
not require gradients (target networks and averages are written by hand), weights that torch averages, what shares
memory with any of these, and whatever belongs to no module or optimizer. Under FSDP1 nothing is still: its state dicts
are fresh copies already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from dcp_plugin._torch import DTensor, is_tensor, own_buffers, own_parameters
from dcp_plugin.state.names import named_modules
from dcp_plugin.types import ShardedValue


class StillMemory:
    """Knows the memory of trained parameters and optimizer state.

    Args:
        objects: Modules and optimizers; anything else is ignored.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self.modules: list[nn.Module] = []
        """Those with parameters of their own: to load into one of them changes some of this."""
        self._slots: dict[int, torch.Tensor] = {}
        trained: set[int] = set()
        self._moving: set[int] = set()
        for one in objects:
            if isinstance(one, nn.Module):
                children = [child for _, child in named_modules(one)]
                self.modules += [child for child in children if next(own_parameters(child), None) is not None]
                parameters = [parameter for child in children for _, parameter in own_parameters(child)]
                trained.update(_memory(parameter for parameter in parameters if parameter.requires_grad))
                self._moving.update(_memory(parameter for parameter in parameters if not parameter.requires_grad))
                self._moving.update(_memory(buffer for child in children for _, buffer in own_buffers(child)))
                for averaged in (child for child in children if isinstance(child, AveragedModel)):
                    self._moving.update(_memory(averaged.parameters()))
            elif isinstance(one, torch.optim.Optimizer):
                slots = (slot for slots in one.state.values() for slot in _tensors(slots))
                self._slots.update((id(slot), slot) for slot in slots)
        self._still = trained - self._moving - {0}  # where nothing is

    def __call__(self, leaf: Any, memory: tuple[torch.Tensor, ...]) -> bool:
        """Whether a leaf of the state is still, and what this rank has of it."""
        places = _places(memory)
        whole = leaf.whole if isinstance(leaf, ShardedValue) else leaf
        return self._moving.isdisjoint(places) if id(whole) in self._slots else self._still.issuperset(places)


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
    with torch.no_grad():  # it takes the memory of a DTensor as it is, and makes no view of it
        return _places([tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors])


def _places(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where the storages begin; 0 for what has none, which is copied at the call in any case."""
    try:
        return [tensor.untyped_storage().data_ptr() for tensor in tensors]
    except Exception:  # each kind without memory has its own
        return [place for tensor in tensors for place in _places([tensor])] if len(tensors) > 1 else [0]
