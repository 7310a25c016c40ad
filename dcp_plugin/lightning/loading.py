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

import importlib.util
import inspect
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from lightning_utilities.core.overrides import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from dcp_plugin import ShardedReader
from dcp_plugin.checkpointer import Checkpointer
from dcp_plugin.errors import CheckpointMismatch, UnsafeCheckpoint, some
from dcp_plugin.integration.files import META, is_of_stock_lightning, is_regular_file
from dcp_plugin.integration.lightning_packages import PACKAGES, Package, package_of
from dcp_plugin.integration.stored import EXTRA, MODEL, OPTIM, among, keys_by_name, optimizer_from_stored
from dcp_plugin.lightning import _lightning, layout
from dcp_plugin.lightning.layout import Checkpoint, restore_configurations
from dcp_plugin.partial import PartialLoad
from dcp_plugin.paths import PathLike, StorageOptions, Where, as_path
from dcp_plugin.records import LoadReport
from dcp_plugin.sources import SourceFiles
from dcp_plugin.state import (
    OwnLayout,
    Unapplied,
    apply_module,
    flatten_optimizer,
    flatten_tree,
    gather_module,
    gather_optimizer,
    load_into,
    unwrapped_optimizer,
    without_wrappers,
)
from dcp_plugin.tensors._torch import DTensor, ShardedTensor, is_tensor

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
    optimizer_names: list[str] = field(default_factory=list)
    """The names of optimizers with state in the checkpoint; empty for a checkpoint of weights alone, and for a file."""
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    """The flat state of each optimizer; empty before the optimizers are loaded."""
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
    checkpointer: Checkpointer,
    model: nn.Module,
    *,
    strict: bool,
    hooked: bool,
    weights_only: bool | None,
    files: SourceFiles | None,
) -> Loaded:
    """Read the model's state into ``model``, and all other values except the optimizers' into the result. Collective.

    Args:
        files: The files from :meth:`dcp_plugin.Checkpointer.shown`.
        weights_only: Refuse to execute code from ``meta.pt`` of a sharded strategy of stock Lightning.
        strict: Raise an error for keys that do not fit; with ``hooked``, :func:`apply_model` raises it later.
        hooked: Read the model's state into separate tensors, since the LightningModule's own hook runs before they are
            applied.

    Raises:
        CheckpointMismatch: The checkpoint does not fit the model.
    """
    unapplied = Unapplied(model)
    keys, of_lightning = checkpointer.ranks.from_zero(
        f"read {path}",
        lambda: (keys_by_name(path, files), files is None and is_of_stock_lightning(path)),
    )
    checkpoint: Checkpoint = {}
    state: dict[str, Any] = {MODEL: unapplied if hooked else model}
    if of_lightning:
        checkpoint = checkpointer.ranks.agree(f"read {path}", lambda: layout.read(path / META, weights_only))
    elif EXTRA in keys:
        state[EXTRA] = checkpoint
        _allocate_like_parameters(path, files, keys[EXTRA], model, checkpoint)
    report = checkpointer.restore(state, path, strict=strict and not hooked)
    restore_configurations(checkpoint)
    loaded = None
    if not hooked:
        missing = set(report.missing)
        loaded = {key: value for key, value in gather_module(model).items() if f"{MODEL}.{key}" not in missing}
    checkpoint["state_dict"] = unapplied.state_dict if loaded is None else dict(loaded)
    return Loaded(path, checkpoint, loaded, among(OPTIM, keys), report=report, of_lightning=of_lightning)


