"""One ``.ckpt`` as stock Lightning's single device and DDP write it: for ``load_from_checkpoint`` and ``ckpt_path``.

What our Lightning package stores under ``extra`` is what Lightning itself had put into its checkpoint: it goes back
there, without what is our own. Optimizers get numbers for the names of parameters, in the order of the groups that are
stored as a list. A checkpoint without the list has the parameters in the order in which the optimizer had them; those
with equal settings that follow each other are taken for one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import groupby
from typing import Any

from dcp_plugin.errors import CheckpointMismatch, some
from dcp_plugin.state.optimizer import GLOBAL, GROUPS, split_key
from dcp_plugin.tools.formats import Layout, Selected, torch_file

_MODEL, _OPTIM, _EXTRA = "model", "optim", "extra"
_LOADERS, _OF_HOOKS = "dataloaders", "of_hooks"
_OURS = ("rng", _LOADERS, "dataloaders_made_by", "plateau_metrics", "dataloaders_made_in", "hyper_parameter_types")
"""What our Lightning package keeps beside Lightning's own; a user's hooks may have had something under such a name."""
_VERSION = "pytorch-lightning_version"
_WRITTEN_AS = "2.6.0"
"""The version of the form, where the checkpoint does not say that: Lightning converts older ones."""


def layout(selected: Selected, name: str, allow_pickle: tuple[str, ...]) -> Layout:
    """One file with Lightning's dictionary.

    Raises:
        CheckpointMismatch: The checkpoint has no module, or several and none is called ``model``.
        UnsafeCheckpoint: A value could only be had by executing code.
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
    checkpoint["state_dict"] = _flat(tree[_module(tree, selected.reader.kinds, selected)])
    named = [name for name in tree if _is_optimizer(name) and isinstance(tree[name], dict)]
    optimizers = sorted(named, key=lambda name: int(name.removeprefix(_OPTIM)[1:] or 0))
    if optimizers:
        checkpoint["optimizer_states"] = [_numbered(tree[name]) for name in optimizers]
        checkpoint.setdefault("lr_schedulers", [])
    return checkpoint


def _is_optimizer(name: str) -> bool:
    return name == _OPTIM or name.removeprefix(f"{_OPTIM}_").isdecimal()


def _without_ours(extra: Any) -> dict[str, Any]:
    """What Lightning and the user's hooks have put into the checkpoint, where they have put it."""
    found: dict[str, Any] = dict(extra) if isinstance(extra, dict) else {}
    loops = found.get("loops")
    if isinstance(states := found.get(_LOADERS), dict) and isinstance(loops, dict) and "0" in states:
        with suppress(KeyError, TypeError):  # it may be from anybody
            loops["fit_loop"]["state_dict"]["combined_loader"] = states["0"]
    of_hooks = found.pop(_OF_HOOKS, {})
    kept = {key: value for key, value in found.items() if key not in _OURS}
    return {**kept, **of_hooks} if isinstance(of_hooks, dict) else kept


def _module(tree: Mapping[str, Any], kinds: Mapping[str, str], selected: Selected) -> str:
    modules = [name for name in tree if kinds.get(name) == "module"] or [name for name in tree if name == _MODEL]
    if _MODEL in modules or len(modules) == 1:
        return _MODEL if _MODEL in modules else modules[0]
    found = f"it has {some(modules)}: select one with include" if modules else "it has none"
    raise CheckpointMismatch(f"{selected.reader.path}: Lightning's checkpoints are of one module, and {found}")


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of a tree under Lightning's names, which are flat."""
    if not isinstance(tree, dict) or (not tree and prefix):
        return {prefix.removesuffix("."): tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.")
    return flat


def _numbered(tree: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer as its own ``state_dict`` has it."""
    listed = tree.get(GROUPS)
    stored = _flat({key: value for key, value in tree.items() if key != GROUPS or not isinstance(listed, list)})
    state: dict[str, dict[str, Any]] = {}
    fields: dict[str, dict[str, Any]] = {}
    for key, value in stored.items():
        kind, fqn, name = split_key(key)
        if kind in ("state", GROUPS):
            (state if kind == "state" else fields).setdefault(fqn, {})[name] = value
    groups = _listed(listed, {*state, *fields}) or [
        {**alike[0][1], "params": [fqn for fqn, _ in alike]}
        for alike in (list(run) for _, run in groupby(fields.items(), key=lambda item: repr(sorted(item[1].items()))))
    ]
    numbers = {fqn: number for number, fqn in enumerate(fqn for group in groups for fqn in group["params"])}
    of_parameters = {number: state[fqn] for fqn, number in numbers.items() if fqn in state}
    return {
        "state": of_parameters | tree.get(GLOBAL, {}),
        "param_groups": [{**group, "params": [numbers[fqn] for fqn in group["params"]]} for group in groups],
    }


def _listed(groups: Any, known: set[str]) -> list[dict[str, Any]]:
    """The groups as they are stored for stock, if they are of the parameters that there are."""
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return []
    names = [group.get("params") for group in groups]
    usable = all(isinstance(some, list) and all(isinstance(name, str) for name in some) for some in names)
    return groups if usable and known <= {name for some in names for name in some} else []
