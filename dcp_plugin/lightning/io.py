"""The plugin that users see: ``Trainer(plugins=[DCPCheckpointIO(async_save=True)])``.

Lightning calls a ``CheckpointIO`` on rank 0 alone, and for sharded strategies not at all. So the plugin does not do
the work: it holds the configuration and the checkpointer, and the trainer's strategy, promoted by
:class:`~dcp_plugin.lightning.callback.DCPCallback`, saves and loads with them on all ranks.

Called directly, by the user or by ``ddp_spawn`` to bring the weights home, it does what a ``CheckpointIO`` is asked
to do: this process alone saves the dictionary it got, and loads it back.
"""

from __future__ import annotations

import os
import warnings
import weakref
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from torch import nn

from dcp_plugin.checkpointer import Checkpointer, SaveHandle
from dcp_plugin.config import CheckpointConfig, PathLike
from dcp_plugin.conventions import MODEL, keys_by_name
from dcp_plugin.lightning import layout
from dcp_plugin.lightning.layout import Checkpoint
from dcp_plugin.lightning.resume import without_own_state
from dcp_plugin.partial import PartialLoad
from dcp_plugin.restart import Restart, decide, load_from

in_existence: weakref.WeakSet[DCPCheckpointIO] = weakref.WeakSet()
"""The plugins of this process: without one, no Trainer needs the callback."""


class DCPCheckpointIO(CheckpointIO):
    """Sharded, crash-safe checkpoints that any strategy on any number of ranks resumes from.

    Args:
        config: How to save and load; the defaults if omitted.
        init_from: A pre-trained checkpoint for the model of a ``fit`` that has no checkpoint to resume from, that is
            one with ``ckpt_path=None``. Read when model and optimizers are set up and sharded, before anything runs.
        partial: Which keys of the model, such as ``model.backbone.*``, that fills, and from where; all if omitted.
        overrides: Fields of :class:`~dcp_plugin.CheckpointConfig`, such as ``async_save=True``.
    """

    def __init__(
        self,
        config: CheckpointConfig | None = None,
        *,
        init_from: PathLike | None = None,
        partial: PartialLoad | None = None,
        **overrides: Any,
    ) -> None:
        super().__init__()
        self.config = CheckpointConfig.merge(config, **overrides)
        self.init_from = init_from
        self.partial = partial
        self.restart: Restart | None = None
        """How the last ``fit`` has started, known from ``on_sanity_check_start`` and ``on_train_start`` on; None if it
        went on with what the one before it had in memory."""
        self._checkpointer: Checkpointer | None = None
        self._last_save: SaveHandle | None = None
        self._obsolete: list[PathLike] = []
        self.serves_strategy = False
        """Set by a promoted strategy: all ranks save."""
        in_existence.add(self)

    def __repr__(self) -> str:
        """What Lightning's other package shows when it refuses this as a plugin: say what to do there."""
        return (
            "DCPCheckpointIO, which is for `lightning` (for a Fabric of `lightning_fabric` there is "
            "dcp_plugin.fabric.attach(fabric))"
        )

    def checkpointer(self, world_size: int) -> Checkpointer:
        """The checkpointer of a promoted strategy, whose ranks all use it together."""
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(self.config, solo=world_size == 1)
        return self._checkpointer

    def save(self, state: dict[str, Any], path: PathLike, step: int | None, world_size: int) -> SaveHandle:
        """Save on all ranks of a promoted strategy.

        Raises:
            SaveFailed: This save failed, or the one before, which nobody has heard of yet.
        """
        self.wait()
        self._last_save = self.checkpointer(world_size).save(state, path, step)
        return self._last_save

    def wait(self) -> None:
        """Wait for the save in flight, then delete what was to be deleted after it.

        Raises:
            SaveFailed: It failed; raised once. Nothing is deleted then.
        """
        obsolete, self._obsolete = self._obsolete, []
        if self._checkpointer is not None:
            self._checkpointer.wait()
        for path in obsolete:
            self.remove_checkpoint(path)

    def start(self, model: nn.Module, world_size: int, strict: bool) -> Restart:
        """Warm-start the model of a promoted strategy, if there is something to start from. Collective.

        Raises:
            CheckpointError: ``init_from`` is not there, or does not fit; on every rank.
        """
        if self.init_from is None:
            return Restart("fresh")
        checkpointer = self.checkpointer(world_size)
        start = decide(checkpointer.ranks, lambda: None, self.init_from)
        return load_from(start, checkpointer, {MODEL: model}, self.partial, strict)

    def save_checkpoint(self, checkpoint: Checkpoint, path: PathLike, storage_options: Any | None = None) -> None:
        """Save a dictionary, by this process alone."""
        refuse_storage_options(storage_options)
        self._say_if_not_promoted()
        self._alone().save(layout.to_state(checkpoint), path)

    def load_checkpoint(
        self, path: PathLike, map_location: Any | None = None, weights_only: bool | None = None
    ) -> Checkpoint:
        """The whole dictionary, in host memory. Files are taken for Lightning's own checkpoints."""
        if os.path.isfile(path):
            return TorchCheckpointIO().load_checkpoint(os.fspath(path), map_location, weights_only)
        state: dict[str, Any] = {name: {} for name in keys_by_name(path)}
        self._alone().load(state, path)
        return without_own_state(layout.from_state(state))

    def remove_checkpoint(self, path: PathLike) -> None:
        """Delete a checkpoint; while a save is in flight, later.

        ``ModelCheckpoint`` deletes the old checkpoint as soon as the save of the new one returns. With ``async_save``
        a crash would then leave neither.
        """
        self._say_if_not_promoted()
        if self._last_save is not None and not self._last_save.done():
            self._obsolete.append(path)
        elif os.path.isfile(path):
            os.remove(path)
        else:
            self._alone().remove(path)

    def teardown(self) -> None:
        """Wait for the save in flight and free what saving needed. The plugin can be used again.

        Raises:
            SaveFailed: As :meth:`wait`.
        """
        try:
            self.wait()
        finally:
            checkpointer, self._checkpointer = self._checkpointer, None
            self._last_save = None
            if checkpointer is not None:
                checkpointer.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_checkpointer": None, "_last_save": None}  # on its way to the processes of ddp_spawn

    def _alone(self) -> Checkpointer:
        """A checkpointer that needs no closing: no process group, no background."""
        return Checkpointer(self.config, solo=True, async_save=False)

    def _say_if_not_promoted(self) -> None:
        if self.serves_strategy or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return
        self.serves_strategy = True  # said once
        warnings.warn(
            "DCPCheckpointIO is used by rank 0 alone: the strategy has not been promoted, so each checkpoint goes "
            "through rank 0's memory, and the random state of the ranks is not saved. The callback that promotes it "
            "comes with the installed package (entry points); without installation, add callbacks=[DCPCallback()]. A "
            "Fabric has no callbacks: dcp_plugin.fabric.attach(fabric) promotes its strategy.",
            stacklevel=3,
        )


def refuse_storage_options(storage_options: Any | None) -> None:
    if storage_options is not None:
        raise TypeError("storage_options are not supported by DCPCheckpointIO; configure it with CheckpointConfig.")
