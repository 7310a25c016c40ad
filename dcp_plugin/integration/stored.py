"""Names and values of a framework's state in a checkpoint, the same for all integrations.

The names are ``model`` and ``optim``, or ``model_0``, ``model_1``, … and ``optim_0``, … for several objects. All other
state has names in ``extra.<name>``: schedulers, loops, samplers, and ``extra.rng.<rank>.streams`` for the random
generators. Values have their stored form, which is plain and loads without executing code.

Random streams are restored on any number of ranks: a rank restores its own, or streams derived from rank 0's if the
checkpoint has none of this rank. Creating an iterator over a dataloader draws from the streams, so each framework
package chooses when it restores them.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

from dcp_plugin.core.errors import UnsafeCheckpoint, some
from dcp_plugin.core.format.index import MAPPING_CLASSES, Entry, Location, StoredChunk, StoredTensor, StoredValue
from dcp_plugin.core.format.keys import encode_state, flatten, of_class_of
from dcp_plugin.core.format.keys import holds_sharded as holds_sharded
from dcp_plugin.core.format.values import encode as encode
from dcp_plugin.core.format.values import is_storable as is_storable
from dcp_plugin.core.format.values import mapping_class
from dcp_plugin.core.paths import PathLike, StoreOptions
from dcp_plugin.core.sources import SourceFiles
from dcp_plugin.core.state import GROUPS, CalledLast, NamesOnly, random_streams, unflatten_optimizer
from dcp_plugin.core.storage.reader import CheckpointReader
from dcp_plugin.core.tensors._torch import is_tensor
from dcp_plugin.tools.contents import CheckpointInfo, info_of

MODEL, OPTIM, EXTRA, RNG = "model", "optim", "extra", "rng"


@dataclasses.dataclass(frozen=True)
class Callbacks:
    """Object of the state that consists of two functions, which the core calls when all ranks take part."""

    state_dict: Callable[[], dict[str, Any]] = dict
    load_state_dict: Callable[[dict[str, Any]], None] = lambda state: None


class RandomStreams(Callbacks, CalledLast):
    """Random streams of a rank, saved and restored after the dataloaders, which may draw from them."""


def of_rank(rank: int, device: torch.device, **more: Any) -> dict[str, dict[str, Any]]:
    """Return the value of ``extra.rng`` on a rank: its own streams under its own number.

    Args:
        device: The device whose generator is stored in addition to those of the CPU.
        more: Further state of a framework.
    """
    return {str(rank): {"streams": random_streams.capture(device), **more}}


@dataclasses.dataclass(frozen=True)
class SavedStreams:
    """Random streams in a checkpoint, for one rank of the run that loads them."""

    saved_on: frozenset[int]
    """The ranks whose streams are in the checkpoint."""
    rank: int
    world_size: int
    device: torch.device
    loaded: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The state that was restored last, or that a load has filled into this mapping."""

    @classmethod
    def among(cls, names: Iterable[str], rank: int, world_size: int, device: torch.device) -> SavedStreams:
        """Return the streams of a checkpoint with these names or keys in ``extra``, as ``rng.0.streams.torch``."""
        stored = [name.split(".", 2)[1] for name in names if name.startswith(f"{RNG}.")]
        return cls(frozenset(int(number) for number in stored if number.isdecimal()), rank, world_size, device)

    @property
    def source(self) -> int | None:
        """The rank whose streams this rank reads: its own, else rank 0's; None if the checkpoint has neither."""
        return next((rank for rank in (self.rank, 0) if rank in self.saved_on), None)

    @property
    def name(self) -> str | None:
        """The name in ``extra`` of the streams of :attr:`source`: ``rng.<rank>``."""
        return None if self.source is None else f"{RNG}.{self.source}"

    @property
    def is_new_rank(self) -> bool:
        """True if the checkpoint, made by fewer ranks, has no streams of this rank."""
        return self.rank not in self.saved_on

    def restore(self, state: Mapping[str, Any] | None = None) -> None:
        """Continue this rank's streams, or start derived streams if the checkpoint has none of this rank.

        Args:
            state: The value of :func:`of_rank` for the rank :attr:`source`; by default the state in :attr:`loaded`. If
                both are empty, nothing is restored.
        """
        self.loaded.update(state or {})
        if self.loaded and self.is_new_rank:
            random_streams.derive(self.loaded["streams"], self.rank)
        elif self.loaded:
            random_streams.restore(self.loaded["streams"], self.device)

    @property
    def about_new_ranks(self) -> str:
        """A message for the user about new ranks; empty if no rank is new, or the checkpoint has no streams."""
        return random_streams.about_new_ranks(len(self.saved_on), self.world_size)


