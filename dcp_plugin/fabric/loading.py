"""Loads by ``fabric.load``: checkpoints of every framework, and of Fabric without this package.

Rank 0 examines the checkpoint for all ranks, so that all ranks request the same keys of the core, or raise the same
error.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from dcp_plugin import ShardedReader
from dcp_plugin.checkpointer import Checkpointer
from dcp_plugin.errors import CheckpointMismatch, NotInCheckpoint
from dcp_plugin.fabric import state_mapping
from dcp_plugin.fabric.state_mapping import NAMES, Callbacks, RandomStreams, names_for, of_kind, trained_modules
from dcp_plugin.integration.files import META, is_regular_file, load_torch_file
from dcp_plugin.integration.key_names import EXTRA, MODEL, OPTIM, RNG, among, keys_by_name
from dcp_plugin.integration.lightning_packages import data_rank
from dcp_plugin.integration.random_streams import SavedStreams
from dcp_plugin.paths import Where
from dcp_plugin.sources import SourceFiles
from dcp_plugin.state import inside_ddp, unflatten_optimizer
from dcp_plugin.state.names import is_of_no_module
from dcp_plugin.state.optimizer import BESIDE, GROUPS
from dcp_plugin.state.per_rank import PerRank
from dcp_plugin.tensors._torch import DTensor, ShardedTensor
from dcp_plugin.tools.contents import info_of

if TYPE_CHECKING:
    from dcp_plugin.fabric.strategy import FabricAdapter

logger = logging.getLogger("dcp_plugin")

OPTIMIZER_KEYS = {"state", GROUPS, *BESIDE}


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint, under the names of its saver."""

    path: Where
    tops: list[str]
    """The first segments of its keys, except ``extra``."""
    optimizers: list[str]
    """The first segments with the state of an optimizer."""
    sharded: list[str]
    """The first segments with tensors."""
    extras: dict[str, list[int]]
    """The names in ``extra``, with the ranks that have state of their own under them."""
    names: dict[str, str]
    """The users' names of modules and optimizers, by ours."""
    made_by_fabric: bool
    """True if Fabric saved the checkpoint without this package."""

    @classmethod
    def of(cls, path: Where, files: SourceFiles | None, wanted: list[str]) -> Contents:
        """Return the contents of a checkpoint, read by this rank.

        Args:
            files: The files from :meth:`dcp_plugin.Checkpointer.shown`.
            wanted: Names in ``extra`` that may have dots.
        """
        with ShardedReader(path, complete=False, files=files) as reader:
            info, kinds = info_of(reader), reader.summary.kinds if reader.summary else {}
        keys = keys_by_name(info)
        with_tensors = {tensor.key.partition(".")[0] for tensor in info.tensors}
        extras: dict[str, list[int]] = {}
        for key in keys.pop(EXTRA, []):
            for name in [name for name in wanted if f"{key}.".startswith(f"{name}.")] or [key.partition(".")[0]]:
                rank = key[len(name) + 1 :].partition(".")[0]
                ranks = extras.setdefault(name, [])
                if rank.isdecimal() and int(rank) not in ranks:
                    ranks.append(int(rank))
        names: dict[str, Any] = {f"{EXTRA}.{NAMES}": {}}
        if extras.pop(NAMES, None) is not None:
            Checkpointer(solo=True).restore(names, path, files=files)
        return cls(
            path,
            tops=list(keys),
            optimizers=[
                top
                for top, below in keys.items()
                if kinds.get(top) == "optimizer" or {key.partition(".")[0] for key in below} <= OPTIMIZER_KEYS
            ],
            sharded=[top for top in keys if top in with_tensors],
            extras=extras,
            names={str(name): str(user) for name, user in names[f"{EXTRA}.{NAMES}"].items()},
            made_by_fabric=info.format != "dcp_plugin" and is_regular_file(path / META),
        )


