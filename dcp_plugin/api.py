"""``dcp_plugin.save`` and ``dcp_plugin.load``: one call, no object to keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_plugin.checkpointer import Checkpointer
from dcp_plugin.config import CheckpointConfig, PathLike
from dcp_plugin.loading.partial import PartialLoad
from dcp_plugin.types import LoadReport


def save(
    state: Mapping[str, Any],
    path: PathLike,
    step: int | None = None,
    config: CheckpointConfig | None = None,
    **overrides: Any,
) -> None:
    """Save ``state`` as the checkpoint ``path``, and return when it is published. Collective.

    See :meth:`Checkpointer.save`. For saves in the background keep a :class:`Checkpointer`.
    """
    checkpointer = Checkpointer(CheckpointConfig.merge(config, ("step",), **overrides))
    if checkpointer.config.async_save:
        raise ValueError("dcp_plugin.save() waits for the disk. For async_save=True keep a Checkpointer.")
    try:
        checkpointer.save(state, path, step)
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
    """Load the checkpoint ``path`` into ``state``, in place. Collective. See :meth:`Checkpointer.load`."""
    checkpointer = Checkpointer(CheckpointConfig.merge(config, ("partial", "strict"), **overrides))
    try:
        return checkpointer.load(state, path, partial, strict)
    finally:
        checkpointer.close()
