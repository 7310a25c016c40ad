"""Optimizers whose own code makes or takes their state dict: overridden methods, and the user's hooks.

Of other optimizers the state is read and written directly, exactly and in place. Here only the optimizer knows what is
to be saved (a hook may save roots of second moments, say) and what a load has to put right. So it is asked as
``torch.distributed.checkpoint`` asks it: one ``state_dict()`` for a save, one for a load, to see what is there, and one
``load_state_dict()`` with the parameters numbered as in the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dcp_plugin._torch import has_own_state_dict


@dataclass(frozen=True)
class OwnStateDict:
    """What ``optimizer.state_dict()`` has returned."""

    state: dict[str, dict[str, Any]]
    """The slots of each parameter, by FQN."""
    others: dict[Any, Any]
    """State that is of no parameter."""
    groups: list[dict[str, Any]]
    """As they were returned, with numbers for parameters."""
    names: dict[Any, str]
    """The FQN of each number."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> OwnStateDict | None:
        """None if no code of its own makes or takes it, or if that makes something else of it than optimizers have.

        Args:
            names: The FQN of each parameter by ``id``.
        """
        found = optimizer.state_dict() if has_own_state_dict(optimizer) else {}
        if not isinstance(found, Mapping) or not {"state", "param_groups"} <= found.keys():
            return None
        groups = [dict(group) for group in found["param_groups"]]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in optimizer.param_groups]:
            return None
        numbers = {
            number: names[id(parameter)]
            for group, live in zip(groups, optimizer.param_groups, strict=True)
            for number, parameter in zip(group["params"], live["params"], strict=True)
        }
        state = {numbers[number]: dict(slots) for number, slots in found["state"].items() if number in numbers}
        others = {key: value for key, value in found["state"].items() if key not in numbers}
        return cls(state, others, groups, numbers)

    @property
    def named_groups(self) -> list[dict[str, Any]]:
        return [{**group, "params": [self.names[number] for number in group["params"]]} for group in self.groups]

    def load_into(
        self,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, dict[str, Any]],
        others: Mapping[Any, Any],
        fields: list[dict[str, Any]],
    ) -> None:
        """Have the optimizer load slots by FQN, other state, and these fields of its groups beside those it has."""
        numbered: dict[Any, Any] = {number: state[fqn] for number, fqn in self.names.items() if fqn in state}
        groups = [
            {**group, **{field: _of_type(group.get(field), value) for field, value in new.items()}}
            for group, new in zip(self.groups, fields, strict=True)
        ]
        optimizer.load_state_dict({"state": {**numbered, **others}, "param_groups": groups})


def _of_type(current: Any, value: Any) -> Any:
    """A tensor where there was one, and a number where there was one."""
    if isinstance(current, torch.Tensor):
        return torch.as_tensor(value, dtype=current.dtype, device=current.device)
    return value.item() if isinstance(value, torch.Tensor) and isinstance(current, (int, float)) else value