def load_optimizers(
    loaded: Loaded, checkpointer: Checkpointer, model: nn.Module, optimizers: list[Optimizer], strict: bool
) -> None:
    """Read the optimizers' state of the same checkpoint, if the checkpoint has any. Collective.

    Raises:
        CheckpointMismatch: The checkpoint does not fit the optimizers.
    """
    path, names = loaded.path, loaded.optimizer_names
    _refuse_other_number(path, names, optimizers)
    # The model gives the names of the parameters, also if the checkpoint's names have a prefix.
    state: dict[str, Any] = {MODEL: model, **dict(zip(names, optimizers, strict=True))}
    # An optimizer whose own state dict is empty has one key, its name.
    only = PartialLoad(include=tuple(f"{name}*" for name in names), cast=True)
    report = checkpointer.restore(state, path, partial=only, strict=False)
    # Parameters without state are no error: another part of the model may be frozen now. The core logs them.
    if strict and not set(names) <= {key.partition(".")[0] for key in report.loaded}:
        raise CheckpointMismatch(f"{path} does not fit the optimizers: {report}. strict_loading=False loads what fits.")
    states = [gather_optimizer(model, optimizer) for optimizer in optimizers]
    loaded.checkpoint["optimizer_states"] = states
    loaded.optimizers = [flatten_optimizer(state) for state in states]


def peek_at_optimizers(loaded: Loaded, checkpointer: Checkpointer) -> list[dict[str, Any]]:
    """Return the full state of each optimizer in the checkpoint, in host memory, for hooks that run before optimizers
    exist. Collective."""
    state: dict[str, Any] = dict.fromkeys(loaded.optimizer_names)
    checkpointer.restore(state, loaded.path)
    return [optimizer_from_stored(tree) for tree in state.values()]


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
        like = parameters.get(steps[-1]) if steps and all(isinstance(step, str) for step in steps) else None
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
    applied = loaded.model
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
    model: nn.Module, optimizers: list[Optimizer], loaded: Loaded, states: list[dict[str, Any]], strict: bool
) -> None:
    """Apply the ``states`` to the optimizers after the hooks."""
    _refuse_other_number(loaded.path, states, optimizers)
    for optimizer, state, applied in zip_longest(optimizers, states, loaded.optimizers):
        if not state:  # Lightning's state of a module without optimizer
            continue
        if isinstance(applied, OwnLayout):
            if isinstance(state, OwnLayout) and not _same(flatten_tree(state)[0], flatten_tree(applied)[0]):
                unwrapped_optimizer(optimizer).load_state_dict(state)  # type: ignore[arg-type]
            continue
        if applied is None or not layout.is_keyed_by_name(state):  # saved without the promoted strategy
            layout.load_optimizer(model, optimizer, state, strict=strict)
            continue
        flat = {key: _in_place_of(applied.get(key), value) for key, value in flatten_optimizer(state).items()}
        if not _same(flat, applied):
            load_into(model, unwrapped_optimizer(optimizer), {}).commit(flat)


def _refuse_other_number(path: Where, saved: Sized, optimizers: Sized) -> None:
    if len(saved) != len(optimizers):
        raise CheckpointMismatch(
            f"{path} has the state of {len(saved)} optimizer(s), this training has {len(optimizers)}. Resume with the "
            "optimizers that the checkpoint was made with."
        )


def _in_place_of(live: Any, value: Any) -> Any:
    """Copy a plain tensor into the optimizer's own tensor, which keeps its device and dtype. Return any other value
    unchanged."""
    plain = all(isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) for tensor in (live, value))
    return live.copy_(value) if plain and live is not value and live.shape == value.shape else value


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

    ``LightningModule.load_from_checkpoint`` cannot open a directory. Only reading differs here: Lightning's code
    applies the checkpoint (hyper-parameters, ``configure_model``, ``on_load_checkpoint``).

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
    if is_regular_file(checkpoint_path):
        options = {"map_location": map_location, "strict": strict, "hparams_file": hparams_file, **kwargs}
        return cast(Loadable, loadable.load_from_checkpoint(checkpoint_path, weights_only=weights_only, **options))
    is_module = issubclass(cls, package.pytorch.LightningModule)
    checkpoint = _read(checkpoint_path, package, loadable if is_module else None, weights_only)
    _take_hyper_parameters(checkpoint, loadable, package, hparams_file, kwargs)
    _refuse_unknown_instantiator(checkpoint_path, checkpoint, loadable, package)
    if is_module and "state_dict" not in checkpoint:
        raise CheckpointMismatch(
            f"{checkpoint_path} has no model; it has {', '.join(sorted(keys_by_name(checkpoint_path)))}."
        )
    loaded = _lightning.from_dictionary(package, cls, checkpoint, {"strict": strict, **kwargs} if is_module else kwargs)
    return cast(Loadable, loaded.to(_device(map_location)) if is_module else loaded)


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


