"""Loading into the live model and optimizers, with Lightning's hooks in between, and ``load_from_checkpoint``.

Lightning asks for a checkpoint before it sets up a single device or DDP, and after it has sharded a model. Callbacks
rely on this order: their restored state may decide which groups an optimizer gets. The state of the optimizers is
therefore read separately, when the optimizers are complete.

A change by a hook has the same effect as with Lightning's own checkpoints. Hooks get the live tensors. Their
replacements and removals, which are rare, are applied after the hooks. If the LightningModule has an
``on_load_checkpoint`` of its own, which may refuse tensors, the model's state is read into separate tensors, and loaded
after that hook.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import operator
import os
from collections.abc import Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.overrides import is_overridden
from torch import nn
from torch.optim import Optimizer

from dcp_plugin import ShardedReader
from dcp_plugin.checkpointer import Checkpointer, Internals
from dcp_plugin.core.errors import CheckpointError, CheckpointMismatch, UnsafeCheckpoint, some
from dcp_plugin.core.partial import PartialLoad
from dcp_plugin.core.paths import PathLike, StorageOptions, Where, as_path
from dcp_plugin.core.records import LoadReport
from dcp_plugin.core.sources import SourceFiles
from dcp_plugin.core.state import (
    GROUPS,
    NamesOnly,
    OwnLayout,
    OwnNames,
    Unapplied,
    apply_module,
    flatten_optimizer,
    flatten_tree,
    gather_module,
    gather_optimizer,
    gather_with_names,
    unwrapped_optimizer,
    with_names,
    with_numbers,
    without_wrappers,
)
from dcp_plugin.core.tensors._torch import DTensor, ShardedTensor, is_tensor
from dcp_plugin.integration import (
    EXTRA,
    META,
    MODEL,
    OPTIM,
    among,
    is_of_stock_lightning,
    is_regular_file,
    keys_by_name,
    kind_of,
    load_torch_file,
    optimizer_from_stored,
)
from dcp_plugin.integration.lightning_packages import PACKAGES, Package, package_of
from dcp_plugin.lightning import _lightning, layout
from dcp_plugin.lightning.layout import (
    FULL,
    OPTIMIZERS,
    OWN_NAMES,
    Checkpoint,
    is_keyed_by_name,
    owner_of,
    restore_configurations,
)

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule

Loadable = TypeVar("Loadable", bound="LightningModule | LightningDataModule")


@dataclass
class Loaded:
    """A checkpoint after :func:`load`, before hooks have seen it."""

    path: Where
    checkpoint: Checkpoint
    """The dictionary for Lightning and the hooks."""
    model: dict[str, Any] | None
    """The loaded values of the model, to detect replacements by hooks; None before the model is loaded."""
    names: OwnNames = field(default_factory=OwnNames)
    """The names in ``state_dict()`` of the model, which hooks may use."""
    optimizer_names: list[str] = field(default_factory=list)
    """The names of optimizers with state in the checkpoint; empty for a checkpoint of weights alone, and for a file."""
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    """The flat state of each optimizer; empty before the optimizers are loaded."""
    peeked: list[dict[str, Any]] = field(default_factory=list)
    """The flat state of each optimizer that hooks were given before the optimizers existed."""
    numbers: list[list[str]] = field(default_factory=list)
    """The names of the parameters of each optimizer, if hooks see their numbers."""
    count: int = 0
    """Number of optimizers with state in the dictionary, before hooks have seen it."""
    saved_with: int | None = None
    """Number of optimizers of the save, if a hook has changed the list of their states then."""
    report: LoadReport | None = None
    """The report of the load without the optimizers; None for a file of Lightning's."""
    of_lightning: bool = False
    """True if a sharded strategy of stock Lightning saved the checkpoint."""

    @classmethod
    def of_file(cls, path: Where, checkpoint: Checkpoint, model: nn.Module) -> Loaded:
        """Return the contents of a file of Lightning's; the model is loaded after the hooks."""
        live, saved = gather_module(model), checkpoint["state_dict"]
        state_dict = {key if key in live else without_wrappers(key): value for key, value in saved.items()}
        return cls(path, {**checkpoint, "state_dict": state_dict}, model=None)


