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

The second half is for stock Lightning: it reads Lightning's own checkpoints, and adds to ours what stock Lightning
needs to resume from them.

- A file (``.ckpt``) is a ``torch.save`` of one dictionary with full tensors. Its optimizer states have numbers instead
  of the names of parameters.
- A directory of a sharded strategy is a DCP checkpoint of model and optimizers, which the core reads under our names
  (:mod:`dcp_plugin.core.format.foreign`), and ``meta.pt`` with all other values. Lightning itself continues loops,
  callbacks and schedules, in its own way.
- No lock-in: stock sharded strategies look for ``model.<FQN>`` (FSDP) or ``state_dict.<FQN>`` (ModelParallel), for
  ``optimizer_0.state.<FQN>.<slot>`` and ``optimizer_0.param_groups.<number>.<field>``, and for ``meta.pt``. Our
  checkpoints have all these tensors, which get the keys as aliases (:mod:`dcp_plugin.core.format.metadata`). The groups
  are small additional values. Our loads read no addition. Single device and DDP get no additions: their format is one
  file, which would be a second copy of all tensors.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from dcp_plugin.core.errors import CheckpointMismatch, UnsafeCheckpoint, some
from dcp_plugin.core.paths import Where
from dcp_plugin.core.state import (
    GROUPS,
    Nested,
    OwnLayout,
    OwnNames,
    contains_fsdp1,
    flatten_optimizer,
    flatten_tree,
    gather_module,
    group_list,
    group_names,
    load_into,
    loose_module,
    mark_parameters,
    mark_slots,
    parameter_names,
    parameters_by_name,
    pruned_names,
    trained_module,
    unwrapped_optimizer,
    with_names,
    with_numbers,
    without_sampler,
    without_wrappers,
)
from dcp_plugin.core.tensors._torch import DTensor, is_tensor, sharded_value
from dcp_plugin.integration import (
    EXTRA,
    META,
    MODEL,
    OPTIM,
    RNG,
    among,
    encode,
    entries_of,
    holds_sharded,
    is_storable,
    like,
    load_torch_file,
    numbered,
    optimizer_from_stored,
    plain,
)
from dcp_plugin.integration.lightning_packages import has_base
from dcp_plugin.lightning import _lightning

ForStock = tuple[dict[str, tuple[str, tuple[Any, ...]]], Callable[[Path], None]]
"""Additions with which stock Lightning resumes from a checkpoint: aliases of keys, and a writer of ``meta.pt``."""

Checkpoint = dict[str, Any]
"""Checkpoint dictionary of Lightning and all hooks."""

KEYS = {"hyper_parameters": "hparams_type", "datamodule_hyper_parameters": "datamodule_hparams_type"}
"""Lightning's keys for the hyper-parameters of the LightningModule and of the datamodule, and for their class."""
TYPES = "hyper_parameter_types"
"""Our key for the classes of OmegaConf; its value has them under the keys of :data:`KEYS`."""
DATALOADERS, MADE_BY, MADE_IN = "dataloaders", "dataloaders_made_by", "dataloaders_made_in"
PLATEAU, OF_HOOKS = "plateau_metrics", "of_hooks"
"""Keys of our own state in Lightning's dictionary; ``OF_HOOKS`` has the values that hooks had put under our keys."""
OWN_NAMES, FULL, OPTIMIZERS = "own_names", "full_tensors", "number_of_optimizers"
"""Keys for what a load must know of the save: the items of :attr:`OwnNames.inside` for hooks' names; the paths of
full tensors that have the name and shape of a sharded parameter; and the number of optimizers, if a hook has changed
the list of their states."""
_OURS = (RNG, DATALOADERS, MADE_BY, PLATEAU, MADE_IN, TYPES, OWN_NAMES, FULL, OPTIMIZERS, OF_HOOKS)
MODEL_NAMES = {"FSDPStrategy": "model", "ModelParallelStrategy": "state_dict"}
"""Name under which each of the sharded strategies stores the model."""
OPTIMIZER = "optimizer"
"""Prefix of the optimizers' names: ``optimizer_0``, ``optimizer_1``, …, even for a single optimizer."""


