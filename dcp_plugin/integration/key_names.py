"""The names that every integration gives to things in a checkpoint, so that any other one finds them.

``model`` and ``optim``; ``model_0``, ``model_1``, … and ``optim_0``, … when there are several; ``extra.<name>`` for
everything else: schedulers, loops, samplers, and ``extra.rng.<rank>.streams`` for the random generators.
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

from dcp_plugin.format import values
from dcp_plugin.paths import PathLike, StoreOptions
from dcp_plugin.sources import SourceFiles
from dcp_plugin.storage.reader import ShardedReader
from dcp_plugin.tools.inspect import info_of
from dcp_plugin.types import CheckpointInfo

MODEL, OPTIM, EXTRA, RNG = "model", "optim", "extra", "rng"


def numbered(name: str, count: int) -> list[str]:
    """The names of ``count`` objects of one kind: ``model``, or ``model_0``, ``model_1``, …"""
    return [name] if count == 1 else [f"{name}_{number}" for number in range(count)]


def among(name: str, names: Iterable[str]) -> list[str]:
    """The names of one kind that occur in ``names``, in the order of the objects."""
    found = [one for one in names if one == name or one.removeprefix(f"{name}_").isdecimal()]
    return sorted(found, key=lambda one: int(one.removeprefix(name).removeprefix("_") or 0))


def keys_by_name(checkpoint: PathLike | CheckpointInfo, files: SourceFiles | None = None) -> dict[str, list[str]]:
    """Return the keys of a checkpoint by name, without the name.

    Args:
        files: Of :meth:`dcp_plugin.Checkpointer.shown`.
    """
    info = checkpoint if isinstance(checkpoint, CheckpointInfo) else inspect_files(checkpoint, files)
    keys: dict[str, list[str]] = {}
    for key in (*(tensor.key for tensor in info.tensors), *info.values):
        name, _, rest = key.partition(".")
        keys.setdefault(name, []).append(rest)
    return keys


def inspect_files(path: PathLike, files: SourceFiles | None) -> CheckpointInfo:
    """:func:`dcp_plugin.inspect` of a checkpoint at its path, or of its files in a source."""
    with ShardedReader(path, complete=False, files=files) as reader:
        return info_of(reader)


def plain(value: Any) -> Any:
    """Settings as the plain values that they stand for, where they cannot be stored as what they are."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and omegaconf.OmegaConf.is_config(value):
        return plain(omegaconf.OmegaConf.to_container(value))
    if isinstance(value, StoreOptions):  # with which a store is reached: not for a checkpoint
        return None
    settings = isinstance(value, (Enum, timedelta, np.ndarray, Namespace)) or dataclasses.is_dataclass(value)
    if settings and values.is_storable(value):
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
