"""Adapters of the objects in the user's ``state`` mapping, for saves and for loads.

There is an adapter for modules, optimizers, objects with a ``state_dict`` (``Stateful``) and data. The class of an
object selects its adapter; the names of the mapping are the first segments of the keys.

For data (mappings, single values, and objects with a ``state_dict``) a tensor is filled in place if the object has one;
all other values are replaced. An adapter determines which tensors only the object or only the checkpoint has, and which
have another shape; :mod:`~dcp_plugin.core.loading.matching` decides the response.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from dcp_plugin.core.errors import CheckpointMismatch
from dcp_plugin.core.format import values
from dcp_plugin.core.format.index import Entry, StoredTensor
from dcp_plugin.core.format.keys import (
    flatten,
    has_keys_below,
    is_empty_mapping,
    join,
    paths_as_stored,
    require_end,
    require_names,
    step_of,
    too_deep,
    unflatten,
    walked_as_stored,
    with_types_of,
)
from dcp_plugin.core.records import Box, LiveState
from dcp_plugin.core.state.annotations import layout_of, mark_parameters, mark_slots
from dcp_plugin.core.state.module import gather_module, reshard
from dcp_plugin.core.state.module_load import Deferred, ModuleLoad, Read
from dcp_plugin.core.state.names import Parts, is_list_of, parameter_names, trained_module
from dcp_plugin.core.state.optimizer import (
    OwnLayout,
    class_name,
    flatten_optimizer,
    flatten_tree,
    flatten_trees,
    gather_optimizer,
    group_list,
    group_names,
    groups_of,
    shards_of,
)
from dcp_plugin.core.state.optimizer_load import OptimizerLoad, OwnLayoutLoad, load_into
from dcp_plugin.core.state.per_rank import OfEachRank, PerRank, RankEntry, is_position
from dcp_plugin.core.tensors._torch import is_meta, is_tensor, shape_of, with_memory
from dcp_plugin.core.tensors._torch_modules import Incompatible, patched_together, refuse_deepspeed, unwrapped_optimizer
from dcp_plugin.core.tensors.kinds import EXACTLY_TENSORS, OF_ITS_OWN_CLASS
from dcp_plugin.core.types import KeyPath, ShardedValue, Wanted


@dataclass(frozen=True)
class NamesOnly:
    """Module in the state that names the parameters of its optimizer, and is itself neither saved nor loaded."""

    module: nn.Module


@dataclass(frozen=True)
class Unapplied:
    """Module whose state is read, distributed as here, but not loaded into it: the caller does that later."""

    module: nn.Module
    state_dict: dict[str, Any] = field(default_factory=dict)
    """All state that is stored for the module, by clean FQN, after the load."""


class CalledLast:
    """Base class for ``Stateful`` objects whose methods are called after those of all others in the state.

    Random streams are an example: the ``state_dict`` of a dataloader may draw from them.
    """


class StateAdapter(ABC):
    """Named object of the state."""

    name: str
    kind: str
    """``"module"``, ``"optimizer"``, ``"stateful"`` or ``"value"``."""
    entry: RankEntry | None = None
    """Place of the object, if each rank has its own."""
    module: nn.Module | None = None
    """Module that the object is, or whose parameters it optimizes; None for any other object."""

    @property
    def is_shared(self) -> bool:
        """True if the object is data that should be the same on all ranks."""
        return False

    @property
    def live(self) -> Any:
        """The user's object; of a single value, the mapping that has it."""
        return self.module

    @abstractmethod
    def gather(self) -> tuple[dict[str, Any], dict[str, KeyPath]]:
        """Return the leaves by key relative to the name, and their paths below it, except those that are ``(key,)``."""

    def present(self) -> Mapping[str, Any]:
        """Return the object's own tensors and values by key relative to the name."""
        return self.gather()[0]

    @abstractmethod
    def names(self) -> list[str]:
        """Return the keys of the object, relative to the name. Collective if a module contains FSDP1.

        An optimizer returns a prefix, up to the dot, for each parameter.
        """

    @abstractmethod
    def want(self, stored: Mapping[str, Entry], paths: Mapping[str, KeyPath]) -> Wanted:
        """Decide what to read, given the entries stored under the name.

        Changes no state of the object. The targets of an optimizer without state are new tensors, which :meth:`take`
        makes its slots.
        """

    def check(self, values: Mapping[str, Any], strict: bool) -> None:  # noqa: B027  most kinds have nothing to check
        """Check the values that are no tensors, before any tensor is overwritten. By default any value is accepted.

        Args:
            strict: True if missing keys will be an error.

        Raises:
            CheckpointMismatch: A value does not fit.
        """

    @abstractmethod
    def take(self, filled: dict[str, Any], read: Read, strict: bool) -> Incompatible | None:
        """Load the object from the filled targets of :meth:`want`.

        Args:
            read: Function that fills deferred targets, after they have memory.
            strict: True if missing keys will be an error.

        Returns:
            For a module, the keys that its own code reports as missing and unexpected.
        """


