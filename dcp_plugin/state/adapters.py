"""The objects of the user's ``state`` mapping: what each gives to a save, what it wants from a load, how it takes it.

There is an adapter for modules, optimizers, objects with a ``state_dict`` (``Stateful``) and data. The class of an
object decides which; the names of the mapping are the first segments of the keys.

For data (mappings, single values, and objects with a ``state_dict``) a tensor is filled in place where the object has
one, everything else is replaced. An adapter finds which tensors only the object or only the checkpoint has, and which
have another shape; :mod:`~dcp_plugin.loading.matching` decides what becomes of them.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.format import values
from dcp_plugin.format.index import Entry, StoredTensor
from dcp_plugin.format.keys import (
    Walks,
    flatten,
    has_keys_below,
    is_empty_mapping,
    join,
    paths_as_stored,
    require_names,
    step_of,
    unflatten,
    walked_as_stored,
    walked_by_us,
    with_types_of,
)
from dcp_plugin.records import Box
from dcp_plugin.state.annotations import layout_of, mark_parameters, mark_slots
from dcp_plugin.state.module import gather_module, reshard
from dcp_plugin.state.module_load import Deferred, ModuleLoad, Read
from dcp_plugin.state.names import trained_module
from dcp_plugin.state.optimizer import (
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
from dcp_plugin.state.optimizer_load import OptimizerLoad, OwnLayoutLoad, load_into
from dcp_plugin.state.per_rank import PerRank, RankEntry, is_position
from dcp_plugin.tensors._torch import is_meta, is_tensor, shape_of, with_memory
from dcp_plugin.tensors._torch_modules import Incompatible, patched_together, unwrapped_optimizer
from dcp_plugin.tensors.kinds import EXACTLY_TENSORS, OF_ITS_OWN_CLASS
from dcp_plugin.types import KeyPath, ShardedValue, Wanted


@dataclass(frozen=True)
class NamesOnly:
    """A module in the state that names the parameters of its optimizer, and is itself neither saved nor loaded."""

    module: nn.Module


@dataclass(frozen=True)
class Unapplied:
    """A module whose state is read, distributed as here, but not loaded into it: the caller does that later."""

    module: nn.Module
    state_dict: dict[str, Any] = field(default_factory=dict)
    """Everything that is stored for the module, by clean FQN, once it is loaded."""


class CalledLast:
    """A base class for ``Stateful`` objects whose methods are called after those of all others in the state: random
    streams, for one, from which the ``state_dict`` of a dataloader may draw."""


class StateAdapter(Protocol):
    """One named object of the state.

    ``kind`` is ``"module"``, ``"optimizer"``, ``"stateful"`` or ``"value"``.
    """

    name: str
    kind: str

    @property
    def entry(self) -> RankEntry | None:
        """The place of the object, if each rank has its own."""

    @property
    def is_shared(self) -> bool:
        """Whether the object is data that should be the same on all ranks."""

    @property
    def module(self) -> nn.Module | None:
        """The module that the object is, or whose parameters it optimizes; None for any other object."""

    def gather(self) -> tuple[dict[str, Any], dict[str, KeyPath]]:
        """Leaves by key relative to the name, and their paths below it, but for those that are ``(key,)``."""

    def names(self) -> list[str]:
        """The keys it has, relative to the name; an optimizer gives a prefix, up to the dot, for each parameter.
        Collective if a module contains FSDP1."""

    def want(self, stored: Mapping[str, Entry], paths: Mapping[str, KeyPath]) -> Wanted:
        """Decide what to read, given what is stored under the name. Changes nothing."""

    def check(self, values: Mapping[str, Any], strict: bool) -> None:
        """Check the values that are no tensors, before any tensor is overwritten.

        Args:
            strict: Whether what is missing will be an error.

        Raises:
            CheckpointMismatch: They do not fit.
        """

    def take(self, filled: dict[str, Any], read: Read, strict: bool) -> Incompatible | None:
        """Load the object from the targets of :meth:`want`, filled.

        Args:
            read: Fills what was deferred, once it has memory.
            strict: Whether what is missing will be an error.

        Returns:
            For a module, what its own code finds missing and unexpected.
        """


_LEAVES = frozenset({*EXACTLY_TENSORS, bool, int, float, str, bytes, type(None)})
"""The classes of most values, which are no objects with state and no containers: nothing else need be asked."""


class Place(NamedTuple):
    """This rank among the ranks that save or load together."""

    rank: int
    world_size: int


ALONE = Place(0, 1)

NamedObject = tuple[str, Any, Any, Any, RankEntry | None]
"""An object of the state: its name, the mapping that has it and the key there, the object, and its place if each rank
has its own."""


def adapters_of(
    state: Mapping[str, Any], stock_aliases: bool = True, place: Place = ALONE, is_data: bool = False
) -> list[StateAdapter]:
    """Return the adapters of a state: of modules, of optimizers, of ``Stateful`` objects, of data.

    The order of the objects is the same on all ranks, because their methods may communicate: they are sorted by name.
    The keys of a state may come in another order on each rank, as from a set. Data keeps the order of the state.

    Args:
        stock_aliases: Whether optimizers give their param groups under stock's keys too.
        place: This rank, for values of which each rank has its own.
        is_data: Whether an object in a mapping of the state is a value, which is not asked for its state.

    Raises:
        TypeError: It is no mapping.
        CheckpointMismatch: An optimizer's parameters are in no module of the state; two objects have one name; or a
            :class:`~dcp_plugin.PerRank` has a module or an optimizer.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f'a state maps names to objects, as {{"model": model}} does; this is a {type(state).__name__}')
    found: list[NamedObject] = [(name, state, name, value, None) for name, value in state.items()]
    if not is_data:
        found = list(_named_objects(state, place))
    names = [name for name, *_ in found]
    if len(set(names)) < len(names):
        raise CheckpointMismatch(f"two objects of the state have the name {max(names, key=names.count)!r}: rename one")
    modules: dict[str, nn.Module] = {}
    adapters: list[StateAdapter] = []
    objects = [(name, value) for name, _, _, value, _ in found if type(value) not in _LEAVES]
    for kind in (nn.Module, Unapplied, NamesOnly):
        for name, value in objects:
            if isinstance(value, kind):
                modules[name] = value if isinstance(value, nn.Module) else value.module
                if kind is not NamesOnly:
                    unapplied = value if isinstance(value, Unapplied) else None
                    adapters.append(ModuleAdapter(name, modules[name], unapplied))
    for module in modules.values():
        reshard(module)
    for name, owner, key, value, entry in found:
        if type(value) in _LEAVES:
            adapters.append(ValueAdapter(name, owner, key, entry))
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
    _check_patched([(name, value) for name, value in objects if isinstance(value, torch.optim.Optimizer)])
    data = [adapter for adapter in adapters if adapter.kind == "value"]
    return [*sorted((adapter for adapter in adapters if adapter.kind != "value"), key=_turn), *data]