def load(
    path: Where,
    internals: Internals,
    model: nn.Module,
    *,
    strict: bool,
    hooked: bool,
    weights_only: bool | None,
    files: SourceFiles | None,
    clean_names: bool,
) -> Loaded:
    """Read the model's state into ``model``, and all other values except the optimizers' into the result. Collective.

    Args:
        files: The files from :meth:`dcp_plugin.checkpointer.Internals.shown`.
        weights_only: Refuse to execute code from ``meta.pt`` of a sharded strategy of stock Lightning.
        strict: Raise an error for keys that do not fit; with ``hooked``, :func:`apply_model` raises it later.
        hooked: Read the model's state into separate tensors, since the LightningModule's own hook runs before they are
            applied.
        clean_names: Give hooks clean FQNs, as sharded strategies do, and not the names in ``state_dict()``.

    Raises:
        CheckpointMismatch: The checkpoint does not fit the model.
    """
    unapplied = Unapplied(model)
    keys, of_lightning = internals.ranks.from_zero(
        f"read {path}",
        lambda: (keys_by_name(path, files), files is None and is_of_stock_lightning(path)),
    )
    checkpoint: Checkpoint = {}
    state: dict[str, Any] = {MODEL: unapplied if hooked else model}
    if of_lightning:
        checkpoint = internals.ranks.agree(f"read {path}", lambda: layout.read(path / META, weights_only))
    elif EXTRA in keys:
        state[EXTRA] = checkpoint
        _allocate_like_parameters(path, files, keys[EXTRA], model, checkpoint)
    report = internals.restore(state, path, strict=strict and not hooked)
    restore_configurations(checkpoint)
    for *steps, name in checkpoint.pop(FULL, ()):  # distributed by _allocate_like_parameters
        holder: Any = functools.reduce(operator.getitem, steps, checkpoint)
        if isinstance(holder[name], DTensor):
            holder[name] = holder[name].full_tensor()
    checkpoint.pop(OWN_NAMES, None)
    values, names = gather_with_names(model)
    missing = set(report.missing)
    loaded = None if hooked else {key: value for key, value in values.items() if f"{MODEL}.{key}" not in missing}
    weights = unapplied.state_dict if loaded is None else loaded
    checkpoint["state_dict"] = dict(weights if clean_names else names.own(weights))
    of_optimizers, saved_with = among(OPTIM, keys), checkpoint.pop(OPTIMIZERS, None)
    return Loaded(
        path, checkpoint, loaded, names, of_optimizers, saved_with=saved_with, report=report, of_lightning=of_lightning
    )


def load_optimizers(
    loaded: Loaded, internals: Internals, model: nn.Module, optimizers: Sequence[Optimizer], strict: bool
) -> list[Any]:
    """Read the state of these optimizers, and return their states. Collective.

    Raises:
        CheckpointMismatch: The checkpoint does not fit the optimizers.
    """
    named = dict(zip(loaded.optimizer_names, optimizers, strict=False))
    if not named:
        return []
    # The owners give the names of the parameters, also if the checkpoint's names have a prefix.
    owners = {name: owner_of(model, unwrapped_optimizer(optimizer)) for name, optimizer in named.items()}
    names = {f"names_for_{name}": NamesOnly(owner) for name, owner in owners.items() if owner is not model}
    state: dict[str, Any] = {MODEL: model, **names, **named}
    # An optimizer whose own state dict is empty has one key, its name.
    only = PartialLoad(include=tuple(f"{name}*" for name in named), cast=True)
    report = internals.restore(state, loaded.path, partial=only, strict=False)
    # Parameters without state are no error: another part of the model may be frozen now. The core logs them.
    if strict and not named.keys() <= {key.partition(".")[0] for key in report.loaded}:
        raise CheckpointMismatch(
            f"{loaded.path} does not fit the optimizers: {report}. strict_loading=False loads what fits."
        )
    states = [gather_optimizer(owner, named[name]) for name, owner in owners.items()]
    loaded.optimizers = [flatten_optimizer(state) for state in states]
    return states


def peek_at_optimizers(loaded: Loaded, internals: Internals) -> list[dict[str, Any]]:
    """Return the full state of each optimizer in the checkpoint, in host memory, for hooks that run before optimizers
    exist. Collective."""
    state: dict[str, Any] = dict.fromkeys(loaded.optimizer_names)
    internals.restore(state, loaded.path)
    return [optimizer_from_stored(tree) for tree in state.values()]


