"""``load_from_checkpoint`` for directories, which ``LightningModule.load_from_checkpoint`` cannot open.

Only reading differs. What is done with the checkpoint (hyper-parameters to ``__init__``, ``configure_model``,
``on_load_checkpoint``, ``strict``, classes of ``LightningCLI``) is Lightning's own code.
"""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning_utilities.core.overrides import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn

from dcp_plugin.checkpointer import Checkpointer
from dcp_plugin.config import PathLike, as_local
from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.integration.key_names import MODEL, OPTIM, among, keys_by_name
from dcp_plugin.lightning import _lightning, layout, stock_format
from dcp_plugin.lightning._packages import Package, package_of
from dcp_plugin.lightning.hyper_parameters import made_of
from dcp_plugin.lightning.resume import without_own_state
from dcp_plugin.lightning.stock_format import Checkpoint

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule

Loadable = TypeVar("Loadable", bound="LightningModule | LightningDataModule")


def load_from_checkpoint(
    cls: type[Loadable],
    path: PathLike,
    *,
    map_location: Any = None,
    strict: bool | None = None,
    hparams_file: PathLike | None = None,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> Loadable:
    """Make a LightningModule or a datamodule from a checkpoint, on this process alone and with whole tensors.

    Args:
        cls: What to make.
        path: A checkpoint of ours, or of Lightning's: a directory of a sharded strategy, or a file.
        map_location: The device of the model, as ``torch.load`` takes it. What is in a directory is on no device: it
            counts as ``"cpu"``, which is also the default.
        strict: Whether the names of parameters and buffers have to be the same; by default what the module's
            ``strict_loading`` says.
        hparams_file: A ``.yaml`` or ``.csv`` file with hyper-parameters to use instead of those of the checkpoint.
        weights_only: False executes code from the checkpoint where only that restores a value. Allow it only for a
            checkpoint of your own.
        kwargs: More arguments of ``__init__``; they win over the hyper-parameters of the checkpoint.

    Raises:
        TypeError: ``cls`` is no class of Lightning's kind, for one an object of such a class.
        CheckpointNotFound, CheckpointCorrupt: There is no checkpoint, or its bytes have changed.
        UnsafeCheckpoint: A value needs ``weights_only=False``.
        CheckpointMismatch: It has no model.
        RuntimeError: From torch, as of Lightning's own method: the model does not fit.
    """
    options = {"map_location": map_location, "strict": strict, "hparams_file": hparams_file, **kwargs}
    if not isinstance(cls, type):
        raise TypeError(
            f"load_from_checkpoint(cls, path) makes a new object: cls is its class, not a {type(cls).__name__}. To "
            'load weights into a module that exists: dcp_plugin.load({"model": module}, path).'
        )
    loadable: Any = cls
    path = Path(as_local(path))
    if path.is_file():
        loaded: Loadable = loadable.load_from_checkpoint(path, weights_only=weights_only, **options)
        return loaded
    package = package_of(cls)
    if package is None or not issubclass(cls, (package.pytorch.LightningModule, package.pytorch.LightningDataModule)):
        raise TypeError(f"{cls!r} is no LightningModule or LightningDataModule")
    is_module = issubclass(cls, package.pytorch.LightningModule)
    checkpoint = _read(path, package, loadable if is_module else None, weights_only)
    _take_hyper_parameters(checkpoint, loadable, package, hparams_file, kwargs)
    if not is_module:
        loaded = _lightning.from_dictionary(package, cls, checkpoint, kwargs)
        return loaded  # noqa: RET504 - typed
    if "state_dict" not in checkpoint:
        raise CheckpointMismatch(f"{path} has no model; it has {', '.join(sorted(keys_by_name(path)))}.")
    loaded = _lightning.from_dictionary(package, cls, checkpoint, {"strict": strict, **kwargs})
    module: Any = loaded
    module.to(_device(map_location))
    return loaded


def _read(path: Path, package: Package, module_class: Any, weights_only: bool | None) -> Checkpoint:
    """Lightning's dictionary. Without a module only what is small; the state of optimizers only for a hook."""
    names = keys_by_name(path)
    left_out = set(among(OPTIM, names))
    if module_class is None:
        left_out.add(MODEL)
    elif is_overridden("on_load_checkpoint", module_class, package.pytorch.LightningModule):
        left_out.clear()
    state: dict[str, Any] = {name: {} for name in names if name not in left_out}
    allow_pickle = ("*",) if weights_only is False else ()
    Checkpointer(solo=True, allow_pickle=allow_pickle).load(state, path)
    checkpoint = layout.from_state(state)
    if stock_format.is_directory_of_lightning(path):
        checkpoint = {**stock_format.read_meta(path, weights_only), **checkpoint}
    checkpoint.setdefault("pytorch-lightning_version", package.pytorch.__version__)  # if saved by another door
    return _lightning.migrated(package, without_own_state(checkpoint), path)


def _take_hyper_parameters(
    checkpoint: Checkpoint, cls: Any, package: Package, hparams_file: PathLike | None, given: dict[str, Any]
) -> None:
    key, kind = cls.CHECKPOINT_HYPER_PARAMS_KEY, cls.CHECKPOINT_HYPER_PARAMS_TYPE
    if hparams_file is not None:
        checkpoint[key] = _lightning.hyper_parameters_in(package, hparams_file)
    saved = checkpoint.get(key, {})
    if unresolved := made_of(saved):  # to ask it for its items would resolve what is in them
        saved, remake = unresolved
        takes_it_whole = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_NAME) in inspect.signature(cls.__init__).parameters
        checkpoint[kind] = remake if takes_it_whole else None
    checkpoint[key] = {**saved, **given}
    if str(checkpoint.get(kind, "")).startswith("omegaconf.") and importlib.util.find_spec("omegaconf"):
        checkpoint[kind] = importlib.import_module("omegaconf").OmegaConf.create


def _device(map_location: Any) -> torch.device:
    if isinstance(map_location, dict):
        map_location = map_location.get("cpu")
    if callable(map_location):
        rank_zero_warn(
            "map_location is a function, which a checkpoint directory has no use for: the model is on the CPU."
        )
        map_location = None
    return torch.device(map_location or "cpu")
