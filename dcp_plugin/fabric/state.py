"""Names of a Fabric state in a checkpoint, which every other framework's integration reads.

| in the state                         | in the checkpoint                                                |
|--------------------------------------|------------------------------------------------------------------|
| modules                              | ``model.<FQN>``, or ``model_0.…``, ``model_1.…`` in their order  |
| optimizers                           | ``optim.…``, or ``optim_0.…``, ``optim_1.…``                     |
| dataloaders that know their position | ``extra.<name>.<data rank>.…``, one per data-parallel rank       |
| everything else                      | ``extra.<name>``                                                 |
| a state of tensors alone             | ``model.<name>``: it is the state dict of a module               |
| (random streams of every rank)       | ``extra.rng.<rank>.streams``                                     |
| (the user's names that differ)       | ``extra.fabric_names``                                           |

A name in ``extra`` that has dots, is no text, or is one of ours is changed. A plain value, or an object with
``state_dict`` that is not a dataloader, is saved with rank 0's value.

Creating an iterator over a dataloader draws from the random generators, and the user's loop does so after the load.
Therefore the load creates the iterator: ``StatefulDataLoader.state_dict()`` makes the iterator that the next ``for
batch in loader`` takes, and the random streams are restored after that. Between two epochs this iterator is at its end,
and the loop creates the next in its ordinary way, with the same draws as without the interruption. The user must put
the loader into the state, and call ``fabric.load`` before the loop over it.

In a load, rank 0 examines the checkpoint for all ranks, so that all ranks request the same keys of the core, or raise
the same error. Checkpoints of every framework are loaded, and of Fabric without this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dcp_plugin import ShardedReader
from dcp_plugin.checkpointer import Checkpointer, Internals
from dcp_plugin.core.errors import CheckpointMismatch, NotInCheckpoint, logger
from dcp_plugin.core.paths import Where
from dcp_plugin.core.sources import SourceFiles
from dcp_plugin.core.state import (
    BESIDE,
    GROUPS,
    OwnLayout,
    PerRank,
    flatten_optimizer,
    gather_module,
    gather_optimizer,
    inside_ddp,
    is_of_no_module,
    loose_module,
    mark_parameters,
    mark_slots,
    trained_module,
)
from dcp_plugin.core.tensors._torch import DTensor, ShardedTensor, is_tensor
from dcp_plugin.integration import (
    EXTRA,
    META,
    MODEL,
    OPTIM,
    RNG,
    Callbacks,
    RandomStreams,
    SavedStreams,
    Saver,
    among,
    is_of_stock_lightning,
    keys_by_name,
    load_torch_file,
    names_for,
    numbered,
    of_rank,
    optimizer_from_stored,
    plain,
)
from dcp_plugin.integration.lightning_packages import StrategyAdapter, data_rank, made_by
from dcp_plugin.tools.contents import info_of

NAMES, _STREAMS = "fabric_names", f"{EXTRA}.{RNG}"
OPTIMIZER_KEYS = {"state", GROUPS, *BESIDE}
STARTS_AGAIN = "the dataloader starts with its first batch, so samples of the epoch under way come again"

Filter = Callable[[str, Any], bool]


class FabricStrategy(StrategyAdapter):
    """Promoted strategy of a Fabric: its attachment, its rank and the modules of ``setup``."""

    @property
    def attachment(self) -> Saver:
        return self.strategy.dcp  # type: ignore[no-any-return]

    @property
    def internals(self) -> Internals:
        return self.attachment.internals

    @property
    def rank(self) -> int:
        return getattr(self.strategy, "global_rank", 0)

    @cached_property
    def modules(self) -> WeakValueDictionary[str, nn.Module]:
        """Modules of ``setup``, in order; an optimizer that is loaded alone trains one of these modules."""
        return WeakValueDictionary()


def of_kind(kind: type, state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if isinstance(value, kind)}


def inside_ddp_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with the modules whose state Fabric saves: for a DDP module the module inside."""
    return {name: inside_ddp(value) if isinstance(value, nn.Module) else value for name, value in state.items()}


def kind_of(value: Any) -> str:
    """Return ``"model"``, ``"optim"``, or an empty text for any other value."""
    return MODEL if isinstance(value, nn.Module) else OPTIM if isinstance(value, Optimizer) else ""


def names_of(kinds: Mapping[Any, str]) -> dict[Any, str]:
    """Return the names of models, then of optimizers in a checkpoint, given the :func:`kind_of` each value."""
    users = {each: [name for name, kind in kinds.items() if kind == each] for each in (MODEL, OPTIM)}
    return {
        user: name
        for kind, of_kind in users.items()
        for user, name in zip(of_kind, numbered(kind, len(of_kind)), strict=True)
    }


