"""Adapters of the objects in the user's ``state`` mapping, for saves and for loads.

There is an adapter for modules, optimizers, objects with a ``state_dict`` (``Stateful``) and data.
:func:`~dcp_plugin.core.state.named_objects.adapters_of` selects the adapter by the class of an object.

A save calls :meth:`StateAdapter.gather`. A load calls ``want``, ``check`` and ``take``, in this order. An adapter only
reports which tensors only the object or only the checkpoint has, and which have another shape.
:mod:`~dcp_plugin.core.loading.matching` decides the response.

For data (mappings, single values, and objects with a ``state_dict``) a tensor is filled in place if the object has one.
All other values are replaced.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dcp_plugin.core.format import values
from dcp_plugin.core.format.index import Entry, KeyPath, StoredTensor
from dcp_plugin.core.format.keys import (
    flatten,
    has_keys_below,
    is_empty_mapping,
    join,
    paths_as_stored,
    require_end,
    require_names,
    step_of,
    unflatten,
    walked_as_stored,
    with_types_of,
)
from dcp_plugin.core.state.module import gather_module
from dcp_plugin.core.state.module_load import Deferred, ModuleLoad, Read
from dcp_plugin.core.state.names import mark_parameters, mark_slots
from dcp_plugin.core.state.optimizer import (
    OwnLayout,
    class_name,
    flatten_optimizer,
    flatten_tree,
    flatten_trees,
    gather_optimizer,
    group_list,
    group_names,
    shards_of,
)
from dcp_plugin.core.state.optimizer_load import OptimizerLoad, OwnLayoutLoad, load_into
from dcp_plugin.core.tensors._torch import is_meta, is_tensor, shape_of, with_memory
from dcp_plugin.core.tensors._torch_modules import Incompatible
from dcp_plugin.core.tensors.kinds import EXACTLY_TENSORS, OF_ITS_OWN_CLASS
from dcp_plugin.core.types import Box, RankEntry, Wanted


@dataclass(frozen=True)
class NamesOnly:
    """Module in the state that names the parameters of its optimizer, and is itself neither saved nor loaded."""

    module: nn.Module


@dataclass(frozen=True)
class Unapplied:
    """Module whose state is read, distributed as here, but not loaded into it. The caller loads it later."""

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
        """The user's object. For a single value it is the mapping that contains the value."""
        return self.module

    @abstractmethod
    def gather(self) -> tuple[dict[str, Any], dict[str, KeyPath]]:
        """Return the leaves by key relative to the name, and their paths below it. Paths ``(key,)`` are left out."""

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


LEAVES = values.PLAIN | {*EXACTLY_TENSORS}
"""Classes of most values. They have no state and contain no objects, so no other check is needed."""


