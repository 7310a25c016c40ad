"""Where in a checkpoint the keys of a model are, when nobody has said it: the prefix that they have there.

``model.`` in a checkpoint of the Trainer, ``state_dict.net.`` in one of Lightning, none in a state dict that was saved
alone. Only text is compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from dcp_plugin.errors import CheckpointMismatch, some

_PROBES = 8
"""Keys of the model by which prefixes are looked for; each that is proposed is judged by all keys."""


@dataclass(frozen=True)
class ModelPrefix:
    """The keys of the model that start with ``here`` are in the checkpoint with ``there`` in its place."""

    there: str
    here: str = ""

    def stored(self, key: str) -> str:
        return self.there + key.removeprefix(self.here)


def find_model_prefix(
    keys: Sequence[str], stored: Collection[str], path: object, model: str, base: str = ""
) -> ModelPrefix:
    """The prefix under which the checkpoint has the most keys of a model.

    Args:
        keys: Of the model.
        stored: Of the checkpoint.
        path: The checkpoint, for messages.
        model: What the model is called in messages.
        base: The name of the part of the model that may have been saved alone, without its head and that name.

    Raises:
        CheckpointMismatch: Several fit equally well, or none does.

    Example:
        >>> find_model_prefix(["a.weight", "b.weight"], ["net.a.weight", "net.b.weight", "step"], "run/step-1", "Net")
        ModelPrefix(there='net.', here='')
    """
    there = set(stored)
    best = _best(keys, there)
    here = ""
    if not best and base:
        here = f"{base}."
        best = _best([key.removeprefix(here) for key in keys if key.startswith(here)], there)
    if len(best) > 1:
        named = [f"prefix={prefix!r}" for prefix in sorted(best)]
        raise CheckpointMismatch(f"{path} has several models that {model} fits equally well: say {some(named)}.")
    if not best:
        raise CheckpointMismatch(
            f"{path} has no key of {model}, which looks for {some(list(keys), 3)} behind any prefix; it has "
            f"{some(sorted(there), 5)}. Another class or config=, or is the model elsewhere?"
        )
    return ModelPrefix(best[0], here)


def _best(keys: Sequence[str], stored: Collection[str]) -> list[str]:
    """The prefixes under which the most keys are stored; none if there is none."""
    counts = {prefix: sum(prefix + key in stored for key in keys) for prefix in _proposed(keys, stored)}
    most = max(counts.values(), default=0)
    return [prefix for prefix, count in counts.items() if count == most]


def _proposed(keys: Sequence[str], stored: Iterable[str]) -> set[str]:
    probes = tuple(dict.fromkeys([*keys[:: max(1, len(keys) // _PROBES)], *keys[-1:]]))
    tails = tuple(f".{probe}" for probe in probes)
    found = {""} if any(probe in stored for probe in probes) else set()
    for key in stored:
        if key.endswith(tails):
            found.update(key.removesuffix(tail[1:]) for tail in tails if key.endswith(tail))
    return found
