"""``dcp_plugin.save`` and ``load``: functions for a single save or load, without a Checkpointer to keep."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from dcp_plugin.checkpointer import Checkpointer
from dcp_plugin.core.config import CheckpointConfig
from dcp_plugin.core.paths import PathLike
from dcp_plugin.core.records import LoadReport

if TYPE_CHECKING:
    from dcp_plugin.core.partial import PartialLoad


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
        state: Names -> Module, Optimizer, Stateful, tensor, plain value, or a mapping of these.
        path: A directory that all ranks share. The complete save replaces an existing checkpoint at this path.
        step: Step to record in the checkpoint, equal on all ranks.
        config: Defaults to ``CheckpointConfig()``.
        metrics: Names -> numbers or tensors of one element, such as the validation loss. The checkpoint records those
            of rank 0.
        overrides: Fields of the configuration.

    Raises:
        ValueError: ``async_save`` is set, which needs a :class:`Checkpointer` that exists longer than this call.
        CheckpointError: See :meth:`Checkpointer.save`; raised on every rank. Anything at ``path`` is unchanged.

    Example:
        >>> import dcp_plugin, torch
        >>> state = {"model": torch.nn.Linear(2, 2), "epoch": 3}
        >>> dcp_plugin.save(state, "checkpoints/step-1", step=1, metrics={"val_loss": 0.25})
        >>> info = dcp_plugin.inspect("checkpoints/step-1")
        >>> info.step, info.metrics
        (1, {'val_loss': 0.25})
    """
    config = CheckpointConfig.merge(config, ("step", "metrics"), **overrides)
    if config.async_save:
        raise ValueError(
            "dcp_plugin.save() waits for the disk, so it cannot take async_save=True. Use a Checkpointer for "
            "background saves."
        )
    with closing(Checkpointer(config)) as checkpointer:
        checkpointer.save(state, path, step, metrics=metrics)


def load(
    state: Mapping[str, Any],
    path: PathLike,
    partial: PartialLoad | None = None,
    strict: bool = True,
    config: CheckpointConfig | None = None,
    **overrides: Any,
) -> LoadReport:
    """Fill ``state`` from the checkpoint ``path``, in place. Collective.

    The target determines the loaded tensors, see :meth:`Checkpointer.load`. To give a run's objects the state of their
    last save, independent of their current tensors, use :func:`resume_or_init`.

    Args:
        state: The state to fill, see :func:`save`. Modules and optimizers may be wrapped and sharded differently than
            at the save.
        path: A checkpoint of this package, of stock DCP, of a framework, or a safetensors or ``torch.save`` file.
        partial: Rules for the keys of ``state`` to load and their names in the checkpoint; all keys by default.
        strict: If true, missing and unexpected keys are errors.
        config: Defaults to ``CheckpointConfig()``.
        overrides: Fields of the configuration.

    Returns:
        A report with the loaded, missing, unexpected and converted keys.

    Raises:
        CheckpointError: See :meth:`Checkpointer.load`; raised on every rank. On a misfit, nothing is overwritten.

    Example:
        >>> import dcp_plugin, torch
        >>> dcp_plugin.save({"weights": torch.arange(3.0), "epoch": 3}, "run/step-1")
        >>> state = {"weights": torch.zeros(3), "epoch": 0}
        >>> dcp_plugin.load(state, "run/step-1").loaded
        ['weights', 'epoch']
        >>> state
        {'weights': tensor([0., 1., 2.]), 'epoch': 3}
    """
    with closing(Checkpointer(CheckpointConfig.merge(config, ("partial", "strict"), **overrides))) as checkpointer:
        return checkpointer.load(state, path, partial, strict)
