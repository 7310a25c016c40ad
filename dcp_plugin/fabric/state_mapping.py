"""Names of a Fabric state in a checkpoint, which every other framework's integration reads.

| in the state                         | in the checkpoint                                                |
|--------------------------------------|------------------------------------------------------------------|
| modules                              | ``model.<FQN>``, or ``model_0.…``, ``model_1.…`` in their order  |
| optimizers                           | ``optim.…``, or ``optim_0.…``, ``optim_1.…``                     |
| dataloaders that know their position | ``extra.<name>.<data rank>.…``, one per data-parallel rank       |
| everything else                      | ``extra.<name>``                                                 |
| (random streams of every rank)       | ``extra.rng.<rank>.streams``                                     |
| (the user's names of all these)      | ``extra.fabric_names``                                           |

A plain value, or an object with ``state_dict`` that is not a dataloader, is saved with rank 0's value.

Creating an iterator over a dataloader draws from the random generators, and the user's loop does so after the load.
Therefore the load creates the iterator: ``StatefulDataLoader.state_dict()`` makes the iterator that the next ``for
batch in loader`` takes, and the random streams are restored after that. Between two epochs this iterator is at its end,
and the loop creates the next in its ordinary way, with the same draws as without the interruption. The user must put
the loader into the state, and call ``fabric.load`` before the loop over it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.integration import random_streams
from dcp_plugin.integration.key_names import EXTRA, MODEL, OPTIM, RNG, numbered
from dcp_plugin.integration.lightning_packages import data_rank, made_by
from dcp_plugin.integration.values import plain
from dcp_plugin.state import (
    OwnLayout,
    flatten_optimizer,
    gather_module,
    gather_optimizer,
    inside_ddp,
    mark_parameters,
    mark_slots,
)
from dcp_plugin.state.adapters import CalledLast, NamesOnly
from dcp_plugin.state.names import joint_module, loose_module, module_of

if TYPE_CHECKING:
    from dcp_plugin.fabric.strategy import FabricAdapter

NAMES = "fabric_names"
STARTS_AGAIN = "the dataloader starts with its first batch, so samples of the epoch under way come again"

Filter = Callable[[str, Any], bool]


@dataclass(frozen=True)
class Callbacks:
    """Object of the state that consists of two functions, which the core calls when all ranks take part."""

    state_dict: Callable[[], dict[str, Any]] = dict
    load_state_dict: Callable[[dict[str, Any]], None] = lambda state: None


class RandomStreams(Callbacks, CalledLast):
    """Random streams of a rank, saved and restored after the dataloaders, which may draw from them."""


def of_kind(kind: type, state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if isinstance(value, kind)}


def as_asked(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with the modules whose state Fabric saves: for a DDP module the module inside."""
    return {name: inside_ddp(value) if isinstance(value, nn.Module) else value for name, value in state.items()}


def named_state(adapter: FabricAdapter, state: Mapping[str, Any], filters: Mapping[str, Filter]) -> dict[str, Any]:
    """Return the state under the names of the table above.

    Raises:
        CheckpointMismatch: The state uses a name that this package reserves.
    """
    state = as_asked(state)
    modules, optimizers = of_kind(nn.Module, state), of_kind(Optimizer, state)
    with_rng = adapter.attachment.config.rng
    taken = sorted(state.keys() & {NAMES, *([RNG] if with_rng else [])})
    if taken:
        raise CheckpointMismatch(
            f"the state has the name {taken[0]!r}, under which dcp_plugin keeps its own. Rename it"
            + (", or take attach(fabric, rng=False)." if taken[0] == RNG else ".")
        )
    users = [*modules, *optimizers]
    ours = [*numbered(MODEL, len(modules)), *numbered(OPTIM, len(optimizers))]
    trained = trained_modules(adapter, state)
    named = {
        name: _filtered(state[user], trained.get(user), filters[user]) if user in filters else state[user]
        for user, name in zip(users, ours, strict=True)
    }
    named.update(names_for(trained, list(of_kind(nn.Module, named).values())))
    extra = {user: _extra(adapter, value, filters.get(user)) for user, value in state.items() if user not in users}
    extra[NAMES] = dict(zip(ours, users, strict=True))
    if with_rng:
        rank, device = adapter.rank, adapter.strategy.root_device
        extra[RNG] = {str(rank): RandomStreams(lambda: random_streams.of_rank(rank, device)[str(rank)])}
    return {**named, EXTRA: extra}


def trained_modules(adapter: FabricAdapter, state: Mapping[str, Any], loose: bool = True) -> dict[str, nn.Module]:
    """Return the module that each optimizer of the state trains: a module of the state, else of ``setup``. It is a
    joint module if an optimizer trains several modules, or parameters of no module (:mod:`dcp_plugin.state.names`).

    Args:
        loose: Permit an optimizer without a parameter of a known module.

    Raises:
        CheckpointMismatch: The module of an optimizer was not set up by this Fabric after ``attach``, and ``loose`` is
            False or the strategy keeps shards.
    """
    optimizers = of_kind(Optimizer, state)
    return {name: _trained(adapter, name, optimizer, state, loose) for name, optimizer in optimizers.items()}


def _trained(
    adapter: FabricAdapter, name: str, optimizer: Optimizer, state: Mapping[str, Any], loose: bool
) -> nn.Module:
    modules = of_kind(nn.Module, state)
    try:
        return module_of(name, optimizer, {**modules, **adapter.modules})
    except CheckpointMismatch:
        named = dict(zip(numbered(MODEL, len(modules)), modules.values(), strict=True))
        named.update({f"set_up_{number}": module for number, module in enumerate(adapter.modules.values())})
        joint = joint_module(name, optimizer, named, state)
        if joint is None and (adapter.keeps_shards or not loose):
            raise
        return loose_module(optimizer) if joint is None else joint


def names_for(trained: Mapping[str, nn.Module], present: list[nn.Module]) -> dict[str, NamesOnly]:
    """Return the modules that name the parameters of optimizers, without those ``present`` in the state."""
    return {f"names_for_{name}": NamesOnly(module) for name, module in trained.items() if module not in present}


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


def _extra(adapter: FabricAdapter, value: Any, wanted: Filter | None) -> Any:
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
