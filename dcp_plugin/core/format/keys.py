"""Conversion of nested state to flat keys and their contents, and back.

A key is the path joined by dots, as in stock DCP. A container is either *walked*, so that its entries have keys of
their own, or it is one value. Mappings are walked. Lists are walked only if they hold tensors or mappings. A tuple is
one value. The caller chooses the rule:

- :func:`walked_by_us`: saves of this package. An empty mapping is one value, because stock loses it. A mapping without
  tensors is one value if a path cannot hold its keys. A tuple or list with sharded tensors is walked, because one value
  could not hold them.
- :func:`walked_by_stock`: saves that ``torch.distributed.checkpoint`` drives. Its loads walk the same containers.
- :func:`walked_as_stored`: loads. The checkpoint determines which containers are walked, because other versions walked
  others. This package walked tuples with tensors up to 0.1.0, and stored a ``Counter`` as one value. Torch before 2.4
  stored all mappings without tensors as one value.

:func:`encode_state` describes the leaves of a save: tensors as chunks, and one-value containers as bytes.

The key of a :class:`LocalSlot` also names its rank and its part of the parameter.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import zip_longest
from operator import add
from typing import Any

import numpy as np
import torch

from dcp_plugin.core.errors import CheckpointMismatch, UnsafeCheckpoint, some, warn
from dcp_plugin.core.format import values
from dcp_plugin.core.format.columns import MAPPING_CLASSES, KeyPath, default_path
from dcp_plugin.core.format.pickles.walk import FEW
from dcp_plugin.core.format.values import PLAIN, mapping_class
from dcp_plugin.core.tensors._torch import DTensor, ShardedTensor, is_tensor, sharded_value
from dcp_plugin.core.tensors.kinds import EXACTLY_TENSORS
from dcp_plugin.core.types import Box, EncodedValue, Flat, ShardedValue, Standing

Walks = Callable[[str, Any], bool]
"""Rule that returns whether the container of a key is walked (True) or is one value (False)."""


def walked_by_us(key: str, value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and (all(map(_fits_path, value)) or _holds_tensors(value))
    return _is_walked_list(value) or (type(value) in (list, tuple) and holds_sharded(value))


def walked_by_stock(key: str, value: Any) -> bool:
    return bool(value) if isinstance(value, Mapping) else walked_by_us(key, value)


def walked_as_stored(stored: Collection[str]) -> Walks:
    """Return a rule that walks the containers of which the checkpoint has entries.

    A container that the checkpoint lacks is walked as in a save.

    Args:
        stored: The keys of the checkpoint.
    """

    def walked(key: str, value: Any) -> bool:
        if walked_by_us(key, value):
            return key not in stored or has_keys_below(key, stored)
        # One value in our saves, but parts in this checkpoint: a tuple with tensors that 0.1.0 walked, for example.
        may_be_walked = isinstance(value, Mapping) or type(value) in (list, tuple)
        return may_be_walked and bool(value) and key not in stored and has_keys_below(key, stored)

    return walked


def join(name: str, key: str) -> str:
    """Return the full key of ``key`` relative to the object ``name``; the key ``""`` is the object itself."""
    return f"{name}.{key}" if key else name


def flatten(
    tree: Mapping[str, Any], walks: Walks = walked_by_us, name: str = ""
) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """Return the leaves of a nested state by key, and the path of each.

    Args:
        name: The key of ``tree``, for messages.

    Raises:
        CheckpointMismatch: Two leaves have the same key, as in ``{"a.b": 1, "a": {"b": 2}}``; or as
            :func:`require_end`.
    """
    require_end(name, tree)
    leaves: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    for key, path, leaf in _walk("", (), tree, walks):
        if key in leaves:
            raise CheckpointMismatch(f"two values of the state have the key {key!r} (paths {paths[key]} and {path})")
        leaves[key], paths[key] = leaf, path
    return leaves, paths


def unflatten(leaves: Mapping[str, Any], paths: Mapping[str, KeyPath]) -> dict[str, Any]:
    """Return the nested state of leaves and their paths: the inverse of :func:`flatten`."""
    # First a tree of dicts whose keys are the steps of the paths: the steps distinguish lists, tuples and mappings.
    root: dict[Any, Any] = {}
    for key, leaf in leaves.items():
        node, (*above, last) = root, paths[key]
        for depth, part in enumerate(above, 1):
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise CheckpointMismatch(
                    f"{key} lies below {name_of(above[:depth])}, which is a value itself: ranks saved values of "
                    f"different kinds under one name. Save the same kind on every rank, and mark it with PerRank on "
                    f"all ranks or on none."
                )
        node[last] = _Leaf(leaf)
    return _mapping({str(part) if isinstance(part, int) else part: node for part, node in root.items()})


class _Leaf:
    """Mark of a leaf, which may be a dict, among the nodes of a tree."""

    def __init__(self, value: Any) -> None:
        self.value = value


def with_types_of(current: Any, tree: Any) -> Any:
    """Return a tree whose plain dicts have the classes (OrderedDict, defaultdict, Counter) of the current state.

    A dict of another class keeps it: the save stored that class.
    """
    if isinstance(current, Mapping) and isinstance(tree, dict):
        children = {key: with_types_of(current.get(key), child) for key, child in tree.items()}
        like = current if type(tree) is dict else tree
        return of_class_of(like, children) if isinstance(like, dict) else children
    if type(current) is type(tree) and type(tree) in (list, tuple) and len(current) == len(tree):
        return type(tree)(map(with_types_of, current, tree))
    return tree


def of_class_of(like: dict[Any, Any], children: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict of the class of ``like`` with other items."""
    if type(like) is dict:
        return children
    copied = copy.copy(like)
    copied.clear()
    copied.update(children)
    return copied