def to_state(checkpoint: Checkpoint, allow_pickle: tuple[str, ...]) -> dict[str, Any]:
    """Return the named state of a dictionary of Lightning's, or of any other dictionary (all its items are then extra).

    Args:
        allow_pickle: Keys (globs) of hyper-parameters to store although only executing code restores them.
    """
    extra = _with_storable_parameters(checkpoint, allow_pickle)
    state: dict[str, Any] = {}
    if extra.get("state_dict"):  # a module without state is omitted, as in a save of the module itself
        state[MODEL] = extra.pop("state_dict")
    optimizers = extra.get("optimizer_states")
    if optimizers and all(isinstance(nested, OwnLayout) or is_keyed_by_name(nested) for nested in optimizers):
        del extra["optimizer_states"]
        # Lightning stores an empty state for a module without optimizer.
        flat = [flatten_optimizer(nested) or {} for nested in optimizers]
        state.update(zip(numbered(OPTIM, len(optimizers)), flat, strict=True))
    return {**state, EXTRA: extra}


def with_stored_names(
    checkpoint: Checkpoint, names: OwnNames, model: nn.Module, optimizers: Sequence[Optimizer]
) -> Checkpoint:
    """Return a checkpoint with clean FQNs in place of the names that hooks see, and a record of these.

    In an optimizer's state, a parameter that the ``state_dict`` has under the plain name of a pruned or parametrized
    one gets that name too: the module that resumes has it so.

    Args:
        names: The names in ``state_dict()`` of the module.

    Raises:
        CheckpointMismatch: Two keys of the ``state_dict`` would become one.
    """
    weights: Mapping[str, Any] = {}
    if isinstance(checkpoint.get("state_dict"), Mapping):
        weights = names.clean(checkpoint["state_dict"])
        checkpoint = {**checkpoint, "state_dict": weights}
    if names.inside:
        checkpoint[OWN_NAMES] = [list(prefixes) for prefixes in names.inside.items()]
    states = checkpoint.get("optimizer_states")
    if isinstance(states, list) and len(states) == len(optimizers):
        pairs = zip(states, optimizers, strict=True)
        checkpoint["optimizer_states"] = [_with_stored_names(model, *pair, weights) for pair in pairs]
    elif states is not None:
        checkpoint[OPTIMIZERS] = len(optimizers)
    return checkpoint


def _with_stored_names(model: nn.Module, state: Any, optimizer: Optimizer, weights: Mapping[str, Any]) -> Any:
    if isinstance(state, OwnLayout):
        return state
    names = dict.fromkeys(name for group in group_names(owner_of(model, optimizer), optimizer) for name in group)
    plain_names = pruned_names(model) if weights and not names.keys() <= weights.keys() else {}
    pruned = {own: name for own, name in plain_names.items() if name in weights and own not in weights}
    is_numbered = not is_keyed_by_name(state)
    with suppress(LookupError, TypeError, AttributeError):  # stored as it is: a hook has put something else there
        if is_numbered or pruned:
            numbered = state if is_numbered else with_numbers(state)
            return with_names(numbered, [pruned.get(name, name) for name in names])
    return state


def owner_of(model: nn.Module, optimizer: Optimizer) -> nn.Module:
    """Return the module that names the parameters of an optimizer: the model, also with parameters of no module."""
    try:
        return trained_module(OPTIM, optimizer, {MODEL: model}, {})
    except CheckpointMismatch:
        if contains_fsdp1(model) or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise  # an optimizer that was made before the model was sharded
        return loose_module(optimizer)


def kinds_of(state: dict[str, Any]) -> dict[str, str]:
    """Return the kind, ``"module"`` or ``"optimizer"``, of each name in ``state`` that has such a state."""
    return dict.fromkeys(among(MODEL, state), "module") | dict.fromkeys(among(OPTIM, state), "optimizer")