def numbered(states: list[Any]) -> tuple[list[Any], list[list[str]]]:
    """Return the states of optimizers with numbers for parameters, as Lightning gives them to hooks, and the names of
    the parameters in the order of the numbers; no names for a layout of an optimizer's own."""
    names = [
        list(dict.fromkeys(name for group in state[GROUPS] for name in group["params"]))
        if is_keyed_by_name(state)
        else []
        for state in states
    ]
    return [with_numbers(state) if of_one else state for state, of_one in zip(states, names, strict=True)], names


def _allocate_like_parameters(
    path: Where, files: SourceFiles | None, keys: list[str], model: nn.Module, checkpoint: Checkpoint
) -> None:
    """Allocate distributed tensors for the state that callbacks keep of every parameter, such as averages.

    A tensor with a parameter's name and shape is distributed like the parameter, so that each rank reads only its part.
    """
    parameters = {name: value for name, value in gather_module(model).items() if isinstance(value, DTensor)}
    if not parameters:
        return
    with ShardedReader(path, check_files=False, files=files) as reader:
        index = reader.index
    for key in keys:
        entry: Any = index[f"{EXTRA}.{key}"]
        steps = index.path_of(f"{EXTRA}.{key}")[1:]
        is_named = bool(steps) and all(isinstance(step, str) for step in steps)
        like = parameters.get(without_wrappers(steps[-1])) if is_named else None
        if like is None or getattr(entry, "shape", None) != tuple(like.shape):  # only tensors have a shape
            continue
        holder = checkpoint
        for step in steps[:-1]:
            holder = holder.setdefault(step, {})
        holder[steps[-1]] = torch.empty_like(like.detach(), dtype=entry.dtype, requires_grad=False)


def apply_model(model: nn.Module, loaded: Loaded, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Apply the ``state_dict`` to the model after the hooks. Collective if a hook has changed it.

    Raises:
        CheckpointMismatch: Keys are missing or unexpected, if ``strict``, or a shape differs.
    """
    applied, state_dict = loaded.model, loaded.names.clean(state_dict)
    if applied is not None and all(state_dict.get(key) is value for key, value in applied.items()):
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
    """Return a value from a hook, distributed like the model's value."""
    if not isinstance(target, (DTensor, ShardedTensor)) or isinstance(source, type(target)) or not is_tensor(source):
        return source
    placed = torch.empty_like(target.detach()) if isinstance(target, DTensor) else target
    layout.fill(key, placed, source)
    return placed


def apply_optimizers(
    model: nn.Module, optimizers: Sequence[Optimizer], loaded: Loaded, states: list[Any], strict: bool
) -> None:
    """Apply the ``states`` to the optimizers after the hooks."""
    for optimizer, state, applied, numbers in zip_longest(optimizers, states, loaded.optimizers, loaded.numbers):
        if optimizer is None or not state:  # Lightning's state of a module without optimizer
            continue
        inner, named = unwrapped_optimizer(optimizer), with_names(state, numbers) if numbers else state
        if isinstance(applied, OwnLayout):
            if isinstance(state, OwnLayout) and not _same(flatten_tree(state)[0], flatten_tree(applied)[0]):
                inner.load_state_dict(state)  # type: ignore[arg-type]
        elif applied is None or not _same(flatten_optimizer(named), applied):
            inner.state.clear()  # a hook may have removed some of it
            layout.load_optimizer(model, inner, named, strict=strict and applied is None)


def refuse_other_number(path: Where, saved: int, optimizers: Sized) -> None:
    if saved != len(optimizers):
        raise CheckpointMismatch(
            f"{path} has the state of {saved} optimizer(s), this training has {len(optimizers)}. Resume with the "
            "optimizers that the checkpoint was made with."
        )


def _same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        value is second[key] or (not is_tensor(value) and not is_tensor(second[key]) and value == second[key])
        for key, value in first.items()
    )