def with_keys_of(current: KeyPath | None, path: KeyPath) -> KeyPath:
    """Return a stored path with the keys of the current state, where stock has lost them.

    Stock stores every key as text, so a key that is no text is taken from the state. A key with dots may be several
    steps in the checkpoint; the complete path is then taken from the state.
    """
    if current is None:
        return path
    # Equal paths, the usual case, are compared first: the texts of thousands of steps would take longer.
    if current == path or [str(step_of(part)) for part in current] != [str(step_of(part)) for part in path]:
        return current
    return tuple(
        own_part
        if isinstance(own_part, tuple) and own_part[0] != "t" and (part == str(own_part[1]) or not _fits_path(own_part))
        else part
        for own_part, part in zip(current, path, strict=True)
    )


def paths_as_stored(
    keys: Iterable[str], current: Mapping[str, KeyPath], stored: Mapping[str, KeyPath]
) -> dict[str, KeyPath]:
    """Return the path of each stored key: the stored path, with the keys of the current state (:func:`with_keys_of`).

    Args:
        current: The paths of the current state.
        stored: The paths in the checkpoint; a key may be missing.
    """
    return {
        key: with_keys_of(current.get(key), stored[key]) if key in stored else current.get(key, default_path(key))
        for key in keys
    }


def has_keys_below(key: str, stored: Iterable[str]) -> bool:
    """Return whether a stored key is below ``key``. Every other key is below the empty key."""
    return any(other != key and (not key or other.startswith(f"{key}.")) for other in stored)


def step_of(part: Any) -> Any:
    """Return the key or index that a part of a :data:`KeyPath` stands for."""
    return part[1] if isinstance(part, tuple) else part


def name_of(path: Iterable[Any]) -> str:
    """Return the key of a path: its steps, joined by dots."""
    return ".".join(str(step_of(part)) for part in path)


def _restore(node: Any) -> Any:
    """Return the tree below a node. A node whose keys are all positions becomes a list or a tuple."""
    if isinstance(node, _Leaf):
        return node.value
    if all(isinstance(part, int) for part in node):
        return [_restore(node[part]) for part in sorted(node)]
    if all(isinstance(part, tuple) and part[0] == "t" for part in node):
        return tuple(_restore(node[part]) for part in sorted(node, key=lambda part: int(part[1])))
    return _mapping(node)


