"""The only module that uses Accelerate's private names; each function gives the reason why no public name serves.

``tests/accelerate/test_canaries.py`` fails loudly when such a name moves or changes its meaning.

This module also refuses ways of training that Accelerate has silently fallen back to.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.scheduler import AcceleratedScheduler
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from accelerate.utils import DistributedType
from torch import nn

from dcp_plugin.core.errors import CheckpointError
from dcp_plugin.core.state import unwrapped_optimizer

PreparedLoader: TypeAlias = DataLoaderShard | DataLoaderDispatcher


def models(accelerator: Accelerator) -> list[nn.Module]:
    """Return the list of prepared models itself, which users' hooks get. The list has no public name."""
    return cast("list[nn.Module]", accelerator._models)


def optimizers(accelerator: Accelerator) -> list[torch.optim.Optimizer]:
    """Return the user's optimizers inside of Accelerate's wrappers."""
    return [unwrapped_optimizer(optimizer) for optimizer in accelerator._optimizers]


def schedulers(accelerator: Accelerator) -> list[AcceleratedScheduler]:
    return cast("list[AcceleratedScheduler]", accelerator._schedulers)


def dataloaders(accelerator: Accelerator) -> list[PreparedLoader]:
    """Return the loaders that Accelerate has prepared, without others that a user has added to the list."""
    return [loader for loader in accelerator._dataloaders if type(loader) in (DataLoaderShard, DataLoaderDispatcher)]


def registered_objects(accelerator: Accelerator) -> list[Any]:
    """Return the objects that users gave to ``register_for_checkpointing``."""
    return cast("list[Any]", accelerator._custom_objects)


def save_hooks(accelerator: Accelerator) -> list[Callable[..., None]]:
    return list(accelerator._save_model_state_pre_hook.values())


def load_hooks(accelerator: Accelerator) -> list[Callable[..., None]]:
    return list(accelerator._load_model_state_pre_hook.values())


def trackers_in_files(accelerator: Accelerator) -> list[str]:
    """Return the names of the trackers that Accelerate will make and that write to its ``logging_dir``. Trackers
    that users have made get no directory."""
    kinds = {str(name): LOGGER_TYPE_TO_CLASS.get(str(name)) for name in accelerator.log_with}
    return [name for name, kind in kinds.items() if kind is not None and kind.requires_logging_directory]


_UNSUPPORTED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def refuse_silent_fallbacks(accelerator: Accelerator) -> None:
    """Refuse a training in which Accelerate has silently replaced the way of training that the user asked for.

    Raises:
        CheckpointError: Accelerate has replaced it, or trains in a way that is not supported.
    """
    kind = accelerator.distributed_type
    if kind in _UNSUPPORTED:
        raise CheckpointError(f"{kind.value} keeps or writes its state in a way of its own, which is not supported.")
    if kind != DistributedType.FSDP and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise CheckpointError(
            f"FSDP was asked for, but Accelerate has silently fallen back to {kind.value}: each process has the whole "
            f"model. It does so on CPUs (cpu=True, use_cpu: true). Train on GPUs, or do not ask for FSDP."
        )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and accelerator.num_processes == 1:
        raise CheckpointError(
            f"{launched} processes were launched, but Accelerate trains each on its own, without a warning: they would "
            f"all write the same checkpoint. On CPUs pass Accelerator(cpu=True)."
        )
