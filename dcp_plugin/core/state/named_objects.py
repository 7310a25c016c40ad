"""The objects in the user's ``state`` mapping, by name: their adapters, and all leaves that a save gathers from them.

The names of the mapping are the first segments of the keys. Mappings that hold live objects are entered, at any depth.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from dcp_plugin.core.errors import CheckpointMismatch
from dcp_plugin.core.format.columns import KeyPath
from dcp_plugin.core.format.keys import (
    join,
    require_end,
    too_deep,
)
from dcp_plugin.core.records import LiveState
from dcp_plugin.core.state.adapters import (
    LEAVES,
    CalledLast,
    MappingAdapter,
    ModuleAdapter,
    NamesOnly,
    OptimizerAdapter,
    PositionAdapter,
    StateAdapter,
    StatefulAdapter,
    Unapplied,
    ValueAdapter,
    is_state_dict,
)
from dcp_plugin.core.state.module import reshard
from dcp_plugin.core.state.names import Parts, is_list_of, layout_of, parameter_names, trained_module
from dcp_plugin.core.tensors._torch import is_tensor
from dcp_plugin.core.tensors._torch_modules import patched_together, refuse_deepspeed, unwrapped_optimizer
from dcp_plugin.core.tensors.kinds import EXACTLY_TENSORS
from dcp_plugin.core.types import OfEachRank, PerRank, RankEntry, ShardedValue


class RankAndSize(NamedTuple):
    """This rank among the ranks that save or load together."""

    rank: int
    world_size: int


ALONE = RankAndSize(0, 1)

NamedObject = tuple[str, Any, Any, Any, RankEntry | None]
"""An object of the state, as a tuple. Its elements: the name of the object, the mapping that has it, its key in that
mapping, the object, and its entry on this rank. The entry is None if all ranks share the value."""


def adapters_of(
    state: Mapping[str, Any], stock_aliases: bool = True, this_rank: RankAndSize = ALONE, is_data: bool = False
) -> list[StateAdapter]:
    """Return the adapters of a state: of modules, of optimizers, of ``Stateful`` objects, of data.

    Modules are resharded: after a forward under ``no_grad``, FSDP2's root has gathered parameters, which no optimizer
    has. Nothing else in the state changes.

    Objects are sorted by name. Their methods may communicate, so all ranks must call them in the same order. The order
    of a state may differ between ranks, for example if it is made from a set. Data keeps the order of the state.

    Args:
        stock_aliases: True if optimizers also store their param groups under stock's keys.
        this_rank: For values that differ between ranks.
        is_data: True if objects inside the mappings of the state are values. Their ``state_dict`` is not called.

    Raises:
        TypeError: The state is no mapping.
        CheckpointMismatch: An optimizer's parameters are in no module of the state. Or two objects have one name, an
            object is DeepSpeed's, or a :class:`~dcp_plugin.PerRank` has a module or an optimizer.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f'a state maps names to objects, as {{"model": model}} does; this is a {type(state).__name__}')
    of_data: Iterable[NamedObject] = ((name, state, name, value, None) for name, value in state.items())
    require_end("", state)
    try:
        named_objects = list(of_data if is_data else _named_objects(state, this_rank))
    except RecursionError as error:
        raise too_deep("") from error
    names = [name for name, *_ in named_objects]
    if len(set(names)) < len(names):
        raise CheckpointMismatch(f"two objects of the state have the name {max(names, key=names.count)!r}: rename one")
    objects = [(name, value) for name, _, _, value, _ in named_objects if type(value) not in LEAVES]
    each = [
        (name, refuse_deepspeed(name, part))
        for name, value in objects
        for part in (value if is_list_of(value, *_LISTED) else [value])
    ]
    of_modules = {  # in the order in which trained_module() searches them: modules of the state itself first
        name: value for kind in (nn.Module, Unapplied, NamesOnly) for name, value in objects if isinstance(value, kind)
    } | {name: Parts(value) for name, value in objects if is_list_of(value, nn.Module)}
    modules = {name: value if isinstance(value, nn.Module) else value.module for name, value in of_modules.items()}
    adapters: list[StateAdapter] = [
        ModuleAdapter(name, value) for name, value in of_modules.items() if not isinstance(value, (NamesOnly, Parts))
    ]
    for module in modules.values():
        reshard(module)  # before the optimizers below, which look for their parameters in the modules
    for name, owner, key, value, entry in named_objects:
        if type(value) in LEAVES:
            adapters.append(ValueAdapter(name, owner, key, entry))
        elif is_list_of(value, *_LISTED):
            from dcp_plugin.core.state.lists import adapter_of_list  # few states have one

            adapters.append(adapter_of_list(name, value, modules, state))
        elif name in modules:
            continue
        elif isinstance(value, torch.optim.Optimizer):
            optimizer = unwrapped_optimizer(value)
            trained = trained_module(name, optimizer, modules, state)
            adapters.append(OptimizerAdapter(name, trained, optimizer, stock_aliases))
        elif is_tensor(value) or not (isinstance(value, Mapping) or _is_stateful(value)):
            adapters.append(ValueAdapter(name, owner, key, entry))
        elif isinstance(value, Mapping):
            adapters.append(MappingAdapter(name, value, entry))
        else:
            is_of_loader = entry is not None and entry.is_position
            adapters.append((PositionAdapter if is_of_loader else StatefulAdapter)(name, value, entry))
    _check_patched([(name, value) for name, value in each if isinstance(value, torch.optim.Optimizer)])
    data = [adapter for adapter in adapters if adapter.kind == "value"]
    return [*sorted((adapter for adapter in adapters if adapter.kind != "value"), key=_turn), *data]