def named_state(
    adapter: FabricStrategy, state: Mapping[str, Any], names: Mapping[Any, str], filters: Mapping[str, Filter]
) -> dict[str, Any]:
    """Return the state under the names of the table above.

    Args:
        names: The names of models and optimizers. Where another rank has one of them, this rank may have None.
    """
    extra: dict[str, Any] = {}
    if adapter.attachment.config.rng:
        rank, device = adapter.rank, adapter.strategy.root_device
        extra[RNG] = {str(rank): RandomStreams(lambda: of_rank(rank, device)[str(rank)])}
    are_tensors = bool(state) and all(isinstance(name, str) and is_tensor(value) for name, value in state.items())
    # In the state dict of a module no name is below another.
    if are_tensors and not any(name[:at] in state for name in state for at in range(len(name)) if name[at] == "."):
        return {MODEL: _StateDict(state), EXTRA: {**extra, NAMES: {MODEL: ""}}}
    state = inside_ddp_of(state)
    trained = trained_modules(adapter, state)
    named = {
        name: _filtered(value, trained.get(user), filters[user]) if user in filters and value is not None else value
        for user, name in names.items()
        for value in ([state[user]] if user in state else [])
    }
    named.update(names_for(trained, of_kind(nn.Module, named).values()))
    stored = {user: _stored_name(user) for user in state if user not in names}
    extra |= {name: _extra(adapter, state[user], filters.get(user)) for user, name in stored.items()}
    changed = {f"{EXTRA}.{name}": user for user, name in stored.items() if user != name}
    return {**named, EXTRA: {**extra, NAMES: {name: user for user, name in names.items()} | changed}}


class _StateDict(dict[str, Any]):
    """State dict of a module, whose buffers may differ between ranks."""

    _metadata: ClassVar[dict[str, Any]] = {}


def _stored_name(user: Any) -> str:
    """Return the name in ``extra`` of one of the user's names; a changed name has a ``%``."""
    name = str(user).replace("%", "%25").replace(".", "%2E")
    return name if isinstance(user, str) and user not in (RNG, NAMES) else f"%{name}"


def trained_modules(adapter: FabricStrategy, state: Mapping[str, Any], loose: bool = True) -> dict[str, nn.Module]:
    """Return the module that each optimizer of the state trains: a module of the state, else of ``setup``. It is a
    joint module if an optimizer trains several modules, or parameters of no module
    (:mod:`dcp_plugin.core.state.names`).

    Args:
        loose: Permit an optimizer without a parameter of a known module.

    Raises:
        CheckpointMismatch: The module of an optimizer was not set up by this Fabric after ``attach``, and ``loose`` is
            False or the strategy keeps shards.
    """
    optimizers = of_kind(Optimizer, state)
    return {name: _trained(adapter, name, optimizer, state, loose) for name, optimizer in optimizers.items()}


def _trained(
    adapter: FabricStrategy, name: str, optimizer: Optimizer, state: Mapping[str, Any], loose: bool
) -> nn.Module:
    modules = of_kind(nn.Module, state)
    named = dict(zip(numbered(MODEL, len(modules)), modules.values(), strict=True))
    named.update({f"set_up_{number}": module for number, module in enumerate(adapter.modules.values())})
    try:
        return trained_module(name, optimizer, named, state)
    except CheckpointMismatch:
        if adapter.keeps_shards or not loose:
            raise
        return loose_module(optimizer)


def _filtered(value: Any, trained: nn.Module | None, wanted: Filter) -> Callbacks:
    """Return the part of a module's, or an optimizer's, state dict that passes a filter, as Fabric defines it."""
    if trained is None:
        return Callbacks(lambda: mark_parameters(value, _passing(gather_module(value), wanted)))

    def of_optimizer() -> Any:
        state = gather_optimizer(trained, value)
        if isinstance(state, OwnLayout):
            return _passing(state, wanted) if isinstance(state, dict) else state
        nested = {"state": {}, "param_groups": [], **_passing(state, wanted)}
        return mark_slots(trained, value, flatten_optimizer(nested))

    return Callbacks(of_optimizer)


def _extra(adapter: FabricStrategy, value: Any, wanted: Filter | None) -> Any:
    if has_position(value):
        return {str(data_rank(adapter.strategy)[0]): Callbacks(partial(position_of, value))}
    if wanted is not None and isinstance(value, Stateful):
        return Callbacks(lambda: _passing(value.state_dict(), wanted))
    if wanted is not None and isinstance(value, dict):
        return Callbacks(lambda: plain(_passing(value, wanted)))
    return value if isinstance(value, Stateful) else plain(value)


