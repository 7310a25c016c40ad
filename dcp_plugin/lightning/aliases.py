"""No lock-in: what stock Lightning needs to resume, without this package, what a sharded strategy saved.

Its sharded strategies look for ``model.<FQN>`` (FSDP) or ``state_dict.<FQN>`` (ModelParallel), for
``optimizer_0.state.<FQN>.<slot>`` and ``optimizer_0.param_groups.<number>.<field>``, and for everything else in a file
``meta.pt``. All tensors are there already: they get these keys as aliases (:mod:`dcp_plugin.format.metadata`), the
groups are small values of their own. Single device and DDP are not imitated: their format is one file, a second copy
of everything.

We never read any of it: the aliases are not in our index, and loads pass over the list of groups.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_plugin.errors import UnsafeCheckpoint
from dcp_plugin.format import values
from dcp_plugin.format.foreign.frameworks import META
from dcp_plugin.format.metadata import Aliases
from dcp_plugin.integration.key_names import EXTRA, MODEL, OPTIM, numbered
from dcp_plugin.lightning import layout
from dcp_plugin.lightning._packages import has_base
from dcp_plugin.lightning.resume import without_own_state
from dcp_plugin.lightning.stock_format import MODEL_NAMES, OPTIMIZER, Checkpoint
from dcp_plugin.planning.flatten import flatten, holds_sharded
from dcp_plugin.state.optimizer import GROUPS, Nested, group_list
from dcp_plugin.types import KeyPath


@dataclass(frozen=True)
class ForStock:
    """What is added to one checkpoint."""

    aliases: Aliases
    meta: Checkpoint | None
    """What goes into ``meta.pt``; None on ranks that do not write it."""

    def write_meta(self, directory: Path) -> None:
        """Everything but model and optimizers, in a file that ``torch.load(weights_only=True)`` takes; unless it holds
        what the user has allowed to be pickled. What cannot be stored at all is left to the save to name."""
        if self.meta is not None:
            with suppress(UnsafeCheckpoint):
                (directory / META).write_bytes(values.encode(self.meta, allow_pickle=True))


def add_for_stock(strategy: Any, checkpoint: Checkpoint, state: dict[str, Any]) -> ForStock | None:
    """What stock Lightning needs of a checkpoint that this strategy saves; None if it is not a sharded one.

    The groups of the optimizers are added to ``state``.

    Args:
        checkpoint: The dictionary of Lightning's.
        state: What is stored of it, see :func:`dcp_plugin.lightning.layout.to_state`.
    """
    names = [name for strategy_class, name in MODEL_NAMES.items() if has_base(type(strategy), strategy_class)]
    if not names:
        return None
    aliases: dict[str, tuple[str, KeyPath]] = {}
    if names[0] != MODEL:
        aliases = {f"{MODEL}.{key}": (f"{names[0]}.{key}", (names[0], key)) for key in state.get(MODEL, ())}
    optimizers = [one for one in checkpoint.get("optimizer_states", ()) if layout.is_keyed_by_name(one)]
    for number, (name, nested) in enumerate(zip(numbered(OPTIM, len(optimizers)), optimizers, strict=True)):
        if not group_list(nested)[0].keys() & state[name].keys():  # a parameter may really be called "0"
            state[name] = {**state[name], GROUPS: nested[GROUPS]}
            aliases.update(_of_optimizer(name, f"{OPTIMIZER}_{number}", nested))
    return ForStock(aliases, _meta(state[EXTRA]) if strategy.is_global_zero else None)


def _of_optimizer(name: str, stock_name: str, nested: Nested) -> dict[str, tuple[str, KeyPath]]:
    _, paths = flatten(nested)
    return {f"{name}.{key}": (f"{stock_name}.{key}", (stock_name, *path)) for key, path in paths.items()}


def _meta(extra: Checkpoint) -> Checkpoint:
    """As Lightning itself would have stored it. Of tensors that are sharded, rank 0 alone has not enough to store."""
    loops = {"loops": copy.deepcopy(extra["loops"])} if "loops" in extra else {}
    meta: Checkpoint = without_own_state({**_whole(extra), **loops})
    return meta


def _whole(value: Any) -> Any:
    if type(value) is not dict:
        return value
    return {key: _whole(item) for key, item in value.items() if type(item) is dict or not holds_sharded(item)}