def _check_patched(optimizers: Sequence[tuple[str, torch.optim.Optimizer]]) -> None:
    """Raise CheckpointMismatch if the state has a part of the optimizers that torch has patched together. With stock,
    each of them stands for all."""
    known = {id(optimizer) for _, optimizer in optimizers}
    for name, optimizer in optimizers:
        lacking = [other for other in patched_together(optimizer) if id(other) not in known]
        if lacking:
            raise CheckpointMismatch(
                f"_patch_optimizer_state_dict of torch has patched the optimizer {name!r} together with "
                f"{len(lacking)} more, which the state lacks. Have each of them in the state under a name of its own; "
                f"dcp_plugin needs no patch."
            )


def _turn(adapter: StateAdapter) -> tuple[int, bool, bool, str]:
    """Return the sort key of an object: when its methods are called. Loaders come before other ``Stateful`` objects,
    which may have random streams, because they draw from these."""
    is_last = isinstance(adapter, StatefulAdapter) and adapter.is_called_last
    is_position = isinstance(adapter, PositionAdapter)
    return ("module", "optimizer", "stateful").index(adapter.kind), is_last, not is_position, adapter.name


def gather_state(adapters: list[StateAdapter]) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """All leaves by key, and the paths of those whose path is not the
    :func:`~dcp_plugin.format.columns.default_path` of their key. Collective if a module contains FSDP1.

    Raises:
        CheckpointMismatch: Two objects have the same key, as ``{"a": {"b.c": 1}, "a.b": {"c": 1}}`` has.
    """
    leaves: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    for adapter in adapters:
        if isinstance(adapter, ValueAdapter) and adapter.is_leaf:  # thousands, where the state is one flat mapping
            key = adapter.name
            if key in leaves:
                raise CheckpointMismatch(f"two values of the state have the key {key!r}")
            leaves[key] = adapter.leaf
            if "." in key:
                paths[key] = tuple(key.split("."))
            continue
        mine, unusual = adapter.gather()
        here = dict(zip(_below(adapter.name, tuple(mine)), mine.values(), strict=True))
        if leaves and (twice := here.keys() & leaves.keys()):
            raise CheckpointMismatch(f"two values of the state have the key {min(twice)!r}")
        leaves |= here
        above = tuple(adapter.name.split("."))
        if len(above) > 1:
            unusual = {key: unusual.get(key, (key,)) for key in mine}
        paths |= {join(adapter.name, key): above + path for key, path in unusual.items()}
    return leaves, paths


