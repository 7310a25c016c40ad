"""Which keys of a checkpoint are meant, and what they are called outside of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from dcp_plugin.errors import CheckpointMismatch, nearest, some


def texts(value: str | Iterable[str]) -> tuple[str, ...]:
    """One glob, or several."""
    return (value,) if isinstance(value, str) else tuple(value)


def select(
    keys: Collection[str], include: str | Iterable[str], exclude: str | Iterable[str], path: object
) -> list[str]:
    """The keys that a glob of ``include`` matches, all if there is none, and none of ``exclude``; in their order.

    Raises:
        CheckpointMismatch: A glob matches nothing, or nothing is left.
    """
    chosen, left_out = texts(include), texts(exclude)
    for glob in (*chosen, *left_out):
        if glob not in keys and not any(fnmatchcase(key, glob) for key in keys):
            raise CheckpointMismatch(f"{path} has no key that {glob!r} matches{nearest(glob, keys)}")
    found = [key for key in keys if not chosen or _matches(key, chosen)]
    found = [key for key in found if not _matches(key, left_out)] if left_out else found
    if not found:
        raise CheckpointMismatch(f"{path}: nothing is left of its {len(keys)} keys without {some(list(left_out))}")
    return found


def _matches(key: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(key, glob) for glob in globs)


def renamed(keys: Iterable[str], rename: Mapping[str, str], path: object) -> dict[str, str]:
    """What each key is called outside of the checkpoint, in their order.

    Args:
        rename: A prefix in the checkpoint, and what takes its place; of several that fit, the longest.

    Raises:
        CheckpointMismatch: No key has the prefix, or two keys would be called the same.
    """
    prefixes = sorted(rename, key=len, reverse=True)
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    used: set[str] = set()
    for key in keys:
        prefix = next((one for one in prefixes if key.startswith(one)), None)
        used.update([] if prefix is None else [prefix])
        name = key if prefix is None else rename[prefix] + key.removeprefix(prefix)
        if not name:
            raise CheckpointMismatch(f"{path}: nothing would be left of the name of {key}: rename it to something")
        if name in taken:
            raise CheckpointMismatch(f"{path}: {taken[name]} and {key} would both be called {name!r}")
        taken[name] = key
        names[key] = name
    if unused := [prefix for prefix in prefixes if prefix not in used]:
        raise CheckpointMismatch(f"{path}: no selected key starts with {some([repr(one) for one in unused])}")
    return names
