"""Optimizer state by FQN, for any wrapper, into fresh optimizers too.

An optimizer knows its parameters by identity and their order; neither survives another wrapper or world size. So
state and hyper-parameters are keyed by the FQN of the parameter:

- ``state.<FQN>.<slot>`` (``state.layer.weight.exp_avg``),
- ``param_groups.<FQN>.<field>`` (``param_groups.layer.weight.lr``): per parameter, since the groups of the saving
  and the loading optimizer need not be the same.

This is what ``get_optimizer_state_dict(flatten_optimizer_state_dict=True)`` of torch gives; unlike that one it is
made without stepping a fresh optimizer, so a save changes nothing, and a failed load leaves no trace.

State that an optimizer keeps under a key that is no parameter is ``global_state.<key>.…``.

Stock code that does not flatten looks for the groups as a list, ``param_groups.<number>.<field>``. Those keys are
stored too (:func:`group_list`). We read them only from checkpoints that have nothing else.

Optimizers whose own code makes or takes their state dict: overridden methods, and the user's hooks.

Of other optimizers the state is read and written directly, exactly and in place. Here only the optimizer knows what is
to be saved (a hook may save roots of second moments, say) and what a load has to put right. So it is asked as
``torch.distributed.checkpoint`` asks it: one ``state_dict()`` for a save, one for a load, to see what is there, and one
``load_state_dict()`` with the parameters numbered as in the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dcp_plugin._torch import ShardedTensor, laid_out_like, shape_of, shard_of, sharded_like, sharded_value
from dcp_plugin._torch_modules import has_own_state_dict
from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.format.index import Entry, StoredTensor
from dcp_plugin.planning.flatten import flatten, unflatten
from dcp_plugin.planning.local_inventory import Box, LocalSlot
from dcp_plugin.state.module import (
    apply_fsdp1_optimizer,
    flat_parameter_names,
    gather_fsdp1_module,
    gather_fsdp1_optimizer,
    reshard,
)
from dcp_plugin.state.names import contains_fsdp1, parameter_names, parameters_by_name
from dcp_plugin.tensors import OF_ITS_OWN_CLASS
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
    names = _names_of(module, optimizer)
    own = OwnStateDict.of(optimizer, names)
    if own is not None:
        kept = {fqn: slots for fqn, slots in own.state.items() if slots}
        return _nested(kept, own.named_groups, own.others)
    state = {
        names[id(parameter)]: _laid_out(slots, parameter) if hasattr(parameter, "global_shape") else dict(slots)
        for parameter, slots in _parameter_state(optimizer).items()
        if slots
    }
    groups = [
        {**_fields(group), "params": [names[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return _nested(state, groups, _global_state(optimizer))


def _nested(state: dict[str, dict[str, Any]], groups: list[dict[str, Any]], others: dict[Any, Any]) -> Nested:
    return {"state": state, "param_groups": groups} | ({GLOBAL: others} if others else {})


def flatten_optimizer(nested: Nested) -> dict[str, Any]:
    """``{"state.<FQN>.<slot>": …, "param_groups.<FQN>.<field>": …}``: how it is stored."""
    flat = {f"state.{fqn}.{slot}": value for fqn, slots in nested["state"].items() for slot, value in slots.items()}
    for group in nested["param_groups"]:
        fields = _fields(group).items()
        flat |= {f"param_groups.{fqn}.{field}": value for fqn in group["params"] for field, value in fields}
    return flat | ({GLOBAL: nested[GLOBAL]} if GLOBAL in nested else {})


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
    single = _names_of(module, optimizer)
    return [[single[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def trained_names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The clean FQNs of an optimizer's parameters, in its order."""
    return [fqn for names in group_names(module, optimizer) for fqn in names]


def shards_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Box]:
    """The parts that this rank has of the sharded parameters of an optimizer, by clean FQN. None under FSDP1, whose
    state dicts have no state of a rank's own."""
    if contains_fsdp1(module):
        return {}
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = {fqn: shard_of(parameter) for fqn, parameter in parameters_by_name(module).items() if id(parameter) in mine}
    return {fqn: box for fqn, box in found.items() if box is not None}