def _passing(state: Mapping[str, Any], wanted: Filter) -> dict[str, Any]:
    return {key: value for key, value in state.items() if wanted(key, value)}


def has_position(value: object) -> bool:
    """Return whether a value is a dataloader with a position, such as torchdata's ``StatefulDataLoader``."""
    return isinstance(value, DataLoader) and isinstance(value, Stateful)


def position_of(loader: Any) -> dict[str, Any]:
    sampler = _sampler_with_epoch(loader)
    return {
        "position": loader.state_dict(),
        "made_by": made_by(loader),
        "epoch": None if sampler is None else sampler.epoch,
        "generator": None if loader.generator is None else loader.generator.get_state(),
    }


def continue_at(loader: Any, warn: Callable[[str], None], state: Mapping[str, Any]) -> None:
    """Have the next iteration over the loader continue at the result of :func:`position_of`, without drawing first.

    Args:
        warn: Function that warns the user of a position that this loader cannot take.
    """
    sampler, finished = _sampler_with_epoch(loader), state["position"].get("_iterator_finished", False)
    if sampler is not None and state["epoch"] is not None:
        _number_epochs_from(sampler, state["epoch"], finished)
    if state["made_by"] == made_by(loader):
        loader.load_state_dict(state["position"])
        loader.state_dict()
    elif not finished:
        warn(
            f"it has a position of a dataloader with {state['made_by']}, and here it is one with {made_by(loader)}: "
            f"{STARTS_AGAIN}. To continue exactly, keep num_workers and shuffle, and the strategy: Fabric changes the "
            "sampler for strategies of several ranks. Or resume from a checkpoint made between two epochs."
        )
    if loader.generator is not None and state["generator"] is not None:
        loader.generator.set_state(state["generator"])


def _sampler_with_epoch(loader: Any) -> Any:
    """Return the loader's sampler with ``set_epoch``, such as torch's ``DistributedSampler``; None without any."""
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if callable(getattr(sampler, "set_epoch", None)) and isinstance(getattr(sampler, "epoch", None), int):
            return sampler
    return None


def _number_epochs_from(sampler: Any, epoch: int, finished: bool) -> None:
    """Have the sampler count epochs from that of the checkpoint. Fabric calls ``set_epoch`` with the number of the
    loader's iterations in this process, which would repeat the orders of the first epochs."""
    set_epoch = type(sampler).set_epoch.__get__(sampler)
    offset: int | None = None

    def counting_on(calls: int) -> None:
        nonlocal offset
        if offset is None:
            offset = epoch + finished - calls
        set_epoch(calls + offset)

    set_epoch(epoch)
    sampler.set_epoch = counting_on


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint, under the names of its saver."""

    path: Where
    tops: list[str]
    """The first segments of its keys, except ``extra``."""
    optimizers: list[str]
    """The first segments with the state of an optimizer."""
    of_no_module: list[str]
    """The ones among :attr:`optimizers` whose parameters are in no module."""
    sharded: list[str]
    """The first segments with tensors."""
    keys: dict[Any, str]
    """The key of each value, by the user's name."""
    ranks: dict[str, set[int]]
    """The ranks that have state of their own below a key in ``extra``."""
    made_by_fabric: bool
    """True if Fabric saved the checkpoint without this package."""

    @classmethod
    def of(cls, path: Where, files: SourceFiles | None, wanted: list[str]) -> Contents:
        """Return the contents of a checkpoint, read by this rank.

        Args:
            files: The files from :meth:`dcp_plugin.checkpointer.Internals.shown`.
            wanted: Names in ``extra`` that may have dots.
        """
        with ShardedReader(path, files=files) as reader:
            info, kinds = info_of(reader.open()), reader.summary.kinds if reader.summary else {}
        keys = keys_by_name(info)
        with_tensors = {tensor.key.partition(".")[0] for tensor in info.tensors}
        ranks: dict[str, set[int]] = {}
        for key in keys.pop(EXTRA, []):
            for name in [name for name in wanted if f"{key}.".startswith(f"{name}.")] or [key.partition(".")[0]]:
                rank = key[len(name) + 1 :].partition(".")[0]
                below = ranks.setdefault(f"{EXTRA}.{name}", set())
                if rank.isdecimal():
                    below.add(int(rank))
        names: dict[str, Any] = {f"{EXTRA}.{NAMES}": {}}
        if ranks.pop(f"{EXTRA}.{NAMES}", None) is not None:
            Internals(Checkpointer(solo=True)).restore(names, path, files=files)
        users = names[f"{EXTRA}.{NAMES}"]
        places = [*keys, *(place for place, of_ranks in ranks.items() if place != _STREAMS or not of_ranks)]
        of_users = {users.get(place, place.removeprefix(f"{EXTRA}.")): place for place in places}
        if "" in of_users:  # the state dict of a module is the state
            of_users |= {key: f"{MODEL}.{key}" for key in keys[of_users.pop("")]}
        optimizers = [
            top
            for top, below in keys.items()
            if kinds.get(top) == "optimizer" or {key.partition(".")[0] for key in below} <= OPTIMIZER_KEYS
        ]
        return cls(
            path,
            tops=list(keys),
            optimizers=optimizers,
            of_no_module=[top for top in optimizers if is_of_no_module(keys[top])],
            sharded=[top for top in keys if top in with_tensors],
            keys=of_users,
            ranks=ranks,
            made_by_fabric=files is None and is_of_stock_lightning(path),
        )