def is_state_dict(value: Any) -> bool:
    """Return whether a mapping is the ``state_dict()`` of a module or an optimizer."""
    return hasattr(value, "_metadata") or (isinstance(value, Mapping) and value.keys() == {"state", "param_groups"})


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
        self._current: dict[str, Any] = {}
        """Leaves of the data to replace, by key."""

    @property
    def is_shared(self) -> bool:
        return self.entry is None and not is_state_dict(self._value)

    @property
    def live(self) -> Any:
        return self._value

    @property
    def stands_for_nothing(self) -> bool:
        return self.kind == "value" and not is_tensor(content := self.content()) and _is_open(content)

    def content(self) -> Any:
        """Return the data that the object has now."""
        return self._value

    def gather(self) -> tuple[dict[str, Any], dict[str, KeyPath]]:
        return flatten_tree(self.content())

    def names(self) -> list[str]:
        return list(self.gather()[0])

    def want(self, stored: Mapping[str, Entry], paths: Mapping[str, KeyPath]) -> Wanted:
        return self.want_for(self.content(), stored, paths)

    def want_for(self, content: Any, stored: Mapping[str, Entry], paths: Mapping[str, KeyPath]) -> Wanted:
        """Return the result of :meth:`want`, given the data to replace."""
        self.replaced = content
        current, current_paths = flatten_tree(content, walked_as_stored(stored))
        # A checkpoint may lack an empty mapping: stock stores no key for it.
        needed = {key: value for key, value in current.items() if key in stored or not is_empty_mapping(value)}
        self._current = current
        wanted = Wanted(missing=self.missing(needed, stored), saved_empty=not needed and not stored)
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
            if not self.may_become_tensor and _has_items(existing):  # missing() reports the items
                continue
            target = with_memory(existing) if is_tensor(existing) else None
            if existing is not None and (target is None or (self.may_grow and shape_of(target) != entry.shape)):
                target = entry.empty()
            if target is not None:
                wanted.targets[key] = target
            else:
                wanted.extra_targets[key] = Deferred(entry)
                if _has_room(key, current):
                    wanted.extra_in_gaps.add(key)
            if target is not existing and is_tensor(existing) and shape_of(existing) not in (None, entry.shape):
                wanted.resized[key] = with_memory(existing)
            # A tensor that torch.save stores fills only a tensor of its own class, which new memory is not.
            is_new = target is None or (target is not existing and type(target) is torch.Tensor)
            if is_new and entry.stored_whole:  # tested second: it decodes the places of chunks
                wanted.unfillable[key] = f"{OF_ITS_OWN_CLASS}: have one there to load into"
        if not wanted.missing:
            wanted.missing_tensors = {
                key: value for key, value in needed.items() if key not in stored and is_tensor(value)
            }
        self._paths = paths_as_stored(stored, current_paths, paths)
        self._paths |= {key: current_paths[key] for key in (*self._empty, *wanted.missing_tensors)}
        return wanted

    def missing(self, current: Mapping[str, Any], stored: Mapping[str, Entry]) -> list[str]:
        """Return the missing keys. The object is missing if the checkpoint has no key of it. Single keys are not, since
        the structure of the object may differ from the checkpoint's."""
        return [] if stored or not current else [""]

    def tree(self, filled: dict[str, Any]) -> Any:
        filled = self.with_empty(filled)
        return filled[""] if "" in filled else unflatten(filled, self._paths)

    def with_empty(self, filled: dict[str, Any]) -> dict[str, Any]:
        """Return the loaded leaves with the empty mappings at their places among them."""
        if not self._empty:
            return filled
        both = filled | self._empty
        return {key: both[key] for key in self._current if key in both} | both


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
        # The object gets mappings of the classes that its own state has, such as OrderedDict.
        self._value.load_state_dict(with_types_of(self.replaced, self.tree(filled)))


class PositionAdapter(StatefulAdapter):
    """Adapter of a loader or a sampler of torchdata.

    A load does not call ``state_dict()`` before it replaces the state: ``torchdata.nodes.Loader`` would keep the
    iterator that the call makes, and begin with the first batch. The load calls it afterwards, which makes the iterator
    of the next loop. Making the iterator draws random numbers. An uninterrupted training does not draw them at this
    point, so the load restores the random streams after the call.
    """

    def names(self) -> list[str]:
        return []

    def want(self, stored: Mapping[str, Entry], paths: Mapping[str, KeyPath]) -> Wanted:
        return self.want_for({}, stored, paths) if stored else Wanted(missing=[""])

    def take(self, filled: dict[str, Any], read: Read, strict: bool) -> None:
        super().take(filled, read, strict)
        with torch.random.fork_rng(devices=[]):
            self._value.state_dict()


def without_sampler(position: Any) -> Any:
    """Return the state of a torchdata loader without that of our sampler (``ResumableSampler``).

    Lightning's own sampler takes no state. torchdata then skips the batches that the rank had read.
    """
    if type(position) is list:
        return [without_sampler(child) for child in position]
    if type(position) is not dict:
        return position
    of_sampler = position.get("sampler_state")
    is_ours = isinstance(of_sampler, dict) and "order_from" in of_sampler
    return {key: without_sampler(child) for key, child in position.items() if not (is_ours and key == "sampler_state")}


class MappingAdapter(TreeAdapter):
    may_become_tensor = False

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
            require_names(join(self.name, key), self._current.get(key), value)

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
        return type(self.value) in LEAVES

    def content(self) -> Any:
        return self.value

    @property
    def is_tensor(self) -> bool:
        """True if the value is a tensor that can be filled."""
        return is_tensor(self.value) and not is_meta(self.value)

    def take(self, filled: dict[str, Any], read: Read, strict: bool) -> None:
        if filled.keys() == {""} and filled[""] is self.value:  # the tensor was filled in place
            return
        if filled := self.with_empty(filled):
            # unflatten() needs paths of at least one step. A single value has none, so "it" is put before all paths.
            loaded = unflatten(filled, {key: ("it", *self._paths[key]) for key in filled})["it"]
            self._value[self._key] = values.on_devices_of(self.value, loaded)