def _check_patched(optimizers: Sequence[tuple[str, torch.optim.Optimizer]]) -> None:
    """Raise CheckpointMismatch if the state has only some of the optimizers that torch has patched together.

    With stock, one of them is enough: its ``state_dict`` returns the state of all.
    """
    ids = {id(optimizer) for _, optimizer in optimizers}
    for name, optimizer in optimizers:
        absent = [other for other in patched_together(optimizer) if id(other) not in ids]
        if absent:
            raise CheckpointMismatch(
                f"torch's _patch_optimizer_state_dict has patched the optimizer {name!r} together with {len(absent)} "
                f"more, which the state lacks. Put each of them into the state under its own name, or leave out the "
                f"patch: dcp_plugin does not need it."
            )


def _turn(adapter: StateAdapter) -> tuple[int, bool, bool, str]:
    """Return the sort key that determines when an object's methods are called.

    Loaders come before other ``Stateful`` objects, which may have random streams, because loaders draw from these.
    """
    is_last = isinstance(adapter, StatefulAdapter) and isinstance(adapter.live, CalledLast)
    return (
        ("module", "optimizer", "stateful").index(adapter.kind),
        is_last,
        not isinstance(adapter, PositionAdapter),
        adapter.name,
    )


def gather_state(adapters: list[StateAdapter]) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """Return all leaves by key, and the paths that differ from the :func:`~dcp_plugin.core.format.columns.default_path`
    of their key.

    Collective if a module contains FSDP1.

    Raises:
        CheckpointMismatch: Two objects have the same key, as ``{"a": {"b.c": 1}, "a.b": {"c": 1}}`` has.
    """
    leaves: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    for adapter in adapters:
        if isinstance(adapter, ValueAdapter) and adapter.is_leaf:  # a state that is one flat mapping has thousands
            key = adapter.name
            if key in leaves:
                raise CheckpointMismatch(f"two values of the state have the key {key!r}")
            leaves[key] = adapter.value
            if "." in key:
                paths[key] = tuple(key.split("."))
            continue
        try:
            own_leaves, unusual = adapter.gather()
        except RecursionError as error:
            raise too_deep(adapter.name) from error
        keys = _below(adapter.name, tuple(own_leaves))
        if not leaves.keys().isdisjoint(keys):
            raise CheckpointMismatch(f"two values of the state have the key {min(leaves.keys() & keys)!r}")
        leaves.update(zip(keys, own_leaves.values(), strict=True))
        above = tuple(adapter.name.split("."))
        if len(above) > 1:  # the default path of a key splits only at the first dot
            unusual = {key: unusual.get(key, (key,)) for key in own_leaves}
        paths |= {join(adapter.name, key): above + path for key, path in unusual.items()}
    return leaves, paths