def _mapping(node: Mapping[Any, Any]) -> dict[Any, Any]:
    # Each step into a mapping that is no plain dict has the name of its class; the first is enough.
    kinds = (part[0] for part in node if isinstance(part, tuple))
    mapping = MAPPING_CLASSES.get(next(kinds, ""), dict)()
    for part, child in node.items():
        mapping[step_of(part)] = _restore(child)
    return mapping


def _walk(key: str, path: KeyPath, value: Any, walks: Walks) -> Iterator[tuple[str, KeyPath, Any]]:
    front = f"{key}." if path else ""
    for part, child in _children(path, value):
        name = front + str(step_of(part))
        if isinstance(child, (Mapping, list, tuple)) and walks(name, child):
            yield from _walk(name, (*path, part), child, walks)
        else:  # here, because a generator for each of thousands of leaves takes longer than the leaf
            yield name, (*path, part), child


def _children(path: KeyPath, value: Any) -> Iterator[tuple[Any, Any]]:
    if not isinstance(value, Mapping):
        for position, child in enumerate(value):
            yield ("t", position) if isinstance(value, tuple) else position, child
        return
    # A step is plain text where it can be. A load restores the class of the mapping, and keys that are no text, from
    # a step that is a pair.
    kind = mapping_class(value)
    for key, child in value.items():
        step = int(key) if isinstance(key, np.integer) else key
        if step == "":
            raise CheckpointMismatch(f"the state has an empty key at {'.'.join(map(str, path)) or 'its root'}")
        yield step if isinstance(step, str) and not kind else (kind or "k", step), child


def require_names(key: str, target: Any, loaded: Any) -> None:
    """Require that a loaded value has all names of the mapping that it is loaded into.

    Raises:
        CheckpointMismatch: The value lacks a name.
    """
    if isinstance(target, Mapping):
        missing = next((name for name in target if not (isinstance(loaded, Mapping) and name in loaded)), None)
        if missing is not None:
            raise CheckpointMismatch(f"{join(key, str(missing))} is not in the checkpoint")


def is_empty_mapping(value: Any) -> bool:
    """Return whether a value is an empty mapping, for which stock stores no key."""
    return isinstance(value, Mapping) and not value


def holds_sharded(value: Any) -> bool:
    """Return whether a container that is stored as one value holds a DTensor or ShardedTensor, at any depth."""
    todo, seen = [value], set()  # a container may contain itself, and deep ones would end a recursion
    while todo:
        node = todo.pop()
        if isinstance(node, (DTensor, ShardedTensor)):
            return True
        if isinstance(node, (Mapping, list, tuple, set)) and id(node) not in seen:
            seen.add(id(node))
            todo += node.values() if isinstance(node, Mapping) else node
    return False


