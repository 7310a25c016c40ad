"""One ``.ckpt`` in the form of stock Lightning's single device and DDP, for ``load_from_checkpoint`` and ``ckpt_path``.

The Lightning package of dcp_plugin stores Lightning's own entries under ``extra``. An export moves them back to the top
and removes the entries of dcp_plugin. Optimizers get numbers for the names of parameters, in the order of the groups
that are stored as a list. A checkpoint without the list has the parameters in the order of the optimizer; successive
parameters with equal settings become one group.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dcp_plugin.errors import CheckpointMismatch, some
from dcp_plugin.format.keys import flatten
from dcp_plugin.state.optimizer import nested_of, with_numbers
from dcp_plugin.state.per_rank import without_sampler
from dcp_plugin.storage.reader import ShardedReader
from dcp_plugin.tools.formats import Layout, Selected, torch_file

_MODEL, _OPTIM, _EXTRA = "model", "optim", "extra"
_LOADERS, _OF_HOOKS = "dataloaders", "of_hooks"
_OURS = ("rng", _LOADERS, "dataloaders_made_by", "plateau_metrics", "dataloaders_made_in", "hyper_parameter_types")
"""Entries of dcp_plugin's Lightning package among Lightning's own. Hooks of a user may use these names as well."""
_VERSION = "pytorch-lightning_version"
_WRITTEN_AS = "2.6.0"
"""The version of the form for a checkpoint without one. Lightning converts older forms."""


def layout(selected: Selected, name: str, allow_pickle: tuple[str, ...]) -> Layout:
    """Lay out one file with Lightning's dictionary.

    Raises:
        CheckpointMismatch: The checkpoint has no module, or several of which none is called ``model``.
        UnsafeCheckpoint: A value cannot be loaded without executing code.
    """
    return torch_file.layout(selected, name, allow_pickle, functools.partial(_as_lightning, selected.reader))


def _as_lightning(reader: ShardedReader, tree: dict[str, Any]) -> dict[str, Any]:
    step = reader.summary.step if reader.summary else None
    defaults = {"epoch": 0, "global_step": step or 0, _VERSION: _WRITTEN_AS}
    checkpoint = defaults | _without_ours(tree.get(_EXTRA, {}))
    module = tree[_module(tree, reader)]
    checkpoint["state_dict"], _ = flatten(module, lambda _, value: isinstance(value, dict) and bool(value))
    named = [name for name in tree if _is_optimizer(name) and isinstance(tree[name], dict)]
    optimizers = sorted(named, key=lambda name: int(name.removeprefix(_OPTIM)[1:] or 0))
    if optimizers:
        checkpoint["optimizer_states"] = [with_numbers(nested_of(tree[name])[0]) for name in optimizers]
        checkpoint.setdefault("lr_schedulers", [])
    return checkpoint


def _is_optimizer(name: str) -> bool:
    return name == _OPTIM or name.removeprefix(f"{_OPTIM}_").isdecimal()


def _without_ours(extra: Any) -> dict[str, Any]:
    """Return the entries of Lightning and of the user's hooks, in their original places."""
    entries: dict[str, Any] = dict(extra) if isinstance(extra, dict) else {}
    loops = entries.get("loops")
    if isinstance(states := entries.get(_LOADERS), dict) and isinstance(loops, dict) and "0" in states:
        with suppress(KeyError, TypeError):  # an untrusted checkpoint may have any structure here
            loops["fit_loop"]["state_dict"]["combined_loader"] = without_sampler(states["0"])
    of_hooks = entries.pop(_OF_HOOKS, {})
    kept = {key: value for key, value in entries.items() if key not in _OURS}
    return {**kept, **of_hooks} if isinstance(of_hooks, dict) else kept


def _module(tree: Mapping[str, Any], reader: ShardedReader) -> str:
    modules = [name for name in tree if reader.kinds.get(name) == "module"]
    if _MODEL in modules or (_MODEL in tree and not modules):
        return _MODEL
    if len(modules) == 1:
        return modules[0]
    reason = f"it has {some(modules)}: select one with include" if modules else "it has none"
    raise CheckpointMismatch(f"{reader.path}: Lightning's checkpoints are of one module, and {reason}")