def load(
    adapter: FabricAdapter,
    path: Where,
    files: SourceFiles | None,
    state: Any,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Load a directory, for ``fabric.load`` and ``fabric.load_raw``. Collective.

    Random streams are restored together with an optimizer; a load of weights alone does not change them.

    Returns:
        The values of the checkpoint that ``state`` does not name. Models and optimizers among them are state dicts. If
        the strategy keeps shards, they are omitted as in Fabric, since they may be too large for a rank.

    Raises:
        NotInCheckpoint: A name of ``state`` is not in the checkpoint, if ``strict``.
        CheckpointMismatch: The checkpoint does not fit.
    """
    if isinstance(state, (nn.Module, Optimizer)):
        _load_raw(adapter, path, files, state, strict)
        return {}
    state = {} if state is None else state
    if not state and adapter.keeps_shards:
        raise ValueError(
            f"fabric.load({str(path)!r}) with {type(adapter.strategy).__name__} needs a state with the module to "
            "restore: the full model may fit on no rank. dcp_plugin.inspect(path) tells what is in a checkpoint."
        )
    objects = state_mapping.as_asked(state)
    modules, optimizers = of_kind(nn.Module, objects), of_kind(Optimizer, objects)
    data = [name for name in state if name not in modules and name not in optimizers]
    contents = _contents(adapter, path, files, data)
    if contents.made_by_fabric:
        return _load_made_by_fabric(adapter, path, state, strict, weights_only)
    places = _places(state, contents, strict)
    target: dict[str, Any] = {**names_for(trained_modules(adapter, objects), list(modules.values()))}
    for name, place in places.items():
        target.update(_target(adapter, name, objects[name], place, contents))
    remainder = _remainder(adapter, contents, set(places.values()))
    target.update(dict.fromkeys(remainder.values()))
    if optimizers and adapter.attachment.config.rng:
        target.update(_streams(adapter, contents))
    adapter.checkpointer.restore(target, path, strict=strict)
    for name, place in places.items():
        if _is_replaced(state[name]):
            state[name] = target[place]
    return {name: _nested(target[place], place in contents.optimizers) for name, place in remainder.items()}


def _contents(adapter: FabricAdapter, path: Where, files: SourceFiles | None, wanted: list[str]) -> Contents:
    """Return on every rank the contents that rank 0 reads."""
    return adapter.checkpointer.ranks.from_zero(f"read {path}", lambda: Contents.of(path, files, wanted))


def _places(state: dict[str, Any], contents: Contents, strict: bool) -> dict[str, str]:
    """Return for each item of the state its name in the checkpoint.

    Raises:
        NotInCheckpoint: The checkpoint lacks an item, if ``strict``.
    """
    modules, optimizers = of_kind(nn.Module, state), of_kind(Optimizer, state)
    places = {**_live_places(MODEL, modules, contents), **_live_places(OPTIM, optimizers, contents)}
    plain = {name: name for name in contents.tops} | {name: f"{EXTRA}.{name}" for name in contents.extras}
    live = modules.keys() | optimizers.keys()
    places.update({name: plain[name] for name in state if name in plain and name not in live})
    missing = [name for name in state if name not in places]
    if strict and missing:
        present = [
            *(contents.names.get(top, top) for top in contents.tops),
            *(name for name in contents.extras if name != RNG),
        ]
        raise NotInCheckpoint(
            f"{contents.path} has no {', '.join(map(repr, missing))}; it has {', '.join(present)}. strict=False loads "
            "what fits."
        )
    return places


def _live_places(kind: str, live: Mapping[str, Any], contents: Contents) -> dict[str, str]:
    """Return for each module or optimizer its name in the checkpoint, by the user's name, else by the order."""
    places: dict[str, str] = {}
    by_order = among(kind, contents.tops)
    for user in live:
        same = [name for name, other in contents.names.items() if other == user and name in by_order]
        if same or user in contents.tops:
            places[user] = same[0] if same else user
    unplaced = [user for user in live if user not in places]
    unused = [name for name in by_order if name not in places.values()]
    if len(unplaced) == len(unused):
        places.update(zip(unplaced, unused, strict=True))
    elif len(live) == 1 and not by_order:
        places[unplaced[0]] = kind  # under another name, the core finds the only object of its kind, and logs the name
    return places


def _target(adapter: FabricAdapter, name: str, value: Any, place: str, contents: Contents) -> dict[str, Any]:
    """Return the targets of the core for an item of the state, by key."""
    if not state_mapping.has_position(value):
        return {place: None if _is_replaced(value) else value}
    rank, ranks = data_rank(adapter.strategy)
    saved_on = contents.extras.get(name, [])
    warn = partial(_warn, adapter, contents)
    if len(saved_on) == ranks:
        return {f"{place}.{rank}": Callbacks(load_state_dict=partial(state_mapping.continue_at, value, warn))}
    warn(
        f"the position of {name!r} was saved on {len(saved_on)} data-parallel ranks and this run has {ranks}: "
        f"{state_mapping.STARTS_AGAIN}. To continue exactly, resume on as many ranks as then, or from a checkpoint "
        "made between two epochs."
    )
    return {}


def _warn(adapter: FabricAdapter, contents: Contents, message: str) -> None:
    """Log a warning about a checkpoint, on rank 0."""
    if adapter.rank == 0:
        logger.warning("%s: %s", contents.path, message)


def _is_replaced(value: Any) -> bool:
    """Return whether the checkpoint's value replaces the value in the state, as Fabric does for plain values. Modules,
    optimizers and sharded objects are filled in place."""
    if isinstance(value, Mapping):
        return all(_is_replaced(item) for item in value.values())
    return not isinstance(value, (nn.Module, Optimizer, Stateful, PerRank, DTensor, ShardedTensor))


def _remainder(adapter: FabricAdapter, contents: Contents, taken: set[str]) -> dict[str, str]:
    """Return the names of the remaining values in the checkpoint, by the names that the user gets."""
    tops = [top for top in contents.tops if top not in taken and not (adapter.keeps_shards and top in contents.sharded)]
    extras = {name: f"{EXTRA}.{name}" for name in contents.extras if name != RNG and f"{EXTRA}.{name}" not in taken}
    return {contents.names.get(top, top): top for top in tops} | extras


def _streams(adapter: FabricAdapter, contents: Contents) -> dict[str, Any]:
    saved_on = frozenset(contents.extras.get(RNG, []))
    streams = SavedStreams(saved_on, adapter.rank, adapter.world_size, adapter.strategy.root_device)
    if streams.about_new_ranks:
        _warn(adapter, contents, f"it has {streams.about_new_ranks}")
    return {} if streams.name is None else {f"{EXTRA}.{streams.name}": RandomStreams(load_state_dict=streams.restore)}


def _nested(value: Any, is_optimizer: bool) -> Any:
    """Return an optimizer's state dict in Fabric's nested layout; any other value unchanged."""
    if not is_optimizer or not isinstance(value, dict) or not any(map(_is_flat, value)):
        return value
    return unflatten_optimizer({key: item for key, item in value.items() if key != GROUPS})


def _is_flat(key: Any) -> bool:
    """Return whether a key belongs to torch's layout of an optimizer. Other layouts may have any keys."""
    return isinstance(key, str) and key.startswith(("state.", "param_groups."))


def _load_made_by_fabric(
    adapter: FabricAdapter, path: Where, state: dict[str, Any], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Load a sharded checkpoint of stock Fabric: tensors under the user's names, and a file with all other values."""
    live = {**of_kind(nn.Module, state), **of_kind(Optimizer, state)}
    metadata: dict[str, Any] = adapter.checkpointer.ranks.from_zero(
        f"read {path}",
        lambda: load_torch_file(path / META, weights_only is not False, "fabric.load(..., weights_only=False)"),
    )
    missing = [name for name in state if name not in live and name not in metadata]
    if strict and missing:
        raise NotInCheckpoint(f"{path} has no {', '.join(map(repr, missing))}; it has {', '.join(metadata)}.")
    adapter.checkpointer.restore(live, path, strict=strict)
    for name in state:
        if name in metadata and isinstance(state[name], Stateful):
            state[name].load_state_dict(metadata.pop(name))
        elif name in metadata and name not in live:
            state[name] = metadata.pop(name)
    return metadata


def _load_raw(
    adapter: FabricAdapter, path: Where, files: SourceFiles | None, value: nn.Module | Optimizer, strict: bool
) -> None:
    """Load a module or an optimizer from a checkpoint with a single object of this kind."""
    contents = _contents(adapter, path, files, [])
    if isinstance(value, nn.Module):
        name = _only("model", path, [top for top in contents.sharded if top not in contents.optimizers])
        adapter.checkpointer.restore({name: inside_ddp(value)}, path, strict=strict)
        return
    name = _only("optimizer", path, contents.optimizers)
    of_none = adapter.checkpointer.ranks.from_zero(
        f"read {path}", lambda: is_of_no_module(keys_by_name(path, files)[name])
    )
    try:
        module = trained_modules(adapter, {name: value}, loose=of_none)[name]
    except CheckpointMismatch as error:
        raise CheckpointMismatch(
            "an optimizer can be loaded alone if its model was set up by this Fabric after attach(fabric). Load it "
            "with its model: fabric.load(path, {'model': model, 'optimizer': optimizer})."
        ) from error
    adapter.checkpointer.restore({**names_for({name: module}, []), name: value}, path, strict=strict)


def _only(kind: str, path: Where, names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    present = f"{len(names)} ({', '.join(names)})" if names else "none"
    raise CheckpointMismatch(
        f"load_raw takes the only {kind} of a checkpoint, and {path} has {present}: use fabric.load."
    )
