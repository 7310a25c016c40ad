"""What ``fabric.save(path, state)`` puts where, so that every other door finds it.

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
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.fabric.resume import Through, has_position, position_of, rank_streams
from dcp_plugin.integration.key_names import EXTRA, MODEL, OPTIM, RNG, numbered, plain
from dcp_plugin.integration.sampler_state import data_rank
from dcp_plugin.state import flatten_optimizer, gather_module, gather_optimizer, mark_parameters, mark_slots
from dcp_plugin.state.adapters import NamesOnly, module_of
from dcp_plugin.state.union import joint_module, loose_module

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