def encode_state(leaves: Mapping[str, Any], allow_pickle: tuple[str, ...] = ()) -> Flat:
    """Describe leaves for the planner: tensors as the chunks on this rank, anything else as bytes.

    Raises:
        CheckpointMismatch: Some leaves cannot be stored, such as tensors without memory. The message names the first
            ten.
        UnsafeCheckpoint: Some values could be restored only by executing pickled code. The message names the first ten.
    """
    flat: Flat = {}
    unsafe: list[str] = []
    misfits: list[str] = []
    changed: list[str] = []
    # Results by the ``id`` of a leaf: the same objects repeat for every parameter of an optimizer's group.
    same: dict[int, EncodedValue] = {}
    for key, leaf in leaves.items():
        if id(leaf) in same:
            flat[key] = same[id(leaf)]
        elif type(leaf) in values.SIZED and (reason := values.why_too_large(leaf)):
            misfits.append(f"{key} is {reason}")
        elif type(leaf) not in EXACTLY_TENSORS and values.is_plain(leaf):  # a class is compared faster than a value
            try:
                flat[key] = same[id(leaf)] = EncodedValue(values.encode(leaf), _standing(leaf))
            except ValueError as error:
                raise CheckpointMismatch(
                    f"{key} cannot be saved: {error}. Save the number as text, hex(number)."
                ) from error
        elif is_tensor(leaf):
            try:
                flat[key] = sharded_value(leaf)
            except CheckpointMismatch as error:
                misfits.append(f"{key} is {error}")
        elif isinstance(leaf, (ShardedValue, EncodedValue)):
            flat[key] = leaf
        else:
            if holds_sharded(leaf):
                raise CheckpointMismatch(
                    f"{key} is a {type(leaf).__name__} with sharded tensors inside; only one rank's part of them would "
                    f"be stored. Keep sharded tensors in dicts, lists or tuples."
                )
            notes: list[str] = []
            try:
                encoded = values.encode(leaf, any(fnmatchcase(key, glob) for glob in allow_pickle), notes)
                flat[key] = EncodedValue(encoded, _standing(leaf))
                changed += [f"{key} ({note})" for note in notes]
            except UnsafeCheckpoint as error:
                unsafe.append(f"{key} is {error}")
    if misfits:
        count = f"{len(misfits)} entries cannot be saved: " if len(misfits) > 1 else ""
        raise CheckpointMismatch(count + some(misfits, 10, "; "))
    if unsafe:
        raise UnsafeCheckpoint(
            f"{len(unsafe)} value(s) cannot be saved: {some(unsafe, 10, '; ')}. Make them plain (numbers, text, "
            f"lists, dicts, tensors), or name them in allow_pickle if you trust everybody who can write to the "
            f"checkpoints."
        )
    if changed:
        warn(f"stored as another type: {some(changed, 10, '; ')}.")
    return flat


def _standing(leaf: Any) -> Standing:
    if is_empty_mapping(leaf):
        return Standing.EMPTY_MAPPING
    is_empty = leaf is None or (isinstance(leaf, (list, tuple, set, frozenset)) and not leaf)
    return Standing.EMPTY if is_empty else Standing.HOLDS


def as_stored(key: str, path: KeyPath) -> KeyPath:
    """Return a path as a checkpoint holds it: with text in place of steps that a file cannot hold.

    Raises:
        CheckpointMismatch: The next process would make another text of a step.
    """
    if all(map(_fits_path, path)):
        return path
    # The default text of an object has its address, and the order of a frozenset depends on the hashes of a process.
    for step in map(step_of, path):
        if hex(id(step)) in str(step) or (isinstance(step, frozenset) and len(step) > 1):
            raise CheckpointMismatch(
                f"{key} is under a key of type {type(step).__name__}, by which no later process would find it again. "
                f"Use text or a number as the key."
            )
    return tuple(
        part if _fits_path(part) else str(part[1]) if part[0] == "k" else (part[0], str(part[1])) for part in path
    )


def require_end(name: str, tree: Any) -> None:
    """Require that a walk over nested containers ends.

    A save, a load and a comparison take each path to a container, so a container counts once for each path, as in
    :mod:`dcp_plugin.core.format.pickles.walk`. Forty lists, each with the next one twice, have 2^40 paths.

    Args:
        name: The key of ``tree``; empty for the state itself.

    Raises:
        CheckpointMismatch: A container contains itself, or the containers have too many paths or too many levels.
    """
    if not isinstance(tree, _CONTAINERS):
        return
    parts = _Parts()
    try:
        parts.below(name, tree)
    except RecursionError as error:
        # ``above`` still has the containers around the deepest one. The outermost key is the shortest to name.
        raise too_deep(next(filter(None, parts.above.values()), "")) from error


def too_deep(name: str) -> CheckpointMismatch:
    """Return the error for a key with containers that Python cannot walk."""
    return CheckpointMismatch(f"{name or 'the state'} has too many containers in each other{_CANNOT}")