class OptimizerLoad:
    """One load into one optimizer: allocate what the checkpoint has, read into that, then swap it in.

    Args:
        stored: The entries of the checkpoint by key relative to the optimizer (``state.<FQN>.<slot>`` …).
        paths: The path of each key, relative too; without it, no group list is recognised.

    Making one is collective if the module contains FSDP1.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        stored: Mapping[str, Entry],
        paths: Mapping[str, KeyPath] | None = None,
    ) -> None:
        self._module = module
        self._optimizer = optimizer
        self._fsdp1 = contains_fsdp1(module)
        reshard(module)
        self._own = None if self._fsdp1 else OwnStateDict.of(optimizer, _names_of(module, optimizer))
        self._global: dict[str, Entry] = {}
        self._paths = dict(paths or {})
        # What has the shape of a parameter is sharded like it.
        self._layouts = gather_fsdp1_module(module) if self._fsdp1 else parameters_by_name(module)
        self._groups = group_names(module, optimizer)
        self._here = {fqn for names in self._groups for fqn in names}
        self._slots: dict[str, dict[str, Entry]] = defaultdict(dict)
        self._hyper: dict[str, dict[str, Entry]] = defaultdict(dict)
        self._group_list: dict[str, Entry] = {}
        self._local: dict[tuple[str, str], list[tuple[LocalSlot, str]]] = defaultdict(list)
        self.stored_as: dict[str, str] = {}
        """Slots that each rank had for itself, and the key of the one that is for this rank."""
        self.lost: list[str] = []
        """Those of which none is for this rank."""
        self.needless: list[str] = []
        """Those of parameters of which this rank has no part."""
        for key, entry in stored.items():
            kind, fqn, name = self._split(key)
            if kind == GLOBAL:
                self._global[key] = entry
            elif kind == "state" and (local := LocalSlot.parse(name)) is not None:
                self._local[fqn, local.slot].append((local, key))
            elif kind == "state":
                self._slots[fqn][name] = entry
            elif any(isinstance(part, int) for part in (paths or {}).get(key, ())):
                self._group_list[key] = entry
            else:
                self._hyper[fqn][name] = entry
        for (fqn, slot), found in self._local.items():
            if fqn in self._here:
                self._take_local(fqn, slot, found, stored)
        known = set(self._slots) | set(self._hyper) | {fqn for fqn, _ in self._local}
        self.foreign = bool(known) and not known & self._here
        """Whether nothing in the checkpoint belongs to this optimizer."""
        listed_only = bool(self._group_list) and not self._hyper  # then it is not known which parameters there were
        self.missing = [] if listed_only else [f"param_groups.{fqn}" for fqn in sorted(self._here - known)]
        """Parameters of the optimizer that the checkpoint's optimizer had not: unfrozen since, for one."""
        self.unexpected = [f"param_groups.{fqn}" for fqn in sorted(known - self._here)]
        """Parameters of the checkpoint's optimizer that the optimizer has not: frozen since, for one."""
        self.refused: dict[str, str] = {}
        """Slots that the optimizer would have to have already, and why; known when the targets are."""
        if self._hyper:
            self._group_list = {}

    def _take_local(self, fqn: str, slot: str, found: list[tuple[LocalSlot, str]], stored: Mapping[str, Entry]) -> None:
        """What this rank itself had for its part of a parameter, else what another rank had for the same part."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        box = shard_of(self._layouts.get(fqn)) or _whole_of(self._layouts[fqn])
        fitting = [(local.rank != rank, key) for local, key in found if local.box == box]
        if fitting:
            _, self.stored_as[f"state.{fqn}.{slot}"] = min(fitting)
            self._slots[fqn][slot] = stored[self.stored_as[f"state.{fqn}.{slot}"]]
        else:  # a rank without a part of the parameter needs none of its state
            (self.lost if box != ((), ()) else self.needless).append(f"state.{fqn}.{slot}")

    def targets(self) -> dict[str, Any]:
        """A tensor to fill, or None for another value, by relative key."""
        current = {} if self._fsdp1 else self._current_state()
        targets: dict[str, Any] = {}
        for fqn in sorted(self._here):
            for slot, entry in self._slots.get(fqn, {}).items():
                key = f"state.{fqn}.{slot}"
                if isinstance(entry, StoredTensor):
                    existing = laid_out_like(current.get(fqn, {}).get(slot), self._layouts[fqn])
                    usable = isinstance(existing, torch.Tensor) and shape_of(existing) == entry.shape
                    targets[key] = existing if usable else self._allocate(fqn, entry, own=key in self.stored_as)
                    if entry.stored_whole and not usable and not sharded_value(targets[key]).stored_whole:
                        self.refused[key] = f"{OF_ITS_OWN_CLASS}, and not there yet: {_HAVE_STATE}"
                else:
                    targets[key] = None
            for field, entry in self._hyper.get(fqn, {}).items():
                targets[f"param_groups.{fqn}.{field}"] = _room_for(entry)
        targets.update({key: _room_for(entry) for key, entry in {**self._group_list, **self._global}.items()})
        return targets

    def check(self, values: Mapping[str, Any]) -> None:
        """Whether the hyper-parameters fit the groups.

        Raises:
            CheckpointMismatch: Parameters of one group here have different hyper-parameters in the checkpoint.
        """
        _, fields = self._sort(values)
        for number, names in enumerate(self._groups):
            self._group_fields(number, names, fields)

    def commit(self, filled: Mapping[str, Any]) -> None:
        """Give the optimizer what was read; parameters of which nothing was read keep what they have.

        Collective if the module contains FSDP1.

        Raises:
            CheckpointMismatch: Parameters of one group here have different hyper-parameters in the checkpoint.
        """
        state, fields = self._sort(filled)
        touched = state.keys() | fields.keys()
        groups = [self._group_fields(number, names, fields) for number, names in enumerate(self._groups)]
        if self._fsdp1:
            nested_groups = [
                {**_fields(group), **new, "params": names}
                for group, new, names in zip(self._optimizer.param_groups, groups, self._groups, strict=True)
            ]
            if touched != self._here:
                now = gather_fsdp1_optimizer(self._module, self._optimizer)["state"]
                state = {**{fqn: slots for fqn, slots in now.items() if fqn not in touched}, **state}
            apply_fsdp1_optimizer(self._module, self._optimizer, {"state": state, "param_groups": nested_groups})
            return
        others = self._global_of(filled)
        if self._own is not None:
            self._commit_through(self._own, state, touched, groups, others)
            return
        self._optimizer.state.update(others)
        names = _names_of(self._module, self._optimizer)
        for group, new in zip(self._optimizer.param_groups, groups, strict=True):
            for parameter in group["params"]:
                fqn = names[id(parameter)]
                if fqn in state:
                    kept = {} if self._is_complete(fqn, state[fqn]) else self._optimizer.state.get(parameter, {})
                    self._optimizer.state[parameter] = {**kept, **state[fqn]}
                elif fqn in touched and fqn not in self._slots:  # it never got a gradient before the checkpoint
                    self._optimizer.state.pop(parameter, None)
            for field, value in new.items():
                group[field] = _keep_tensor(group.get(field), value)

    def _is_complete(self, fqn: str, slots: Mapping[str, Any]) -> bool:
        """Whether this is all that the checkpoint has of a parameter's state."""
        lost = any(key.startswith(f"state.{fqn}.") for key in self.lost)
        return slots.keys() == self._slots[fqn].keys() and not lost

    def _commit_through(
        self,
        own: OwnStateDict,
        state: Mapping[str, dict[str, Any]],
        touched: set[str],
        groups: list[dict[str, Any]],
        others: Mapping[Any, Any],
    ) -> None:
        """The same by the optimizer's own ``load_state_dict``, which replaces all of its state."""
        slots = dict(own.state)
        for fqn in touched & self._here:
            if fqn in state:
                kept = {} if self._is_complete(fqn, state[fqn]) else slots.get(fqn, {})
                slots[fqn] = {**kept, **state[fqn]}
            elif fqn not in self._slots:  # it never got a gradient before the checkpoint
                slots.pop(fqn, None)
        own.load_into(self._optimizer, slots, {**own.others, **others}, groups)

    def _global_of(self, filled: Mapping[str, Any]) -> dict[Any, Any]:
        """The state that is of no parameter, with what was not read as it is."""
        if GLOBAL in filled:
            return dict(filled[GLOBAL])
        read = {key: filled[key] for key in self._global if key in filled}
        tree: dict[Any, Any] = unflatten(read, self._paths)[GLOBAL] if read else {}
        if len(read) < len(self._global):
            return _merged(self._own.others if self._own else _global_state(self._optimizer), tree)
        return tree

    def _sort(self, filled: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """Slots and hyper-parameters by FQN."""
        state: dict[str, dict[str, Any]] = defaultdict(dict)
        fields: dict[str, dict[str, Any]] = defaultdict(dict)
        listed: dict[str, dict[str, Any]] = defaultdict(dict)
        for key, value in filled.items():
            kind, fqn, name = self._split(key)
            if kind == GLOBAL:
                continue
            where = state if kind == "state" else listed if key in self._group_list else fields
            where[fqn][name] = value
        for group in listed.values():
            for fqn in group.get("params", ()):
                fields[fqn] = _fields(group)
        return state, fields

    def _split(self, key: str) -> tuple[str, str, str]:
        """Like :func:`split_key`, and right for slots with dots in their names if the parameter is known here."""
        kind, fqn, name = split_key(key)
        parts = fqn.split(".")
        for count in range(len(parts), 0, -1):
            known = ".".join(parts[:count])
            if known in self._here:
                return kind, known, ".".join([*parts[count:], name])
        return kind, fqn, name

    def _current_state(self) -> dict[str, dict[str, Any]]:
        if self._own is not None:
            return self._own.state
        names = _names_of(self._module, self._optimizer)
        return {names[id(parameter)]: slots for parameter, slots in _parameter_state(self._optimizer).items()}

    def _allocate(self, fqn: str, entry: StoredTensor, own: bool) -> Any:
        """A tensor for a slot that the optimizer does not have yet: laid out like the parameter if it has its shape
        and is not this rank's own."""
        like = self._layouts[fqn]
        if entry.shape == sharded_value(like).shape and not own:  # a ShardedTensor warns when asked for its size
            dtype = self._dtype_of_slot(entry.dtype, like)
            if isinstance(like, ShardedTensor):
                local = [torch.empty_like(shard.tensor, dtype=dtype) for shard in like.local_shards()]
                return sharded_like(like, local)
            return laid_out_like(torch.empty_like(like.detach(), dtype=dtype, requires_grad=False), like)
        on_device = entry.shape != () or self._steps_on_device(fqn)
        return torch.empty(entry.shape, dtype=entry.dtype, device=like.device if on_device else "cpu")

    def _dtype_of_slot(self, stored: torch.dtype, like: Any) -> torch.dtype:
        """Torch's own optimizers want state of the dtype of the parameter, which may have been another at the save.
        What others have is theirs: 8 bits beside 32, say."""
        of_torch = type(self._optimizer).__module__.startswith("torch.optim.")
        cast = of_torch and stored.is_floating_point and like.dtype.is_floating_point
        return like.dtype if cast else stored

    def _steps_on_device(self, fqn: str) -> bool:
        """Optimizers keep scalars such as ``step`` on the host, unless they are fused or capturable."""
        for group, names in zip(self._optimizer.param_groups, self._groups, strict=True):
            if fqn in names:
                return bool(group.get("fused") or group.get("capturable"))
        return False

    @staticmethod
    def _group_fields(number: int, names: list[str], fields: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        source: dict[str, str] = {}
        for fqn in names:
            for field, value in fields.get(fqn, {}).items():
                if field in merged and repr(merged[field]) != repr(value):
                    raise CheckpointMismatch(
                        f"param group {number} holds {source[field]} and {fqn}, which had different {field} in the "
                        f"checkpoint ({merged[field]} and {value}). Give the optimizer the groups it was saved with."
                    )
                merged.setdefault(field, value)
                source.setdefault(field, fqn)
        return merged


_HAVE_STATE = (
    "let the optimizer take one step first (torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(module, "
    "optimizer) lets it take one that changes nothing)"
)


def _laid_out(slots: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    return {slot: laid_out_like(value, parameter) for slot, value in slots.items()}


def _names_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
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


def _whole_of(value: Any) -> Box:
    """All of a tensor, as the part that a rank has."""
    shape = sharded_value(value).shape
    return (0,) * len(shape), shape


def _parameter_state(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    return {key: slots for key, slots in optimizer.state.items() if isinstance(key, torch.Tensor)}


def _global_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}


def _merged(current: Mapping[Any, Any], new: Mapping[Any, Any]) -> dict[Any, Any]:
    """The current tree with the leaves of the new one in it."""
    result = dict(current)
    for key, value in new.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _merged(result[key], value) if both else value
    return result


def _room_for(entry: Entry) -> torch.Tensor | None:
    return torch.empty(entry.shape, dtype=entry.dtype) if isinstance(entry, StoredTensor) else None


def _keep_tensor(current: Any, value: Any) -> Any:
    """A tensor learning rate stays the same tensor (captured graphs and schedulers hold it), a float stays a float."""
    if isinstance(current, torch.Tensor):
        return current.copy_(torch.as_tensor(value))
    return value.item() if isinstance(value, torch.Tensor) and isinstance(current, (int, float)) else value


def _fields(group: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in group.items() if field != "params"}


@dataclass(frozen=True)
class OwnStateDict:
    """What ``optimizer.state_dict()`` has returned."""

    state: dict[str, dict[str, Any]]
    """The slots of each parameter, by FQN."""
    others: dict[Any, Any]
    """State that is of no parameter."""
    groups: list[dict[str, Any]]
    """As they were returned, with numbers for parameters."""
    names: dict[Any, str]
    """The FQN of each number."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> OwnStateDict | None:
        """None if no code of its own makes or takes it, or if that makes something else of it than optimizers have.

        Args:
            names: The FQN of each parameter by ``id``.
        """
        found = optimizer.state_dict() if has_own_state_dict(optimizer) else {}
        if not isinstance(found, Mapping) or not {"state", "param_groups"} <= found.keys():
            return None
        groups = [dict(group) for group in found["param_groups"]]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in optimizer.param_groups]:
            return None
        numbers = {
            number: names[id(parameter)]
            for group, live in zip(groups, optimizer.param_groups, strict=True)
            for number, parameter in zip(group["params"], live["params"], strict=True)
        }
        state = {numbers[number]: dict(slots) for number, slots in found["state"].items() if number in numbers}
        others = {key: value for key, value in found["state"].items() if key not in numbers}
        return cls(state, others, groups, numbers)

    @property
    def named_groups(self) -> list[dict[str, Any]]:
        return [{**group, "params": [self.names[number] for number in group["params"]]} for group in self.groups]

    def load_into(
        self,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, dict[str, Any]],
        others: Mapping[Any, Any],
        fields: list[dict[str, Any]],
    ) -> None:
        """Have the optimizer load slots by FQN, other state, and these fields of its groups beside those it has."""
        numbered: dict[Any, Any] = {number: state[fqn] for number, fqn in self.names.items() if fqn in state}
        groups = [
            {**group, **{field: _of_type(group.get(field), value) for field, value in new.items()}}
            for group, new in zip(self.groups, fields, strict=True)
        ]
        optimizer.load_state_dict({"state": {**numbered, **others}, "param_groups": groups})


def _of_type(current: Any, value: Any) -> Any:
    """A tensor where there was one, and a number where there was one."""
    if isinstance(current, torch.Tensor):
        return torch.as_tensor(value, dtype=current.dtype, device=current.device)
    return value.item() if isinstance(value, torch.Tensor) and isinstance(current, (int, float)) else value