_LEAVES = values.PLAIN | {*EXACTLY_TENSORS}
"""Classes of most values. They have no state and contain no objects, so no other check is needed."""


class Place(NamedTuple):
    """This rank among the ranks that save or load together."""

    rank: int
    world_size: int


ALONE = Place(0, 1)

NamedObject = tuple[str, Any, Any, Any, RankEntry | None]
"""Object of the state: its name, the mapping that has it and its key there, the object, and its place if each rank has
its own."""


def adapters_of(
    state: Mapping[str, Any], stock_aliases: bool = True, place: Place = ALONE, is_data: bool = False
) -> list[StateAdapter]:
    """Return the adapters of a state: of modules, of optimizers, of ``Stateful`` objects, of data.

    The order of the objects is the same on all ranks, because their methods may communicate: they are sorted by name.
    The keys of a state may have another order on each rank, as from a set. Data keeps the order of the state.

    Args:
        stock_aliases: True if optimizers store their param groups under stock's keys, too.
        place: This rank, for values that differ between ranks.
        is_data: True if an object in a mapping of the state is a value, whose ``state_dict`` is not called.

    Raises:
        TypeError: The state is no mapping.
        CheckpointMismatch: An optimizer's parameters are in no module of the state; two objects have one name; an
            object is DeepSpeed's; or a :class:`~dcp_plugin.PerRank` has a module or an optimizer.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f'a state maps names to objects, as {{"model": model}} does; this is a {type(state).__name__}')
    of_data: Iterable[NamedObject] = ((name, state, name, value, None) for name, value in state.items())
    require_end("", state)
    try:
        named_objects = list(of_data if is_data else _named_objects(state, place))
    except RecursionError as error:
        raise too_deep("") from error
    names = [name for name, *_ in named_objects]
    if len(set(names)) < len(names):
        raise CheckpointMismatch(f"two objects of the state have the name {max(names, key=names.count)!r}: rename one")
    objects = [(name, value) for name, _, _, value, _ in named_objects if type(value) not in _LEAVES]
    each = [
        (name, refuse_deepspeed(name, part))
        for name, value in objects
        for part in (value if is_list_of(value, *_LISTED) else [value])
    ]
    of_modules = {  # those of the state itself first, in which optimizers look for their parameters
        name: value for kind in (nn.Module, Unapplied, NamesOnly) for name, value in objects if isinstance(value, kind)
    } | {name: Parts(value) for name, value in objects if is_list_of(value, nn.Module)}
    modules = {name: value if isinstance(value, nn.Module) else value.module for name, value in of_modules.items()}
    adapters: list[StateAdapter] = [
        ModuleAdapter(name, value) for name, value in of_modules.items() if not isinstance(value, (NamesOnly, Parts))
    ]
    for module in modules.values():
        reshard(module)
    for name, owner, key, value, entry in named_objects:
        if type(value) in _LEAVES:
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

    With stock, each of them stands for all.
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
    is_last = isinstance(adapter, StatefulAdapter) and isinstance(adapter._value, CalledLast)
    is_position = isinstance(adapter, PositionAdapter)
    return ("module", "optimizer", "stateful").index(adapter.kind), is_last, not is_position, adapter.name


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
        keyed = dict(zip(_below(adapter.name, tuple(own_leaves)), own_leaves.values(), strict=True))
        if leaves and (twice := keyed.keys() & leaves.keys()):
            raise CheckpointMismatch(f"two values of the state have the key {min(twice)!r}")
        leaves |= keyed
        above = tuple(adapter.name.split("."))
        if len(above) > 1:
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
    """Return the adapters of all optimizers by name, also of those whose state dicts are in the state.

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
        owned = zip(names, optimizers, strict=True)
        found |= {name: OptimizerAdapter(name, module, optimizer, False) for name, optimizer in owned}
    return found