def shared_by_ranks(state: dict[str, Any], model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Mark the values that DDP keeps equal in a state, so that its ranks share the writing."""
    marked = {MODEL: mark_parameters(model, state[MODEL])} if MODEL in state else {}
    names = among(OPTIM, state)
    if len(names) == len(optimizers):  # else a hook has changed the list, and the owners are unknown
        marked |= {
            name: mark_slots(owner_of(model, optimizer), optimizer, state[name])
            for name, optimizer in zip(names, optimizers, strict=True)
            if not isinstance(state[name], OwnLayout)
        }
    return {**state, **marked}


def from_state(state: dict[str, Any]) -> Checkpoint:
    """Return the dictionary of a state: the inverse of :func:`to_state`."""
    checkpoint: Checkpoint = dict(state.get(EXTRA, {}))
    restore_configurations(checkpoint)
    if MODEL in state:
        checkpoint["state_dict"] = state[MODEL]
    if optimizers := among(OPTIM, state):
        checkpoint["optimizer_states"] = [optimizer_from_stored(state[name]) for name in optimizers]
    return checkpoint


def is_keyed_by_name(optimizer_state: Any) -> bool:
    """Return whether an optimizer's state is keyed by FQN, as the promoted strategies make it, and not by number."""
    groups = optimizer_state.get("param_groups", ()) if isinstance(optimizer_state, dict) else ()
    return bool(groups) and all(isinstance(name, str) for group in groups for name in group["params"])


def _with_storable_parameters(checkpoint: Checkpoint, allow_pickle: tuple[str, ...]) -> Checkpoint:
    """Return a checkpoint with its hyper-parameters in their stored form; warn of those that are left out."""
    stored = dict(checkpoint)
    left_out: list[str] = []
    allowed = [glob.removeprefix(f"{EXTRA}.") for glob in allow_pickle]
    for key, kind in KEYS.items():
        if key in stored:
            if classes := _classes_in(stored[key]):
                stored[TYPES] = {**stored.get(TYPES, {}), key: classes}
            unstorable: list[str] = []
            stored[key] = _storable_part(key, plain(stored[key]), allowed, unstorable)
            left_out += sorted(unstorable)
        if isinstance(of_class := stored.get(kind), type):  # loading a class would execute its module
            stored[kind] = f"{of_class.__module__}.{of_class.__qualname__}"
    if left_out:
        _warn_left_out(tuple(left_out))
    return stored


def restore_configurations(checkpoint: Checkpoint) -> None:
    """Have OmegaConf make its configurations from the stored hyper-parameters, in place. Values that OmegaConf refuses
    stay plain, with a warning: a resume does not need them."""
    types = checkpoint.pop(TYPES, None)
    if not isinstance(types, dict) or not importlib.util.find_spec("omegaconf"):
        return
    for key, kind in KEYS.items():
        if key in checkpoint and key in types:
            try:
                checkpoint[key] = _with_classes(checkpoint[key], types[key])
                if "is" in types[key]:
                    checkpoint[kind] = type(checkpoint[key])
            except Exception as error:  # a checkpoint of any author may have any values here
                rank_zero_warn(f"OmegaConf cannot make the {key} of the checkpoint again, which stay plain: {error!r}")


def unresolved(value: Any) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Any]] | None:
    """Return the unresolved items of a ``DictConfig``, and a function that makes a configuration of such items; None
    for any other value."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is None or not isinstance(value, omegaconf.DictConfig):
        return None
    classes = {**_classes_in(value), "root": None, "keys": []}
    return omegaconf.OmegaConf.to_container(value), lambda items: _with_classes(items, classes)


def _classes_in(value: Any) -> dict[str, Any]:
    """Return the classes of OmegaConf in a value; an empty mapping if it has none.

    For a configuration the result is ``{"is": class, "flags": …, "root": …, "keys": …}``: interpolations may refer to
    the root, from which the keys lead to this part. For a container the result is ``{"in": {key: …}}``.
    """
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and isinstance(value, (omegaconf.DictConfig, omegaconf.ListConfig)):
        root, keys = _lightning.place_in_configuration(value)
        plain_root = plain(root) if keys else None
        if plain_root is not None and not _is_storable("", plain_root, []):
            root, keys, plain_root = value, [], None
        flags = {"struct": bool(omegaconf.OmegaConf.is_struct(root)), "readonly": omegaconf.OmegaConf.is_readonly(root)}
        return {"is": type(value).__name__, "flags": flags, "root": plain_root, "keys": keys}
    inside = {key: classes for key, item in _items(value) if (classes := _classes_in(item))}
    return {"in": inside} if inside else {}


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, dict) else enumerate(value) if type(value) in (list, tuple) else ()


def _with_classes(value: Any, classes: dict[str, Any]) -> Any:
    """Return the configurations of a plain value: the inverse of :func:`_classes_in`."""
    if "is" not in classes:
        inside = classes["in"]
        items = {key: _with_classes(item, inside[key]) if key in inside else item for key, item in _items(value)}
        return like(value, items) if isinstance(value, dict) else type(value)(items.values())
    omegaconf = importlib.import_module("omegaconf")
    source = value if classes["root"] is None else classes["root"]
    if classes["is"] not in ("DictConfig", "ListConfig") or not isinstance(source, (dict, list, type(None))):
        raise TypeError(f"a {classes['is']} of a {type(source).__name__}")
    kind = classes["is"] if source is None else "ListConfig" if isinstance(source, list) else "DictConfig"
    config = root = getattr(omegaconf, kind)(source)
    for key in classes["keys"]:
        if omegaconf.OmegaConf.is_interpolation(config, key):
            raise TypeError(f"{key} is an interpolation")
        config = config[key]
    if type(config).__name__ != classes["is"]:
        raise TypeError(f"a {classes['is']} of a {type(config).__name__}")
    omegaconf.OmegaConf.set_struct(root, classes["flags"]["struct"] or None)
    omegaconf.OmegaConf.set_readonly(root, classes["flags"]["readonly"] or None)
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
    return like(value, kept)


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


def beside_ours(checkpoint: Checkpoint) -> Checkpoint:
    """Return a new mapping to which our keys can be added. A hook's values under these keys, such as ``"rng"``, move to
    ``OF_HOOKS``; the hook's own mapping is unchanged."""
    of_hooks = {key: value for key, value in checkpoint.items() if key in _OURS}
    remaining = {key: value for key, value in checkpoint.items() if key not in of_hooks}
    return {**remaining, OF_HOOKS: of_hooks} if of_hooks else remaining


