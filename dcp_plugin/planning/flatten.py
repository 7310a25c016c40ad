"""Nested state to flat keys and back.

Keys are the path joined by dots, as stock DCP makes them: mappings are walked, lists only if they hold tensors or
mappings. Two things are kept that stock loses: empty containers, and mapping keys that are not text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dcp_plugin._torch import DTensor, ShardedTensor, is_tensor
from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.types import KeyPath


def flatten(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """The leaves of a nested state by key, and the path of each.

    Raises:
        CheckpointMismatch: Two leaves have the same key, as in ``{"a.b": 1, "a": {"b": 2}}``.
    """
    leaves: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    for path, leaf in _walk((), tree):
        key = ".".join(str(part[1] if isinstance(part, tuple) else part) for part in path)
        if key in leaves:
            raise CheckpointMismatch(f"two values of the state have the key {key!r} (paths {paths[key]} and {path})")
        leaves[key] = leaf
        paths[key] = path
    return leaves, paths


def unflatten(leaves: Mapping[str, Any], paths: Mapping[str, KeyPath]) -> dict[str, Any]:
    """The inverse of :func:`flatten`."""
    root: dict[Any, Any] = {}
    for key, leaf in leaves.items():
        node = root
        path = paths[key]
        for part in path[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise CheckpointMismatch(f"{key} lies inside of another value")
        node[path[-1]] = _Leaf(leaf)
    return {str(part): _restore(node) for part, node in root.items()}


class _Leaf:
    """Tells a leaf that is a dict (an empty one, say) from a node."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _restore(node: Any) -> Any:
    """Nodes keyed by list or tuple positions become lists and tuples again."""
    if isinstance(node, _Leaf):
        return node.value
    parts = list(node)
    if all(isinstance(part, int) for part in parts):
        return [_restore(node[part]) for part in sorted(parts)]
    if all(isinstance(part, tuple) and part[0] == "t" for part in parts):
        return tuple(_restore(node[part]) for part in sorted(parts, key=lambda part: int(part[1])))
    return {(part[1] if isinstance(part, tuple) else part): _restore(child) for part, child in node.items()}


def _walk(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    if not path or _is_walked(value):
        for key, child in value.items():
            if key == "":
                raise CheckpointMismatch(f"the state has an empty key at {'.'.join(map(str, path)) or 'its root'}")
            part = _mapping_part(key)
            yield from _walk((*path, str(key) if part is None else part), child)
    elif isinstance(value, list) and _holds_more(value):
        for position, child in enumerate(value):
            yield from _walk((*path, position), child)
    elif type(value) is tuple and _holds_tensors(value):
        for position, child in enumerate(value):
            yield from _walk((*path, ("t", position)), child)
    else:
        yield path, value


def holds_sharded(value: Any) -> bool:
    """Whether there is a DTensor or ShardedTensor in a container that is stored as one value."""
    if isinstance(value, (DTensor, ShardedTensor)):
        return True
    children = value.values() if isinstance(value, Mapping) else value
    return isinstance(value, (Mapping, list, tuple, set)) and any(holds_sharded(child) for child in children)


def _mapping_part(key: Any) -> Any:
    if isinstance(key, str):
        return key
    if isinstance(key, np.integer):
        return ("k", int(key))
    if isinstance(key, (bool, int, float)):
        return ("k", key)
    return None


def _is_walked(value: Any) -> bool:
    """Plain mappings are; a mapping with other keys than text and numbers, or of a class of its own such as a Counter,
    only if it holds tensors, which a single value could not share out."""
    if not isinstance(value, Mapping) or not value:
        return False
    plain = not isinstance(value, Counter) and all(_mapping_part(key) is not None for key in value)
    return plain or _holds_tensors(value)


def _holds_more(values: list[Any]) -> bool:
    return any(isinstance(value, Mapping) for value in values) or _holds_tensors(values)


def _holds_tensors(values: Any) -> bool:
    children = values.values() if isinstance(values, Mapping) else values
    return any(
        is_tensor(child) or (isinstance(child, (list, tuple, Mapping)) and _holds_tensors(child)) for child in children
    )
