"""A load straight into the live model and optimizers, with Lightning's hooks in between reading and applying.

Lightning asks for a checkpoint before it sets up a single device or DDP, and after it has sharded a model. Callbacks
rely on that: what they restore may decide which groups an optimizer gets. So the optimizers' state is read by itself,
when the optimizers are complete.

The rule: whatever a hook changes, adds or removes has the effect that it has with Lightning's own checkpoints. Hooks
get the live tensors; afterwards only what they replaced or removed is put right, which is nothing for almost all.
Only if the LightningModule has an ``on_load_checkpoint`` of its own, which may decide not to load something, the
model's state is read into tensors of its own, and loaded when that has run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dcp_plugin._torch import DTensor, ShardedTensor, is_tensor
from dcp_plugin.checkpointer import Checkpointer
from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.format.index import StoredTensor
from dcp_plugin.integration.key_names import EXTRA, MODEL, OPTIM, among, keys_by_name
from dcp_plugin.lightning import layout, stock_format
from dcp_plugin.lightning.full_state import fill, load_optimizer
from dcp_plugin.lightning.hyper_parameters import made_again
from dcp_plugin.lightning.stock_format import Checkpoint
from dcp_plugin.loading.partial import PartialLoad
from dcp_plugin.messages import some
from dcp_plugin.state import flatten_optimizer, gather_module, gather_optimizer
from dcp_plugin.state.adapters import Unapplied
from dcp_plugin.state.module import apply_module
from dcp_plugin.state.names import without_wrappers
from dcp_plugin.state.optimizer_load import OptimizerLoad
from dcp_plugin.storage.reader import ShardedReader
from dcp_plugin.types import LoadReport


@dataclass
class Loaded:
    """A checkpoint after :func:`load`, before hooks have seen it."""

    path: Path
    checkpoint: Checkpoint
    """What Lightning and the hooks get."""
    model: dict[str, Any] | None
    """What the model has been given, to tell what hooks replaced; None if it has been given nothing yet."""
    optimizer_names: list[str] = field(default_factory=list)
    """Of the optimizers whose state is there to be loaded; none if it has only the weights, and of a file."""
    optimizers: list[dict[str, Any]] | None = None
    """What each optimizer has been given, flat; None if they are not loaded yet."""
    report: LoadReport | None = None
    """What of the model and of all but the optimizers was loaded; None for a file of Lightning's."""

    @classmethod
    def of_file(cls, path: Path, checkpoint: Checkpoint, model: nn.Module) -> Loaded:
        """A file of Lightning's: nothing is given to anybody before the hooks have seen it."""
        known = gather_module(model)
        names = {key: key if key in known else without_wrappers(key) for key in checkpoint["state_dict"]}
        state_dict = {names[key]: value for key, value in checkpoint["state_dict"].items()}
        return cls(path, {**checkpoint, "state_dict": state_dict}, model=None, optimizers=[])


def load(
    path: Path, checkpointer: Checkpointer, model: nn.Module, *, strict: bool, hooked: bool, weights_only: bool | None
) -> Loaded:
    """Read the checkpoint into ``model``, and all else but the optimizers' state into the result. Collective.

    Args:
        weights_only: How to unpickle what a sharded strategy of Lightning's had saved beside model and optimizers.
        strict: Whether keys that do not fit are an error; if ``hooked``, they are judged later.
        hooked: Whether the LightningModule's own hook runs before the model's state is applied.

    Raises:
        CheckpointMismatch: The checkpoint does not fit the model.
    """
    keys = keys_by_name(path)
    checkpoint: Checkpoint = {}
    state: dict[str, Any] = {MODEL: model}
    if stock_format.is_directory_of_lightning(path):
        checkpoint = checkpointer.ranks.agree(f"read {path}", lambda: stock_format.read_meta(path, weights_only))
    elif EXTRA in keys:
        state[EXTRA] = checkpoint
        _make_room_like_parameters(path, keys[EXTRA], model, checkpoint)
    unapplied = Unapplied(model)
    if hooked:
        state[MODEL] = unapplied
    report = checkpointer.load(state, path, strict=strict and not hooked)
    made_again(checkpoint)
    given = None
    if not hooked:
        missing = set(report.missing)
        given = {key: value for key, value in gather_module(model).items() if f"{MODEL}.{key}" not in missing}
    checkpoint["state_dict"] = unapplied.state_dict if given is None else dict(given)
    return Loaded(path, checkpoint, given, among(OPTIM, keys), report=report)


