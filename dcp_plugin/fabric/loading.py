"""What ``fabric.load`` takes from where: checkpoints of every framework, and of Fabric without this package.

Rank 0 looks at what is there and tells the others, so that all ranks ask the core for the same, or raise the same.
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
from dcp_plugin.tools.inspect import info_of

if TYPE_CHECKING:
    from dcp_plugin.fabric.strategy import FabricAdapter

logger = logging.getLogger("dcp_plugin")

OPTIMIZER_KEYS = {"state", GROUPS, *BESIDE}


@dataclass(frozen=True)
class Contents:
    """What a checkpoint has, under the names that whoever saved it gave."""

    path: Where
    tops: list[str]
    """The first segments of its keys, but for ``extra``."""
    optimizers: list[str]
    """Those of them under which there is the state of an optimizer."""
    sharded: list[str]
    """Those under which there are tensors."""
    extras: dict[str, list[int]]
    """What it has of ``extra``, and which ranks have it, if it is kept by rank."""
    names: dict[str, str]
    """The users' names of modules and optimizers, by ours."""
    made_by_fabric: bool
    """Fabric itself saved it, without this package."""

    @classmethod
    def of(cls, path: Where, files: SourceFiles | None, wanted: list[str]) -> Contents:
        """Return what a checkpoint has, as this rank sees it.

        Args:
            files: Of :meth:`dcp_plugin.Checkpointer.shown`.
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
        found: dict[str, Any] = {f"{EXTRA}.{NAMES}": {}}
        if extras.pop(NAMES, None) is not None:
            Checkpointer(solo=True).restore(found, path, files=files)
        return cls(
            path,
            tops=list(keys),
            optimizers=[
                top
                for top, rest in keys.items()
                if kinds.get(top) == "optimizer" or {key.partition(".")[0] for key in rest} <= OPTIMIZER_KEYS
            ],
            sharded=[top for top in keys if top in with_tensors],
            extras=extras,
            names={str(name): str(user) for name, user in found[f"{EXTRA}.{NAMES}"].items()},
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
    """``fabric.load`` and ``fabric.load_raw`` of a directory. Collective.

    Random streams are restored with an optimizer: loading weights alone does not change them.

    Returns:
        What the checkpoint has and ``state`` did not ask for. Where the strategy keeps shards this leaves out models
        and optimizers, which no rank could hold, as Fabric does; otherwise they are in it as state dicts.

    Raises:
        NotInCheckpoint: A name of ``state`` is not in the checkpoint, if ``strict``.
        CheckpointMismatch: What is there does not fit.
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
    found = _contents(adapter, path, files, data)
    if found.made_by_fabric:
        return _load_made_by_fabric(adapter, path, state, strict, weights_only)
    places = _places(state, found, strict)
    target: dict[str, Any] = {**names_for(trained_modules(adapter, objects), list(modules.values()))}
    for name, place in places.items():
        target.update(_target(adapter, name, objects[name], place, found))
    remainder = _remainder(adapter, found, set(places.values()))
    target.update(dict.fromkeys(remainder.values()))
    if optimizers and adapter.attachment.config.rng:
        target.update(_streams(adapter, found))
    adapter.checkpointer.restore(target, path, strict=strict)
    for name, place in places.items():
        if _is_replaced(state[name]):
            state[name] = target[place]
    return {name: _nested(target[place], place in found.optimizers) for name, place in remainder.items()}


def _contents(adapter: FabricAdapter, path: Where, files: SourceFiles | None, wanted: list[str]) -> Contents:
    """Return what rank 0 sees; on every rank."""
    return adapter.checkpointer.ranks.from_zero(f"read {path}", lambda: Contents.of(path, files, wanted))


def _places(state: dict[str, Any], found: Contents, strict: bool) -> dict[str, str]:
    """Where the items of the state are in the checkpoint.

    Raises:
        NotInCheckpoint: One is not there, if ``strict``.
    """
    modules, optimizers = of_kind(nn.Module, state), of_kind(Optimizer, state)
    places = {**_live_places(MODEL, modules, found), **_live_places(OPTIM, optimizers, found)}
    plain = {name: name for name in found.tops} | {name: f"{EXTRA}.{name}" for name in found.extras}
    live = modules.keys() | optimizers.keys()
    places.update({name: plain[name] for name in state if name in plain and name not in live})
    missing = [name for name in state if name not in places]
    if strict and missing:
        there = [*(found.names.get(top, top) for top in found.tops), *(name for name in found.extras if name != RNG)]
        raise NotInCheckpoint(
            f"{found.path} has no {', '.join(map(repr, missing))}; it has {', '.join(there)}. strict=False loads what "
            "fits."
        )
    return places