class _Parts:
    """Counter of the parts of containers, each counted once for each path that leads to it."""

    def __init__(self) -> None:
        self.above: dict[int, str] = {}
        """Keys of the containers around the current one, by ``id``."""
        self._counts: dict[int, int] = {}
        self._once = 0
        """Number of parts, each counted once."""

    def below(self, key: str, node: Any) -> int:
        """Return the number of parts below a container, whose key is ``key``."""
        if id(node) in self._counts:
            return self._counts[id(node)]
        if id(node) in self.above:
            raise CheckpointMismatch(f"{key} is {self.above[id(node)] or 'the state'}, which contains it{_CANNOT}")
        self.above[id(node)] = key
        count = len(node)
        self._once += count
        # A shared container is walked once, and its count is added for each path that leads to it.
        for step, child in node.items() if isinstance(node, Mapping) else enumerate(node):
            if type(child) not in _WITHOUT_PARTS and isinstance(child, _CONTAINERS):
                count += self.below(f"{key}.{step}".removeprefix("."), child)
        if count > max(FEW, _MOST_PATHS * self._once):
            raise CheckpointMismatch(
                f"{key or 'the state'} has {count} parts, counted once for each path that leads to them, since "
                f"containers in it are shared{_CANNOT}"
            )
        del self.above[id(node)]
        self._counts[id(node)] = count
        return count


_CANNOT = ": it cannot be saved or loaded. Leave it out of the state."
_MOST_PATHS = 8
"""Most paths to a part, on average, in a state with more than ``FEW`` parts.

A load accepts as many paths as a pickle has bytes, and a pickle takes about as many bytes for a part.
"""
_CONTAINERS = (Mapping, list, tuple, set, frozenset)
_WITHOUT_PARTS = PLAIN | {torch.Tensor, torch.nn.Parameter}


_STEPS = (str, int, float, np.integer, type(None))


def _fits_path(key: Any) -> bool:
    """Return whether a path can hold the key of a mapping."""
    return isinstance(key, _STEPS) or (type(key) is tuple and all(map(_fits_path, key)))


def _is_walked_list(value: Any) -> bool:
    """Return whether stock walks a list: the list, or a list in it, holds a mapping or a tensor."""
    return isinstance(value, list) and any(
        is_tensor(child) or isinstance(child, Mapping) or _is_walked_list(child) for child in value
    )


def _holds_tensors(values: Any) -> bool:
    children = values.values() if isinstance(values, Mapping) else values
    return any(
        is_tensor(child) or (isinstance(child, (list, tuple, Mapping)) and _holds_tensors(child)) for child in children
    )


_LOCAL = re.compile(r"(?P<slot>.+)\.rank(?P<rank>\d+)\((?P<begin>[\d,]*):(?P<end>[\d,]*)\)", re.DOTALL)


@dataclass(frozen=True)
class LocalSlot:
    """Slot of an optimizer's state in which each rank has its own part of the parameter."""

    slot: str
    rank: int
    box: Box
    """The part of the parameter. The name has its begin and its end."""

    def __str__(self) -> str:
        begin, end = (",".join(map(str, edge)) for edge in (self.box[0], map(add, *self.box)))
        return f"{self.slot}.rank{self.rank}({begin}:{end})"

    @classmethod
    def parse(cls, name: str) -> LocalSlot | None:
        """Return the slot of a name; None if the name has no rank, since all ranks share the slot."""
        match = _LOCAL.fullmatch(name)
        if match is None:
            return None
        begin, end = (tuple(int(number) for number in match[edge].split(",") if number) for edge in ("begin", "end"))
        # A damaged name may have more numbers on one side. Its box then fits no parameter.
        sizes = tuple(last - first for first, last in zip_longest(begin, end, fillvalue=0))
        return cls(match["slot"], int(match["rank"]), Box(begin, sizes))


def without_rank(key: str) -> str:
    """Return a key without the rank and the part that its last segment may name."""
    return slot.slot if (slot := LocalSlot.parse(key)) else key
