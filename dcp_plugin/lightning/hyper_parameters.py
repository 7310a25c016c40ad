"""Hyper-parameters as they are stored: values for which no code needs to be executed to come back.

``save_hyperparameters()`` takes every argument of ``__init__``: configurations, paths and enums, which are stored as
what they are, or as the plain values that they stand for; and also modules, loss functions and classes. Stock
Lightning pickles those, and then refuses to load its own checkpoint, since ``torch.load`` does not execute code from a
file any more. They are not worth a training, and who makes the model again has them at hand: they are left out, once
with a warning that names them, and ``load_from_checkpoint`` takes them as arguments.
``allow_pickle=("extra.hyper_parameters.*",)`` stores them, except modules.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from dcp_plugin._torch import is_tensor
from dcp_plugin.conventions import EXTRA, plain
from dcp_plugin.lightning.native import Checkpoint
from dcp_plugin.storage import values

KEYS = {
    "hyper_parameters": "hparams_type",
    "datamodule_hyper_parameters": "datamodule_hparams_type",
}
"""Lightning's keys for those of the LightningModule and of the datamodule, and for their class."""


def made_storable(checkpoint: Checkpoint, allow_pickle: tuple[str, ...]) -> Checkpoint:
    """A checkpoint with its hyper-parameters as they are stored; warns of what is left out."""
    made = dict(checkpoint)
    left_out: list[str] = []
    for key, kind in KEYS.items():
        if key in made:
            converted = plain(made[key])
            allowed = [glob.removeprefix(f"{EXTRA}.") for glob in allow_pickle]
            without = {name for name, value in _leaves(key, converted) if not _is_storable(name, value, allowed)}
            made[key] = _without(key, converted, without)
            left_out += sorted(without)
        if isinstance(of_class := made.get(kind), type):  # a class would need its code
            made[kind] = f"{of_class.__module__}.{of_class.__qualname__}"
    if left_out:
        _say(tuple(left_out))
    return made


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{name}.{key}", item)
    else:
        yield name, value


def _without(name: str, value: Any, without: set[str]) -> Any:
    if not isinstance(value, dict):
        return value
    inside = {key: f"{name}.{key}" for key in value}
    return {key: _without(inside[key], item, without) for key, item in value.items() if inside[key] not in without}


def _is_storable(name: str, value: Any, allowed: list[str]) -> bool:
    if isinstance(value, nn.Module):  # to the core it is something to be loaded in place
        return False
    if is_tensor(value) or any(fnmatchcase(name, glob) for glob in allowed):
        return True
    if callable(value):
        return False
    return values.is_storable(value)


@functools.cache
def _say(names: tuple[str, ...]) -> None:
    rank_zero_warn(
        f"Not stored with checkpoints, since only executing pickled code would restore them: {', '.join(names)}. Give "
        "them to load_from_checkpoint as arguments. save_hyperparameters(ignore=[...]) silences this; "
        f'allow_pickle=("{EXTRA}.{names[0]}",) stores what is no module nevertheless.'
    )
