"""One load into one optimizer.

The rule: state is filled first, and then given to the optimizer, so a load that fails earlier leaves no trace. A slot
that the optimizer does not have yet gets new memory, so an optimizer without state needs no step before a load.

:class:`OptimizerLoad` is for torch's layout of state, :class:`OwnLayoutLoad` for any other.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dcp_plugin.core.errors import CheckpointMismatch
from dcp_plugin.core.format.index import Entry, KeyPath, StoredTensor, places_of
from dcp_plugin.core.format.keys import (
    LocalSlot,
    has_keys_below,
    is_empty_mapping,
    name_of,
    paths_as_stored,
    unflatten,
    walked_as_stored,
    with_types_of,
)
from dcp_plugin.core.state.module import gather_module, reshard
from dcp_plugin.core.state.module_load import Deferred
from dcp_plugin.core.state.names import contains_fsdp1, parameters_by_name
from dcp_plugin.core.state.optimizer import (
    BESIDE,
    EXTRA_STATE,
    GLOBAL,
    GROUPS,
    Named,
    OptimizerState,
    OwnLayout,
    class_name,
    extras_of,
    fields_of,
    flatten_tree,
    group_names,
    groups_of,
    numbers_of,
    own_state_dict,
    sort_by_name,
    split_key,
)
from dcp_plugin.core.tensors._torch import (
    empty_like,
    is_tensor,
    laid_out_like,
    shape_of,
    shard_of,
    sharded_value,
    with_memory,
)
from dcp_plugin.core.tensors._torch_modules import is_of_torch, new_state, slots_of_torch, unpatched
from dcp_plugin.core.tensors.kinds import OF_ITS_OWN_CLASS
from dcp_plugin.core.types import Box, Wanted


def load_into(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    stored: Mapping[str, Entry],
    paths: Mapping[str, KeyPath] | None = None,
) -> OptimizerLoad | OwnLayoutLoad:
    """Begin one load into one optimizer of ``module``. Collective if the module contains FSDP1.

    Args:
        stored: The entries of the checkpoint by key relative to the optimizer (``state.<FQN>.<slot>`` …).
        paths: The path of each key, also relative. Without paths, param groups stored as a list are not recognised.
    """
    reshard(module)
    own, paths = own_state_dict(optimizer), paths or {}
    if isinstance(own, OwnLayout):
        return OwnLayoutLoad(module, optimizer, own, stored, paths)
    return OptimizerLoad(module, optimizer, stored, paths, own)


def may_be_another(optimizer: torch.optim.Optimizer, recorded: str) -> bool:
    """Return whether a state may belong to another class than the optimizer's class and its bases.

    Args:
        recorded: The class that the checkpoint records; empty if it records none.
    """
    return recorded not in map(class_name, type(optimizer).__mro__)


class OptimizerLoad:
    """One load into one optimizer: allocate memory for the stored state, read into it, then swap it in.

    Args:
        stored, paths: As in :func:`load_into`.
        own: The result of :func:`~dcp_plugin.core.state.optimizer.own_state_dict`.

    Construction is collective if the module contains FSDP1.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        stored: Mapping[str, Entry],
        paths: Mapping[str, KeyPath],
        own: Mapping[str, Any] | None,
    ) -> None:
        self._module = module
        self._optimizer = optimizer
        self._fsdp1 = contains_fsdp1(module)
        self._live = (
            OptimizerState({}, {}, extras_of(own), [], {}, False)
            if self._fsdp1
            else OptimizerState.of(module, optimizer, own)
        )
        self._beside: dict[str, Entry] = {}  # state of no parameter, by stored key
        self._paths = paths
        # Parameters by FQN: a slot with the shape of its parameter is distributed like it.
        self._layouts = gather_module(module) if self._fsdp1 else parameters_by_name(module)
        self._groups = group_names(module, optimizer)
        self._here = {fqn for names in self._groups for fqn in names}  # the parameters of the optimizer
        self._slots: dict[str, dict[str, Entry]] = defaultdict(dict)  # stored slots, by FQN and slot
        self._parts: dict[str, KeyPath] = {}
        """Key of each part of a slot that is stored in parts -> the key of the slot, and the steps below it."""
        self._hyper: dict[str, dict[str, Entry]] = defaultdict(dict)  # stored hyper-parameters, by FQN and field
        self._group_list: dict[str, Entry] = {}  # param groups that are stored as a list, if ``_hyper`` is empty
        self._has_other_layout = False
        # State of single ranks, by FQN and slot: the rank and the part of the parameter, and the stored key.
        self._local: dict[tuple[str, str], list[tuple[LocalSlot, str]]] = defaultdict(list)
        self.wanted = Wanted()
        self._sort_entries(stored, own is not None)
        self._compare_names(bool(stored))
        # ZeroRedundancyOptimizer has the state of each parameter on one rank only.
        if (owned := getattr(optimizer, "owned", None)) is not None:
            self._slots = defaultdict(dict, {f: s for f, s in self._slots.items() if id(self._layouts.get(f)) in owned})
        if not self.wanted.unusable:
            self._add_targets()

    def _sort_entries(self, stored: Mapping[str, Entry], takes_extras: bool) -> None:
        """Sort the stored entries into slots and hyper-parameters by FQN, and state of no parameter."""
        for key, entry in stored.items():
            kind, fqn, name = split_key(key, self._here)
            if key == "state":  # an empty mapping, from an optimizer without state that was saved as data
                continue
            self._has_other_layout |= kind not in ("state", GROUPS, *BESIDE)
            if kind in BESIDE:
                # An optimizer without a state_dict of its own cannot take extra entries.
                if kind == GLOBAL or takes_extras:
                    self._beside[key] = entry
            elif kind == "state" and (local := LocalSlot.parse(name)) is not None:
                self._local[fqn, local.slot].append((local, key))
            elif kind == "state":
                self._slots[fqn][name] = entry
                if (path := self._path_in_slot(key, fqn))[1:]:
                    self._parts[key] = path
            elif any(isinstance(part, int) for part in self._paths.get(key, ())):  # an index into a list of groups
                self._group_list[key] = entry
            else:
                self._hyper[fqn][name] = entry
        for (fqn, slot), locals_of_slot in self._local.items():
            if fqn in self._here:
                self._take_local(fqn, slot, locals_of_slot, stored)

    def _compare_names(self, has_state: bool) -> None:
        """Compare the parameters of the checkpoint with those of the optimizer."""
        self._numbers = {number: fqn for fqn, number in numbers_of(self._groups).items()}
        has_numbers = self._here.isdisjoint(self._slots) and all(map(str.isdecimal, self._slots))
        if self._group_list and not self._hyper and has_numbers:
            self.wanted.unusable = self._take_numbered()
        stored_names = set(self._slots) | set(self._hyper) | {fqn for fqn, _ in self._local}
        listed_only = bool(self._group_list) and not self._hyper  # then the parameters of the save are unknown
        if not listed_only:
            stored_names |= self._take_tied(self._here - stored_names)
            self.wanted.missing = [f"param_groups.{fqn}" for fqn in sorted(self._here - stored_names)]
        self.wanted.unexpected = [f"param_groups.{fqn}" for fqn in sorted(stored_names - self._here)]
        if has_state and (not stored_names or stored_names & self._here):  # otherwise the state is of another optimizer
            self.wanted.tolerated = (
                "parameters that are trained now and were not then start with fresh optimizer state, and the state of "
                "those that are not trained now is left out"
            )
        if self._hyper:
            self._group_list = {}

    def _take_tied(self, missing: set[str]) -> set[str]:
        """Have parameters that were tied at the save take the state of their common weight. Return their names.

        An optimizer has the state of a tied weight once, under its first name. Names were tied if the checkpoint has
        their weights as the same items. Two parameters with equal values, one of them frozen, look the same, but the
        trained one has other values after its first step.
        """
        # The checkpoint's index, which each stored tensor refers to, has the weights of all modules. Their names there
        # begin with that of a module of the state: try each one below which a missing parameter has its FQN.
        tensors = (e for slots in self._slots.values() for e in slots.values() if isinstance(e, StoredTensor))
        index = getattr(getattr(next(tensors, None), "chunks", None), "parent", {}) if missing else {}
        fronts = {key[: m.end()] for key in index for m in re.finditer(r"^|\.", key) if key[m.end() :] in missing}
        owners: dict[str, str] = {}
        for front in fronts:
            names = {places_of(index[front + fqn]): fqn for fqn in self._slots if front + fqn in index}
            here = {fqn: places_of(index[front + fqn]) for fqn in missing if front + fqn in index}
            owners |= {fqn: names[places] for fqn, places in here.items() if places in names}
        # Parts of a slot are joined under the key of their owner, so no other parameter takes them.
        in_parts = {split_key(str(path[0]), self._slots)[1] for path in self._parts.values()}
        owners = {fqn: owner for fqn, owner in owners.items() if owner not in in_parts}
        for fqn, owner in owners.items():
            for kind, stored in (("state", self._slots), (GROUPS, self._hyper)):
                stored[fqn] = stored[owner]
                keys = {f"{kind}.{fqn}.{name}": f"{kind}.{owner}.{name}" for name in stored[owner]}
                self.wanted.stored_as |= {key: self.wanted.stored_as.get(of, of) for key, of in keys.items()}
        return set(owners)

    def _path_in_slot(self, key: str, fqn: str) -> KeyPath:
        """Return the key of the slot that a stored key belongs to, and the steps from that slot to the value.

        Paths differ in the number of steps of the slot's key: stock's have ``state`` and the FQN as steps of their own,
        ``("state", fqn, slot, step)``.
        """
        path = self._paths.get(key, (key,))
        for length in range(1, len(path)):
            if len(name_of(path[:length])) > len(f"state.{fqn}"):
                return name_of(path[:length]), *path[length:]
        return (key,)

    def _take_local(
        self, fqn: str, slot: str, candidates: list[tuple[LocalSlot, str]], stored: Mapping[str, Entry]
    ) -> None:
        """Take the state that this rank had for its part of a parameter, else that of another rank with the same
        part."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        shape = sharded_value(self._layouts[fqn]).shape
        box = shard_of(self._layouts[fqn]) or Box((0,) * len(shape), shape)
        fitting = [(local.rank != rank, key) for local, key in candidates if local.box == box]
        if fitting:
            _, self.wanted.stored_as[f"state.{fqn}.{slot}"] = min(fitting)
            self._slots[fqn][slot] = stored[self.wanted.stored_as[f"state.{fqn}.{slot}"]]
        else:  # a rank without a part of the parameter needs none of its state
            (self.wanted.lost_per_rank if box != ((), ()) else self.wanted.per_rank_of_others).append(
                f"state.{fqn}.{slot}"
            )

    def _take_numbered(self) -> str:
        """Assign numbered state to parameters by their order. Return the reason if that is impossible, else an empty
        text."""
        numbered = {int(number): slots for number, slots in self._slots.items()}
        if max(numbered, default=0) >= len(self._numbers):
            return _NUMBERED.format(f"it has number {max(numbered)}, and the optimizer {len(self._numbers)} parameters")
        if any(
            len(names) != len(group["params"])
            for names, group in zip(self._groups, groups_of(self._optimizer), strict=True)
        ):
            return _NUMBERED.format(
                "FSDP1 has joined parameters here, so that their order is not that of the optimizer"
            )
        for number, slots in numbered.items():
            fqn = self._numbers[number]
            shape = sharded_value(self._layouts[fqn]).shape
            shapes = [entry.shape for entry in slots.values() if isinstance(entry, StoredTensor) and entry.shape]
            # A factored slot has 1 in place of some sizes of its parameter.
            fitting = [
                of_slot
                for of_slot in shapes
                if len(of_slot) == len(shape) and all(size in (1, of) for size, of in zip(of_slot, shape, strict=True))
            ]
            if shapes and not fitting:
                return _NUMBERED.format(f"number {number} has state of shape {shapes[0]}, and {fqn} has shape {shape}")
        for number, slots in numbered.items():
            fqn = self._numbers[number]
            self.wanted.stored_as |= {f"state.{fqn}.{slot}": f"state.{number}.{slot}" for slot in slots}
        self._slots = defaultdict(dict, {self._numbers[number]: slots for number, slots in numbered.items()})
        return ""

    def _add_targets(self) -> None:
        """Add a tensor to fill, or None for another value, for each entry that is read."""
        targets = self.wanted.targets
        for fqn in sorted(self._here):
            for slot, entry in self._slots.get(fqn, {}).items():
                key = f"state.{fqn}.{slot}"
                if isinstance(entry, StoredTensor):
                    existing = laid_out_like(self._live.slots.get(fqn, {}).get(slot), self._layouts[fqn])
                    usable = isinstance(existing, torch.Tensor) and shape_of(existing) == entry.shape
                    targets[key] = existing if usable else self._allocate(fqn, slot, entry)
                    if entry.stored_whole and not usable and not sharded_value(targets[key]).stored_whole:
                        self.wanted.unfillable[key] = f"{OF_ITS_OWN_CLASS}, and not there yet: {_HAVE_STATE}"
                else:
                    targets[key] = None
            for field, entry in self._hyper.get(fqn, {}).items():
                targets[f"param_groups.{fqn}.{field}"] = _target_for(entry)
        targets.update({key: _target_for(entry) for key, entry in self._group_list.items()})
        memory = Memory(self._module, self.wanted.unfillable)
        current, _ = flatten_tree(
            {GLOBAL: self._live.global_state, EXTRA_STATE: self._live.extras}, walked_as_stored(self._beside)
        )
        for key, entry in self._beside.items():
            targets[key] = memory.of(key, entry, current.get(key)) if isinstance(entry, StoredTensor) else None

    def lacks(self, recorded: str) -> list[str]:
        """Return the fields and slots that the optimizer needs and that the state of another class lacks.

        Needed fields are those with numbers. New versions of torch add flags and fields with None.

        Args:
            recorded: The class that the checkpoint records; empty if it records none.
        """
        if not may_be_another(self._optimizer, recorded):
            return []
        if self._has_other_layout:
            return ["the state and param_groups of torch's layout"]
        stored = {name for fields in self._hyper.values() for name in fields}
        stored |= {key.rpartition(".")[2] for key in self._group_list}
        defaults = getattr(self._optimizer, "defaults", {})
        fields = [field for field, value in defaults.items() if type(value) in (int, float, tuple) and stored]
        lacking = [f"the group field {field!r}" for field in fields if field not in stored]
        slots = self._slots_needed()
        if slots is None:
            is_known = not recorded or recorded.rpartition(".")[2] == type(self._optimizer).__name__
            return lacking if is_known or not self._slots else [*lacking, f"slots that are not known: {_HAVE_STATE}"]
        of_all = [
            {split_key(str(self._parts.get(key, (key,))[0]), self._here)[2] for key in keys}
            for keys in (
                [f"state.{fqn}.{name}" for name in self._slots[fqn]] for fqn in self._here & self._slots.keys()
            )
            if keys
        ]
        return lacking + [f"the slot {slot!r}" for slot in sorted(slots) if any(slot not in names for names in of_all)]

    def _slots_needed(self) -> set[str] | None:
        """Return the slots that the optimizer has for every parameter; None if they are not known yet."""
        if (slots := slots_of_torch(self._optimizer)) is not None:
            return slots
        live = [set(slots) for slots in self._optimizer.state.values() if isinstance(slots, Mapping) and slots]
        return set.intersection(*live) if live else None

    def check(self, values: Mapping[str, Any]) -> None:
        """Check that the hyper-parameters fit the groups.

        Raises:
            CheckpointMismatch: Parameters of one group here have different hyper-parameters in the checkpoint.
        """
        _, fields = self._sort(values)
        listed = {key: value for key, value in values.items() if key in self._group_list and key.endswith(".params")}
        if any(isinstance(number, int) for numbers in listed.values() for number in numbers):
            stored, own = [len(numbers) for numbers in listed.values()], [len(names) for names in self._groups]
            if stored != own or [number for numbers in listed.values() for number in numbers] != list(self._numbers):
                raise CheckpointMismatch(
                    f"the optimizer {_NUMBERED.format(f'its groups have {stored} parameters, and those here {own}')}"
                )
        for number, names in enumerate(self._groups):
            self._group_fields(number, names, fields)

    def commit(self, filled: Mapping[str, Any]) -> None:
        """Give the optimizer the loaded state; parameters without loaded state keep theirs.

        Collective if the module contains FSDP1.

        Raises:
            CheckpointMismatch: Parameters of one group here have different hyper-parameters in the checkpoint.
        """
        state, fields = self._sort(filled)
        touched = state.keys() | fields.keys()
        groups = [self._group_fields(number, names, fields) for number, names in enumerate(self._groups)]
        if self._fsdp1:
            from dcp_plugin.core.state import fsdp1  # only such modules need it

            nested_groups = [
                {**fields_of(group), **new, "params": names}
                for group, new, names in zip(self._optimizer.param_groups, groups, self._groups, strict=True)
            ]
            if touched != self._here:
                # Torch replaces the complete state, so the state of the other parameters is given back to it.
                now = fsdp1.gather_optimizer(self._module, self._optimizer)["state"]
                state = {**{fqn: slots for fqn, slots in now.items() if fqn not in touched}, **state}
            nested = {"state": state, "param_groups": nested_groups}
            extras = {**self._live.extras, **self._trees_of(filled, EXTRA_STATE, self._live.extras)}
            fsdp1.apply_optimizer(self._module, self._optimizer, nested, extras)
            return
        slots: dict[str, dict[str, Any] | None] = {}
        for fqn in touched & self._here:
            if fqn in state:
                # After a partial load of its slots, a parameter keeps the others.
                is_complete = all(f"state.{fqn}.{name}" in filled for name in self._slots[fqn]) and not any(
                    key.startswith(f"state.{fqn}.") for key in self.wanted.lost_per_rank
                )
                kept = {} if is_complete else self._live.slots.get(fqn, {})
                slots[fqn] = {**kept, **state[fqn]}
            elif fqn not in self._slots:  # the parameter had no gradient before the checkpoint
                slots[fqn] = None
        global_state = self._trees_of(filled, GLOBAL, self._live.global_state)
        extras = self._trees_of(filled, EXTRA_STATE, self._live.extras)
        self._live.load(self._optimizer, slots, global_state, extras, groups)

    def _trees_of(self, filled: Mapping[str, Any], name: str, current: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the state that belongs to no parameter and is stored under a name. Keys that were not read keep their
        current values."""
        if name in filled:
            return dict(filled[name])
        stored = [key for key in self._beside if key.startswith(f"{name}.")]
        read = {key: filled[key] for key in stored if key in filled}
        tree: dict[Any, Any] = unflatten(read, self._paths)[name] if read else {}
        return _merged(current, tree) if len(read) < len(stored) else tree

    def _sort(self, filled: Mapping[str, Any]) -> tuple[Named, Named]:
        """Return slots and hyper-parameters by FQN."""
        parts = {key: value for key, value in filled.items() if key in self._parts}
        slots = {key: value for key, value in filled.items() if key not in self._parts}
        state, fields = sort_by_name({**slots, **unflatten(parts, self._parts)}, self._here)
        if not self._group_list:
            return state, fields
        listed, fields = fields, {}
        for group in listed.values():
            for fqn in group.get("params", ()):
                fields[self._numbers.get(fqn, fqn)] = fields_of(group)
        return state, fields

    def _allocate(self, fqn: str, slot: str, entry: StoredTensor) -> Any:
        """Allocate a slot that the optimizer does not have in the stored shape.

        A slot with the shape of its parameter is distributed like the parameter, unless it is this rank's own.
        """
        like, own = self._layouts[fqn], (fqn, slot) in self._local
        # An optimizer's own class of tensors cannot be allocated here: it has to be there, or be torchao's.
        if entry.stored_whole and (made := new_state(self._optimizer, like, slot)) is not None:
            return made
        if entry.shape == sharded_value(like).shape and not own:  # a ShardedTensor warns when asked for its size
            # Torch's own optimizers need state in the dtype of the parameter, which may have been another at the save.
            # Other optimizers choose theirs, such as 8 bits for a parameter of 32, so the stored dtype is kept.
            are_floats = entry.dtype.is_floating_point and like.dtype.is_floating_point
            return empty_like(like, like.dtype if are_floats and is_of_torch(self._optimizer) else entry.dtype)
        # Scalars such as ``step`` are on the device only in fused and capturable optimizers.
        groups = zip(self._optimizer.param_groups, self._groups, strict=True)
        fused = any(group.get("fused") or group.get("capturable") for group, names in groups if fqn in names)
        return entry.empty(like.device if fused or entry.shape != () else "cpu")

    @staticmethod
    def _group_fields(number: int, names: list[str], fields: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        merged: dict[str, tuple[str, Any]] = {}
        for fqn in names:
            for field, value in fields.get(fqn, {}).items():
                source, first_value = merged.setdefault(field, (fqn, value))
                if repr(first_value) != repr(value):
                    raise CheckpointMismatch(
                        f"param group {number} holds {source} and {fqn}, which had different {field} in the "
                        f"checkpoint ({first_value} and {value}). Give the optimizer the groups it was saved with."
                    )
        return {field: value for field, (_, value) in merged.items()}


_NUMBERED = (
    "has numbers instead of parameter names in the checkpoint, and they do not fit: {}. Load it into an optimizer with "
    "the same parameters in the same order and groups"
)


_HAVE_STATE = (
    "let the optimizer take one step first (torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(module, "
    "optimizer) lets it take one that changes nothing)"
)


class OwnLayoutLoad:
    """One load into an optimizer whose state dict has a layout of its own.

    As with a ``Stateful``, the checkpoint determines the keys, and the optimizer's own ``load_state_dict`` decides how
    to use them.

    Args:
        tree: The result of its ``state_dict()``.
        stored, paths: As in :func:`load_into`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        tree: Any,
        stored: Mapping[str, Entry],
        paths: Mapping[str, KeyPath],
    ) -> None:
        self._optimizer, self._tree, self._stored = optimizer, tree, stored
        self.current, self._paths = flatten_tree(tree, walked_as_stored(stored))
        self._paths |= paths_as_stored(stored, self._paths, paths)
        self.wanted = Wanted(missing=[] if stored else [""])
        """Wanted state. Targets are keys that the optimizer has, or that name a parameter of this rank. All other keys
        are extra, since they may belong to another pipeline stage."""
        memory = Memory(module, self.wanted.unfillable)
        for key, entry in stored.items():
            if key not in self.current and memory.parameter_in(key) is None:
                self.wanted.extra_targets[key] = Deferred(entry) if isinstance(entry, StoredTensor) else None
                if isinstance(entry, StoredTensor) and (reason := memory.refusal(entry)):
                    self.wanted.unfillable[key] = reason
            elif isinstance(entry, StoredTensor):
                self.wanted.targets[key] = memory.of(key, entry, self.current.get(key))
            else:
                self.wanted.targets[key] = None

    def lacks(self, recorded: str) -> list[str]:
        """Return the keys of the optimizer that the state of another class lacks, as :meth:`OptimizerLoad.lacks`."""
        if not recorded or not may_be_another(self._optimizer, recorded):
            return []
        return [key for key in self.current if key not in self._stored and not has_keys_below(key, self._stored)]

    def check(self, values: Mapping[str, Any]) -> None:
        """Accept any value."""

    def commit(self, filled: Mapping[str, Any]) -> None:
        """Give the optimizer the loaded state.

        Keys that a partial load has left out keep the optimizer's own values. Empty mappings also stay, since stock
        stores no key for them.
        """
        kept = {
            key: value
            for key, value in self.current.items()
            if key in self._stored or (is_empty_mapping(value) and not has_keys_below(key, self._stored))
        }
        leaves = {**kept, **filled}
        # unflatten() needs paths of at least one step. A tree that is one leaf has none, so "it" is put before all.
        tree = unflatten(leaves, {key: ("it", *self._paths[key]) for key in leaves})["it"]
        unpatched(self._optimizer, "load_state_dict")(with_types_of(self._tree, _with_numbers(tree)))


def _with_numbers(tree: Any) -> Any:
    """Return a tree whose state dicts of torch's layout have numbers for parameters. Stock stores the numbers as
    text."""
    if isinstance(tree, list):
        return [_with_numbers(child) for child in tree]
    if not isinstance(tree, Mapping):
        return tree
    if isinstance(tree.get("state"), Mapping) and isinstance(tree.get(GROUPS), list):
        listed = [group.get("params") for group in tree[GROUPS] if isinstance(group, Mapping)]
        numbers = {str(number): number for in_group in listed if isinstance(in_group, list) for number in in_group}
        return {**tree, "state": {numbers.get(key, key): slots for key, slots in tree["state"].items()}}
    return {key: _with_numbers(child) for key, child in tree.items()}


class Memory:
    """Memory for stored tensors of which only the key may name the parameter that they belong to.

    Args:
        module: The module with the parameters. FSDP1's are slices, so no stored tensor is distributed like them.
        refused: Output: the keys of tensors that cannot get memory, with the reason.
    """

    def __init__(self, module: nn.Module, refused: dict[str, str]) -> None:
        is_fsdp1 = contains_fsdp1(module)
        self._layouts = {} if is_fsdp1 else parameters_by_name(module)
        self._refused = refused
        self._is_sharded = is_fsdp1 or any(shard_of(parameter) is not None for parameter in self._layouts.values())

    def of(self, key: str, entry: StoredTensor, current: Any) -> Any:
        """Return the current tensor if it fits, or a new one, distributed like the parameter that the key names."""
        if is_tensor(current):
            current = with_memory(current)
            if shape_of(current) == entry.shape:
                return current
        fqn = self.parameter_in(key)
        if fqn is not None and sharded_value(self._layouts[fqn]).shape == entry.shape:
            return empty_like(self._layouts[fqn], entry.dtype)
        if reason := self.refusal(entry):
            self._refused[key] = reason
        return entry.empty()

    def refusal(self, entry: StoredTensor) -> str:
        """Return the reason why a tensor that is like no parameter cannot get memory; empty if it can."""
        if entry.stored_whole:
            return f"{OF_ITS_OWN_CLASS}, and not there yet: {_HAVE_STATE}"
        if self._is_sharded and len(entry.chunks) > 1:
            return (
                f"stored in {len(entry.chunks)} shards, and names no parameter of its shape that would tell how to "
                f"shard it here; the optimizer does not have it yet: {_HAVE_STATE}"
            )
        return ""

    def parameter_in(self, key: str) -> str | None:
        """Return the longest FQN of a parameter of this rank that the steps of a key contain."""
        steps = key.split(".")
        for length in range(len(steps), 0, -1):
            for start in range(len(steps) - length + 1):
                name = ".".join(steps[start : start + length])
                if name in self._layouts:
                    return name
        return None


def _merged(current: Mapping[Any, Any], new: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the current tree, with leaves replaced by those of the new tree."""
    result = dict(current)
    for key, value in new.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _merged(result[key], value) if both else value
    return result


def _target_for(entry: Entry) -> torch.Tensor | None:
    return entry.empty() if isinstance(entry, StoredTensor) else None
