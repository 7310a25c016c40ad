"""The one place for Accelerate's private names, each with the reason why no public one does.

``tests/accelerate/test_canaries.py`` fails loudly when one of them moves or changes its meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import nn

PreparedLoader: TypeAlias = DataLoaderShard | DataLoaderDispatcher


def models(accelerator: Accelerator) -> list[nn.Module]:
    """The live list of prepared models; what users' hooks get. There is no public one."""
    return cast("list[nn.Module]", accelerator._models)


def optimizers(accelerator: Accelerator) -> list[torch.optim.Optimizer]:
    """The user's optimizers inside of Accelerate's wrappers, which have no name for them in public."""
    return [one.optimizer if isinstance(one, AcceleratedOptimizer) else one for one in accelerator._optimizers]


def schedulers(accelerator: Accelerator) -> list[AcceleratedScheduler]:
    return cast("list[AcceleratedScheduler]", accelerator._schedulers)


def dataloaders(accelerator: Accelerator) -> list[PreparedLoader]:
    """Only those that Accelerate has prepared: a user may have put others there."""
    return [one for one in accelerator._dataloaders if type(one) in (DataLoaderShard, DataLoaderDispatcher)]


def registered_objects(accelerator: Accelerator) -> list[Any]:
    """What users gave to ``register_for_checkpointing``."""
    return cast("list[Any]", accelerator._custom_objects)


def save_hooks(accelerator: Accelerator) -> list[Callable[..., None]]:
    return list(accelerator._save_model_state_pre_hook.values())


def load_hooks(accelerator: Accelerator) -> list[Callable[..., None]]:
    return list(accelerator._load_model_state_pre_hook.values())
