"""One ``.ckpt`` in the form of stock Lightning's single device and DDP, for ``load_from_checkpoint`` and ``ckpt_path``.

The Lightning package of dcp_plugin stores Lightning's own entries under ``extra``. An export moves them back to the top
and removes the entries of dcp_plugin. Optimizers get numbers for the names of parameters, in the order of the groups
that are stored as a list. A checkpoint without the list has the parameters in the order of the optimizer; successive
parameters with equal settings become one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dcp_plugin.errors import CheckpointMismatch, some
from dcp_plugin.format.keys import flatten
from dcp_plugin.state.optimizer import nested_of, with_numbers
from dcp_plugin.state.per_rank import without_sampler
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
    summary = selected.reader.summary
    step = summary.step if summary else None

    def shaped(tree: dict[str, Any]) -> dict[str, Any]:
        return _as_lightning(tree, step, selected)

    return torch_file.layout(selected, name, allow_pickle, shaped)


def _as_lightning(tree: dict[str, Any], step: int | None, selected: Selected) -> dict[str, Any]:
    checkpoint = _without_ours(tree.get(_EXTRA, {}))
    checkpoint.setdefault("epoch", 0)
    checkpoint.setdefault("global_step", step or 0)
    checkpoint.setdefault(_VERSION, _WRITTEN_AS)
    module = tree[_module(tree, selected.reader.kinds, selected)]
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


def _module(tree: Mapping[str, Any], kinds: Mapping[str, str], selected: Selected) -> str:
    modules = [name for name in tree if kinds.get(name) == "module"] or [name for name in tree if name == _MODEL]
    if _MODEL in modules or len(modules) == 1:
        return _MODEL if _MODEL in modules else modules[0]
    reason = f"it has {some(modules)}: select one with include" if modules else "it has none"
    raise CheckpointMismatch(f"{selected.reader.path}: Lightning's checkpoints are of one module, and {reason}")
