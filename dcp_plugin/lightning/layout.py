"""Conversion between Lightning's checkpoint dictionary and the named state that a checkpoint stores.

| in the dictionary                 | in the checkpoint                                      |
|-----------------------------------|--------------------------------------------------------|
| ``state_dict``                    | ``model.<FQN>``                                        |
| ``optimizer_states``              | ``optim.…``, or ``optim_0.…``, ``optim_1.…`` of several |
| everything else                   | ``extra.…``                                            |

Hooks may add any value. The core stores each value by its kind: sharded or not, tensor or not.

Hyper-parameters are stored so that no code needs to be executed to load them. ``save_hyperparameters()`` takes every
argument of ``__init__``: configurations, paths and enums are stored unchanged, or as plain values; modules, loss
functions and classes are left out, with a warning that names them, and
``load_from_checkpoint`` takes them as arguments. (Stock Lightning pickles them, and ``torch.load`` then refuses the
checkpoint.) ``allow_pickle=("extra.hyper_parameters.*",)`` stores them, except modules.

Configurations of OmegaConf are stored as plain values, with the names of their OmegaConf classes under :data:`TYPES`.
Loading makes objects of these classes alone, and resolves no interpolation.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from dcp_plugin.integration.key_names import EXTRA, MODEL, OPTIM, among, numbered
from dcp_plugin.integration.values import is_storable, plain
from dcp_plugin.lightning._lightning import place_in_configuration
from dcp_plugin.state import OwnLayout, flatten_optimizer, mark_parameters, mark_slots, unflatten_optimizer
from dcp_plugin.state.optimizer import GROUPS
from dcp_plugin.tensors._torch import is_tensor

Checkpoint = dict[str, Any]
"""Checkpoint dictionary of Lightning and all hooks."""

KEYS = {"hyper_parameters": "hparams_type", "datamodule_hyper_parameters": "datamodule_hparams_type"}
"""Lightning's keys for the hyper-parameters of the LightningModule and of the datamodule, and for their class."""
TYPES = "hyper_parameter_types"
"""Our key for the classes of OmegaConf; its value has them under the keys of :data:`KEYS`."""


