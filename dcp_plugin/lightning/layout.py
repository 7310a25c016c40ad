"""Lightning's checkpoint dictionary and the named state that is stored, one into the other.

| in the dictionary              | in the checkpoint                                      |
|--------------------------------|--------------------------------------------------------|
| ``state_dict``                 | ``model.<FQN>``                                        |
| ``optimizer_states``           | ``optim.…``, or ``optim_0.…``, ``optim_1.…`` of several |
| everything else, whoever added it | ``extra.…``                                         |

What a value is, sharded or not, tensor or not, is left to the core: hooks may put anything anywhere.
"""

from __future__ import annotations

import dataclasses
import sys
from argparse import Namespace
from collections.abc import Iterable
from datetime import timedelta
from enum import Enum
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn

from dcp_plugin.config import PathLike
from dcp_plugin.inspection import inspect
from dcp_plugin.state import flatten_optimizer, mark_parameters, mark_slots, unflatten_optimizer

MODEL, EXTRA = "model", "extra"
Checkpoint = dict[str, Any]


def to_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """The named state of a dictionary of Lightning's, or of any other (all of which is then extra)."""
    extra = dict(checkpoint)
    state: dict[str, Any] = {}
    if "state_dict" in extra:
        state[MODEL] = extra.pop("state_dict")
    optimizers = extra.get("optimizer_states")
    if optimizers and all(map(is_keyed_by_name, optimizers)):
        del extra["optimizer_states"]
        state.update(zip(optimizer_names(len(optimizers)), map(flatten_optimizer, optimizers), strict=True))
    for owner in (LightningModule, LightningDataModule):
        if (key := owner.CHECKPOINT_HYPER_PARAMS_KEY) in extra:
            extra[key] = _plain(extra[key])
        # Their class, which only executing pickled code would restore. They come back as plain dictionaries.
        extra.pop(owner.CHECKPOINT_HYPER_PARAMS_TYPE, None)
    return {**state, EXTRA: extra}


def shared_by_ranks(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """The state with what DDP keeps equal marked, so that its ranks share the writing."""
    marked = {MODEL: mark_parameters(model, state[MODEL])} if MODEL in state else {}
    slots = {name: mark_slots(model, state[name]) for name in optimizers_among(state)}
    return {**state, **marked, **slots}


def from_state(state: dict[str, Any]) -> Checkpoint:
    """The inverse of :func:`to_state`."""
    checkpoint: Checkpoint = dict(state.get(EXTRA, {}))
    if MODEL in state:
        checkpoint["state_dict"] = state[MODEL]
    if optimizers := optimizers_among(state):
        checkpoint["optimizer_states"] = [unflatten_optimizer(state[name]) for name in optimizers]
    return checkpoint


def keys_by_name(path: PathLike) -> dict[str, list[str]]:
    """The keys of the checkpoint by name, without the name."""
    info = inspect(path)
    keys: dict[str, list[str]] = {}
    for key in (*(tensor.key for tensor in info.tensors), *info.values):
        name, _, rest = key.partition(".")
        keys.setdefault(name, []).append(rest)
    return keys


def optimizer_names(count: int) -> list[str]:
    return ["optim"] if count == 1 else [f"optim_{number}" for number in range(count)]


def optimizers_among(names: Iterable[str]) -> list[str]:
    """The names of optimizers, in the order of the optimizers."""
    found = [name for name in names if name == "optim" or name.removeprefix("optim_").isdecimal()]
    return sorted(found, key=lambda name: int(name.removeprefix("optim").removeprefix("_") or 0))


def _plain(value: Any) -> Any:
    """Settings as the plain values that they stand for: configurations, dataclasses and enums need their code to be
    restored, and nobody resumes with those of the checkpoint."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and omegaconf.OmegaConf.is_config(value):
        return _plain(omegaconf.OmegaConf.to_container(value))
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Namespace):
        return _plain(vars(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple, set) else value


def is_keyed_by_name(optimizer_state: Any) -> bool:
    """Whether an optimizer's state is keyed by FQN, as the promoted strategies make it, and not by number."""
    groups = optimizer_state.get("param_groups", ()) if isinstance(optimizer_state, dict) else ()
    return bool(groups) and all(isinstance(name, str) for group in groups for name in group["params"])