def _read(path: Where, package: Package, module_class: Any, weights_only: bool | None) -> Checkpoint:
    """Return Lightning's dictionary: without the model if no module is to be made, without the optimizers' state if no
    hook can use it."""
    left_out = list(among(OPTIM, keys_by_name(path)))
    if module_class is None:
        left_out.append(MODEL)
    elif is_overridden("on_load_checkpoint", module_class, package.pytorch.LightningModule):
        left_out.clear()
    allow_pickle = ("*",) if weights_only is False else ()
    checkpoint = read_full(path, Checkpointer(solo=True, allow_pickle=allow_pickle), weights_only, left_out)
    checkpoint.setdefault("pytorch-lightning_version", package.pytorch.__version__)  # if not saved by a Trainer
    return _lightning.migrated(package, checkpoint, path)


def read_full(
    path: Where, checkpointer: Checkpointer, weights_only: bool | None, left_out: Sequence[str] = ()
) -> Checkpoint:
    """Return Lightning's dictionary of a directory, with full tensors in host memory.

    Args:
        checkpointer: A Checkpointer of this process alone.
        weights_only: Refuse to execute code from ``meta.pt`` of a sharded strategy of stock Lightning.
        left_out: Names to omit, such as ``optim``.
    """
    state: dict[str, Any] = {name: {} for name in keys_by_name(path) if name not in left_out}
    checkpointer.restore(state, path)
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


def _take_hyper_parameters(
    checkpoint: Checkpoint, cls: Any, package: Package, hparams_file: PathLike | None, arguments: dict[str, Any]
) -> None:
    key, kind = cls.CHECKPOINT_HYPER_PARAMS_KEY, cls.CHECKPOINT_HYPER_PARAMS_TYPE
    if hparams_file is not None:
        checkpoint[key] = _lightning.hyper_parameters_in(package, hparams_file)
    saved = checkpoint.get(key, {})
    if unresolved := layout.unresolved(saved):  # reading its items would resolve them
        saved, with_items = unresolved
        is_argument = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_NAME) in inspect.signature(cls.__init__).parameters
        checkpoint[kind] = with_items if is_argument else None
    checkpoint[key] = {**saved, **arguments}
    if str(checkpoint.get(kind, "")).startswith("omegaconf.") and importlib.util.find_spec("omegaconf"):
        checkpoint[kind] = importlib.import_module("omegaconf").OmegaConf.create


def _device(map_location: Any) -> torch.device:
    if isinstance(map_location, dict):
        map_location = map_location.get("cpu")
    if callable(map_location):
        rank_zero_warn("a checkpoint directory has no use for a map_location function: the model is on the CPU.")
        map_location = None
    return torch.device(map_location or "cpu")


def name_ours_in_errors() -> None:
    """Have Lightning's own ``load_from_checkpoint``, in each imported package, name ours when it cannot open a
    directory."""
    for package in PACKAGES:
        _lightning.add_notes_to_reading(package, _note_for)


def _note_for(path: Any, error: Exception) -> str:
    """Return a note for an error of Lightning's own method; an empty string for an error with another cause.

    For a URL the note is general, since a message is not worth a request. For a directory some file systems of fsspec
    report no object, and s3fs opens an empty object.
    """
    if isinstance(error, IsADirectoryError):
        reason = "This is a directory"
    elif isinstance(error, (FileNotFoundError, EOFError)) and "://" in str(path):
        reason = "There is no single object with a checkpoint in it"
    else:
        return ""
    return (
        f"{reason}, and Lightning's own load_from_checkpoint opens nothing but single files. What is in a checkpoint "
        "directory is loaded with dcp_plugin.lightning.load_from_checkpoint(Model, path)."
    )


name_ours_in_errors()