@functools.lru_cache(maxsize=16)
def _below(name: str, keys: tuple[str, ...]) -> list[str]:
    """Return the keys of an object in the state. Each save needs them all, and they are the same each time."""
    return [f"{name}.{key}" if key else name for key in keys]


def optimizers_in(
    adapters: list[StateAdapter], kinds: Mapping[str, str], owners: Sequence[Any]
) -> dict[str, OptimizerAdapter]:
    """Return the adapters of all optimizers by name, including optimizers of which the state has only the state dict.

    Args:
        kinds: The kinds of the names that hold state dicts. The optimizers among them are the optimizers in ``owners``,
            in their order, and these train the only module in ``owners``.
    """
    found = {adapter.name: adapter for adapter in adapters if isinstance(adapter, OptimizerAdapter)}
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]
    optimizers = [unwrapped_optimizer(owner) for owner in owners if isinstance(owner, torch.optim.Optimizer)]
    names = [name for name, kind in kinds.items() if kind == "optimizer" and name not in found]
    if len(names) == len(optimizers):
        module = modules[0] if len(modules) == 1 else nn.Module()  # without parameters, which then have no shards
        found |= {
            name: OptimizerAdapter(name, module, optimizer, False)
            for name, optimizer in zip(names, optimizers, strict=True)
        }
    return found