def load_from_checkpoint(
    cls: type[Loadable],
    path: PathLike,
    *,
    map_location: Any = None,
    strict: bool | None = None,
    hparams_file: PathLike | None = None,
    weights_only: bool | None = None,
    storage_options: StorageOptions | None = None,
    **kwargs: Any,
) -> Loadable:
    """Make a LightningModule or a datamodule from a checkpoint, on this process alone and with full tensors.

    ``LightningModule.load_from_checkpoint`` does the same where this package is imported. This function also takes the
    options of a store.

    Args:
        cls: The class of the new object.
        path: A checkpoint of ours, or of Lightning's (a directory of a sharded strategy, or a file), or its URL.
        map_location: The device of the model, as ``torch.load`` takes it. The tensors of a directory have no device and
            count as saved on ``"cpu"``, which is also the default.
        strict: Require equal keys; by default the module's ``strict_loading``.
        hparams_file: A ``.yaml`` or ``.csv`` file with hyper-parameters to use instead of those of the checkpoint.
        weights_only: False executes code from the checkpoint where only that restores a value: allow it only for a
            checkpoint of your own.
        storage_options: Options of the store of a URL, see :class:`~dcp_plugin.CheckpointConfig`.
        kwargs: More arguments of ``__init__``, which override the hyper-parameters of the checkpoint.

    Returns:
        The module with its weights, on the device of ``map_location``; or the datamodule.

    Raises:
        TypeError: ``cls`` is not a class of LightningModules or LightningDataModules, but for example an object.
        CheckpointNotFound, CheckpointCorrupt: The checkpoint does not exist, or its bytes have changed.
        UnsafeCheckpoint: A value needs ``weights_only=False``; or the hyper-parameters name an unknown function to
            call.
        CheckpointMismatch: The checkpoint has no model.
        RuntimeError: The model does not fit, as with Lightning's own method.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from dcp_plugin.lightning import DCPCheckpointIO
        >>> DCPCheckpointIO().save_checkpoint({"state_dict": BoringModel().state_dict()}, "boring.ckpt")
        >>> load_from_checkpoint(BoringModel, "boring.ckpt").layer.out_features
        2
    """
    checkpoint_path, loadable, package = as_path(path, storage_options), cast(Any, cls), _package_of(cls)
    options = {"hparams_file": hparams_file, **package.load_options(weights_only), **kwargs}
    if is_module := issubclass(cls, package.pytorch.LightningModule):
        options["strict"] = strict
    if is_regular_file(checkpoint_path):
        if "weights_only" not in options:  # Lightning 2.5 executes code from any file
            load_torch_file(checkpoint_path, weights_only, "load_from_checkpoint(weights_only=False)", "meta")
        return cast(Loadable, loadable.load_from_checkpoint(checkpoint_path, map_location=map_location, **options))
    open_directories()  # the package may have been imported after this module
    loaded = _lightning.load_from_checkpoint(package, cls, _Directory(checkpoint_path, weights_only), **options)
    return cast(Loadable, loaded.to(_device(map_location)) if is_module else loaded)


@dataclass(frozen=True)
class _Directory:
    """Path from our own :func:`load_from_checkpoint`. Lightning passes it on to :func:`_read_directory`."""

    path: Where
    weights_only: bool | None = None


def _package_of(cls: Any) -> Package:
    if not isinstance(cls, type):
        raise TypeError(
            f"load_from_checkpoint(cls, path) makes a new object: cls is its class, not a {type(cls).__name__}. To "
            'load weights into a module that exists: dcp_plugin.load({"model": module}, path).'
        )
    package = package_of(cls)
    if package is None or not issubclass(cls, (package.pytorch.LightningModule, package.pytorch.LightningDataModule)):
        raise TypeError(f"{cls!r} is no LightningModule or LightningDataModule")
    return package


