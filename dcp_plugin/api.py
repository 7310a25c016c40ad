"""``dcp_plugin.save`` and ``load``: one call, no object to keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_plugin.checkpointer import Checkpointer
from dcp_plugin.config import CheckpointConfig
from dcp_plugin.partial import PartialLoad
from dcp_plugin.paths import PathLike
from dcp_plugin.records import LoadReport


def save(
    state: Mapping[str, Any],
    path: PathLike,
    step: int | None = None,
    config: CheckpointConfig | None = None,
    metrics: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> None:
    """Save ``state`` as the checkpoint ``path``, and return when it is published. Collective.

    Args:
        state: Name to Module, Optimizer, Stateful, tensor, plain value, or a mapping of these.
        path: A directory that all ranks share. A checkpoint that is there is replaced when this one is complete.
        step: Recorded in the checkpoint. The same on all ranks.
        config: Defaults to ``CheckpointConfig()``.
        metrics: Numbers by name, or tensors of one element, such as the validation loss. Those of rank 0 are recorded
            in the checkpoint.
        overrides: Fields of the configuration.

    Raises:
        ValueError: ``async_save`` is set: that needs a :class:`Checkpointer` that lives longer than this call.
        CheckpointError: As :meth:`Checkpointer.save`, on every rank. What was at ``path`` is untouched.

    Example:
        >>> import dcp_plugin, torch
        >>> state = {"model": torch.nn.Linear(2, 2), "epoch": 3}
        >>> dcp_plugin.save(state, "checkpoints/step-1", step=1, metrics={"val_loss": 0.25})
        >>> info = dcp_plugin.inspect("checkpoints/step-1")
        >>> info.step, info.metrics
        (1, {'val_loss': 0.25})
    """
    checkpointer = Checkpointer(CheckpointConfig.merge(config, ("step", "metrics"), **overrides))
    if checkpointer.config.async_save:
        raise ValueError("dcp_plugin.save() waits for the disk. For async_save=True keep a Checkpointer.")
    try:
        checkpointer.save(state, path, step, metrics=metrics)
    finally:
        checkpointer.close()


def load(
    state: Mapping[str, Any],
    path: PathLike,
    partial: PartialLoad | None = None,
    strict: bool = True,
    config: CheckpointConfig | None = None,
    **overrides: Any,
) -> LoadReport:
    """Fill ``state`` from the checkpoint ``path``, in place. Collective.

    The target says which tensors are loaded, see :meth:`Checkpointer.load`. To restore what a run itself has saved,
    whatever its objects have now, use :func:`resume_or_init`.

    Args:
        state: As for :func:`save`. Modules and optimizers may be wrapped and sharded in another way than at the save.
        path: A checkpoint of this package, of stock DCP, of a framework, or a safetensors or ``torch.save`` file.
        partial: Which keys of ``state`` to load, and from where. Without it, all.
        strict: Whether missing and unexpected keys are errors.
        config: Defaults to ``CheckpointConfig()``.
        overrides: Fields of the configuration.

    Returns:
        What was loaded, missing, unexpected and converted.

    Raises:
        CheckpointError: As :meth:`Checkpointer.load`, on every rank. If anything does not fit, nothing is overwritten.

    Example:
        >>> import dcp_plugin, torch
        >>> dcp_plugin.save({"weights": torch.arange(3.0), "epoch": 3}, "run/step-1")
        >>> state = {"weights": torch.zeros(3), "epoch": 0}
        >>> dcp_plugin.load(state, "run/step-1").loaded
        ['weights', 'epoch']
        >>> state
        {'weights': tensor([0., 1., 2.]), 'epoch': 3}
    """
    checkpointer = Checkpointer(CheckpointConfig.merge(config, ("partial", "strict"), **overrides))
    try:
        return checkpointer.load(state, path, partial, strict)
    finally:
        checkpointer.close()
