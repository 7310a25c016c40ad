"""Select keys of a checkpoint, and map them to names outside of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from dcp_plugin.errors import CheckpointMismatch, nearest, some


def texts(value: str | Iterable[str]) -> tuple[str, ...]:
    """Return one or several globs as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value)


def select(
    keys: Collection[str], include: str | Iterable[str], exclude: str | Iterable[str], path: object
) -> list[str]:
    """Return, in their order, the keys that match a glob of ``include`` (all if it is empty) and none of ``exclude``.

    Raises:
        CheckpointMismatch: A glob matches no key, or no key remains.
    """
    chosen, left_out = texts(include), texts(exclude)
    for glob in (*chosen, *left_out):
        if glob not in keys and not any(fnmatchcase(key, glob) for key in keys):
            raise CheckpointMismatch(f"{path} has no key that {glob!r} matches{nearest(glob, keys)}")
    selected = [key for key in keys if not chosen or _matches(key, chosen)]
    selected = [key for key in selected if not _matches(key, left_out)] if left_out else selected
    if not selected:
        raise CheckpointMismatch(f"{path}: nothing is left of its {len(keys)} keys without {some(list(left_out))}")
    return selected


def _matches(key: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(key, glob) for glob in globs)


def renamed(keys: Iterable[str], rename: Mapping[str, str], path: object) -> dict[str, str]:
    """Return the name of each key outside of the checkpoint, in the order of the keys.

    Args:
        rename: Prefixes in the checkpoint -> their replacements. The longest prefix that fits a key is replaced.

    Raises:
        CheckpointMismatch: No key has a prefix, two keys would get the same name, or a name would be empty.
    """
    prefixes = sorted(rename, key=len, reverse=True)
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    used: set[str] = set()
    for key in keys:
        prefix = next((candidate for candidate in prefixes if key.startswith(candidate)), None)
        used.update([] if prefix is None else [prefix])
        name = key if prefix is None else rename[prefix] + key.removeprefix(prefix)
        if not name:
            raise CheckpointMismatch(f"{path}: nothing would be left of the name of {key}: rename it to something")
        if name in taken:
            raise CheckpointMismatch(f"{path}: {taken[name]} and {key} would both be called {name!r}")
        taken[name] = key
        names[key] = name
    if unused := [prefix for prefix in prefixes if prefix not in used]:
        raise CheckpointMismatch(f"{path}: no selected key starts with {some([repr(prefix) for prefix in unused])}")
    return names