def _read_directory(
    package: Package, cls: Any, directory: _Directory, map_location: Any, weights_only: bool | None
) -> Checkpoint:
    """Return Lightning's dictionary of a directory for ``load_from_checkpoint`` of a class: without the model if no
    module is to be made, without the optimizers' state if no hook can use it."""
    path, weights_only = directory.path, directory.weights_only if weights_only is None else weights_only
    left_out = list(among(OPTIM, keys_by_name(path)))
    is_module = issubclass(cls, package.pytorch.LightningModule)
    if not is_module:
        left_out.append(MODEL)
    elif is_overridden("on_load_checkpoint", cls, package.pytorch.LightningModule):
        left_out.clear()
    allow_pickle = ("*",) if weights_only is False else ()
    alone = Checkpointer(solo=True, allow_pickle=allow_pickle)
    checkpoint = read_full(path, Internals(alone), weights_only, left_out)
    checkpoint.setdefault("pytorch-lightning_version", package.pytorch.__version__)  # if not saved by a Trainer
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"], _ = numbered(checkpoint["optimizer_states"])
    _restore_class_of_hyper_parameters(checkpoint, cls)
    _refuse_unknown_instantiator(path, checkpoint, cls, package)
    if is_module and "state_dict" not in checkpoint:
        raise CheckpointMismatch(f"{path} has no model; it has {', '.join(sorted(keys_by_name(path)))}.")
    if (device := _device(map_location)).type != "cpu":
        moved = {key: value for key, value in checkpoint.items() if key not in layout.KEYS}
        checkpoint |= apply_to_collection(moved, torch.Tensor, lambda tensor: tensor.to(device))
    return checkpoint


def _directory_at(opened: Any) -> _Directory | None:
    """Return the path that Lightning could not open as a file, if it is a directory."""
    if isinstance(opened, _Directory):
        return opened
    with suppress(OSError, ValueError, CheckpointError):  # Lightning's own error is raised
        if isinstance(opened, (str, os.PathLike)) and kind_of(path := as_path(opened)) == "folder":
            return _Directory(path)
    return None


def read_full(path: Where, internals: Internals, weights_only: bool | None, left_out: Sequence[str] = ()) -> Checkpoint:
    """Return Lightning's dictionary of a directory, with full tensors in host memory.

    Args:
        internals: Those of a Checkpointer of this process alone.
        weights_only: Refuse to execute code from ``meta.pt`` of a sharded strategy of stock Lightning.
        left_out: Names to omit, such as ``optim``.
    """
    state: dict[str, Any] = {name: {} for name in keys_by_name(path) if name not in left_out}
    internals.restore(state, path)
    checkpoint = layout.from_state(state)
    if is_of_stock_lightning(path):
        return {**layout.read(path / META, weights_only), **checkpoint}
    return layout.without_own_state(checkpoint)


def _refuse_unknown_instantiator(path: Where, checkpoint: Checkpoint, cls: Any, package: Package) -> None:
    """Refuse a function that is to make the object, unless it belongs to LightningCLI, which stores its name. The
    author of the checkpoint chose the name, and could have any function called."""
    for parameters in _lightning.hyper_parameters_of(package, cls, checkpoint):
        name = parameters.get("_instantiator")
        if name is not None and not (isinstance(name, str) and name in _lightning.instantiators(package)):
            raise UnsafeCheckpoint(
                f"{path}: its hyper-parameters name {name!r} as the function that makes the {cls.__name__}, which is "
                "none of LightningCLI's. Whoever wrote the checkpoint could have any code executed; it is not called."
            )


def _restore_class_of_hyper_parameters(checkpoint: Checkpoint, cls: Any) -> None:
    """Replace a configuration by its items, to which Lightning adds arguments, and a function that makes it again."""
    key, kind = cls.CHECKPOINT_HYPER_PARAMS_KEY, cls.CHECKPOINT_HYPER_PARAMS_TYPE
    if unresolved := layout.unresolved(checkpoint.get(key)):  # reading its items would resolve them
        checkpoint[key], with_items = unresolved
        is_argument = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_NAME) in inspect.signature(cls.__init__).parameters
        checkpoint[kind] = with_items if is_argument else None
    elif str(checkpoint.get(kind, "")).startswith("omegaconf.") and importlib.util.find_spec("omegaconf"):
        checkpoint[kind] = importlib.import_module("omegaconf").OmegaConf.create


def _device(map_location: Any) -> torch.device:
    """Return the device for tensors of a directory, which count as saved on ``"cpu"``."""
    if isinstance(map_location, dict):
        map_location = map_location.get("cpu")
    if callable(map_location):
        storage = map_location(torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage(), "cpu")
        map_location = None if storage is None else storage.device
    return torch.device(map_location or "cpu")


def open_directories() -> None:
    """Have Lightning's own ``load_from_checkpoint``, in each imported package, open directories."""
    for package in PACKAGES:
        _lightning.replace_reading(package, _directory_at, _read_directory)


open_directories()
