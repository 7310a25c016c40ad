"""Quantized weights of another tool's folder in a load: multiplied with their scales, raw, or refused.

The rule: a quantized tensor never fills a target without its scale. A target that has the key of the scale too gets
both as they are stored. Any other target gets the product. If the scale cannot be applied, the load is an error, also
with ``strict=False``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from dcp_plugin.core.errors import first
from dcp_plugin.core.format.foreign.scales import NOT_OF_WEIGHTS
from dcp_plugin.core.format.index import CheckpointIndex
from dcp_plugin.core.format.keys import join
from dcp_plugin.core.loading import KeyMap
from dcp_plugin.core.records import Match
from dcp_plugin.core.state.module_load import Deferred
from dcp_plugin.core.types import Wanted

_WAY_OUT = "Dequantize it with the library that has written it"


def settle(
    wanted: Mapping[str, Wanted],
    stored: Mapping[str, str],
    deferred: dict[str, Any],
    key_maps: Mapping[str, KeyMap],
    index: CheckpointIndex,
) -> None:
    """Take the scales that a load applies off the keys that only the checkpoint has.

    A tensor that gets memory later is of the stored dtype otherwise. Here it becomes one of the module's dtype.

    Args:
        wanted, stored, deferred: As in :class:`~dcp_plugin.core.records.Match`, which is unfinished. They are changed.
    """
    weights = {scaled.scale: scaled.packed or key for key, scaled in index.scaled.items() if not scaled.refusal}
    products = {scaled.packed: key for key, scaled in index.scaled.items() if scaled.packed}
    if not weights:
        return
    taken = set(stored.values())
    for name, key_map in key_maps.items():
        want = wanted[name]
        for key, target in want.targets.items():
            scaled = index.scaled.get(key_map.stored(key))
            if isinstance(target, Deferred) and scaled and not scaled.refusal and scaled.scale not in taken:
                made = replace(target, entry=replace(target.entry, dtype=target.dtype or torch.float32))
                want.targets[key] = deferred[join(name, key)] = made
        _drop_scales(want, key_map, weights, products)


def _drop_scales(want: Wanted, key_map: KeyMap, weights: Mapping[str, str], products: Mapping[str, str]) -> None:
    """Drop the keys of scales, except those that an object gets together with the weight. Of a packed tensor and its
    product, drop the key that is not loaded.

    Ranks may have different keys, and a key that another rank takes is not unexpected. So an unexpected key is that of
    the product, which the other rank takes.

    Args:
        weights: Key of a scale -> the key of its weight, as it is stored.
        products: Key of a packed tensor -> the key of its product.
    """
    filled, pairs = set(map(key_map.stored, want.targets)), products.items()
    unexpected_idle = {*products, *(product for packed, product in pairs if packed in filled)}
    handed_idle = {*products.values(), *(packed for packed, product in pairs if product in filled)}
    handed = set(map(key_map.stored, want.extra_targets)) - handed_idle

    def is_idle(key: str, others: set[str]) -> bool:
        stored = key_map.stored(key)
        if stored in weights:
            return weights[stored] not in handed
        return stored in others or (stored.rpartition(".")[2] in NOT_OF_WEIGHTS and key not in want.extra_in_gaps)

    want.unexpected = [key for key in want.unexpected if not is_idle(key, unexpected_idle)]
    want.extra_targets = {key: target for key, target in want.extra_targets.items() if not is_idle(key, handed_idle)}


def judged(match: Match, index: CheckpointIndex) -> Match:
    """Decide for each quantized tensor of a match if it is multiplied with its scale. Return the match with a
    problem for each target that would be filled without the scale, and for each target that is stored packed."""
    taken, problems, scales = set(match.stored.values()), list[str](), dict[str, bool]()
    for key, name in match.stored.items():
        target: Any = match.deferred.get(key) or match.targets.get(key)
        scaled = index.scaled.get(name)
        if scaled is None or target is None:
            continue
        stored, dtype = index.table.dtype_of(index.slots[name]), target.dtype or target.entry.dtype
        is_raw = not scaled.packed and (scaled.scale in taken or (dtype == stored and not scaled.needs_scale))
        scales[name] = not is_raw
        is_fine = dtype.itemsize > 1 and dtype.is_floating_point
        fault = "" if is_fine else f"{dtype} cannot hold the product"
        if scaled.packed and key.rpartition(".")[2] != name.rpartition(".")[2]:
            fault = f"only the model of transformers, which names it {name}, is known to have its matrices transposed"
        if not is_raw and (reason := scaled.refusal or fault):
            problems.append(
                f"{key} is {dtype} here and quantized in the checkpoint: {stored}, to be multiplied with "
                f"{scaled.scale}; {reason}. {_WAY_OUT}, or have {scaled.scale} in the target too: both are then loaded "
                f"as they are stored"
            )
    problems += [
        f"{key} is quantized in the checkpoint: {index.scaled[key].refusal}. {_WAY_OUT}, or leave it out "
        f"(PartialLoad(exclude={key!r}))"
        for key in match.report.missing
        if key in index.scaled
    ]
    return replace(match, problems=[*first(problems), *match.problems], scales=scales)