def load_optimizers(
    loaded: Loaded,
    checkpointer: Checkpointer,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    *,
    strict: bool,
) -> None:
    """Read the optimizers' state of the same checkpoint, if it has any. Collective.

    Raises:
        CheckpointMismatch: The checkpoint does not fit the optimizers.
    """
    path, names = loaded.path, loaded.optimizer_names
    _refuse_other_number(path, names, optimizers)
    # The model tells the names of the parameters, also if the checkpoint's have a prefix.
    state: dict[str, Any] = {MODEL: model, **dict(zip(names, optimizers, strict=True))}
    only = PartialLoad(include=tuple(f"{name}.*" for name in names), cast=True)
    report = checkpointer.load(state, path, partial=only, strict=False)
    # Another part of the model may be frozen now: that is said, and no error.
    if strict and not set(names) <= {key.partition(".")[0] for key in report.loaded}:
        raise CheckpointMismatch(f"{path} does not fit the optimizers: {report}. strict_loading=False loads what fits.")
    states = [gather_optimizer(model, optimizer) for optimizer in optimizers]
    loaded.checkpoint["optimizer_states"] = states
    loaded.optimizers = [flatten_optimizer(nested) for nested in states]


def peek_at_optimizers(loaded: Loaded, checkpointer: Checkpointer) -> list[dict[str, Any]]:
    """The whole state of each optimizer in the checkpoint, in host memory: for hooks that run before there are
    optimizers. Collective."""
    state: dict[str, Any] = {name: {} for name in loaded.optimizer_names}
    checkpointer.load(state, loaded.path)
    return [layout.optimizer_of(tree) for tree in state.values()]


def _make_room_like_parameters(path: Path, keys: list[str], model: nn.Module, checkpoint: Checkpoint) -> None:
    """For what callbacks keep of every parameter, averages for one: what has a parameter's name and shape comes back
    distributed as the parameter is, as it was handed in, and no rank reads the whole of it."""
    parameters = {name: value for name, value in gather_module(model).items() if isinstance(value, DTensor)}
    if not parameters:
        return
    index = ShardedReader(path, check_files=False).index
    for key in keys:
        entry, steps = index[f"{EXTRA}.{key}"], index.path_of(f"{EXTRA}.{key}")[1:]
        like = parameters.get(steps[-1]) if steps and all(isinstance(step, str) for step in steps) else None
        if like is None or not isinstance(entry, StoredTensor) or entry.shape != tuple(like.shape):
            continue
        holder = checkpoint
        for step in steps[:-1]:
            holder = holder.setdefault(step, {})
        holder[steps[-1]] = torch.empty_like(like.detach(), dtype=entry.dtype, requires_grad=False)


def apply_model(model: nn.Module, loaded: Loaded, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Make the model what the hooks left in ``state_dict``. Collective if there was a hook.

    Raises:
        CheckpointMismatch: Keys are missing or unexpected, if ``strict``, or a shape differs.
    """
    given = loaded.model
    if given is not None and all(state_dict.get(key) is value for key, value in given.items()):
        return
    live = gather_module(model)
    placed = {key: _placed_like(key, live.get(key), source) for key, source in state_dict.items()}
    missing, unexpected = apply_module(model, placed, strict)
    if strict and (missing or unexpected):
        raise CheckpointMismatch(
            f"after on_load_checkpoint, the state_dict does not fit the model: missing {some(missing) or 'none'}; "
            f"unexpected {some(unexpected) or 'none'}. Set strict_loading=False on the LightningModule to load what "
            "fits."
        )


def _placed_like(key: str, target: Any, source: Any) -> Any:
    """What a hook has left, distributed as the model is."""
    if not isinstance(target, (DTensor, ShardedTensor)) or isinstance(source, type(target)) or not is_tensor(source):
        return source
    room = torch.empty_like(target.detach()) if isinstance(target, DTensor) else target
    fill(key, room, source)
    return room


def apply_optimizers(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    loaded: Loaded,
    states: list[dict[str, Any]],
    *,
    strict: bool,
) -> None:
    """Make the optimizers what the hooks left in ``states``."""
    _refuse_other_number(loaded.path, states, optimizers)
    given = loaded.optimizers or []
    for number, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
        if not state:  # of what Lightning has where a module has no optimizer
            continue
        if not loaded.optimizers or not layout.is_keyed_by_name(state):  # saved without the promoted strategy
            load_optimizer(model, optimizer, state, strict=strict)
            continue
        flat = flatten_optimizer(state)
        if number < len(given):
            flat = {key: _in_place_of(given[number].get(key), value) for key, value in flat.items()}
        if number >= len(given) or not _same(flat, given[number]):
            OptimizerLoad(model, optimizer, {}).commit(flat)


def _refuse_other_number(path: Path, saved: Sized, optimizers: Sized) -> None:
    if len(saved) != len(optimizers):
        raise CheckpointMismatch(
            f"{path} has the state of {len(saved)} optimizer(s), this training has {len(optimizers)}. Resume with the "
            "optimizers that the checkpoint was made with."
        )


def _in_place_of(live: Any, value: Any) -> Any:
    """The value in the memory that the optimizer has for it, where it is and of its type, if it has any."""
    if value is live or not (isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor)):
        return value
    if isinstance(live, DTensor) or isinstance(value, DTensor) or live.shape != value.shape:
        return value
    return live.copy_(value)


def _same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        value is right[key] or (not is_tensor(value) and not is_tensor(right[key]) and value == right[key])
        for key, value in left.items()
    )
