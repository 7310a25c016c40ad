"""Lightning's own checkpoints: reading them, and the additions with which stock Lightning resumes from ours.

- A file (``.ckpt``) is a ``torch.save`` of one dictionary with full tensors. Its optimizer states have numbers instead
  of the names of parameters.
- A directory of a sharded strategy is a DCP checkpoint of model and optimizers, which the core reads under our names
  (:mod:`dcp_plugin.format.foreign`), and ``meta.pt`` with all other values. Lightning itself continues loops, callbacks
  and schedules, in its own way.
- No lock-in: stock sharded strategies look for ``model.<FQN>`` (FSDP) or ``state_dict.<FQN>`` (ModelParallel), for
  ``optimizer_0.state.<FQN>.<slot>`` and ``optimizer_0.param_groups.<number>.<field>``, and for ``meta.pt``. Our
  checkpoints have all these tensors, which get the keys as aliases (:mod:`dcp_plugin.format.metadata`). The groups are
  small additional values. Our loads read no addition. Single device and DDP get no additions: their format is one file,
  which would be a second copy of all tensors.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from dcp_plugin.errors import CheckpointMismatch, UnsafeCheckpoint, some
from dcp_plugin.integration.files import META, is_regular_file, load_torch_file, read_summary
from dcp_plugin.integration.key_names import EXTRA, MODEL, OPTIM, numbered
from dcp_plugin.integration.lightning_packages import has_base
from dcp_plugin.integration.values import encode, entries_of, holds_sharded
from dcp_plugin.lightning import layout
from dcp_plugin.lightning.layout import Checkpoint
from dcp_plugin.lightning.resume import without_own_state
from dcp_plugin.paths import Where
from dcp_plugin.state import OwnLayout, flatten_optimizer, gather_module, load_into, unwrapped_optimizer
from dcp_plugin.state.module import flat_parameter_names
from dcp_plugin.state.names import contains_fsdp1, parameter_names
from dcp_plugin.state.optimizer import EXTRA_STATE, GROUPS, Nested, extras_of, flatten_tree, group_list, group_names
from dcp_plugin.tensors._torch import is_tensor, sharded_value
from dcp_plugin.types import KeyPath

MODEL_NAMES = {"FSDPStrategy": "model", "ModelParallelStrategy": "state_dict"}
"""Name under which each of the sharded strategies stores the model."""
OPTIMIZER = "optimizer"
"""Prefix of the optimizers' names: ``optimizer_0``, ``optimizer_1``, …, even for a single optimizer."""


def is_directory_of_lightning(path: Where) -> bool:
    """Return whether a sharded strategy of stock Lightning saved the directory, also over a checkpoint of ours.

    Raises:
        CheckpointCorrupt: The directory mixes the files of both.
    """
    return is_regular_file(path / META) and read_summary(path) is None


def read(path: Where, weights_only: bool | None, map_location: Any = "cpu") -> Checkpoint:
    """Read a file of Lightning's, also ``meta.pt``, as :func:`~dcp_plugin.integration.files.load_torch_file`."""
    return cast(Checkpoint, load_torch_file(path, weights_only, "DCPCheckpointIO(weights_only=False)", map_location))


def fill(key: str, target: Any, source: Any) -> None:
    """Copy ``source``, full or distributed like ``target``, into this rank's part of ``target``.

    Raises:
        CheckpointMismatch: The shapes differ.
    """
    live, stored = sharded_value(target), sharded_value(source)
    if live.shape != stored.shape:
        raise CheckpointMismatch(f"{key} has shape {live.shape} here and {stored.shape} in the checkpoint")
    is_full = len(stored.chunks) == 1 and stored.chunks[0].sizes == stored.shape
    for number, chunk in enumerate(live.chunks):
        box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        chunk.tensor.copy_(stored.chunks[0].tensor[box] if is_full else stored.chunks[number].tensor)


def load_optimizer(model: nn.Module, optimizer: Optimizer, state: Nested, *, strict: bool) -> None:
    """Load a state into an optimizer. The state has names or numbers of parameters as keys, or a layout of the
    optimizer's own. Collective with FSDP1.

    Raises:
        CheckpointMismatch: The state does not fit the optimizer, or is of other parameters; the optimizer is unchanged.
    """
    optimizer = unwrapped_optimizer(optimizer)
    if not isinstance(state, dict) or GROUPS not in state:
        optimizer.load_state_dict(state)
        return
    nested = _keyed_by_name(model, optimizer, state)
    flat = flatten_optimizer(nested)
    load = load_into(model, optimizer, entries_of(flat))
    wanted = load.wanted
    if strict and (wanted.missing or wanted.unexpected):
        raise CheckpointMismatch(
            f"the checkpoint's {type(optimizer).__name__} has other parameters: only here {some(wanted.missing)}; only "
            f"in the checkpoint {some(wanted.unexpected)}. strict_loading=False loads what fits."
        )
    _refuse_state_of_others(nested["state"], gather_module(model))
    targets = load.targets()
    load.check({key: flat[key] for key in targets if not is_tensor(flat[key])})
    for key, target in targets.items():
        if is_tensor(target):
            fill(key, target, flat[key])
    load.commit({key: flat[key] if target is None else target for key, target in targets.items()})