@functools.lru_cache(maxsize=16)
def _below(name: str, keys: tuple[str, ...]) -> list[str]:
    """The keys of an object in the state. Each save has them all, the same ones each time."""
    return [f"{name}.{key}" if key else name for key in keys]


def shards_in(
    adapters: list[StateAdapter], kinds: Mapping[str, str], owners: Iterable[Any]
) -> dict[str, dict[str, Box]]:
    """This rank's parts of sharded parameters, by the name of their optimizer.

    Args:
        kinds: Names under which there are state dicts. Those of optimizers are of the optimizers in ``owners``, in
            their order, and these train its only module.
    """
    found = {adapter.name: adapter.shards() for adapter in adapters if isinstance(adapter, OptimizerAdapter)}
    owners = list(owners)
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]
    if len(modules) == 1:
        owned = _owned_optimizers(found, kinds, owners)
        found |= {name: shards_of(modules[0], optimizer) for name, optimizer in owned.items()}
    return found


def optimizer_classes(adapters: list[StateAdapter], kinds: Mapping[str, str], owners: Iterable[Any]) -> dict[str, str]:
    """Return the class of each optimizer, without wrappers, by name. The arguments are those of :func:`shards_in`."""
    found = {adapter.name: adapter.optimizer for adapter in adapters if isinstance(adapter, OptimizerAdapter)}
    found |= _owned_optimizers(found, kinds, owners)
    return {name: class_name(type(optimizer)) for name, optimizer in found.items()}


