"""How a training continues where its checkpoint was made: random streams and the positions of dataloaders.

Creating an iterator over a dataloader draws from the random generators, and the loop that does it is the user's,
after the load. So the load itself creates the iterator: ``StatefulDataLoader.state_dict()`` makes the one that the
next ``for batch in loader`` takes, and the random streams are restored after that. Between two epochs that iterator
is at its end, and the loop begins the next one in its ordinary way, with the same draws as without the interruption.

All that is asked of the user: the loader is in the state, and ``fabric.load`` comes before the loop over it.

Random streams are kept by global rank, positions by the rank of the data, so that ranks which share their data
(tensor parallelism) share the position.

What ``fabric.save(path, state)`` puts where, so that every other door finds it.

| in the state                         | in the checkpoint                                                |
|--------------------------------------|------------------------------------------------------------------|
| modules                              | ``model.<FQN>``, or ``model_0.…``, ``model_1.…`` in their order  |
| optimizers                           | ``optim.…``, or ``optim_0.…``, ``optim_1.…``                     |
| dataloaders that know their position | ``extra.<name>.<data rank>.…``, one per rank                     |
| everything else                      | ``extra.<name>``                                                 |
| (random streams of every rank)       | ``extra.rng.<rank>.streams``                                     |
| (the user's names of all these)      | ``extra.fabric_names``                                           |

A plain value, or an object with ``state_dict`` that is no dataloader, is saved as rank 0 has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.integration import random_streams
from dcp_plugin.integration.key_names import EXTRA, MODEL, OPTIM, RNG, numbered, plain
from dcp_plugin.integration.sampler_state import data_rank, made_by
from dcp_plugin.state import flatten_optimizer, gather_module, gather_optimizer, mark_parameters, mark_slots
from dcp_plugin.state.adapters import NamesOnly, module_of
from dcp_plugin.state.union import joint_module, loose_module

STARTS_AGAIN = "the dataloader starts with its first batch, so samples of the epoch under way come again"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Through:
    """An object of the state that is made of two functions, which the core calls when all ranks take part."""

    get: Callable[[], dict[str, Any]]
    put: Callable[[dict[str, Any]], None]

    def state_dict(self) -> dict[str, Any]:
        return self.get()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.put(state)

    @classmethod
    def saves(cls, get: Callable[[], dict[str, Any]]) -> Through:
        return cls(get, lambda state: None)

    @classmethod
    def loads(cls, put: Callable[[dict[str, Any]], None]) -> Through:
        return cls(dict, put)


def has_position(value: object) -> bool:
    """Whether this is a dataloader that knows where it is, as torchdata's ``StatefulDataLoader``."""
    return isinstance(value, DataLoader) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def position_of(loader: Any) -> dict[str, Any]:
    sampler = _sampler_with_epoch(loader)
    return {
        "position": loader.state_dict(),
        "made_by": made_by(loader),
        "epoch": None if sampler is None else sampler.epoch,
        "generator": None if loader.generator is None else loader.generator.get_state(),
    }


def continue_at(loader: Any, say: Say, state: Mapping[str, Any]) -> None:
    """Have the next iteration over the loader go on where :func:`position_of` was asked, without drawing first."""
    sampler, finished = _sampler_with_epoch(loader), state["position"].get("_iterator_finished", False)
    if sampler is not None and state["epoch"] is not None:
        _number_epochs_from(sampler, state["epoch"], finished)
    if state["made_by"] == made_by(loader):
        loader.load_state_dict(state["position"])
        loader.state_dict()
    elif not finished:
        say(
            f"it has a position of a dataloader with {state['made_by']}, and here it is one with {made_by(loader)}: "
            f"{STARTS_AGAIN}. To continue exactly, keep num_workers and shuffle, and the strategy: Fabric changes the "
            "sampler for strategies of several ranks. Or resume from a checkpoint made between two epochs."
        )
    if loader.generator is not None and state["generator"] is not None:
        loader.generator.set_state(state["generator"])


def restore_rng(strategy: Any, saved_on: int, say: Say, state: Mapping[str, Any]) -> None:
    """Continue this rank's streams, or start some of its own if the checkpoint, made by fewer ranks, has none."""
    rank = getattr(strategy, "global_rank", 0)
    if rank < saved_on:
        random_streams.restore(state["streams"], strategy.root_device)
    else:
        random_streams.derive(state["streams"], rank)
    if (ranks := getattr(strategy, "world_size", 1)) > saved_on:
        say(f"it has {random_streams.about_new_ranks(saved_on, ranks)}")


def _sampler_with_epoch(loader: Any) -> Any:
    """The sampler that is told the epoch, as torch's ``DistributedSampler``; None if there is none."""
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if callable(getattr(sampler, "set_epoch", None)) and isinstance(getattr(sampler, "epoch", None), int):
            return sampler
    return None


def _number_epochs_from(sampler: Any, epoch: int, finished: bool) -> None:
    """Fabric calls ``set_epoch`` with the number of times that the loader was iterated in this process. Count on from
    the epoch of the checkpoint instead; otherwise the orders of the first epochs would come again."""
    set_epoch = type(sampler).set_epoch.__get__(sampler)
    offset: int | None = None

    def counting_on(calls: int) -> None:
        nonlocal offset
        if offset is None:
            offset = epoch + finished - calls
        set_epoch(calls + offset)

    set_epoch(epoch)
    sampler.set_epoch = counting_on