def shared_keys(live: LiveState, adapters: list[StateAdapter], leaves: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys of data that should be the same on all ranks.

    The state of a module or an optimizer does not count, as an object or as its state dict: under DDP buffers differ
    between ranks, and a save stores those of rank 0. Copies of buffers in other data do not count either.
    """
    if _is_state_dict(live.state):
        return frozenset()
    apart = {*live.kinds, *(adapter.name for adapter in adapters if not adapter.is_shared)}
    fronts = tuple(f"{name}." for name in apart)
    modules = [
        value for value in (*live.owners, *(adapter.module for adapter in adapters)) if isinstance(value, nn.Module)
    ]
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
    """Return the keys of parameters and of optimizer state, which should be equal on all ranks that hold them. Buffers,
    and what a module adds to its parameters in a state dict, may differ.

    Args:
        kinds: The kinds of the names that hold state dicts of modules and optimizers.
        owners: The modules of these.
    """
    owned = [owner for owner in owners if isinstance(owner, nn.Module)]
    of_modules = [adapter for adapter in adapters if adapter.kind == "module"]
    modules = [(adapter.name, adapter.module) for adapter in of_modules if adapter.module is not None]
    modules += [(name, module) for name, kind in kinds.items() if kind == "module" for module in owned]
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


def _is_state_dict(value: Any) -> bool:
    """Return whether a mapping is the ``state_dict()`` of a module or an optimizer."""
    return hasattr(value, "_metadata") or (isinstance(value, Mapping) and value.keys() == {"state", "param_groups"})


def layouts_of(leaves: Mapping[str, Any]) -> list[str]:
    """Return how the tensors were distributed, in words for the summary."""
    distinct = {id(leaf): leaf for leaf in leaves.values() if type(leaf) not in (int, float, bool)}.values()
    return sorted({layout_of(leaf) for leaf in distinct if is_tensor(leaf) or isinstance(leaf, ShardedValue)})


def _named_objects(state: Mapping[str, Any], place: Place) -> Iterator[NamedObject]:
    """Yield each object of the state.

    Raises:
        CheckpointMismatch: A :class:`PerRank` has a module or an optimizer.
    """
    for path, owner, value in _objects((), state):
        name = _dotted(path)
        if type(value) in _LEAVES:
            yield name, owner, path[-1], value, None
        elif isinstance(value, PerRank):
            for (_, *below), holder, part in _objects((), vars(value)):
                if isinstance(part, _LIVE) or is_list_of(part, *_LISTED):
                    raise CheckpointMismatch(
                        f"{_dotted((name, *below))} is a {type(part).__name__} in a PerRank, which takes tensors, "
                        f"plain values, objects with a state_dict and mappings of these. If each rank has its own "
                        f"module or optimizer, give each a different name in the state."
                    )
                entry = RankEntry(name, _dotted(below), *place, is_position(part))
                yield entry.name_on(place.rank), holder, below[-1] if below else "value", part, entry
        elif is_position(value) or isinstance(value, OfEachRank):
            is_derived = isinstance(value, OfEachRank)
            entry = RankEntry(name, "", *place, is_position=not is_derived, is_derived=is_derived)
            yield entry.name_on(place.rank), owner, path[-1], value, entry
        else:
            yield name, owner, path[-1], value, None


def _dotted(path: Iterable[Any]) -> str:
    return ".".join(map(str, path))


def _objects(path: tuple[Any, ...], node: Mapping[Any, Any]) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """Yield (path, mapping with the object, object) for each object. Mappings are entered if they hold live objects."""
    for key, value in node.items():
        if type(value) not in _LEAVES and isinstance(value, Mapping) and _holds_objects(value):
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
        if type(value) not in _LEAVES
    )


def _is_stateful(value: Any) -> bool:
    """Return whether a value is an object with a state dict. A class with the methods is not."""
    return isinstance(value, Stateful) and not isinstance(value, type)


class ModuleAdapter(StateAdapter):
    kind = "module"
    module: nn.Module

    def __init__(self, name: str, value: nn.Module | Unapplied) -> None:
        self.name = name
        self._unapplied = value if isinstance(value, Unapplied) else None
        self.module = value.module if isinstance(value, Unapplied) else value

    def gather(self) -> tuple[dict[str, Any], dict[str, KeyPath]]:
        state = mark_parameters(self.module, gather_module(self.module))
        trees = {key for key, value in state.items() if isinstance(value, (dict, list, tuple)) and value}
        if not trees:  # only an extra state may be a tree
            return state, {}
        leaves, paths = flatten({key: state.pop(key) for key in trees}, name=self.name)
        return state | leaves, {key: path for key, path in paths.items() if len(path) > 1}

    def present(self) -> Mapping[str, Any]:
        return self._loading.state.values

    def names(self) -> list[str]:
        return list(self._loading.state.values)

    @functools.cached_property
    def _loading(self) -> ModuleLoad:
        return ModuleLoad(self.module, apply=self._unapplied is None)

    def want(self, stored: Mapping[str, Entry], paths: Mapping[str, KeyPath]) -> Wanted:
        return self._loading.want(stored, paths)

    def take(self, filled: dict[str, Any], read: Read, strict: bool) -> Incompatible:
        report = self._loading.take(filled, read, strict)
        if self._unapplied is not None:
            self._unapplied.state_dict.update(self._loading.unapplied)
        return report


class OptimizerAdapter(StateAdapter):
    """Adapter of an optimizer, without the wrappers of frameworks."""

    kind = "optimizer"
    module: nn.Module
    has_own_layout = False
    """True if a gather has found another layout than torch's."""

    def __init__(self, name: str, module: nn.Module, optimizer: torch.optim.Optimizer, stock_aliases: bool) -> None:
        self.name, self.module, self.optimizer = name, module, optimizer
        self._stock_aliases = stock_aliases

    def gather(self) -> tuple[dict[str, Any], dict[str, KeyPath]]:
        nested = gather_optimizer(self.module, self.optimizer)
        if isinstance(nested, OwnLayout):
            self.has_own_layout = True
            require_end(self.name, nested)
            return flatten_tree(nested)
        state, unusual = flatten_trees(mark_slots(self.module, self.optimizer, flatten_optimizer(nested)))
        if self._stock_aliases:
            listed, paths = group_list(nested)
            if not listed.keys() & state.keys():  # a parameter may really have the name "0"
                return state | listed, unusual | paths
        return state, unusual

    def classes(self) -> str:
        """Return the name under which a checkpoint records the class; for several optimizers, separated by ", "."""
        return class_name(type(self.optimizer))

    def shards(self) -> dict[str, Box]:
        """Return the parts of sharded parameters (:func:`~dcp_plugin.core.state.optimizer.shards_of`) after a
        gather."""
        return {} if self.has_own_layout else shards_of(self.module, self.optimizer)

    def names(self) -> list[str]:
        if not groups_of(self.optimizer):
            return []
        groups = group_names(self.module, self.optimizer)
        return [f"{kind}.{fqn}." for names in groups for fqn in names for kind in ("state", "param_groups")]

    def want(self, stored: Mapping[str, Entry], paths: Mapping[str, KeyPath]) -> Wanted:
        self.load: OptimizerLoad | OwnLayoutLoad = load_into(self.module, self.optimizer, stored, paths)
        return self.load.wanted

    def lacks(self, recorded: str) -> list[str]:
        """Return what the optimizer needs and the wanted state of the ``recorded`` class does not have."""
        return self.load.lacks(recorded)

    def check(self, values: Mapping[str, Any], strict: bool) -> None:
        self.load.check(values)

    def take(self, filled: dict[str, Any], read: Read, strict: bool) -> None:
        self.load.commit(filled)


class TreeAdapter(StateAdapter):
    """Common base of the adapters of data and ``Stateful`` objects."""

    kind = "value"
    may_grow = False
    """True if the object accepts a tensor of another shape than it has."""
    may_become_tensor = True
    """True if a stored tensor may take the place of a mapping with items."""

    def __init__(self, name: str, value: Any, entry: RankEntry | None = None) -> None:
        self.name = name
        self.entry = entry
        self._value = value
        self._paths: dict[str, KeyPath] = {}
        self._empty: dict[str, Any] = {}
        """Empty mappings that the object has now and for which the checkpoint has no key: stock never stores them."""
        self._order: list[str] = []

    @property
    def is_shared(self) -> bool:
        return self.entry is None and not _is_state_dict(self._value)

    @property
    def live(self) -> Any:
        return self._value

    @property
    def stands_for_nothing(self) -> bool:
        return self.kind == "value" and not is_tensor(content := self.content()) and _is_open(content)

    @abstractmethod
    def content(self) -> Any:
        """Return the data that the object has now."""

    def gather(self) -> tuple[dict[str, Any], dict[str, KeyPath]]:
        return flatten_tree(self.content())

    def names(self) -> list[str]:
        return list(self.gather()[0])

    def want(self, stored: Mapping[str, Entry], paths: Mapping[str, KeyPath]) -> Wanted:
        return self.want_for(self.content(), stored, paths)

    def want_for(self, content: Any, stored: Mapping[str, Entry], paths: Mapping[str, KeyPath]) -> Wanted:
        """Return the result of :meth:`want`, given the data to replace."""
        self._replaced = content
        current, current_paths = flatten_tree(content, walked_as_stored(stored))
        needed = {key: value for key, value in current.items() if key in stored or not is_empty_mapping(value)}
        self._order = list(current)
        wanted = Wanted(missing=self.missing(needed, stored), empty=not needed and not stored)
        self._empty = {
            key: value for key, value in current.items() if key not in needed and not has_keys_below(key, stored)
        }
        for key, entry in stored.items():
            existing = current.get(key)
            if not is_tensor(existing) and _is_open(existing):
                wanted.received.add(key)
            if not isinstance(entry, StoredTensor):
                wanted.targets[key] = None
                continue
            if not self.may_become_tensor and _has_items(existing):
                continue
            target = self._memory_for(entry, existing) if existing is not None else None
            if target is not None:
                wanted.targets[key] = target
            else:
                wanted.extra[key] = Deferred(entry)
                if _has_room(key, current):
                    wanted.in_room.add(key)
            if target is not existing and is_tensor(existing) and shape_of(existing) not in (None, entry.shape):
                wanted.resized[key] = with_memory(existing)
            is_new = target is None or (target is not existing and type(target) is torch.Tensor)
            if is_new and entry.stored_whole:  # tested second: it decodes the places of chunks
                wanted.refused[key] = f"{OF_ITS_OWN_CLASS}: have one there to load into"
        if not wanted.missing:
            wanted.lacking = {key: value for key, value in needed.items() if key not in stored and is_tensor(value)}
        self._paths = paths_as_stored(stored, current_paths, paths)
        self._paths |= {key: current_paths[key] for key in (*self._empty, *wanted.lacking)}
        return wanted

    def _memory_for(self, entry: StoredTensor, existing: Any) -> Any:
        """Return the object's own tensor if it can hold the entry, or a new one."""
        if is_tensor(existing):
            existing = with_memory(existing)
            if not self.may_grow or shape_of(existing) == entry.shape:
                return existing
        return entry.empty()

    def missing(self, current: Mapping[str, Any], stored: Mapping[str, Entry]) -> list[str]:
        """Return the missing keys. The structure may differ from the checkpoint's; only an object without any key is
        missing."""
        return [] if stored or not current else [""]

    def tree(self, filled: dict[str, Any]) -> Any:
        filled = self.with_empty(filled)
        return filled[""] if "" in filled else unflatten(filled, self._paths)

    def with_empty(self, filled: dict[str, Any]) -> dict[str, Any]:
        """Return the loaded leaves with the empty mappings at their places among them."""
        if not self._empty:
            return filled
        both = filled | self._empty
        return {key: both[key] for key in self._order if key in both} | both


def _has_items(value: Any) -> bool:
    return not is_tensor(value) and isinstance(value, Mapping) and bool(value)


def _has_room(key: str, current: Mapping[str, Any]) -> bool:
    """Return whether a stored key is the key of a leaf that is no tensor, or is below one.

    An empty mapping or None is such a leaf: the load replaces it by all that is stored below it.
    """
    above = (key[:at] for at, letter in enumerate(key) if letter == ".")
    leaf = next((name for name in ("", *above, key) if name in current), None)
    return leaf is not None and not is_tensor(current[leaf])


def _is_open(value: Any) -> bool:
    """Return whether a value takes all leaves that are stored below its key."""
    return value is None or (isinstance(value, (Mapping, list)) and not value)


class StatefulAdapter(TreeAdapter):
    kind = "stateful"
    may_grow = True

    def content(self) -> Any:
        state = self._value.state_dict()
        require_end(self.name, state)
        return state

    def take(self, filled: dict[str, Any], read: Read, strict: bool) -> None:
        self._value.load_state_dict(with_types_of(self._replaced, self.tree(filled)))


class PositionAdapter(StatefulAdapter):
    """Adapter of a loader or a sampler of torchdata.

    A load does not call ``state_dict()`` before it replaces the state: ``torchdata.nodes.Loader`` would keep the
    iterator that the call makes, and begin with the first batch. The load calls it afterwards, which makes the iterator
    of the next loop. Making it draws random numbers, which an uninterrupted training does not draw at this point, so
    the load then restores the random streams.
    """

    def names(self) -> list[str]:
        return []

    def want(self, stored: Mapping[str, Entry], paths: Mapping[str, KeyPath]) -> Wanted:
        return self.want_for({}, stored, paths) if stored else Wanted(missing=[""])

    def take(self, filled: dict[str, Any], read: Read, strict: bool) -> None:
        super().take(filled, read, strict)
        with torch.random.fork_rng(devices=[]):
            self._value.state_dict()


class MappingAdapter(TreeAdapter):
    may_become_tensor = False

    def content(self) -> Any:
        return self._value

    def missing(self, current: Mapping[str, Any], stored: Mapping[str, Entry]) -> list[str]:
        """Return the missing keys: all keys of a mapping are wanted, since the user has named them.

        An empty container or None takes the leaves stored below it.
        """
        if not stored:
            return [""] if current else []
        under_tensors = [
            f"{key}.{name}".removeprefix(".")
            for key, value in current.items()
            if _has_items(value) and isinstance(stored.get(key), StoredTensor)
            for name in value
        ]
        return under_tensors + [
            key
            for key, value in current.items()
            if key and key not in stored and not (_is_open(value) and has_keys_below(key, stored))
        ]

    def check(self, values: Mapping[str, Any], strict: bool) -> None:
        for key, value in values.items() if strict else ():
            path = self._paths[key]
            holder = _holder_of(self._value, path)
            current = self._value if not path else None if holder is None else holder[step_of(path[-1])]
            require_names(join(self.name, key), current, value)

    def take(self, filled: dict[str, Any], read: Read, strict: bool) -> None:
        if not isinstance(self._value, MutableMapping):
            return
        holders = {key: _holder_of(self._value, self._paths[key]) for key in filled}
        if "" not in filled and all(holder is not None for holder in holders.values()):
            for key, holder in holders.items():  # all holders exist: set each leaf in place, also in lists
                holder[step_of(self._paths[key][-1])] = filled[key]
        else:
            _update(self._value, with_types_of(self._value, self.tree(filled)))


def _holder_of(node: Any, path: KeyPath) -> Any:
    """Return the mapping or list in ``node`` that has the last step of the path; None if none has it."""
    for part in path[:-1]:
        node = node[step_of(part)] if _has(node, step_of(part)) else None
    return node if path and _has(node, step_of(path[-1])) else None


def _has(node: Any, step: Any) -> bool:
    if isinstance(node, list):
        return isinstance(step, int) and step < len(node)
    return isinstance(node, MutableMapping) and step in node


def _update(target: MutableMapping[Any, Any], tree: Mapping[Any, Any]) -> None:
    """Replace the keys that the tree has, and keep the others; nested mappings stay the same objects."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and isinstance(target.get(key), MutableMapping):
            _update(target[key], value)
        else:
            target[key] = value


class ValueAdapter(TreeAdapter):
    """Adapter of a single tensor, filled in place, or a single plain value, replaced in the mapping that holds it.

    ``self._value`` is that mapping.
    """

    def __init__(self, name: str, owner: Any, key: Any, entry: RankEntry | None = None) -> None:
        super().__init__(name, owner, entry)
        self._key = key

    @property
    def value(self) -> Any:
        return self._value[self._key]

    @property
    def is_leaf(self) -> bool:
        """True if the value is certainly one leaf, under the bare name."""
        return type(self.value) in _LEAVES

    def content(self) -> Any:
        return self.value

    @property
    def is_tensor(self) -> bool:
        """True if the value is a tensor that can be filled."""
        return is_tensor(self.value) and not is_meta(self.value)

    def take(self, filled: dict[str, Any], read: Read, strict: bool) -> None:
        if filled.keys() == {""} and filled[""] is self.value:
            return
        if filled := self.with_empty(filled):
            loaded = unflatten(filled, {key: ("it", *self._paths[key]) for key in filled})["it"]
            self._value[self._key] = values.on_devices_of(self.value, loaded)


def _is_expected_equal(leaf: Any) -> bool:
    """Return whether a leaf of data should be the same on all ranks: it is neither a number nor a shard."""
    if type(leaf) in EXACTLY_TENSORS:
        return bool(leaf.numel() > 1)
    if type(leaf) in (list, tuple):
        return not all(type(item) is float for item in leaf)
    if isinstance(leaf, (set, frozenset)):  # the order of sets, and so of their bytes, differs between processes
        return False
    return not isinstance(leaf, (Number, ShardedValue)) and not is_tensor(leaf)
