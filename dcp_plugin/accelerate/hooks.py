"""Users' hooks of ``save_state`` and ``load_state``: what they leave in their lists is what is saved and loaded.

Stock saves the list of state dicts that the save hooks leave, and loads into the list of models that the load hooks
leave, both by position. Here each item has a name: an item that a hook has left keeps the name of its model, and any
other takes the first free name. A state dict with the tensors of its model is saved from the model, so its tensors may
be copied later; any other is saved as it stands. A model without a state dict is not saved, and one that a load hook
has removed is not loaded. Both still name the parameters of their optimizer.

Where each rank has the complete models, stock saves those of the main process, whose hooks alone may have changed the
list. After save hooks the other ranks therefore save no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator
from torch import nn

from dcp_plugin.accelerate import _accelerate
from dcp_plugin.accelerate.extra_state import Training
from dcp_plugin.integration.stored import MODEL, Callbacks, holds_sharded
from dcp_plugin.state import CleanNames, NamesOnly

T = TypeVar("T")


def models_of_hooks(accelerator: Accelerator, training: Training) -> dict[str, nn.Module]:
    """Return the models in the lists of the hooks by name: the prepared ones, and none if Accelerate shards them."""
    prepared = [] if training.sharded else [id(model) for model in _accelerate.models(accelerator)]
    return {name: model for name, model in training.models.items() if id(model) in prepared}


def run_save_hooks(accelerator: Accelerator, training: Training, directory: Path) -> dict[str, Any]:
    """Run the save hooks. Return the models to save by name, and modules that only name parameters."""
    hooks, models = _accelerate.save_hooks(accelerator), models_of_hooks(accelerator, training)
    if not hooks:
        return dict(training.models)
    weights = {name: accelerator.get_state_dict(model, unwrap=False) for name, model in models.items()}
    before = {name: dict(state) for name, state in weights.items()}
    left = list(weights.values())
    for hook in hooks:
        hook(_accelerate.models(accelerator), left, str(directory))
    is_main = accelerator.is_main_process
    chosen: dict[str, Any] = {name: model for name, model in training.models.items() if name not in models}
    for name, state in _named(weights, left, len(training.models)).items():
        origin = next((other for other, own in before.items() if _is_same(own, state)), None)
        if origin is not None:
            chosen |= {name: models[origin]} if is_main or not training.is_replicated else {}
        elif part := {key: value for key, value in state.items() if is_main or holds_sharded(value)}:
            clean = CleanNames(models[name]) if name in models else str
            chosen[name] = Callbacks(partial(dict, {clean(key): value for key, value in part.items()}))
    return chosen | names_for(training.models, chosen)


def run_load_hooks(accelerator: Accelerator, training: Training, directory: Path) -> dict[str, nn.Module]:
    """Run the load hooks. Return the models that they have left in their list by name, in the order of the list."""
    models = models_of_hooks(accelerator, training)
    left = list(models.values())
    for hook in _accelerate.load_hooks(accelerator):
        hook(left, str(directory))
    return _named(models, left, len(training.models))


def names_for(models: Mapping[str, nn.Module], chosen: Mapping[str, Any]) -> dict[str, NamesOnly]:
    """Return the models that are not among ``chosen``, for the names of their optimizers' parameters."""
    present = {id(value) for value in chosen.values()}
    return {f"names_for_{name}": NamesOnly(model) for name, model in models.items() if id(model) not in present}


def _named(before: Mapping[str, T], left: list[T], models: int) -> dict[str, T]:
    """Return the items that hooks have left by name.

    Args:
        models: Number of names that the models of the training have.
    """
    kept = {name: item for name, item in before.items() if any(item is other for other in left)}
    others = (f"{MODEL}_{number}" for number in count(models))
    free = chain([name for name in before if name not in kept], others)
    named: dict[str, T] = {}
    for item in left:
        own = next((name for name, other in kept.items() if other is item and name not in named), None)
        named[own or next(free)] = item
    return named


def _is_same(before: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Return whether a state dict has exactly the values that it had before the hooks."""
    return before.keys() == state.keys() and all(state[key] is value for key, value in before.items())