def _owned_optimizers(
    found: Collection[str], kinds: Mapping[str, str], owners: Iterable[Any]
) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers among ``owners`` by the names of their state dicts, which are none of the found ones."""
    optimizers = [unwrapped_optimizer(owner) for owner in owners if isinstance(owner, torch.optim.Optimizer)]
    names = [name for name, kind in kinds.items() if kind == "optimizer" and name not in found]
    return dict(zip(names, optimizers, strict=True)) if len(names) == len(optimizers) else {}


def shared_keys(
    state: Mapping[str, Any], adapters: list[StateAdapter], leaves: Mapping[str, Any], kinds: Mapping[str, str]
) -> frozenset[str]:
    """Return the keys of data that should be the same on all ranks.

    The state of a module or an optimizer does not count, as an object or as its state dict: buffers differ between
    ranks under DDP, and the buffers of rank 0 are meant.

    Args:
        kinds: Names under which there are state dicts of modules and optimizers.
    """
    if _is_state_dict(state):
        return frozenset()
    apart = {*kinds, *(adapter.name for adapter in adapters if not adapter.is_shared)}
    fronts = tuple(f"{name}." for name in apart)
    return frozenset(
        key for key, leaf in leaves.items() if _is_expected_equal(leaf) and not f"{key}.".startswith(fronts)
    )


def _is_state_dict(value: Any) -> bool:
    """Whether a mapping is the ``state_dict()`` of a module or an optimizer."""
    return hasattr(value, "_metadata") or (isinstance(value, Mapping) and value.keys() == {"state", "param_groups"})


def layouts_of(leaves: Mapping[str, Any]) -> list[str]:
    """How the tensors were distributed, in words for the summary."""
    found = {id(leaf): leaf for leaf in leaves.values() if type(leaf) not in (int, float, bool)}.values()
    return sorted({layout_of(leaf) for leaf in found if is_tensor(leaf) or isinstance(leaf, ShardedValue)})


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
                if isinstance(part, _LIVE):
                    raise CheckpointMismatch(
                        f"{_dotted((name, *below))} is a {type(part).__name__} in a PerRank, which takes tensors, "
                        f"plain values, objects with a state_dict and mappings of these. Where ranks have modules or "
                        f"optimizers of their own, give each a name of its own in the state."
                    )
                entry = RankEntry(name, _dotted(below), *place, is_position(part))
                yield entry.name_on(place.rank), holder, below[-1] if below else "value", part, entry
        elif is_position(value):
            entry = RankEntry(name, "", *place, is_position=True)
            yield entry.name_on(place.rank), owner, path[-1], value, entry
        else:
            yield name, owner, path[-1], value, None


def _dotted(path: Iterable[Any]) -> str:
    return ".".join(map(str, path))


def _objects(path: tuple[Any, ...], node: Mapping[Any, Any]) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """(path, the mapping it is in, object) for each object. Mappings are entered if they hold live objects."""
    for key, value in node.items():
        if type(value) not in _LEAVES and isinstance(value, Mapping) and _holds_objects(value):
            yield from _objects((*path, key), value)
        else:
            yield (*path, key), node, value


_LIVE = (nn.Module, torch.optim.Optimizer, NamesOnly, Unapplied, PerRank)
"""The classes of objects that are found in mappings at any depth, beside objects with a state dict."""


def _holds_objects(node: Mapping[str, Any]) -> bool:
    return any(
        isinstance(value, _LIVE)
        or (not is_tensor(value) and _is_stateful(value))
        or (isinstance(value, Mapping) and _holds_objects(value))
        for value in node.values()
        if type(value) not in _LEAVES
    )


def _is_stateful(value: Any) -> bool:
    """Whether a value is an object with a state dict. A class with the methods is none."""
    return isinstance(value, Stateful) and not isinstance(value, type)


class ModuleAdapter:
    kind = "module"
    entry: RankEntry | None = None
    is_shared = False

    def __init__(self, name: str, module: nn.Module, unapplied: Unapplied | None = None) -> None:
        self.name, self.module, self._unapplied = name, module, unapplied

    def gather(self) -> tuple[dict[str, Any], dict[str, KeyPath]]:
        state = mark_parameters(self.module, gather_module(self.module))
        trees = {key for key, value in state.items() if isinstance(value, (dict, list, tuple)) and value}
        if not trees:  # of an extra state, for one
            return state, {}
        leaves, paths = flatten({key: state.pop(key) for key in trees})
        return state | leaves, {key: path for key, path in paths.items() if len(path) > 1}

    def names(self) -> list[str]:
        return list(self._loading.state.values)

    @functools.cached_property
    def _loading(self) -> ModuleLoad:
        return ModuleLoad(self.module, apply=self._unapplied is None)

    def want(self, stored: Mapping[str, Entry], paths: Mapping[str, KeyPath]) -> Wanted:
        return self._loading.want(stored, paths)

    def check(self, values: Mapping[str, Any], strict: bool) -> None:
        """Any value is fine."""

    def take(self, filled: dict[str, Any], read: Read, strict: bool) -> Incompatible:
        found = self._loading.take(filled, read, strict)
        if self._unapplied is not None:
            self._unapplied.state_dict.update(self._loading.unapplied)
        return found


class OptimizerAdapter:
    """An optimizer, without the wrappers of frameworks."""

    kind = "optimizer"
    entry: RankEntry | None = None
    is_shared = False

    def __init__(self, name: str, module: nn.Module, optimizer: torch.optim.Optimizer, stock_aliases: bool) -> None:
        self.name, self.module, self.optimizer = name, module, optimizer
        self._stock_aliases = stock_aliases
        self._has_own_layout = False

    def gather(self) -> tuple[dict[str, Any], dict[str, KeyPath]]:
        nested = gather_optimizer(self.module, self.optimizer)
        if isinstance(nested, OwnLayout):
            self._has_own_layout = True
            return flatten_tree(nested)
        state, unusual = flatten_trees(mark_slots(self.module, self.optimizer, flatten_optimizer(nested)))
        if self._stock_aliases:
            listed, paths = group_list(nested)
            if not listed.keys() & state.keys():  # a parameter may really be called "0"
                return state | listed, unusual | paths
        return state, unusual

    def shards(self) -> dict[str, Box]:
        """Return the parts of sharded parameters (:func:`~dcp_plugin.state.optimizer.shards_of`) after a gather."""
        return {} if self._has_own_layout else shards_of(self.module, self.optimizer)

    def names(self) -> list[str]:
        if not groups_of(self.optimizer):
            return []
        groups = group_names(self.module, self.optimizer)
        return [f"{kind}.{fqn}." for names in groups for fqn in names for kind in ("state", "param_groups")]

    def want(self, stored: Mapping[str, Entry], paths: Mapping[str, KeyPath]) -> Wanted:
        self._load: OptimizerLoad | OwnLayoutLoad = load_into(self.module, self.optimizer, stored, paths)
        self._load.targets()
        return self._load.wanted

    def lacks(self, recorded: str) -> list[str]:
        """Return what the optimizer needs and the wanted state of another class, the recorded one, does not have."""
        return self._load.lacks(recorded)

    def check(self, values: Mapping[str, Any], strict: bool) -> None:
        self._load.check(values)

    def take(self, filled: dict[str, Any], read: Read, strict: bool) -> None:
        self._load.commit(filled)


class TreeAdapter:
    """What data and Stateful objects have in common."""

    kind = "value"
    module: nn.Module | None = None
    may_grow = False
    """Whether the object can be handed a tensor of another shape than it has."""

    def __init__(self, name: str, value: Any, entry: RankEntry | None = None) -> None:
        self.name = name
        self.entry = entry
        self._value = value
        self._paths: dict[str, KeyPath] = {}
        self._empty: dict[str, Any] = {}
        """The empty mappings that the object has now and of which nothing is stored: stock never stores them."""
        self._order: list[str] = []

    @property
    def is_shared(self) -> bool:
        """See :class:`StateAdapter`."""
        return self.entry is None and not _is_state_dict(self._value)

    def gather(self, walks: Walks = walked_by_us) -> tuple[dict[str, Any], dict[str, KeyPath]]:
        raise NotImplementedError

    def names(self) -> list[str]:
        return list(self.gather()[0])

    def want(self, stored: Mapping[str, Entry], paths: Mapping[str, KeyPath]) -> Wanted:
        current, mine_at = self.gather(walked_as_stored(stored))
        needed = {key: value for key, value in current.items() if key in stored or not is_empty_mapping(value)}
        self._order = list(current)
        wanted = Wanted(missing=self.missing(needed, stored), empty=not needed and not stored)
        self._empty = {
            key: value for key, value in current.items() if key not in needed and not has_keys_below(key, stored)
        }
        for key, entry in stored.items():
            mine = current.get(key)
            if not isinstance(entry, StoredTensor):
                wanted.targets[key] = None
                continue
            made = self._memory_for(entry, mine) if mine is not None else None
            if made is not None:
                wanted.targets[key] = made
            else:
                wanted.extra[key] = Deferred(entry)
                if _has_room(key, current):
                    wanted.in_room.add(key)
            if made is not mine and is_tensor(mine) and shape_of(mine) not in (None, entry.shape):
                wanted.resized[key] = with_memory(mine)
            is_new = made is None or (made is not mine and type(made) is torch.Tensor)
            if is_new and entry.stored_whole:  # in this order: the entry decodes the places of its chunks for it
                wanted.refused[key] = f"{OF_ITS_OWN_CLASS}: have one there to load into"
        if not wanted.missing:
            wanted.lacking = {key: value for key, value in needed.items() if key not in stored and is_tensor(value)}
        self._paths = paths_as_stored(stored, mine_at, paths)
        self._paths |= {key: mine_at[key] for key in (*self._empty, *wanted.lacking)}
        return wanted

    def check(self, values: Mapping[str, Any], strict: bool) -> None:
        """Any value is fine."""

    def _memory_for(self, entry: StoredTensor, mine: Any) -> Any:
        """The object's own tensor, or a new one where it has none to offer."""
        if is_tensor(mine):
            mine = with_memory(mine)
            if not self.may_grow or shape_of(mine) == entry.shape:
                return mine
        return entry.empty()

    def missing(self, current: Mapping[str, Any], stored: Mapping[str, Entry]) -> list[str]:
        """The structure may differ from the checkpoint's; an object is missing if nothing of it is stored."""
        return [] if stored or not current else [""]

    def tree(self, filled: dict[str, Any]) -> Any:
        filled = self.with_empty(filled)
        return filled[""] if "" in filled else unflatten(filled, self._paths)

    def with_empty(self, filled: dict[str, Any]) -> dict[str, Any]:
        """What was read, and the empty mappings in their places among it."""
        if not self._empty:
            return filled
        both = filled | self._empty
        return {key: both[key] for key in self._order if key in both} | both


