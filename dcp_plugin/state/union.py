"""The module of an optimizer that trains more than one module of the state, or parameters that are in none.

Optimizer state is named by the FQN of the parameter, so an optimizer needs one module that has all of its parameters.
Where the state has none, one is put together from what the state has; nothing is copied:

| parameters                                | their names                          |
|-------------------------------------------|--------------------------------------|
| of a module of the state (``gen``)        | ``gen.0.weight``: its name in front  |
| in no module (a temperature, for one)     | ``loose.<group>.<position>``         |

A save and a load find the same names if the state has the same names for its modules, and the groups the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dcp_plugin._torch import own_parameters, union_of
from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.state.names import contains_fsdp1, named_modules

LOOSE = "loose"


def joint_module(
    name: str, optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module], state: Mapping[str, Any]
) -> nn.Module | None:
    """A module that has all parameters of an optimizer of which no single module has them all.

    None if nothing in the state has any of them (the optimizer was made before the module was wrapped, say), and if it
    would have to join FSDP1 with others: its optimizer state is gathered through its own root.

    Raises:
        CheckpointMismatch: A module has the name under which loose parameters are stored.
    """
    loose = _by_place(optimizer)
    wanted = {id(parameter) for parameter in loose.values()}
    members: dict[str, nn.Module] = {}
    for member, module in modules.items():
        found = wanted & {id(p) for _, child in named_modules(module) for _, p in own_parameters(child)}
        if found:
            members[member] = module
            wanted -= found
    if not members and wanted.isdisjoint(map(id, _tensors(state))):
        return None
    if any(map(contains_fsdp1, members.values())):
        return None
    loose = {fqn: parameter for fqn, parameter in loose.items() if id(parameter) in wanted}
    if loose and LOOSE in members:
        raise CheckpointMismatch(
            f"the state of parameters of the optimizer {name!r} that are in no module is stored under {LOOSE!r}, and a "
            f"module has this name: rename it"
        )
    return union_of(members, loose)


def loose_module(optimizer: torch.optim.Optimizer) -> nn.Module:
    """A module that names all parameters of an optimizer as those of none, for who knows that none is meant to."""
    return union_of({}, _by_place(optimizer))


def is_of_no_module(keys: Iterable[str]) -> bool:
    """Whether the state of an optimizer, by its keys, is that of parameters of none (:func:`loose_module`)."""
    return all(key.split(".")[1:2] == [LOOSE] for key in keys)


def _by_place(optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    return {
        f"{LOOSE}.{number}.{position}": parameter
        for number, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
    }


def _tensors(node: Any) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, (Mapping, list, tuple)):
        for child in node.values() if isinstance(node, Mapping) else node:
            yield from _tensors(child)
