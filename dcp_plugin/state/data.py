"""Adapters for data: mappings, single values, and objects with a ``state_dict`` that are no module and no optimizer.

The checkpoint says what there is; the object only offers memory for it. A tensor is filled in place where the object
has one, everything else is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from dcp_plugin._torch import is_tensor, shape_of, with_memory
from dcp_plugin.format import values
from dcp_plugin.format.columns import default_path
from dcp_plugin.format.index import Entry, StoredTensor
from dcp_plugin.planning.flatten import (
    Walks,
    flatten,
    is_empty_mapping,
    step_of,
    unflatten,
    walked_as_stored,
    walked_by_us,
    with_keys_of,
    with_types_of,
)
from dcp_plugin.state.module_load import Read
from dcp_plugin.tensors import OF_ITS_OWN_CLASS
from dcp_plugin.types import KeyPath, Wanted


class TreeAdapter:
    """What data and Stateful objects have in common."""

    kind = "value"
    module: nn.Module | None = None
    may_grow = False
    """Whether a tensor may have another shape than in the checkpoint."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._paths: dict[str, KeyPath] = {}
        self._empty: dict[str, Any] = {}
        """The empty mappings that the object has now and of which nothing is stored: stock never stores them."""
        self._order: list[str] = []

    def gather(self, walks: Walks = walked_by_us) -> tuple[dict[str, Any], dict[str, KeyPath]]:
        raise NotImplementedError

    def names(self) -> list[str]:
        return list(self.gather()[0])

    def want(self, stored: Mapping[str, Entry], paths: Mapping[str, KeyPath]) -> Wanted:
        current, mine_at = self.gather(walked_as_stored(stored))
        needed = {key: value for key, value in current.items() if key in stored or not is_empty_mapping(value)}
        wanted = Wanted(missing=self.missing(needed, stored), empty=not needed and not stored)
        self._order = list(current)
        self._empty = {
            key: value
            for key, value in current.items()
            if key not in needed and not any(not key or other.startswith(f"{key}.") for other in stored)
        }
        for key, entry in stored.items():
            mine = current.get(key)
            if isinstance(entry, StoredTensor):
                made = wanted.targets[key] = self._memory_for(entry, mine)
                if entry.stored_whole and made is not mine and type(made) is torch.Tensor:
                    wanted.refused[key] = f"{OF_ITS_OWN_CLASS}: have one there to load into"
            else:
                wanted.targets[key] = None
        self._paths = {
            key: with_keys_of(mine_at.get(key), paths[key]) if key in paths else mine_at.get(key, default_path(key))
            for key in stored
        }
        self._paths |= {key: mine_at[key] for key in self._empty}
        return wanted

    def check(self, values: Mapping[str, Any]) -> None:
        """Any value is fine."""

    def _memory_for(self, entry: StoredTensor, mine: Any) -> Any:
        """The object's own tensor, or a new one where it has none to offer."""
        if is_tensor(mine):
            mine = with_memory(mine)
            if not self.may_grow or shape_of(mine) == entry.shape:
                return mine
        return torch.empty(entry.shape, dtype=entry.dtype)

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


def _flatten_or_empty(tree: Mapping[str, Any], walks: Walks) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """Flatten a mapping. An empty one is a value, stored under the bare name."""
    return flatten(tree, walks) if tree else ({"": {}}, {"": ()})


class StatefulAdapter(TreeAdapter):
    kind = "stateful"
    may_grow = True

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(name)
        self._value = value
        self._current: Any = {}

    def gather(self, walks: Walks = walked_by_us) -> tuple[dict[str, Any], dict[str, KeyPath]]:
        self._current = self._value.state_dict()
        return _flatten_or_empty(self._current, walks)

    def take(self, filled: dict[str, Any], read: Read, strict: bool) -> None:
        self._value.load_state_dict(with_types_of(self._current, self.tree(filled)))


class MappingAdapter(TreeAdapter):
    def __init__(self, name: str, value: Mapping[str, Any]) -> None:
        super().__init__(name)
        self._value = value

    def gather(self, walks: Walks = walked_by_us) -> tuple[dict[str, Any], dict[str, KeyPath]]:
        return _flatten_or_empty(self._value, walks)

    def missing(self, current: Mapping[str, Any], stored: Mapping[str, Entry]) -> list[str]:
        """All keys of a mapping are wanted, since the user has named them; an empty container takes what is stored."""
        if not stored:
            return [""] if current else []
        empty = {key for key, value in current.items() if isinstance(value, (Mapping, list)) and not value}
        return [
            key
            for key in current
            if key and key not in stored and not (key in empty and any(other.startswith(f"{key}.") for other in stored))
        ]

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

    def __init__(self, name: str, owner: Any, key: Any) -> None:
        super().__init__(name)
        self._owner = owner
        self._key = key

    def gather(self, walks: Walks = walked_by_us) -> tuple[dict[str, Any], dict[str, KeyPath]]:
        leaves, paths = flatten({"it": self._owner[self._key]}, lambda key, value: walks(key[3:], value))
        return {key[3:]: leaf for key, leaf in leaves.items()}, {key[3:]: path[1:] for key, path in paths.items()}

    def take(self, filled: dict[str, Any], read: Read, strict: bool) -> None:
        filled = self.with_empty(filled)
        if not filled:
            return
        paths = {key: ("it", *self._paths[key]) for key in filled}
        loaded = unflatten(filled, paths)["it"]
        self._owner[self._key] = values.on_devices_of(self._owner[self._key], loaded)