def shared_keys(live: LiveState, adapters: list[StateAdapter], leaves: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys of data that should be the same on all ranks.

    Modules, optimizers and their state dicts do not count: under DDP buffers differ between ranks, and a save stores
    those of rank 0. Copies of buffers in other data do not count either.
    """
    if is_state_dict(live.state):
        return frozenset()
    apart = {*live.kinds, *(adapter.name for adapter in adapters if not adapter.is_shared)}
    fronts = tuple(f"{name}." for name in apart)
    modules = [
        value for value in (*live.owners, *(adapter.module for adapter in adapters)) if isinstance(value, nn.Module)
    ]
    # By their last segments, since data may have copies of buffers below any name.
    buffers = {fqn.rpartition(".")[2] for module in modules for fqn, _ in module.named_buffers()}
    return frozenset(
        key
        for key, leaf in leaves.items()
        if key.startswith(live.compared)
        and _is_expected_equal(leaf)
        and not f"{key}.".startswith(fronts)
        and key.rpartition(".")[2] not in buffers
    )


def replica_keys(
    leaves: Iterable[str], adapters: list[StateAdapter], kinds: Mapping[str, str], owners: Sequence[Any]
) -> frozenset[str]:
    """Return the keys of parameters and of optimizer state, which should be equal on all ranks that hold them. Buffers
    may differ, and so may other entries of a module's state dict.

    Args:
        kinds: The kinds of the names that hold state dicts of modules and optimizers.
        owners: The modules of these.
    """
    of_modules = [adapter for adapter in adapters if adapter.kind == "module"]
    modules = [(adapter.name, adapter.module) for adapter in of_modules if adapter.module is not None]
    modules += [
        (name, owner)
        for name, kind in kinds.items()
        if kind == "module"
        for owner in owners
        if isinstance(owner, nn.Module)
    ]
    replicas: set[str] = set()
    for name, module in modules:
        own = {key for key in leaves if key.startswith(f"{name}.")}
        parameters = own & {f"{name}.{fqn}" for names in parameter_names(module).values() for fqn in names}
        if not parameters:  # its state_dict has other names, as {"state_dict": ..., "ema": ...} has
            buffers = {fqn.rpartition(".")[2] for fqn, _ in module.named_buffers()}
            parameters = {key for key in own if key.rpartition(".")[2] not in buffers}
        replicas |= parameters
    of_optimizers = {adapter.name for adapter in adapters if adapter.kind == "optimizer"}
    of_optimizers.update(name for name, kind in kinds.items() if kind == "optimizer")
    fronts = tuple(f"{name}." for name in of_optimizers)
    return frozenset(replicas).union(key for key in leaves if key.startswith(fronts))


def layouts_of(leaves: Mapping[str, Any]) -> list[str]:
    """Return how the tensors were distributed, in words for the summary."""
    distinct = {id(leaf): leaf for leaf in leaves.values() if type(leaf) not in (int, float, bool)}.values()
    return sorted({layout_of(leaf) for leaf in distinct if is_tensor(leaf) or isinstance(leaf, ShardedValue)})


def _named_objects(state: Mapping[str, Any], this_rank: RankAndSize) -> Iterator[NamedObject]:
    """Yield each object of the state.

    Raises:
        CheckpointMismatch: A :class:`PerRank` has a module or an optimizer.
    """
    for path, owner, value in _objects((), state):
        name = _dotted(path)
        if type(value) in LEAVES:
            yield name, owner, path[-1], value, None
        elif isinstance(value, PerRank):
            # vars() is the mapping {"value": ...}, in which a load can replace the value like that of any mapping.
            for (_, *below), holder, part in _objects((), vars(value)):
                if isinstance(part, _LIVE) or is_list_of(part, *_LISTED):
                    raise CheckpointMismatch(
                        f"{_dotted((name, *below))} is a {type(part).__name__} in a PerRank, which takes tensors, "
                        f"plain values, objects with a state_dict and mappings of these. If each rank has its own "
                        f"module or optimizer, give each a different name in the state."
                    )
                entry = RankEntry(name, _dotted(below), *this_rank, _is_position(part))
                yield entry.name_on(this_rank.rank), holder, below[-1] if below else "value", part, entry
        elif _is_position(value) or isinstance(value, OfEachRank):
            is_derived = isinstance(value, OfEachRank)
            entry = RankEntry(name, "", *this_rank, is_position=not is_derived, is_derived=is_derived)
            yield entry.name_on(this_rank.rank), owner, path[-1], value, entry
        else:
            yield name, owner, path[-1], value, None


def _dotted(path: Iterable[Any]) -> str:
    return ".".join(map(str, path))


def _objects(path: tuple[Any, ...], node: Mapping[Any, Any]) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """Yield (path, mapping with the object, object) for each object. Mappings are entered if they hold live objects."""
    for key, value in node.items():
        if type(value) not in LEAVES and isinstance(value, Mapping) and _holds_objects(value):
            yield from _objects((*path, key), value)
        else:
            yield (*path, key), node, value


_LIVE = (nn.Module, torch.optim.Optimizer, NamesOnly, Unapplied, PerRank)
"""Classes of objects that are found in mappings at any depth, in addition to objects with a state dict."""

_LISTED = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
"""Classes of objects of which a list is one object of the state."""


def _holds_objects(node: Mapping[str, Any]) -> bool:
    return any(
        isinstance(value, _LIVE)
        or is_list_of(value, *_LISTED)
        or (not is_tensor(value) and _is_stateful(value))
        or (isinstance(value, Mapping) and _holds_objects(value))
        for value in node.values()
        if type(value) not in LEAVES
    )


def _is_stateful(value: Any) -> bool:
    """Return whether a value is an object with a state dict. A class with the methods is not."""
    return isinstance(value, Stateful) and not isinstance(value, type)


def _is_expected_equal(leaf: Any) -> bool:
    """Return whether a leaf of data should be the same on all ranks: it is neither a number nor a shard."""
    if type(leaf) in EXACTLY_TENSORS:
        return bool(leaf.numel() > 1)
    if type(leaf) in (list, tuple):
        return not all(type(item) is float for item in leaf)
    if isinstance(leaf, (set, frozenset)):  # the order of sets, and so of their bytes, differs between processes
        return False
    return not isinstance(leaf, (Number, ShardedValue)) and not is_tensor(leaf)


def _is_position(value: Any) -> bool:
    """Return whether a value is a loader or a sampler of torchdata, whose ``state_dict`` is the position of this rank.

    A subclass with its own ``state_dict`` does not count. Such a class may have the positions of all ranks in its
    state, as torchtitan's does.
    """
    module: str = getattr(getattr(type(value), "state_dict", None), "__module__", None) or ""
    return module.partition(".")[0] == "torchdata" and isinstance(value, Stateful)