def load(
    adapter: FabricStrategy,
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
    ranks = adapter.internals.ranks
    if isinstance(state, (nn.Module, Optimizer)):
        contents = ranks.from_zero(f"read {path}", lambda: Contents.of(path, files, []))
        if not contents.tops and not adapter.keeps_shards:
            saved = load(adapter, path, files, None, strict, weights_only)
            if isinstance(state, Optimizer) and GROUPS in saved:
                state.load_state_dict(saved)
                return {}
            if isinstance(state, nn.Module) and not saved.keys().isdisjoint(adapter.stock.get_module_state_dict(state)):
                adapter.stock.load_module_state_dict(module=state, state_dict=saved, strict=strict)
                return {}
        _load_raw(adapter, contents, state, strict)
        return {}
    state = {} if state is None else state
    if not state and adapter.keeps_shards:
        raise ValueError(
            f"fabric.load({str(path)!r}) with {type(adapter.strategy).__name__} needs a state with the module to "
            "restore: the full model may fit on no rank. dcp_plugin.inspect(path) tells what is in a checkpoint."
        )
    objects = inside_ddp_of(state)
    modules, optimizers = of_kind(nn.Module, objects), of_kind(Optimizer, objects)
    data = [str(name) for name in state if name not in modules and name not in optimizers]
    contents = ranks.from_zero(f"read {path}", lambda: Contents.of(path, files, data))
    if contents.made_by_fabric:
        return _load_made_by_fabric(adapter, path, state, strict, weights_only)
    sharded = contents.sharded if adapter.keeps_shards else ()  # None stays None, since the full model may not fit
    places = {
        name: place
        for name, place in _places(state, contents, strict).items()
        if state[name] is not None or place not in sharded
    }
    target: dict[str, Any] = {**names_for(trained_modules(adapter, objects), modules.values())}
    for name, place in places.items():
        target.update(_target(adapter, name, objects[name], place, contents))
    remainder = {
        name: key
        for name, key in contents.keys.items()
        if key not in places.values() and key.partition(".")[0] not in sharded
    }
    target.update(dict.fromkeys(remainder.values()))
    if optimizers and adapter.attachment.config.rng:
        target.update(_streams(adapter, contents))
    adapter.attachment.last_load = adapter.internals.restore(target, path, strict=strict)

    def value_at(place: str) -> Any:
        return optimizer_from_stored(target[place]) if place in contents.optimizers else target[place]

    for name, place in places.items():
        if _is_replaced(state[name]):
            state[name] = value_at(place)
        elif isinstance(objects[name], Optimizer) and target[place] is not objects[name]:
            objects[name].load_state_dict(target[place])
    return {name: value_at(place) for name, place in remainder.items()}


def _places(state: dict[str, Any], contents: Contents, strict: bool) -> dict[str, str]:
    """Return for each item of the state its key in the checkpoint: by the user's name or by ours, else by the order of
    the modules and of the optimizers.

    Raises:
        NotInCheckpoint: The checkpoint lacks an item, if ``strict``.
    """
    keys = {top: top for top in contents.tops} | contents.keys
    places = {name: keys[name] for name in state if name in keys}
    for kind, live in ((MODEL, of_kind(nn.Module, state)), (OPTIM, of_kind(Optimizer, state))):
        unplaced = [name for name in live if name not in places]
        stored = among(kind, contents.tops)
        unused = [top for top in stored if top not in places.values()]
        if len(unplaced) == len(unused):
            places.update(zip(unplaced, unused, strict=True))
        elif len(live) == 1 and not stored:
            # Under another name, the core finds the only object of its kind, and logs the name.
            places.update(dict.fromkeys(unplaced, kind))
    missing = [name for name in state if name not in places]
    if strict and missing:
        present = ", ".join(map(str, contents.keys))
        raise NotInCheckpoint(
            f"{contents.path} has no {', '.join(map(repr, missing))}; it has {present}. strict=False loads what fits."
        )
    return places


def _target(adapter: FabricStrategy, name: str, value: Any, place: str, contents: Contents) -> dict[str, Any]:
    """Return the targets of the core for an item of the state, by key."""
    if not has_position(value):
        # A state dict of an optimizer, which the state had in place of the optimizer, has numbers for parameters.
        is_value = _is_replaced(value) or (isinstance(value, Optimizer) and place.startswith(f"{EXTRA}."))
        return {place: None if is_value else value}
    rank, ranks = data_rank(adapter.strategy)
    saved_on = contents.ranks.get(place, set())
    warn = partial(_warn, adapter, contents)
    if len(saved_on) == ranks:
        return {f"{place}.{rank}": Callbacks(load_state_dict=partial(continue_at, value, warn))}
    warn(
        f"the position of {name!r} was saved on {len(saved_on)} data-parallel ranks and this run has {ranks}: "
        f"{STARTS_AGAIN}. To continue exactly, resume on as many ranks as then, or from a checkpoint "
        "made between two epochs."
    )
    return {}


def _warn(adapter: FabricStrategy, contents: Contents, message: str) -> None:
    """Log a warning about a checkpoint, on rank 0."""
    if adapter.rank == 0:
        logger.warning("%s: %s", contents.path, message)


def _is_replaced(value: Any) -> bool:
    """Return whether the checkpoint's value replaces the value in the state, as Fabric does for plain values. Modules,
    optimizers and sharded objects are filled in place."""
    if isinstance(value, Mapping):
        return all(_is_replaced(item) for item in value.values())
    return not isinstance(value, (nn.Module, Optimizer, Stateful, PerRank, DTensor, ShardedTensor))


def _streams(adapter: FabricStrategy, contents: Contents) -> dict[str, Any]:
    """Return the target of the random streams that this rank continues, by key."""
    saved_on = frozenset(contents.ranks.get(_STREAMS, set()))
    streams = SavedStreams(saved_on, adapter.rank, adapter.attachment.world_size, adapter.strategy.root_device)
    if streams.about_new_ranks:
        _warn(adapter, contents, f"it has {streams.about_new_ranks}")
    return {} if streams.name is None else {f"{EXTRA}.{streams.name}": RandomStreams(load_state_dict=streams.restore)}


def _load_made_by_fabric(
    adapter: FabricStrategy, path: Where, state: dict[str, Any], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Load a sharded checkpoint of stock Fabric: tensors under the user's names, and a file with all other values."""
    live = {**of_kind(nn.Module, state), **of_kind(Optimizer, state)}
    metadata: dict[str, Any] = adapter.internals.ranks.from_zero(
        f"read {path}",
        lambda: load_torch_file(path / META, weights_only is not False, "fabric.load(..., weights_only=False)"),
    )
    missing = [name for name in state if name not in live and name not in metadata]
    if strict and missing:
        raise NotInCheckpoint(f"{path} has no {', '.join(map(repr, missing))}; it has {', '.join(metadata)}.")
    adapter.attachment.last_load = adapter.internals.restore(live, path, strict=strict)
    for name in state:
        if name in metadata and isinstance(state[name], Stateful):
            state[name].load_state_dict(metadata.pop(name))
        elif name in metadata and name not in live:
            state[name] = metadata.pop(name)
    return metadata


def _load_raw(adapter: FabricStrategy, contents: Contents, value: nn.Module | Optimizer, strict: bool) -> None:
    """Load a module or an optimizer from a checkpoint with a single object of this kind."""
    path, kind, names = contents.path, "optimizer", contents.optimizers
    if isinstance(value, nn.Module):
        kind, names = "model", [top for top in contents.sharded if top not in contents.optimizers]
    if len(names) != 1:
        present = f"{len(names)} ({', '.join(names)})" if names else "none"
        raise CheckpointMismatch(
            f"load_raw takes the only {kind} of a checkpoint, and {path} has {present}: use fabric.load."
        )
    target = inside_ddp_of({names[0]: value})
    try:
        trained = trained_modules(adapter, target, loose=names[0] in contents.of_no_module)
    except CheckpointMismatch as error:
        raise CheckpointMismatch(
            "an optimizer can be loaded alone if its model was set up by this Fabric after attach(fabric). Load it "
            "with its model: fabric.load(path, {'model': model, 'optimizer': optimizer})."
        ) from error
    adapter.internals.restore({**names_for(trained, []), **target}, path, strict=strict)