def _has_room(key: str, current: Mapping[str, Any]) -> bool:
    """Whether a stored key is that of a leaf that is no tensor, or lies below one, such as an empty mapping or None:
    the leaf is replaced by all that is stored there."""
    above = (key[:at] for at, letter in enumerate(key) if letter == ".")
    leaf = next((name for name in ("", *above, key) if name in current), None)
    return leaf is not None and not is_tensor(current[leaf])


def _is_open(value: Any) -> bool:
    """Whether a value takes everything that is stored below its key."""
    return value is None or (isinstance(value, (Mapping, list)) and not value)


def _flatten_mapping(tree: Mapping[str, Any], walks: Walks) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """Flatten a mapping. One that is not walked is a value, stored under the bare name."""
    return flatten(tree, walks) if walks("", tree) else ({"": tree}, {"": ()})


class StatefulAdapter(TreeAdapter):
    kind = "stateful"
    may_grow = True

    @property
    def is_called_last(self) -> bool:
        return isinstance(self._value, CalledLast)

    def gather(self, walks: Walks = walked_by_us) -> tuple[dict[str, Any], dict[str, KeyPath]]:
        self._current = self._value.state_dict()
        return _flatten_mapping(self._current, walks)

    def take(self, filled: dict[str, Any], read: Read, strict: bool) -> None:
        self._value.load_state_dict(with_types_of(self._current, self.tree(filled)))


