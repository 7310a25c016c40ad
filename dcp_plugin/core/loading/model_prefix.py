"""The prefix of a model's keys in a checkpoint, determined without help from the user.

The prefix is ``model.`` in a checkpoint of the Trainer, ``state_dict.net.`` in a checkpoint of Lightning, and empty in
a plain state dict. The search compares only the text of keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from dcp_plugin.core.errors import CheckpointMismatch, some

_PROBES = 8
"""Number of model keys with which candidate prefixes are collected. Each candidate is then judged by all keys."""


@dataclass(frozen=True)
class ModelPrefix:
    """A pair of prefixes: model keys that start with ``here`` start with ``there`` in the checkpoint."""

    there: str
    here: str = ""

    def stored(self, key: str) -> str:
        return self.there + key.removeprefix(self.here)


def find_model_prefix(
    keys: Sequence[str], stored: Collection[str], path: object, model: str, base: str = ""
) -> ModelPrefix:
    """Return the prefix under which the checkpoint has the most keys of a model.

    Args:
        keys: Keys of the model.
        stored: Keys of the checkpoint.
        path: The checkpoint, for messages.
        model: Name of the model, for messages.
        base: Name of the part of the model that may have been saved alone, without the model's head and without this
            name in its keys.

    Raises:
        CheckpointMismatch: Several prefixes fit equally well, or no prefix fits.

    Example:
        >>> find_model_prefix(["a.weight", "b.weight"], ["net.a.weight", "net.b.weight", "step"], "run/step-1", "Net")
        ModelPrefix(there='net.', here='')
    """
    stored_keys = set(stored)
    best = _best(keys, stored_keys)
    here = ""
    if not best and base:
        here = f"{base}."
        best = _best([key.removeprefix(here) for key in keys if key.startswith(here)], stored_keys)
    if len(best) > 1:
        named = [f"prefix={prefix!r}" for prefix in sorted(best)]
        raise CheckpointMismatch(
            f"{path} has several models that {model} fits equally well. Choose one: {some(named)}."
        )
    if not best:
        raise CheckpointMismatch(
            f"{path} has no key of {model}. The model needs {some(list(keys), 3)}, with or without a prefix; the "
            f"checkpoint has {some(sorted(stored_keys), 5)}. Check the class, config= and the path."
        )
    return ModelPrefix(best[0], here)


def _best(keys: Sequence[str], stored: Collection[str]) -> list[str]:
    """Return the prefixes under which the most keys are stored; empty if no key is stored under any prefix."""
    counts = {prefix: sum(prefix + key in stored for key in keys) for prefix in _proposed(keys, stored)}
    most = max(counts.values(), default=0)
    return [prefix for prefix, count in counts.items() if count == most]


def _proposed(keys: Sequence[str], stored: Iterable[str]) -> set[str]:
    probes = tuple(dict.fromkeys([*keys[:: max(1, len(keys) // _PROBES)], *keys[-1:]]))
    tails = tuple(f".{probe}" for probe in probes)
    prefixes = {""} if any(probe in stored for probe in probes) else set()
    for key in stored:
        if key.endswith(tails):
            prefixes.update(key.removesuffix(tail[1:]) for tail in tails if key.endswith(tail))
    return prefixes