def to_state(checkpoint: Checkpoint, allow_pickle: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the named state of a dictionary of Lightning's, or of any other dictionary (all its items are then extra).

    Args:
        allow_pickle: Keys (globs) of hyper-parameters to store although only executing code restores them.
    """
    extra = made_storable(checkpoint, allow_pickle)
    state: dict[str, Any] = {}
    if extra.get("state_dict"):  # a module without state is omitted, as in a save of the module itself
        state[MODEL] = extra.pop("state_dict")
    optimizers = extra.get("optimizer_states")
    if optimizers and all(isinstance(state, OwnLayout) or is_keyed_by_name(state) for state in optimizers):
        del extra["optimizer_states"]
        # Lightning stores an empty state for a module without optimizer.
        flat = [flatten_optimizer(state) or {} for state in optimizers]
        state.update(zip(numbered(OPTIM, len(optimizers)), flat, strict=True))
    return {**state, EXTRA: extra}


def kinds_of(state: dict[str, Any]) -> dict[str, str]:
    """Return the kind, ``"module"`` or ``"optimizer"``, of each name in ``state`` that has such a state."""
    return dict.fromkeys(among(MODEL, state), "module") | dict.fromkeys(among(OPTIM, state), "optimizer")


def shared_by_ranks(state: dict[str, Any], model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Mark the values that DDP keeps equal in a state, so that its ranks share the writing."""
    marked = {MODEL: mark_parameters(model, state[MODEL])} if MODEL in state else {}
    names = among(OPTIM, state)
    if len(names) == len(optimizers):  # else a hook has changed the list, and the owners are unknown
        marked |= {
            name: mark_slots(model, optimizer, state[name])
            for name, optimizer in zip(names, optimizers, strict=True)
            if not isinstance(state[name], OwnLayout)
        }
    return {**state, **marked}


def from_state(state: dict[str, Any]) -> Checkpoint:
    """Return the dictionary of a state: the inverse of :func:`to_state`."""
    checkpoint: Checkpoint = dict(state.get(EXTRA, {}))
    made_again(checkpoint)
    if MODEL in state:
        checkpoint["state_dict"] = state[MODEL]
    if optimizers := among(OPTIM, state):
        checkpoint["optimizer_states"] = [optimizer_of(state[name]) for name in optimizers]
    return checkpoint


def optimizer_of(stored: Any) -> Any:
    """Return the nested state of an optimizer from its stored form: flat, nested if stock Lightning has written it, or
    in a layout of the optimizer's own, which stays."""
    if isinstance(stored, dict) and any(key.startswith(("state.", f"{GROUPS}.")) for key in stored):
        return unflatten_optimizer(stored)
    return {"state": {}, **stored} if isinstance(stored, dict) and GROUPS in stored else stored


def is_keyed_by_name(optimizer_state: Any) -> bool:
    """Return whether an optimizer's state is keyed by FQN, as the promoted strategies make it, and not by number."""
    groups = optimizer_state.get("param_groups", ()) if isinstance(optimizer_state, dict) else ()
    return bool(groups) and all(isinstance(name, str) for group in groups for name in group["params"])


def made_storable(checkpoint: Checkpoint, allow_pickle: tuple[str, ...]) -> Checkpoint:
    """Return a checkpoint with its hyper-parameters in their stored form; warn of those that are left out."""
    made = dict(checkpoint)
    left_out: list[str] = []
    allowed = [glob.removeprefix(f"{EXTRA}.") for glob in allow_pickle]
    for key, kind in KEYS.items():
        if key in made:
            if classes := _how_made(made[key]):
                made[TYPES] = {**made.get(TYPES, {}), key: classes}
            unstorable: list[str] = []
            made[key] = _storable_part(key, plain(made[key]), allowed, unstorable)
            left_out += sorted(unstorable)
        if isinstance(of_class := made.get(kind), type):  # loading a class would execute its module
            made[kind] = f"{of_class.__module__}.{of_class.__qualname__}"
    if left_out:
        _warn_left_out(tuple(left_out))
    return made


def made_again(checkpoint: Checkpoint) -> None:
    """Have OmegaConf make its configurations from the stored hyper-parameters, in place. Values that OmegaConf refuses
    stay plain, with a warning: a resume does not need them."""
    types = checkpoint.pop(TYPES, None)
    if not isinstance(types, dict) or not importlib.util.find_spec("omegaconf"):
        return
    for key, kind in KEYS.items():
        if key in checkpoint and key in types:
            try:
                checkpoint[key] = _make(checkpoint[key], types[key])
                if "is" in types[key]:
                    checkpoint[kind] = type(checkpoint[key])
            except Exception as error:  # a checkpoint of any author may have any values here
                rank_zero_warn(f"OmegaConf cannot make the {key} of the checkpoint again, which stay plain: {error!r}")


def made_of(value: Any) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Any]] | None:
    """Return the unresolved items of a ``DictConfig``, and a function that makes a configuration of such items; None
    for any other value."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is None or not isinstance(value, omegaconf.DictConfig):
        return None
    how = {**_how_made(value), "root": None, "keys": []}
    return omegaconf.OmegaConf.to_container(value), lambda items: _make(items, how)


def _how_made(value: Any) -> dict[str, Any]:
    """Return the classes of OmegaConf in a value; an empty mapping if it has none.

    For a configuration the result is ``{"is": class, "flags": …, "root": …, "keys": …}``: interpolations may refer to
    the root, from which the keys lead to this part. For a container the result is ``{"in": {key: …}}``.
    """
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and isinstance(value, (omegaconf.DictConfig, omegaconf.ListConfig)):
        root, keys = place_in_configuration(value)
        plain_root = plain(root) if keys else None
        if plain_root is not None and not _is_storable("", plain_root, []):
            root, keys, plain_root = value, [], None
        flags = {"struct": bool(omegaconf.OmegaConf.is_struct(root)), "readonly": omegaconf.OmegaConf.is_readonly(root)}
        return {"is": type(value).__name__, "flags": flags, "root": plain_root, "keys": keys}
    inside = {key: how for key, item in _items(value) if (how := _how_made(item))}
    return {"in": inside} if inside else {}


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, dict) else enumerate(value) if type(value) in (list, tuple) else ()


def _make(value: Any, how: dict[str, Any]) -> Any:
    if "is" not in how:
        inside = how["in"]
        made = {key: _make(item, inside[key]) if key in inside else item for key, item in _items(value)}
        return made if isinstance(value, dict) else type(value)(made.values())
    omegaconf = importlib.import_module("omegaconf")
    source = value if how["root"] is None else how["root"]
    if how["is"] not in ("DictConfig", "ListConfig") or not isinstance(source, (dict, list, type(None))):
        raise TypeError(f"a {how['is']} of a {type(source).__name__}")
    kind = how["is"] if source is None else "ListConfig" if isinstance(source, list) else "DictConfig"
    config = root = getattr(omegaconf, kind)(source)
    for key in how["keys"]:
        if omegaconf.OmegaConf.is_interpolation(config, key):
            raise TypeError(f"{key} is an interpolation")
        config = config[key]
    if type(config).__name__ != how["is"]:
        raise TypeError(f"a {how['is']} of a {type(config).__name__}")
    omegaconf.OmegaConf.set_struct(root, how["flags"]["struct"] or None)
    omegaconf.OmegaConf.set_readonly(root, how["flags"]["readonly"] or None)
    return config


def _storable_part(name: str, value: Any, allowed: list[str], left_out: list[str]) -> Any:
    """Return the value without the unstorable items of nested dictionaries. Add the names of these to ``left_out``."""
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, item in value.items():
        inside = f"{name}.{key}"
        if isinstance(item, dict) or _is_storable(inside, item, allowed):
            kept[key] = _storable_part(inside, item, allowed, left_out)
        else:
            left_out.append(inside)
    return kept


def _is_storable(name: str, value: Any, allowed: list[str]) -> bool:
    if isinstance(value, nn.Module):  # the model's state usually has its weights
        return False
    if is_tensor(value) or any(fnmatchcase(name, glob) for glob in allowed):
        return True
    return not callable(value) and is_storable(value)


@functools.cache
def _warn_left_out(names: tuple[str, ...]) -> None:
    rank_zero_warn(
        f"Not stored with checkpoints, since only executing pickled code would restore them: {', '.join(names)}. Give "
        "them to load_from_checkpoint as arguments. save_hyperparameters(ignore=[...]) silences this; "
        f'allow_pickle=("{EXTRA}.{names[0]}",) stores what is no module nevertheless.'
    )