class PositionAdapter(StatefulAdapter):
    """A loader or a sampler of torchdata.

    A load does not ask for the state that it replaces: ``torchdata.nodes.Loader`` would keep the iterator that its
    ``state_dict()`` makes, and begin with the first batch. The load asks afterwards, which makes the iterator of the
    next loop. To make it draws from the random streams, and a training that is not interrupted draws nothing there.
    """

    def names(self) -> list[str]:
        return []

    def want(self, stored: Mapping[str, Entry], paths: Mapping[str, KeyPath]) -> Wanted:
        return super().want(stored, paths) if stored else Wanted(missing=[""])

    def gather(self, walks: Walks = walked_by_us) -> tuple[dict[str, Any], dict[str, KeyPath]]:
        if walks is walked_by_us:
            return super().gather(walks)
        self._current: dict[str, Any] = {}
        return _flatten_mapping(self._current, walks)

    def take(self, filled: dict[str, Any], read: Read, strict: bool) -> None:
        super().take(filled, read, strict)
        with torch.random.fork_rng(devices=[]):
            self._value.state_dict()


class MappingAdapter(TreeAdapter):
    def gather(self, walks: Walks = walked_by_us) -> tuple[dict[str, Any], dict[str, KeyPath]]:
        return _flatten_mapping(self._value, walks)

    def missing(self, current: Mapping[str, Any], stored: Mapping[str, Entry]) -> list[str]:
        """All keys of a mapping are wanted, since the user has named them; an empty container or None takes what is
        stored below it."""
        if not stored:
            return [""] if current else []
        empty = {key for key, value in current.items() if _is_open(value)}
        return [
            key
            for key in current
            if key and key not in stored and not (key in empty and any(other.startswith(f"{key}.") for other in stored))
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
            for key, holder in holders.items():  # the structure is there: leaf by leaf, also in lists
                holder[step_of(self._paths[key][-1])] = filled[key]
        else:
            _update(self._value, with_types_of(self._value, self.tree(filled)))


def _holder_of(node: Any, path: KeyPath) -> Any:
    """The mapping or list in ``node`` that has the last step of the path; None if there is none."""
    for part in path[:-1]:
        node = node[step_of(part)] if _has(node, step_of(part)) else None
    return node if path and _has(node, step_of(path[-1])) else None


def _has(node: Any, step: Any) -> bool:
    if isinstance(node, list):
        return isinstance(step, int) and step < len(node)
    return isinstance(node, MutableMapping) and step in node


def _update(target: MutableMapping[Any, Any], tree: Mapping[Any, Any]) -> None:
    """Replace what the tree has, keep the rest; nested mappings stay the same objects."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and isinstance(target.get(key), MutableMapping):
            _update(target[key], value)
        else:
            target[key] = value


class ValueAdapter(TreeAdapter):
    """A single tensor, filled in place, or a single plain value, replaced in the mapping that holds it."""

    def __init__(self, name: str, owner: Any, key: Any, entry: RankEntry | None = None) -> None:
        super().__init__(name, owner, entry)
        self._key = key

    @property
    def leaf(self) -> Any:
        """The value, as it is now."""
        return self._value[self._key]

    @property
    def is_leaf(self) -> bool:
        """Whether it is certain that the value is one leaf, under the bare name."""
        return type(self.leaf) in _LEAVES

    def gather(self, walks: Walks = walked_by_us) -> tuple[dict[str, Any], dict[str, KeyPath]]:
        return flatten_tree(self._value[self._key], walks)

    @property
    def value(self) -> Any:
        return self._value[self._key]

    @property
    def is_tensor(self) -> bool:
        """Whether the value is a tensor that can be filled."""
        return is_tensor(self.value) and not is_meta(self.value)

    def take(self, filled: dict[str, Any], read: Read, strict: bool) -> None:
        if filled.keys() == {""} and filled[""] is self.value:
            return
        if filled := self.with_empty(filled):
            loaded = unflatten(filled, {key: ("it", *self._paths[key]) for key in filled})["it"]
            self._value[self._key] = values.on_devices_of(self._value[self._key], loaded)


def _is_expected_equal(leaf: Any) -> bool:
    """Whether a leaf of data should be the same on all ranks: not a number, and not a shard."""
    if type(leaf) in EXACTLY_TENSORS:
        return bool(leaf.numel() > 1)
    if type(leaf) in (list, tuple):
        return not all(type(item) is float for item in leaf)
    if isinstance(leaf, (set, frozenset)):  # whose order, and so whose bytes, differ between processes
        return False
    return not isinstance(leaf, (Number, ShardedValue)) and not is_tensor(leaf)
