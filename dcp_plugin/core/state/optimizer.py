"""Optimizer state by FQN, for any wrapper, and for optimizers without state.

An optimizer knows its parameters by identity and by their order. Neither survives another wrapper or world size. State
and hyper-parameters have the FQN of the parameter in their keys instead:

- ``state.<FQN>.<slot>`` (``state.layer.weight.exp_avg``); ``state.<FQN>.<slot>.<step>`` for a slot that is a mapping
  or a list of sharded tensors,
- ``param_groups.<FQN>.<field>`` (``param_groups.layer.weight.lr``): per parameter, since the groups of the saving
  and the loading optimizer need not be the same,
- ``global_state.<key>.…``: the optimizer's state under a key that is no parameter,
- ``extra_state.<key>.…``: entries of its own ``state_dict()`` other than ``state`` and ``param_groups``,
- ``param_groups.<number>.<field>`` (:func:`group_list`): the groups as a list, for stock code that does not flatten. A
  load reads these only from checkpoints without the other keys.

If an optimizer's own ``state_dict()`` returns another layout (flat names, a list of state dicts), it is stored like a
``Stateful`` (:class:`OwnLayout`).

The first two kinds are those of torch's ``get_optimizer_state_dict(flatten_optimizer_state_dict=True)``. But that
function steps an optimizer that has no state. This module steps none: a save changes no state, and a failed load leaves
no trace.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dcp_plugin.core.errors import CheckpointMismatch, some
from dcp_plugin.core.format.columns import KeyPath
from dcp_plugin.core.format.keys import (
    LocalSlot,
    Walks,
    flatten,
    holds_sharded,
    require_end,
    walked_by_us,
    with_types_of,
)
from dcp_plugin.core.state.module import reshard
from dcp_plugin.core.state.names import contains_fsdp1, parameter_names, parameters_by_name
from dcp_plugin.core.tensors._torch import laid_out_like, shard_of
from dcp_plugin.core.tensors._torch_modules import has_own_state_dict, unpatched, unwrapped_optimizer
from dcp_plugin.core.tensors.kinds import EXACTLY_TENSORS
from dcp_plugin.core.types import Box

GROUPS = "param_groups"
GLOBAL = "global_state"

EXTRA_STATE = "extra_state"
BESIDE = (GLOBAL, EXTRA_STATE)
"""Names of trees that belong to no parameter."""

_CONTAINERS = frozenset((dict, OrderedDict, defaultdict, list, tuple))

Nested = dict[str, Any]
"""Nested state: ``{"state": {fqn: {slot: value}}, "param_groups": [{"params": [fqn, ...], field: value}]}``. It also
has ``"global_state"`` and ``"extra_state"`` if the optimizer has them."""


class OwnLayout:
    """Mark of a state dict that does not have torch's layout, and so has no FQNs of ours in it."""


class _OwnMapping(dict[str, Any], OwnLayout): ...


class _OwnList(list[Any], OwnLayout): ...


def own_state_dict(optimizer: torch.optim.Optimizer) -> Any:
    """Return the state dict of an optimizer whose own code makes it, and None for any other optimizer.

    Returns:
        The state dict, as an :class:`OwnLayout` unless it has torch's layout. In torch's layout each number in a group
        stands for the parameter at the same place in the group of the optimizer.

    Raises:
        CheckpointMismatch: The state dict is neither a mapping nor a list.
    """
    if not has_own_state_dict(optimizer):
        return None
    state: Any = unpatched(optimizer, "state_dict")()
    if not isinstance(state, (Mapping, list)):
        raise CheckpointMismatch(
            f"{type(optimizer).__name__}.state_dict() returns a {type(state).__name__}. Have it return a dict."
        )
    if _has_torch_layout(state, optimizer):
        return state
    return _OwnMapping(state) if isinstance(state, Mapping) else _OwnList(state)


def _has_torch_layout(state: Any, optimizer: torch.optim.Optimizer) -> bool:
    if not isinstance(state, Mapping) or not {"state", GROUPS} <= state.keys() or not hasattr(optimizer, GROUPS):
        return False
    groups, live = state[GROUPS], optimizer.param_groups
    if not isinstance(state["state"], Mapping) or not isinstance(groups, (list, tuple)):
        return False
    listed: list[Any] = [group.get("params") if isinstance(group, Mapping) else None for group in groups]
    is_listed = all(isinstance(numbers, (list, tuple)) for numbers in listed)
    if not is_listed or list(map(len, listed)) != [len(group["params"]) for group in live]:
        return False
    numbers = {number for in_group in listed for number in in_group}
    # A state dict that merges those of several optimizers repeats their numbers.
    return len(numbers) == len({id(p) for group in live for p in group["params"]})


