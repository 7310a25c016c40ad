"""Optimizer state by FQN, for any wrapper, and for optimizers that have no state yet.

An optimizer knows its parameters by identity and by their order. Neither survives another wrapper or world size, so
state and hyper-parameters are keyed by the FQN of the parameter:

- ``state.<FQN>.<slot>`` (``state.layer.weight.exp_avg``),
- ``param_groups.<FQN>.<field>`` (``param_groups.layer.weight.lr``): per parameter, since the groups of the saving
  and the loading optimizer need not be the same,
- ``global_state.<key>.…``: what the optimizer keeps under a key that is no parameter,
- ``param_groups.<number>.<field>`` (:func:`group_list`): the groups as a list, for stock code that does not flatten. A
  load reads these only from checkpoints that have nothing else.

``get_optimizer_state_dict(flatten_optimizer_state_dict=True)`` of torch gives the first two as well, but it steps an
optimizer that has no state. Here nothing is stepped: a save changes nothing, and a failed load leaves no trace.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dcp_plugin._torch import laid_out_like, shard_of
from dcp_plugin._torch_modules import has_own_state_dict
from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.planning.flatten import flatten
from dcp_plugin.planning.local_inventory import Box
from dcp_plugin.state.module import flat_parameter_names, gather_fsdp1_optimizer, reshard
from dcp_plugin.state.names import contains_fsdp1, parameter_names, parameters_by_name
from dcp_plugin.tensors import EXACTLY_TENSORS
from dcp_plugin.types import KeyPath

GROUPS = "param_groups"
GLOBAL = "global_state"

Nested = dict[str, Any]
"""``{"state": {fqn: {slot: value}}, "param_groups": [{"params": [fqn, ...], field: value}]}``; and
``"global_state"``, if there is any."""


def gather_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer) -> Nested:
    """The state of an optimizer of ``module``, keyed by clean FQN. Collective if the module contains FSDP1.

    Raises:
        CheckpointMismatch: The optimizer has a parameter that the module has not.
    """
    if contains_fsdp1(module):
        return gather_fsdp1_optimizer(module, optimizer)
    reshard(module)
    found = LiveState.of(module, optimizer)
    groups = [{**fields_of(group), "params": [found.names[key] for key in group["params"]]} for group in found.groups]
    return _nested({fqn: slots for fqn, slots in found.slots.items() if slots}, groups, found.others)


def _nested(state: dict[str, dict[str, Any]], groups: list[dict[str, Any]], others: dict[Any, Any]) -> Nested:
    return {"state": state, "param_groups": groups} | ({GLOBAL: others} if others else {})


def flatten_optimizer(nested: Nested) -> dict[str, Any]:
    """``{"state.<FQN>.<slot>": …, "param_groups.<FQN>.<field>": …}``: how it is stored."""
    state = nested["state"]
    slots = [key for fqn, names in _runs(state) for key in _keys("state", fqn, names)]
    flat = dict(zip(slots, (value for slots in state.values() for value in slots.values()), strict=True))
    for group in nested["param_groups"]:
        names, fields = tuple(group["params"]), fields_of(group)
        flat.update(zip(_keys("param_groups", names, tuple(fields)), [*fields.values()] * len(names), strict=True))
    if GLOBAL in nested:
        flat[GLOBAL] = nested[GLOBAL]
    return flat


def _runs(state: dict[str, dict[str, Any]]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The parameters, those with the same slots that follow each other together, and their slots."""
    for slots, run in itertools.groupby(state, key=lambda fqn: tuple(state[fqn])):
        yield tuple(run), slots


@functools.lru_cache(maxsize=16)
def _keys(kind: str, names: tuple[str, ...], fields: tuple[str, ...]) -> list[str]:
    """Each field of each parameter. A save makes a dozen keys for each parameter, the same ones each time."""
    return [f"{kind}.{name}.{field}" for name in names for field in fields]


def flatten_global_state(flat: dict[str, Any]) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """What :func:`flatten_optimizer` gives with the state that is of no parameter flattened too, and its paths."""
    if GLOBAL not in flat:
        return flat, {}
    leaves, paths = flatten({GLOBAL: flat[GLOBAL]})
    return {key: value for key, value in flat.items() if key != GLOBAL} | leaves, paths


def group_list(nested: Nested) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """The param groups under the keys where stock code looks for them, with their paths."""
    leaves: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    for number, group in enumerate(nested["param_groups"]):
        for field, value in group.items():
            leaves[f"param_groups.{number}.{field}"] = value
            paths[f"param_groups.{number}.{field}"] = ("param_groups", number, field)
    return leaves, paths


def unflatten_optimizer(flat: Mapping[str, Any]) -> Nested:
    """The inverse of :func:`flatten_optimizer`; parameters with equal hyper-parameters share a group."""
    state: dict[str, dict[str, Any]] = defaultdict(dict)
    fields: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in flat.items():
        if key in (GROUPS, GLOBAL):  # the list, for stock code
            continue
        kind, fqn, name = split_key(key)
        (state if kind == "state" else fields)[fqn][name] = value
    groups: dict[str, Nested] = {}
    for fqn, group in fields.items():
        groups.setdefault(repr(sorted(group.items())), {**group, "params": []})["params"].append(fqn)
    return _nested(dict(state), list(groups.values()), flat.get(GLOBAL, {}))