def full_tensors(checkpoint: Checkpoint, model: nn.Module) -> list[list[str]]:
    """Return the paths of full tensors, in mappings of hooks, with the name and the shape of a sharded parameter."""
    sharded = {name: p.shape for name, p in parameters_by_name(model).items() if isinstance(p, DTensor)}
    of_hooks = {key: item for key, item in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    leaves, paths = flatten_tree(of_hooks if sharded else {})
    return [
        list(path)
        for key, path in paths.items()
        if all(isinstance(step, str) for step in path)
        and is_tensor(leaves[key])
        and not isinstance(leaves[key], DTensor)
        and sharded.get(without_wrappers(path[-1])) == leaves[key].shape
    ]


def put_back(checkpoint: Checkpoint) -> Checkpoint:
    """Restore in place the values of hooks that :func:`beside_ours` had moved. Our values must have been removed."""
    of_hooks: Checkpoint = checkpoint.pop(OF_HOOKS, {})
    checkpoint.update({key: of_hooks[key] for key in _OURS if key in of_hooks})
    return checkpoint


def without_own_state(checkpoint: Checkpoint) -> Checkpoint:
    """Remove our state in place, and return the checkpoint as Lightning itself would have made it on rank 0."""
    if "state_dict" in checkpoint:
        checkpoint["state_dict"] = OwnNames(dict(checkpoint.get(OWN_NAMES, ()))).own(checkpoint["state_dict"])
    if states := checkpoint.get(DATALOADERS):
        _lightning.put_dataloader_states(checkpoint["loops"]["fit_loop"], without_sampler(states["0"]))
    for key in _OURS:
        if key != OF_HOOKS:
            checkpoint.pop(key, None)
    return put_back(checkpoint)


def read(path: Where, weights_only: bool | None, map_location: Any = "cpu") -> Checkpoint:
    """Read a file of Lightning's, also ``meta.pt``, as :func:`~dcp_plugin.integration.extra_files.load_torch_file`."""
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
    model = owner_of(model, optimizer)
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
    load.check({key: flat[key] for key in wanted.targets if not is_tensor(flat[key])})
    for key, target in wanted.targets.items():
        if is_tensor(target):
            fill(key, target, flat[key])
    load.commit({key: flat[key] if target is None else target for key, target in wanted.targets.items()})


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
    return with_names(state, names)


def _names_in_optimizer(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of the parameters in the order of an optimizer of the unwrapped model. For a flat parameter of
    FSDP1 these are the names of its unit; the names of such a group are assumed to be in the model's order."""
    in_model = gather_module(model) if contains_fsdp1(model) else ()
    order = {name: number for number, name in enumerate(in_model)}
    names = []
    for group, of_group in zip(optimizer.param_groups, group_names(model, optimizer), strict=True):
        flat = len(of_group) != len(group["params"])
        names += sorted(of_group, key=order.__getitem__) if flat else of_group
    return names


def _names_in_model(model: nn.Module) -> list[str]:
    names = {name: None for of_one in parameter_names(model).values() for name in of_one}
    return [name for name in gather_module(model) if name in names] if contains_fsdp1(model) else list(names)


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


def add_for_stock(strategy: Any, checkpoint: Checkpoint, state: dict[str, Any]) -> ForStock | None:
    """Return the additions for stock Lightning to a checkpoint of this strategy; None if the strategy is not sharded.

    Add the groups of the optimizers to ``state`` for every strategy: an export needs them, too.

    Args:
        checkpoint: Lightning's dictionary.
        state: Its stored form, see :func:`to_state`.
    """
    model = next((name for base, name in MODEL_NAMES.items() if has_base(type(strategy), base)), None)
    aliases: dict[str, tuple[str, tuple[Any, ...]]] = {}
    if model not in (None, MODEL):
        aliases = {f"{MODEL}.{key}": (f"{model}.{key}", (model, key)) for key in state.get(MODEL, ())}
    for number, name in enumerate(among(OPTIM, state)):
        nested, stock_name = checkpoint["optimizer_states"][number], f"{OPTIMIZER}_{number}"
        if isinstance(nested, OwnLayout) or group_list(nested)[0].keys() & state[name].keys():
            continue  # in the second case a parameter has the name "0"
        state[name] = {**state[name], GROUPS: nested[GROUPS]}
        if model is not None:
            for key, path in flatten_tree(nested)[1].items():
                aliases[f"{name}.{key}"] = f"{stock_name}.{key}", (stock_name, *path)
    if model is None:
        return None
    meta = _meta(state[EXTRA]) if strategy.is_global_zero else None
    return aliases, functools.partial(_write_meta, meta)


def _write_meta(meta: Checkpoint | None, directory: Path) -> None:
    """Write all values except model and optimizers, on the rank that has them. ``torch.load(weights_only=True)`` reads
    the file, unless the user has allowed pickled values. The save itself reports values that cannot be stored."""
    if meta is None:
        return
    with suppress(UnsafeCheckpoint):
        (directory / META).write_bytes(encode(meta, allow_pickle=True))


def _meta(extra: Checkpoint) -> Checkpoint:
    """Return the values as Lightning itself would store them. Omit sharded tensors, which no rank has in full."""
    loops = {"loops": copy.deepcopy(extra["loops"])} if "loops" in extra else {}
    return without_own_state({**_unsharded(extra), **loops})


def _unsharded(value: Any) -> Any:
    if type(value) is not dict:
        return value
    return {key: _unsharded(item) for key, item in value.items() if type(item) is dict or not holds_sharded(item)}
