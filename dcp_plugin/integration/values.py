"""Values of framework checkpoints in their stored form, which is plain and loads without executing code."""

from __future__ import annotations

import dataclasses
import sys
from argparse import Namespace
from collections.abc import Mapping
from datetime import timedelta
from enum import Enum
from typing import Any

import numpy as np
import torch

from dcp_plugin.errors import UnsafeCheckpoint
from dcp_plugin.format.index import Entry, Location, StoredTensor, StoredValue
from dcp_plugin.format.keys import flatten
from dcp_plugin.format.keys import holds_sharded as holds_sharded
from dcp_plugin.format.values import encode as encode
from dcp_plugin.format.values import is_storable as is_storable
from dcp_plugin.paths import StoreOptions
from dcp_plugin.planning.save import encode_state
from dcp_plugin.tensors._torch import is_tensor


def plain(value: Any) -> Any:
    """Return settings as plain values, unless they can be stored unchanged."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and omegaconf.OmegaConf.is_config(value):
        return plain(omegaconf.OmegaConf.to_container(value))
    if isinstance(value, StoreOptions):  # has credentials, which no checkpoint stores
        return None
    settings = isinstance(value, (Enum, timedelta, np.ndarray, Namespace)) or dataclasses.is_dataclass(value)
    if settings and is_storable(value):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Namespace):
        return plain(vars(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple, set) else value


def refuse_unstorable(state: Mapping[str, Any], allow_pickle: tuple[str, ...]) -> None:
    """Check that the values of a state can be stored: encode them, and write nothing.

    Raises:
        UnsafeCheckpoint: Only executing code would restore some values; the message names all of them.
    """
    leaves, _ = flatten(state)
    try:
        encode_state({key: value for key, value in leaves.items() if not is_tensor(value)}, allow_pickle)
    except UnsafeCheckpoint as error:
        raise UnsafeCheckpoint(f"the checkpoints of this training could not be saved: {error}") from error


def entries_of(values: Mapping[str, Any]) -> dict[str, Entry]:
    """Return the entries that a checkpoint with these values would have, for :func:`dcp_plugin.state.load_into`."""
    no_location = StoredValue(Location("", 0, 0, None, 0))
    return {
        key: StoredTensor(value.dtype, tuple(value.shape), ()) if isinstance(value, torch.Tensor) else no_location
        for key, value in values.items()
    }
