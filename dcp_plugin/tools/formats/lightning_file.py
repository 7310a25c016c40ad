"""One ``.ckpt`` as stock Lightning's single device and DDP write it: for ``load_from_checkpoint`` and ``ckpt_path``.

What our Lightning package stores under ``extra`` is what Lightning itself had put into its checkpoint: it goes back
there. Optimizers get numbers for the names of parameters, in the order of the model, in which nearly every
``configure_optimizers`` hands them over; a group of parameters keeps together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_plugin.errors import CheckpointMismatch, some
from dcp_plugin.state.optimizer import unflatten_optimizer
from dcp_plugin.tools.formats import Layout, Selected, torch_file

_MODEL, _OPTIM, _EXTRA = "model", "optim", "extra"
_OURS = ("hyper_parameter_types",)
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
    kinds = selected.reader.kinds
    model = _flat(tree[_module(tree, kinds, selected)])
    extra = tree.get(_EXTRA, {})
    checkpoint: dict[str, Any] = {key: value for key, value in extra.items() if key not in _OURS}
    checkpoint.setdefault("epoch", 0)
    checkpoint.setdefault("global_step", step or 0)
    checkpoint.setdefault(_VERSION, _WRITTEN_AS)
    checkpoint["state_dict"] = model
    optimizers = [name for name in tree if name == _OPTIM or name.startswith(f"{_OPTIM}_")]
    if optimizers:
        checkpoint["optimizer_states"] = [_numbered(_flat(tree[name]), list(model)) for name in optimizers]
        checkpoint.setdefault("lr_schedulers", [])
    return checkpoint


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


def _numbered(stored: dict[str, Any], order: list[str]) -> dict[str, Any]:
    """The state of an optimizer as its own ``state_dict`` has it."""
    nested = unflatten_optimizer({key: value for key, value in stored.items() if not _is_of_list(key)})
    place = {name: number for number, name in enumerate(order)}
    groups = [sorted(group["params"], key=lambda name: place.get(name, len(place))) for group in nested["param_groups"]]
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group)}
    return {
        "state": {numbers[name]: slots for name, slots in nested["state"].items() if name in numbers},
        "param_groups": [
            {**group, "params": [numbers[name] for name in names]}
            for group, names in zip(nested["param_groups"], groups, strict=True)
        ],
    }


def _is_of_list(key: str) -> bool:
    """Whether a key is one of the groups in stock's form, which repeat what is there by name."""
    return key.startswith("param_groups.") and key.split(".")[1].isdigit() and key.count(".") == 2