def rank_streams(device: torch.device) -> dict[str, Any]:
    """The random streams of this rank, as every door stores them."""
    return {"streams": random_streams.capture(device)}


NAMES = "fabric_names"
Filter = Callable[[str, Any], bool]


def save(strategy: Any, path: Path, state: Mapping[str, Any], filters: Mapping[str, Filter]) -> None:
    """Save a Fabric's state on all ranks. ``step`` or ``global_step`` of the state is recorded as the step."""
    steps = [state[name] for name in ("global_step", "step") if isinstance(state.get(name), int)]
    strategy.dcp.save(named_state(strategy, state, filters), path, steps[0] if steps else None)


def of_kind(kind: type, state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if isinstance(value, kind)}


def named_state(strategy: Any, state: Mapping[str, Any], filters: Mapping[str, Filter]) -> dict[str, Any]:
    """The state under the names of the table above.

    Raises:
        CheckpointMismatch: The user has a name that is taken.
    """
    modules, optimizers = of_kind(nn.Module, state), of_kind(Optimizer, state)
    with_rng = strategy.dcp.config.rng
    taken = sorted(state.keys() & {NAMES, *([RNG] if with_rng else [])})
    if taken:
        raise CheckpointMismatch(
            f"the state has the name {taken[0]!r}, under which dcp_plugin keeps its own. Rename it"
            + (", or take attach(fabric, rng=False)." if taken[0] == RNG else ".")
        )
    users = [*modules, *optimizers]
    ours = [*numbered(MODEL, len(modules)), *numbered(OPTIM, len(optimizers))]
    trained = trained_modules(strategy, state)
    named: dict[str, Any] = {}
    for user, name in zip(users, ours, strict=True):
        filtered = user in filters
        named[name] = _filtered(state[user], trained.get(user), filters[user]) if filtered else state[user]
    saved_whole = [named[name] for name in ours if isinstance(named[name], nn.Module)]
    named.update(names_for({name: module for name, module in trained.items() if module not in saved_whole}))
    extra: dict[str, Any] = {}
    for user, value in state.items():
        if user not in users:
            extra[user] = _extra(strategy, value, filters.get(user))
    extra[NAMES] = dict(zip(ours, users, strict=True))
    if with_rng:  # last: asking a dataloader for its state may draw
        rank = str(getattr(strategy, "global_rank", 0))
        extra[RNG] = {rank: Through.saves(partial(rank_streams, strategy.root_device))}
    return {**named, EXTRA: extra}


def trained_modules(strategy: Any, state: Mapping[str, Any], loose: bool = True) -> dict[str, nn.Module]:
    """The module that each optimizer of the state trains: one of the state, or else one that was set up; put together
    if it trains several, or parameters of none (:mod:`dcp_plugin.state.union`).

    Args:
        loose: Whether all parameters of an optimizer may be in no module that is known.

    Raises:
        CheckpointMismatch: They must not, or shards are kept, and the module that they belong to was not set up by
            this Fabric after ``attach``.
    """
    return {name: _trained(strategy, name, one, state, loose) for name, one in of_kind(Optimizer, state).items()}


def _trained(strategy: Any, name: str, optimizer: Optimizer, state: Mapping[str, Any], loose: bool) -> nn.Module:
    modules = of_kind(nn.Module, state)
    try:
        return module_of(name, optimizer, {**modules, **strategy.dcp_modules})
    except CheckpointMismatch:
        set_up = list(strategy.dcp_modules.values())
        named = dict(zip(numbered(MODEL, len(modules)), modules.values(), strict=True))
        named.update({f"set_up_{number}": module for number, module in enumerate(set_up)})
        joint = joint_module(name, optimizer, named, state)
        if joint is None and (strategy.keeps_shards or not loose):
            raise
        return loose_module(optimizer) if joint is None else joint


def names_for(trained: Mapping[str, nn.Module]) -> dict[str, NamesOnly]:
    """What the core needs for optimizers whose modules are not saved or loaded with them."""
    return {f"names_for_{name}": NamesOnly(module) for name, module in trained.items()}


def _filtered(value: Any, trained: nn.Module | None, wanted: Filter) -> Through:
    """What passes the filter of a module's, or an optimizer's, state dict, as Fabric defines it."""
    if trained is None:
        return Through.saves(lambda: mark_parameters(value, _passing(gather_module(value), wanted)))

    def of_optimizer() -> dict[str, Any]:
        nested = {"state": {}, "param_groups": [], **_passing(gather_optimizer(trained, value), wanted)}
        return mark_slots(trained, value, flatten_optimizer(nested))

    return Through.saves(of_optimizer)


def _extra(strategy: Any, value: Any, wanted: Filter | None) -> Any:
    if has_position(value):
        rank, _ = data_rank(strategy)
        return {str(rank): Through.saves(partial(position_of, value))}
    if wanted is not None and isinstance(value, Stateful):
        return Through.saves(lambda: _passing(value.state_dict(), wanted))
    if wanted is not None and isinstance(value, dict):
        return Through.saves(lambda: plain(_passing(value, wanted)))
    return value if isinstance(value, Stateful) else plain(value)


def _passing(state: Mapping[str, Any], wanted: Filter) -> dict[str, Any]:
    return {key: value for key, value in state.items() if wanted(key, value)}
