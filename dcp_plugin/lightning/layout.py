"""Lightning's checkpoint dictionary and the named state that is stored, one into the other.

| in the dictionary              | in the checkpoint                                      |
|--------------------------------|--------------------------------------------------------|
| ``state_dict``                 | ``model.<FQN>``                                        |
| ``optimizer_states``           | ``optim.…``, or ``optim_0.…``, ``optim_1.…`` of several |
| everything else, whoever added it | ``extra.…``                                         |

What a value is, sharded or not, tensor or not, is left to the core: hooks may put anything anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dcp_plugin.integration.key_names import EXTRA, MODEL, OPTIM, among, numbered
from dcp_plugin.lightning.hyper_parameters import made_again, made_storable
from dcp_plugin.lightning.stock_format import Checkpoint
from dcp_plugin.state import flatten_optimizer, mark_parameters, mark_slots, unflatten_optimizer
from dcp_plugin.state.optimizer import Nested


def to_state(checkpoint: Checkpoint, allow_pickle: tuple[str, ...] = ()) -> dict[str, Any]:
    """The named state of a dictionary of Lightning's, or of any other (all of which is then extra).

    Args:
        allow_pickle: Keys (globs) of hyper-parameters that are stored although only executing code restores them.
    """
    extra = made_storable(checkpoint, allow_pickle)
    state: dict[str, Any] = {}
    if "state_dict" in extra:
        state[MODEL] = extra.pop("state_dict")
    optimizers = extra.get("optimizer_states")
    if optimizers and all(map(is_keyed_by_name, optimizers)):
        del extra["optimizer_states"]
        state.update(zip(numbered(OPTIM, len(optimizers)), map(flatten_optimizer, optimizers), strict=True))
    return {**state, EXTRA: extra}


def kinds_of(state: dict[str, Any]) -> dict[str, str]:
    """Which names of :func:`to_state` have the state of a module, and which that of an optimizer."""
    return dict.fromkeys(among(MODEL, state), "module") | dict.fromkeys(among(OPTIM, state), "optimizer")


def shared_by_ranks(state: dict[str, Any], model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """The state with what DDP keeps equal marked, so that its ranks share the writing."""
    marked = {MODEL: mark_parameters(model, state[MODEL])} if MODEL in state else {}
    names = among(OPTIM, state)
    if len(names) != len(optimizers):  # a hook has changed the list: nobody knows whose state it is
        return {**state, **marked}
    slots = {name: mark_slots(model, one, state[name]) for name, one in zip(names, optimizers, strict=True)}
    return {**state, **marked, **slots}


def from_state(state: dict[str, Any]) -> Checkpoint:
    """The inverse of :func:`to_state`."""
    checkpoint: Checkpoint = dict(state.get(EXTRA, {}))
    made_again(checkpoint)
    if MODEL in state:
        checkpoint["state_dict"] = state[MODEL]
    if optimizers := among(OPTIM, state):
        checkpoint["optimizer_states"] = [optimizer_of(state[name]) for name in optimizers]
    return checkpoint


def optimizer_of(stored: dict[str, Any]) -> Nested:
    """The state of an optimizer as it was read: flat, or nested if Lightning has written it itself."""
    return unflatten_optimizer(stored) if any("." in key for key in stored) else {"state": {}, **stored}


def is_keyed_by_name(optimizer_state: Any) -> bool:
    """Whether an optimizer's state is keyed by FQN, as the promoted strategies make it, and not by number."""
    groups = optimizer_state.get("param_groups", ()) if isinstance(optimizer_state, dict) else ()
    return bool(groups) and all(isinstance(name, str) for group in groups for name in group["params"])