def _live_places(kind: str, mine: Mapping[str, Any], found: Contents) -> dict[str, str]:
    """Where the user's modules, or optimizers, are in the checkpoint: by the user's names, else by their order."""
    places: dict[str, str] = {}
    by_order = among(kind, found.tops)
    for user in mine:
        known = [name for name, other in found.names.items() if other == user and name in by_order]
        if known or user in found.tops:
            places[user] = known[0] if known else user
    others = [user for user in mine if user not in places]
    rest = [name for name in by_order if name not in places.values()]
    if len(others) == len(rest):
        places.update(zip(others, rest, strict=True))
    elif len(mine) == 1 and not by_order:
        places[others[0]] = kind  # of another name: the core finds the only one of its kind, and says so
    return places


def _target(adapter: FabricAdapter, name: str, value: Any, place: str, found: Contents) -> dict[str, Any]:
    """What the core has to fill for one item of the state, by key."""
    if not state_mapping.has_position(value):
        return {place: None if _is_replaced(value) else value}
    rank, ranks = data_rank(adapter.strategy)
    saved_on = found.extras.get(name, [])
    warn = partial(_warn, adapter, found)
    if len(saved_on) == ranks:
        return {f"{place}.{rank}": Callbacks(load_state_dict=partial(state_mapping.continue_at, value, warn))}
    warn(
        f"the position of {name!r} was saved on {len(saved_on)} data-parallel ranks and this run has {ranks}: "
        f"{state_mapping.STARTS_AGAIN}. To continue exactly, resume on as many ranks as then, or from a checkpoint "
        "made between two epochs."
    )
    return {}


def _warn(adapter: FabricAdapter, found: Contents, message: str) -> None:
    """Warn of something about a checkpoint, on rank 0."""
    if adapter.rank == 0:
        logger.warning("%s: %s", found.path, message)


def _is_replaced(value: Any) -> bool:
    """Whether a value of the state is exchanged for that of the checkpoint, as Fabric does with plain ones; live and
    sharded ones are filled in place."""
    if isinstance(value, Mapping):
        return all(_is_replaced(item) for item in value.values())
    return not isinstance(value, (nn.Module, Optimizer, Stateful, PerRank, DTensor, ShardedTensor))


def _remainder(adapter: FabricAdapter, found: Contents, taken: set[str]) -> dict[str, str]:
    """Where the remainder is, by the name under which the user gets it."""
    tops = [top for top in found.tops if top not in taken and not (adapter.keeps_shards and top in found.sharded)]
    extras = {name: f"{EXTRA}.{name}" for name in found.extras if name != RNG and f"{EXTRA}.{name}" not in taken}
    return {found.names.get(top, top): top for top in tops} | extras


def _streams(adapter: FabricAdapter, found: Contents) -> dict[str, Any]:
    saved_on = frozenset(found.extras.get(RNG, []))
    streams = SavedStreams(saved_on, adapter.rank, adapter.world_size, adapter.strategy.root_device)
    if streams.about_new_ranks:
        _warn(adapter, found, f"it has {streams.about_new_ranks}")
    return {} if streams.name is None else {f"{EXTRA}.{streams.name}": RandomStreams(load_state_dict=streams.restore)}


def _nested(value: Any, is_optimizer: bool) -> Any:
    """An optimizer's state dict as Fabric would have it; any other value as it is."""
    if not is_optimizer or not isinstance(value, dict) or not any(map(_is_flat, value)):
        return value
    return unflatten_optimizer({key: item for key, item in value.items() if key != GROUPS})


def _is_flat(key: Any) -> bool:
    """Return whether a key is one of an optimizer in torch's layout: a layout of its own may have any keys."""
    return isinstance(key, str) and key.startswith(("state.", "param_groups."))


def _load_made_by_fabric(
    adapter: FabricAdapter, path: Where, state: dict[str, Any], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """A sharded checkpoint of Fabric without this package: tensors by the user's names, all else in a file."""
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
    """Load one module or optimizer, from a checkpoint that has one."""
    found = _contents(adapter, path, files, [])
    if isinstance(value, nn.Module):
        name = _only("model", path, [top for top in found.sharded if top not in found.optimizers])
        adapter.checkpointer.restore({name: inside_ddp(value)}, path, strict=strict)
        return
    name = _only("optimizer", path, found.optimizers)
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


def _only(what: str, path: Where, found: list[str]) -> str:
    if len(found) == 1:
        return found[0]
    there = f"{len(found)} ({', '.join(found)})" if found else "none"
    raise CheckpointMismatch(
        f"load_raw takes the only {what} of a checkpoint, and {path} has {there}: use fabric.load."
    )