def _keyed_by_name(model: nn.Module, optimizer: Optimizer, state: Nested) -> Nested:
    """Return the state with names of parameters in place of numbers.

    The meaning of a number depends on the strategy that saved it. One device and DDP number the parameters of the
    optimizer, in the order of its groups. FSDP and ModelParallel, saving "full", number all parameters of the model,
    even frozen ones. Lightning's sharded strategies read both files by the second rule; if a parameter is frozen, they
    give a parameter the state of another.
    """
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if all(isinstance(number, str) for number in numbers):
        return state
    of_optimizer = numbers == list(range(len(numbers)))
    names = _names_in_optimizer(model, optimizer) if of_optimizer else _names_in_model(model)
    if len(names) < len(numbers) or max(numbers) >= len(names) or (of_optimizer and len(names) > len(numbers)):
        raise CheckpointMismatch(
            f"the checkpoint's {type(optimizer).__name__} has the state of {len(numbers)} parameters, up to number "
            f"{max(numbers)}; this {'optimizer' if of_optimizer else 'model'} has {len(names)}. Make it with the "
            "parameters that it was saved with."
        )
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    slots = {names[number]: slots for number, slots in state["state"].items()}
    extras = extras_of(state)
    return {"state": slots, GROUPS: groups} | ({EXTRA_STATE: extras} if extras else {})


def _names_in_optimizer(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of the parameters in the order of an optimizer of the unwrapped model. For a flat parameter of
    FSDP1 these are the names of its unit; the names of such a group are assumed to be in the model's order."""
    order = {name: number for number, name in enumerate(gather_module(model))}
    names = []
    for group, of_group in zip(optimizer.param_groups, group_names(model, optimizer), strict=True):
        flat = len(of_group) != len(group["params"])
        names += sorted(of_group, key=order.__getitem__) if flat else of_group
    return names


def _names_in_model(model: nn.Module) -> list[str]:
    if not contains_fsdp1(model):
        return list(parameter_names(model).values())
    parameters = {name for names in flat_parameter_names(model).values() for name in names}
    return [name for name in gather_module(model) if name in parameters]


def _refuse_state_of_others(state: dict[str, dict[str, Any]], model: dict[str, Any]) -> None:
    """Refuse slots of another parameter. A slot has the shape of its parameter, or, if it is factored, sizes of that
    shape."""
    for name in [name for name in state if name in model]:
        shape = sharded_value(model[name]).shape
        shapes = [tuple(slot.shape) for slot in state[name].values() if is_tensor(slot) and slot.ndim > 0]
        if shapes and not any(set(of_slot) <= {1, *shape} for of_slot in shapes):
            raise CheckpointMismatch(
                f"the checkpoint's optimizer state for {name} has shape {shapes[0]}, the parameter {shape}: it is that "
                "of another parameter. Make the optimizer with the parameters, groups and order it was saved with."
            )


@dataclass(frozen=True)
class ForStock:
    """Additions to a checkpoint with which stock Lightning resumes from it."""

    aliases: dict[str, tuple[str, KeyPath]]
    meta: Checkpoint | None
    """The contents of ``meta.pt``; None on ranks that do not write it."""

    def write_meta(self, directory: Path) -> None:
        """Write all values except model and optimizers. ``torch.load(weights_only=True)`` reads the file, unless the
        user has allowed pickled values. The save itself reports values that cannot be stored."""
        if self.meta is not None:
            with suppress(UnsafeCheckpoint):
                (directory / META).write_bytes(encode(self.meta, allow_pickle=True))


def add_for_stock(strategy: Any, checkpoint: Checkpoint, state: dict[str, Any]) -> ForStock | None:
    """Return the additions for stock Lightning to a checkpoint of this strategy; None if the strategy is not sharded.

    Add the groups of the optimizers to ``state`` for every strategy: an export needs them, too.

    Args:
        checkpoint: Lightning's dictionary.
        state: Its stored form, see :func:`dcp_plugin.lightning.layout.to_state`.
    """
    groups = _add_groups(checkpoint, state)
    model = next((name for base, name in MODEL_NAMES.items() if has_base(type(strategy), base)), None)
    if model is None:
        return None
    aliases: dict[str, tuple[str, KeyPath]] = {}
    if model != MODEL:
        aliases = {f"{MODEL}.{key}": (f"{model}.{key}", (model, key)) for key in state.get(MODEL, ())}
    for number, (name, nested) in groups.items():
        stock_name = f"{OPTIMIZER}_{number}"
        for key, path in flatten_tree(nested)[1].items():
            aliases[f"{name}.{key}"] = f"{stock_name}.{key}", (stock_name, *path)
    return ForStock(aliases, _meta(state[EXTRA]) if strategy.is_global_zero else None)


def _add_groups(checkpoint: Checkpoint, state: dict[str, Any]) -> dict[int, tuple[str, Nested]]:
    """Add the groups of the optimizers to ``state``. Return the names and states of these optimizers by number."""
    added: dict[int, tuple[str, Nested]] = {}
    optimizers = checkpoint.get("optimizer_states", ())
    if not optimizers or not all(isinstance(each, OwnLayout) or layout.is_keyed_by_name(each) for each in optimizers):
        return added
    for number, (name, nested) in enumerate(zip(numbered(OPTIM, len(optimizers)), optimizers, strict=True)):
        if isinstance(nested, OwnLayout):
            continue
        if not group_list(nested)[0].keys() & state[name].keys():  # a parameter may have the name "0"
            state[name] = {**state[name], GROUPS: nested[GROUPS]}
            added[number] = name, nested
    return added


def _meta(extra: Checkpoint) -> Checkpoint:
    """Return the values as Lightning itself would store them. Omit sharded tensors, which no rank has in full."""
    loops = {"loops": copy.deepcopy(extra["loops"])} if "loops" in extra else {}
    return without_own_state({**_unsharded(extra), **loops})


def _unsharded(value: Any) -> Any:
    if type(value) is not dict:
        return value
    return {key: _unsharded(item) for key, item in value.items() if type(item) is dict or not holds_sharded(item)}