def numbered(name: str, count: int) -> list[str]:
    """Return the names of ``count`` objects of a kind: ``model``, or ``model_0``, ``model_1``, …"""
    return [name] if count == 1 else [f"{name}_{number}" for number in range(count)]


def among(name: str, names: Iterable[str]) -> list[str]:
    """Return the names of a kind that occur in ``names``, in the order of the objects."""
    of_kind = [other for other in names if other == name or other.removeprefix(f"{name}_").isdecimal()]
    return sorted(of_kind, key=lambda other: int(other.removeprefix(name).removeprefix("_") or 0))


def names_for(modules: Mapping[str, nn.Module], present: Collection[Any]) -> dict[str, NamesOnly]:
    """Return the modules that name the parameters of optimizers, without those ``present`` in the state."""
    return {f"names_for_{name}": NamesOnly(module) for name, module in modules.items() if module not in present}


def keys_by_name(checkpoint: PathLike | CheckpointInfo, files: SourceFiles | None = None) -> dict[str, list[str]]:
    """Return the keys of a checkpoint without their first segment, by that segment: the name of the object.

    Args:
        files: The files from :meth:`dcp_plugin.checkpointer.Internals.shown`.
    """
    info = checkpoint if isinstance(checkpoint, CheckpointInfo) else inspect_files(checkpoint, files)
    keys: dict[str, list[str]] = {}
    for key in (*(tensor.key for tensor in info.tensors), *info.values):
        name, _, below = key.partition(".")
        keys.setdefault(name, []).append(below)
    return keys


def optimizer_from_stored(stored: Any) -> Any:
    """Return the nested state dict of an optimizer from its stored form.

    This package stores it flat, and stock Lightning stores it nested. A layout of the optimizer's own is returned
    unchanged.
    """
    if isinstance(stored, dict) and any(str(key).startswith(("state.", f"{GROUPS}.")) for key in stored):
        return unflatten_optimizer(stored)
    has_no_state = isinstance(stored, dict) and stored.keys() == {GROUPS}  # SGD, as stock Lightning stores it
    return {"state": {}, **stored} if has_no_state else stored


def inspect_files(path: PathLike, files: SourceFiles | None) -> CheckpointInfo:
    """Return the result of :func:`dcp_plugin.inspect` for a checkpoint at its path, or for its files in a source."""
    with CheckpointReader(path, files=files) as reader:
        return info_of(reader.open())


_PLAIN_FORMS: dict[type, Callable[[Any], Any]] = {
    Enum: lambda value: value.value,
    timedelta: timedelta.total_seconds,
    np.ndarray: np.ndarray.tolist,
    Namespace: vars,
}


def like(mapping: Mapping[Any, Any], items: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a mapping with these items, of the class of ``mapping`` if a checkpoint stores that, else a ``dict``."""
    kind = mapping_class(mapping)
    if isinstance(mapping, defaultdict) and not kind:
        keys = some(list(map(str, mapping)), 3)
        warnings.warn(f"the defaultdict with {keys} comes back as a dict, since its factory is code", stacklevel=2)
    made = MAPPING_CLASSES.get(kind, dict)()
    made.update(items)
    return made


def plain(value: Any) -> Any:
    """Return settings as plain values, unless they can be stored unchanged."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and omegaconf.OmegaConf.is_config(value):
        return plain(omegaconf.OmegaConf.to_container(value))
    if isinstance(value, StoreOptions):  # has credentials, which no checkpoint stores
        return None
    form = next((form for kind, form in _PLAIN_FORMS.items() if isinstance(value, kind)), None)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        form = form or (lambda value: {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if form is not None:
        return value if is_storable(value) else plain(form(value))
    if isinstance(value, dict):
        items = {key: plain(item) for key, item in value.items()}
        # The state dict of a module has _metadata.
        return of_class_of(value, items) if hasattr(value, "_metadata") else like(value, items)
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
    """Return the entries that a checkpoint with these values would have, for
    :func:`dcp_plugin.core.state.load_into`."""
    no_location = StoredValue((StoredChunk((), (), Location("", 0, 0, None, 0)),))
    return {
        key: StoredTensor(value.dtype, tuple(value.shape), ()) if isinstance(value, torch.Tensor) else no_location
        for key, value in values.items()
    }