def split_key(key: str) -> tuple[str, str, str]:
    """``("state" | "param_groups", FQN, slot or field)`` of a stored key."""
    kind, _, rest = key.partition(".")
    fqn, _, name = rest.rpartition(".")
    return kind, fqn, name


def group_names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The clean FQNs of the parameters of each group."""
    if contains_fsdp1(module):
        names = flat_parameter_names(module)
        return [[name for p in group["params"] for name in names[id(p)]] for group in optimizer.param_groups]
    single = names_of(module, optimizer)
    return [[single[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def shards_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Box]:
    """The parts that this rank has of the sharded parameters of an optimizer, by clean FQN. None under FSDP1, whose
    state dicts have no state of a rank's own."""
    if contains_fsdp1(module):
        return {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if all(type(parameter) in EXACTLY_TENSORS for parameter in parameters):  # none is sharded: no name is needed
        return {}
    mine = set(map(id, parameters))
    found = {fqn: shard_of(parameter) for fqn, parameter in parameters_by_name(module).items() if id(parameter) in mine}
    return {fqn: box for fqn, box in found.items() if box is not None}


def names_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    names = parameter_names(module)
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointMismatch(
                    f"param group {number} of {type(optimizer).__name__} has a parameter of shape "
                    f"{tuple(parameter.shape)} that the module has not. Was the optimizer made before the module was "
                    f"wrapped or moved? Make it after."
                )
    return names


def fields_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in group.items() if field != "params"}


@dataclass(frozen=True)
class LiveState:
    """The state of an optimizer on this rank, by FQN.

    Most optimizers are read and written directly, in place. If code of an optimizer's own makes or takes its state
    dict (an overridden method, a hook of the user's), only that code knows what is to be saved. It is then asked as
    ``torch.distributed.checkpoint`` asks it: one ``state_dict()`` for a save, one for a load, to see what is there, and
    one ``load_state_dict()`` with the parameters numbered as in the first.
    """

    slots: dict[str, dict[str, Any]]
    others: dict[Any, Any]
    """State that is of no parameter."""
    groups: list[dict[str, Any]]
    """The optimizer's groups, or those that its ``state_dict()`` returned, with numbers for parameters."""
    names: dict[Any, str]
    """The FQN of each parameter or number."""
    by_state_dict: bool

    @classmethod
    def of(cls, module: nn.Module, optimizer: torch.optim.Optimizer) -> LiveState:
        """Read the state of an optimizer of ``module``, which must not contain FSDP1.

        Raises:
            CheckpointMismatch: The optimizer has a parameter that the module has not.
        """
        names = names_of(module, optimizer)
        found: Any = optimizer.state_dict() if has_own_state_dict(optimizer) else None
        own = (
            isinstance(found, Mapping)
            and {"state", "param_groups"} <= found.keys()
            and [len(g["params"]) for g in found["param_groups"]] == [len(g["params"]) for g in optimizer.param_groups]
        )
        state, groups = (found["state"], found["param_groups"]) if own else (optimizer.state, optimizer.param_groups)
        known = {
            key: names[id(parameter)]
            for group, live in zip(groups, optimizer.param_groups, strict=True)
            for key, parameter in zip(group["params"], live["params"], strict=True)
        }
        if not own:  # there may be state of a parameter that is in no group any more
            known |= {key: names[id(key)] for key in state if isinstance(key, torch.Tensor)}
        slots = {
            known[key]: {slot: laid_out_like(value, key) for slot, value in slots.items()}
            if hasattr(key, "global_shape")
            else dict(slots)
            for key, slots in state.items()
            if key in known
        }
        others = {key: value for key, value in state.items() if key not in known}
        return cls(slots, others, list(groups), known, own)

    def load(
        self,
        optimizer: torch.optim.Optimizer,
        slots: Mapping[str, dict[str, Any] | None],
        others: Mapping[Any, Any],
        fields: list[dict[str, Any]],
    ) -> None:
        """Give the optimizer new slots for some FQNs (None: it has none), other state, and new fields of its groups."""
        if self.by_state_dict:
            kept = {fqn: found for fqn, found in {**self.slots, **slots}.items() if found is not None}
            groups = [
                {**group, **{field: _of_type(group.get(field), value) for field, value in new.items()}}
                for group, new in zip(self.groups, fields, strict=True)
            ]
            state = {number: kept[fqn] for number, fqn in self.names.items() if fqn in kept}
            optimizer.load_state_dict({"state": {**state, **self.others, **others}, "param_groups": groups})
            return
        optimizer.state.update(others)
        for parameter, fqn in self.names.items():
            if slots.get(fqn) is not None:
                optimizer.state[parameter] = slots[fqn]
            elif fqn in slots:
                optimizer.state.pop(parameter, None)
        for group, new in zip(optimizer.param_groups, fields, strict=True):
            for field, value in new.items():
                current, value = group.get(field), _of_type(group.get(field), value)
                # Captured graphs and schedulers hold a learning rate that is a tensor: it stays the same object.
                group[field] = current.copy_(value) if isinstance(current, torch.Tensor) else value


def _of_type(current: Any, value: Any) -> Any:
    """A tensor where there was one, and a number where there was one."""
    if isinstance(current, torch.Tensor):
        return torch.as_tensor(value, dtype=current.dtype, device=current.device)
    return value.item() if isinstance(value, torch.Tensor) and isinstance(current, (int, float)) else value