def gather_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer) -> Nested | OwnLayout:
    """Return the state of an optimizer of ``module``, keyed by clean FQN, or in the optimizer's own layout.

    Collective if the module contains FSDP1.

    Raises:
        CheckpointMismatch: The optimizer has a parameter that the module lacks, or its layout cannot be stored.
    """
    optimizer = unwrapped_optimizer(optimizer)
    reshard(module)
    own = own_state_dict(optimizer)
    if isinstance(own, OwnLayout):
        refuse_slices(module, optimizer, own)
        return own
    if contains_fsdp1(module):
        from dcp_plugin.core.state import fsdp1  # only such modules need it

        extras = extras_of(own)
        refuse_slices(module, optimizer, extras)
        return fsdp1.gather_optimizer(module, optimizer, own) | ({EXTRA_STATE: extras} if extras else {})
    live = OptimizerState.of(module, optimizer, own)
    groups = [{**fields_of(group), "params": [live.names[key] for key in group["params"]]} for group in live.groups]
    return _nested({fqn: slots for fqn, slots in live.slots.items() if slots}, groups, live.global_state, live.extras)


def extras_of(own: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the entries of a state dict of torch's layout other than ``state`` and ``param_groups``."""
    return {key: value for key, value in (own or {}).items() if key not in ("state", GROUPS)}


def refuse_slices(module: nn.Module, optimizer: torch.optim.Optimizer, tree: Any) -> None:
    """Refuse state in an optimizer's own layout that may have been cut with the flat parameters of FSDP1.

    Each rank has another slice, and a slice does not record its place. The slice of one rank would be stored for all.

    Raises:
        CheckpointMismatch: The state has a tensor with dimensions.
    """
    if not contains_fsdp1(module):
        return
    leaves, _ = flatten_tree(tree)
    slices = [key for key, leaf in leaves.items() if type(leaf) in EXACTLY_TENSORS and leaf.dim() > 0]
    if slices:
        raise CheckpointMismatch(
            f"{type(optimizer).__name__} cannot be saved under FSDP1: its state has another layout than torch's "
            f"({some(slices, 3)}), and FSDP1 cuts parameters into slices that differ between ranks, so the parameter "
            f"of each value is unknown. Use FSDP2 (fully_shard), or an optimizer with torch's layout of the state dict."
        )


def flatten_tree(tree: Any, walks: Walks = walked_by_us) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """Return the leaves of a mapping or list by key, and their paths. A tree that is not walked, such as an empty
    mapping, is one value under the key ``""``."""
    return flatten(tree, walks) if walks("", tree) else ({"": tree}, {"": ()})


def _nested(
    state: dict[str, dict[str, Any]], groups: list[dict[str, Any]], global_state: dict[Any, Any], extras: dict[str, Any]
) -> Nested:
    beside = {GLOBAL: global_state, EXTRA_STATE: extras}
    return {"state": state, GROUPS: groups} | {name: content for name, content in beside.items() if content}


def flatten_optimizer(nested: Nested | OwnLayout) -> Any:
    """Return ``{"state.<FQN>.<slot>": …, "param_groups.<FQN>.<field>": …}``, as it is stored.

    A state of its own layout is returned unchanged.
    """
    if isinstance(nested, OwnLayout):
        return nested
    state = nested["state"]
    slots = [key for fqn, names in _runs(state) for key in _keys("state", fqn, names)]
    flat = dict(zip(slots, [value for slots in state.values() for value in slots.values()], strict=True))
    for group in nested["param_groups"]:
        names, fields = tuple(group["params"]), fields_of(group)
        # The keys are ordered by parameter, so the values of the group repeat for each.
        flat.update(zip(_keys("param_groups", names, tuple(fields)), [*fields.values()] * len(names), strict=True))
    return flat | {name: nested[name] for name in BESIDE if name in nested}


def _runs(state: dict[str, dict[str, Any]]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield the runs of consecutive parameters with the same slots, and these slots."""
    for slots, run in itertools.groupby(state, key=lambda fqn: tuple(state[fqn])):
        yield tuple(run), slots


@functools.lru_cache(maxsize=16)
def _keys(kind: str, names: tuple[str, ...], fields: tuple[str, ...]) -> list[str]:
    """Return the key of each field of each parameter. A save makes a dozen keys per parameter, the same ones each
    time."""
    return [f"{kind}.{name}.{field}" for name in names for field in fields]


def flatten_trees(flat: dict[str, Any]) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """Flatten the trees in a result of :func:`flatten_optimizer`, and also return the paths of their leaves.

    Trees are the state of no parameter, and slots that have sharded tensors in a mapping or a list. Such a slot, stored
    as one value, would have only one rank's shards.
    """
    # The class is compared first: a lazy save makes this test for thousands of tensors during the call.
    containers = [key for key, value in flat.items() if type(value) in _CONTAINERS and key.startswith("state.")]
    for key in containers:
        require_end(key, flat[key])
    trees = {key: flat[key] for key in containers if holds_sharded(flat[key])}
    trees |= {name: flat[name] for name in BESIDE if name in flat}
    if not trees:
        return flat, {}
    leaves, paths = flatten(trees)
    return {key: value for key, value in flat.items() if key not in trees} | leaves, paths


def group_list(nested: Nested) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """Return the param groups under the keys where stock code looks for them, with their paths."""
    groups = nested[GROUPS]
    paths = {
        f"{GROUPS}.{number}.{field}": (GROUPS, number, field) for number, group in enumerate(groups) for field in group
    }
    return {key: groups[number][field] for key, (_, number, field) in paths.items()}, paths


def unflatten_optimizer(flat: Mapping[str, Any]) -> Nested:
    """Return the nested state: the inverse of :func:`flatten_optimizer`."""
    return nested_of(flat)[0]


def nested_of(tree: Mapping[str, Any]) -> tuple[Nested, bool]:
    """Return the tree of an optimizer's stored keys, nested as in :data:`Nested`, and whether the result is certain.

    It is uncertain if the groups are not stored as a list, or if ranks have state of their own. Without the list,
    consecutive parameters with equal settings count as one group.
    """
    groups = _listed(tree.get(GROUPS))
    listed_names = {fqn for group in groups for fqn in group["params"]}
    flat = {key: value for key, value in tree.items() if key not in ("state", GROUPS, *BESIDE)}
    for kind in ("state", GROUPS):  # the kind and the FQN may be separate steps, as stock nests them
        if isinstance(tree.get(kind), dict):
            for fqn, named in tree[kind].items():
                flat |= {f"{kind}.{fqn}.{name}": value for name, value in named.items()}
    state, fields = sort_by_name(flat, listed_names)
    is_listed = bool(groups) and state.keys() | fields.keys() <= listed_names
    if not is_listed:
        runs = (list(run) for _, run in itertools.groupby(fields, key=lambda fqn: repr(sorted(fields[fqn].items()))))
        groups = [{**fields[run[0]], "params": run} for run in runs]
    nested = _nested(state, groups, tree.get(GLOBAL, {}), tree.get(EXTRA_STATE, {}))
    return nested, is_listed and not any(map(LocalSlot.parse, flat))


def _listed(groups: Any) -> list[dict[str, Any]]:
    """Return the groups of a tree if they are stored as a list (:func:`group_list`), else an empty list."""
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return []
    names = [group.get("params") for group in groups]
    is_named = all(isinstance(some, list) and all(isinstance(name, str) for name in some) for some in names)
    return groups if is_named else []


def numbers_of(groups: Iterable[Iterable[str]]) -> dict[str, int]:
    """Return the number that torch gives to each parameter in an optimizer's ``state_dict()``.

    Args:
        groups: The FQNs of the parameters of each group.
    """
    return {fqn: number for number, fqn in enumerate(dict.fromkeys(itertools.chain.from_iterable(groups)))}


def with_numbers(nested: Nested) -> dict[str, Any]:
    """Return the tree in the form of the optimizer's ``state_dict()``: with numbers in place of FQNs."""
    numbers = numbers_of(group["params"] for group in nested[GROUPS])
    state = {number: nested["state"][fqn] for fqn, number in numbers.items() if fqn in nested["state"]}
    groups = [{**group, "params": [numbers[fqn] for fqn in group["params"]]} for group in nested[GROUPS]]
    return {"state": state | nested.get(GLOBAL, {}), GROUPS: groups, **nested.get(EXTRA_STATE, {})}


def with_names(state: Mapping[str, Any], names: Iterable[str]) -> Nested:
    """Return a state dict of torch's layout with FQNs in place of numbers: the inverse of :func:`with_numbers`."""
    numbered = dict(enumerate(names))
    slots = {numbered[key]: slots for key, slots in state["state"].items() if key in numbered}
    groups = [{**group, "params": [numbered[number] for number in group["params"]]} for group in state[GROUPS]]
    others = {key: value for key, value in state["state"].items() if key not in numbered}
    return _nested(slots, groups, others, extras_of(state))


Named = dict[str, dict[str, Any]]
"""Slots, or hyper-parameters, by the FQN of their parameter and their name."""


def sort_by_name(flat: Mapping[str, Any], fqns: Collection[str]) -> tuple[Named, Named]:
    """Return the slots and the hyper-parameters among stored keys, without the state of no parameter.

    Args:
        fqns: As in :func:`split_key`.
    """
    sorted_by_kind: dict[str, Named] = {"state": defaultdict(dict), GROUPS: defaultdict(dict)}
    for key, value in flat.items():
        kind, fqn, name = split_key(key, fqns)
        if kind in sorted_by_kind:
            sorted_by_kind[kind][fqn][name] = value
    return dict(sorted_by_kind["state"]), dict(sorted_by_kind[GROUPS])


def split_key(key: str, fqns: Collection[str] = ()) -> tuple[str, str, str]:
    """Return ``("state" | "param_groups", FQN, slot or field)`` of a stored key.

    Args:
        fqns: FQNs. Only the slots of these may have dots in their names.
    """
    kind, _, remainder = key.partition(".")
    parts = remainder.split(".")
    # The longest known FQN, since both an FQN and a slot may have dots. Without one, the last segment is the slot.
    count = next((count for count in range(len(parts) - 1, 0, -1) if ".".join(parts[:count]) in fqns), len(parts) - 1)
    return kind, ".".join(parts[:count]), ".".join(parts[count:])


def group_names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the clean FQNs of the parameters of each group."""
    names = names_of(module, optimizer)
    return [[name for p in group["params"] for name in names[id(p)]] for group in groups_of(optimizer)]


def shards_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Box]:
    """Return the parts that this rank has of the sharded parameters of an optimizer, by clean FQN.

    FSDP1 has none: its state dicts have no state of a single rank.
    """
    if contains_fsdp1(module):
        return {}
    parameters = [parameter for group in groups_of(optimizer) for parameter in group["params"]]
    if all(type(parameter) in EXACTLY_TENSORS for parameter in parameters):  # skip the names if no parameter is sharded
        return {}
    ids = set(map(id, parameters))
    boxes = {fqn: shard_of(parameter) for fqn, parameter in parameters_by_name(module).items() if id(parameter) in ids}
    return {fqn: box for fqn, box in boxes.items() if box is not None}


def names_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, list[str]]:
    """Return :func:`~dcp_plugin.core.state.names.parameter_names`. Raise CheckpointMismatch if an optimized parameter
    is not among them."""
    names = parameter_names(module)
    for number, group in enumerate(groups_of(optimizer)):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointMismatch(
                    f"param group {number} of {type(optimizer).__name__} has a parameter of shape "
                    f"{tuple(parameter.shape)} that is not in the module. If the optimizer was made before the module "
                    f"was wrapped or moved, make it afterwards."
                )
    return names


def class_name(cls: type) -> str:
    """Return the name under which a checkpoint records the class of an optimizer."""
    return f"{cls.__module__}.{cls.__qualname__}"


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the groups of an optimizer. An optimizer that only contains others may have no ``param_groups``."""
    return getattr(optimizer, GROUPS, [])


def fields_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in group.items() if field != "params"}


@dataclass(frozen=True)
class OptimizerState:
    """State of an optimizer on this rank, by FQN.

    Most optimizers are read and written directly, in place. But an optimizer's own code (an overridden method, a hook
    of the user) may make or take its state dict. Then only that code knows the content of a save, and it is called as
    ``torch.distributed.checkpoint`` calls it. A save calls ``state_dict()`` once. A load calls ``state_dict()`` once to
    get the present state, and ``load_state_dict()`` once, with the parameters numbered as in the present state.
    """

    slots: dict[str, dict[str, Any]]
    global_state: dict[Any, Any]
    """State that belongs to no parameter."""
    extras: dict[str, Any]
    """Entries of its ``state_dict()`` other than ``state`` and ``param_groups``."""
    groups: list[dict[str, Any]]
    """Groups of the optimizer, or the groups that its ``state_dict()`` returned, with numbers for parameters."""
    names: dict[Any, str]
    """FQN of each parameter or number."""
    by_state_dict: bool

    @classmethod
    def of(cls, module: nn.Module, optimizer: torch.optim.Optimizer, own: Mapping[str, Any] | None) -> OptimizerState:
        """Read the state of an optimizer of ``module``, which must not contain FSDP1.

        Args:
            own: The result of :func:`own_state_dict`, if it has torch's layout. If None, the state is read directly.

        Raises:
            CheckpointMismatch: The optimizer has a parameter that the module lacks.
        """
        names = {parameter: of_one[0] for parameter, of_one in names_of(module, optimizer).items()}
        state, groups = (optimizer.state, optimizer.param_groups) if own is None else (own["state"], own[GROUPS])
        fqn_of = {
            key: names[id(parameter)]
            for group, live in zip(groups, optimizer.param_groups, strict=True)
            for key, parameter in zip(group["params"], live["params"], strict=True)
        }
        if own is None:  # the state may have a parameter that was removed from its group
            fqn_of |= {key: names[id(key)] for key in state if isinstance(key, torch.Tensor)}
        # A slot made by zeros_like() has lost the place of its CheckpointableTensor in the global tensor.
        slots = {
            fqn_of[key]: {slot: laid_out_like(value, key) for slot, value in slots.items()}
            if hasattr(key, "global_shape")
            else dict(slots)
            for key, slots in state.items()
            if key in fqn_of
        }
        global_state = {key: value for key, value in state.items() if key not in fqn_of}
        return cls(slots, global_state, extras_of(own), list(groups), fqn_of, own is not None)

    def load(
        self,
        optimizer: torch.optim.Optimizer,
        slots: Mapping[str, dict[str, Any] | None],
        global_state: Mapping[Any, Any],
        extras: Mapping[str, Any],
        fields: list[dict[str, Any]],
    ) -> None:
        """Change the state of the optimizer.

        Args:
            slots: New slots by FQN. None removes the slots of a parameter; other parameters keep theirs.
            global_state: New state that belongs to no parameter.
            extras: New extra entries of its state dict.
            fields: New fields of each group.
        """
        if self.by_state_dict:
            kept = {fqn: own_slots for fqn, own_slots in {**self.slots, **slots}.items() if own_slots is not None}
            groups = [
                {**group, **{field: _of_type(group.get(field), value) for field, value in new.items()}}
                for group, new in zip(self.groups, fields, strict=True)
            ]
            state = {number: kept[fqn] for number, fqn in self.names.items() if fqn in kept}
            state_dict = {"state": {**state, **self.global_state, **global_state}, GROUPS: groups}
            unpatched(optimizer, "load_state_dict")(
                {**state_dict, **self.extras, **with_types_of(self.extras, dict(extras))}
            )
            return
        optimizer.state.update(global_state)
        for parameter, fqn in self.names.items():
            if slots.get(fqn) is not None:
                optimizer.state[parameter] = slots[fqn]
            elif fqn in slots:
                optimizer.state.pop(parameter, None)
        for group, new in zip(optimizer.param_groups, fields, strict=True):
            for field, value in new.items():
                current, value = group.get(field), _of_type(group.get(field), value)
                # A tensor of a learning rate stays the same object, because captured graphs and schedulers hold it.
                group[field] = current.copy_(value) if isinstance(current, torch.Tensor) else value


def _of_type(current: Any, value: Any) -> Any:
    """Return the value as a tensor if the current value is one, and as a number if the current value is one."""
    if isinstance(current, torch.Tensor):
        return torch.as_tensor(value, dtype=current.dtype, device=current.device)
    return value.item() if isinstance(value, torch.Tensor) and isinstance(current, (int, float)) else value
