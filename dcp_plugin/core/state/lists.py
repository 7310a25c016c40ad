"""Adapters of lists: several modules, optimizers or schedulers that are one object of the checkpoint.

A rank of an interleaved pipeline has several stages, and an optimizer and a scheduler for each. All objects of a list
are stored under the name of the list, without a number. Modules have the FQNs of the complete model as keys, optimizers
the FQNs of their parameters, as torchtitan's wrappers store them. The checkpoint does not depend on the number of
objects on a rank, and loads on any split of the model.

Several objects of the list may have the same key, for example of a rotary buffer. Its values must be equal.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from dcp_plugin.core.errors import CheckpointMismatch
from dcp_plugin.core.format.index import Entry, KeyPath
from dcp_plugin.core.format.payload import hashes_of
from dcp_plugin.core.state.adapters import ModuleAdapter, OptimizerAdapter, StateAdapter, StatefulAdapter
from dcp_plugin.core.state.module import same_memory
from dcp_plugin.core.state.module_load import Read
from dcp_plugin.core.state.names import Parts, trained_module
from dcp_plugin.core.state.optimizer import groups_of, split_key
from dcp_plugin.core.tensors._torch import is_tensor, sharded_value
from dcp_plugin.core.tensors._torch_modules import Incompatible, unwrapped_optimizer
from dcp_plugin.core.types import Box, ShardedValue, Wanted


def adapter_of_list(
    name: str, objects: Sequence[Any], modules: Mapping[str, nn.Module], state: Mapping[str, Any]
) -> StateAdapter:
    """Return the adapter of a list of modules, optimizers or schedulers.

    Args:
        modules: The modules of the state, with one :class:`~dcp_plugin.core.state.names.Parts` for each list.
    """
    if isinstance(module := modules.get(name), Parts):
        return ListAdapter(name, [ModuleAdapter(name, part) for part in module.parts], module)
    if not isinstance(objects[0], torch.optim.Optimizer):
        return ListAdapter(name, [StatefulAdapter(name, scheduler) for scheduler in objects], None)
    optimizers = [unwrapped_optimizer(optimizer) for optimizer in objects]
    together: Any = SimpleNamespace(param_groups=[group for each in optimizers for group in groups_of(each)])
    module = trained_module(name, together, modules, state)
    # Without the list of groups for stock code, which has the numbers of one optimizer.
    parts = [OptimizerAdapter(name, module, optimizer, stock_aliases=False) for optimizer in optimizers]
    return OptimizerListAdapter(name, parts, module)


class ListAdapter(StateAdapter):
    """Adapter of a list, made of the adapters of its objects. ``module`` has the names that all of them use."""

    def __init__(self, name: str, parts: Sequence[Any], module: nn.Module | None) -> None:
        self.name, self.kind, self.parts, self.module = name, parts[0].kind, parts, module

    def gather(self) -> tuple[dict[str, Any], dict[str, KeyPath]]:
        leaves, paths, owners = dict[str, Any](), dict[str, KeyPath](), dict[str, int]()
        for number, part in enumerate(self.parts):
            own_leaves, own_paths = part.gather()
            for key, value in own_leaves.items():
                if key in leaves and not _is_equal(leaves[key], value):
                    raise CheckpointMismatch(
                        f"numbers {owners[key]} and {number} of the list {self.name!r} have different values under "
                        f"the key {self.name}.{key}. A checkpoint has one value for each key: give the two objects "
                        f"names of their own in the state."
                    )
            # The first operand sets the order of the keys, the last one their values: the earlier object counts.
            leaves, paths = leaves | own_leaves | leaves, paths | own_paths | paths
            owners = dict.fromkeys(own_leaves, number) | owners
        return leaves, paths

    def present(self) -> Mapping[str, Any]:
        return _merged([part.present() for part in self.parts])  # type: ignore[no-any-return]

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for part in self.parts for name in part.names()))

    def want(self, stored: Mapping[str, Entry], paths: Mapping[str, KeyPath]) -> Wanted:
        self._wants: list[Wanted] = [part.want(stored, paths) for part in self.parts]
        merged = Wanted(**{name: _merged([vars(want)[name] for want in self._wants]) for name in vars(Wanted())})
        merged.extra_targets = {
            key: target for key, target in merged.extra_targets.items() if key not in merged.targets
        }
        of_all = set(merged.unexpected).intersection(*(want.unexpected for want in self._wants))
        merged.unexpected = [key for key in merged.unexpected if key in of_all]
        merged.prefix_candidates = (
            merged.prefix_candidates if all(want.prefix_candidates for want in self._wants) else []
        )
        if any(split_key(key)[1].isdecimal() for key in merged.stored_as.values()):
            merged.unusable = (
                "has numbers instead of parameter names in the checkpoint, which only one optimizer can take"
            )
        # An entry that no object has is for the hooks of all. The keys are kept here, because the match changes the
        # merged result.
        self._taken = [
            want.targets.keys() | (want.extra_targets.keys() & merged.extra_targets.keys()) for want in self._wants
        ]
        return merged

    def check(self, values: Mapping[str, Any], strict: bool) -> None:
        for part, keys in zip(self.parts, self._taken, strict=True):
            part.check({key: value for key, value in values.items() if key in keys}, strict)

    def take(self, filled: dict[str, Any], read: Read, strict: bool) -> Incompatible:
        report, taken = Incompatible(), set[str]()
        for part, want, keys in zip(self.parts, self._wants, self._taken, strict=True):
            mine = {
                *keys,
                *want.missing_tensors,
                *want.missing,
            }  # frozen parameters left out are missing, and in ``filled``
            own = {key: want.missing_tensors.get(key, value) for key, value in filled.items() if key in mine}
            if self.kind != "module":  # a module copies values into its memory; other objects would share them
                own |= {key: copy.deepcopy(own[key]) for key in own.keys() & taken}
            taken |= own.keys()
            if own or want.saved_empty:
                result = part.take(own, read, strict) or Incompatible()
                report = Incompatible(
                    **{name: _merged([vars(report)[name], vars(result)[name]]) for name in vars(report)}
                )
        return report


class OptimizerListAdapter(ListAdapter, OptimizerAdapter):  # type: ignore[misc]  # take(), which reports for modules
    def __init__(self, name: str, parts: Sequence[OptimizerAdapter], module: nn.Module) -> None:
        super().__init__(name, parts, module)
        self.optimizer = parts[0].optimizer

    def classes(self) -> str:
        return ", ".join(dict.fromkeys(part.classes() for part in self.parts))

    def shards(self) -> dict[str, Box]:
        return _merged([part.shards() for part in self.parts])  # type: ignore[no-any-return]

    def lacks(self, recorded: str) -> list[str]:
        return _merged([part.lacks(recorded) for part in self.parts])  # type: ignore[no-any-return]


def _merged(fields: Sequence[Any]) -> Any:
    """Return the union of the same field of several objects. For a single value, the first that is not empty counts."""
    if isinstance(fields[0], dict):
        return {key: value for field in reversed(fields) for key, value in field.items()}
    if isinstance(fields[0], (list, set)):
        return type(fields[0])(dict.fromkeys(key for field in fields for key in field))
    return next(filter(None, fields), fields[0])


def _is_equal(first: Any, second: Any) -> bool:
    if not all(is_tensor(value) or isinstance(value, ShardedValue) for value in (first, second)):
        return first is second or (type(first) is type(second) and bool(np.all(first == second)))
    one, other = (value if isinstance(value, ShardedValue) else sharded_value(value) for value in (first, second))
    places = [[(chunk.offsets, chunk.sizes) for chunk in value.chunks] for value in (one, other)]
    pairs = zip(one.chunks, other.chunks, strict=False)
    return (one.shape, one.dtype, places[0]) == (other.shape, other.dtype, places[1]) and all(
        same_memory(a.tensor, b.tensor) or len({*hashes_of([a.tensor, b.tensor], 1)}) == 1 for a, b in pairs
    )
