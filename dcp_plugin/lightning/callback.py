"""The callback that promotes the trainer's strategy. Users need not know it: an entry point brings it.

The rule: a Trainer without :class:`DCPCheckpointIO` is as if this package did not exist. It gets no callback; if
Lightning ever hides which Trainer is asking, it gets one that takes itself out at ``setup``.
"""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from dcp_plugin.lightning._lightning import take_callback_out, trainer_under_construction, unwrapped
from dcp_plugin.lightning.io import DCPCheckpointIO, in_existence
from dcp_plugin.lightning.strategy import promote


class DCPCallback(Callback):
    """Promotes the strategy of a trainer that has :class:`DCPCheckpointIO` among its plugins.

    ``setup`` is the first hook on all ranks and the last moment before Lightning decides how to restore.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if _has_plugin(trainer):
            promote(trainer.strategy)
            if not isinstance(trainer.strategy.checkpoint_io, DCPCheckpointIO):
                rank_zero_warn(
                    f"{type(trainer.strategy.checkpoint_io).__name__} around DCPCheckpointIO has no effect: all ranks "
                    "save, not the plugin on rank 0. For saves in the background use DCPCheckpointIO(async_save=True)."
                )
        else:
            take_callback_out(trainer, self)


def callbacks_for_new_trainer() -> list[DCPCallback]:
    """What the entry point gives to a Trainer under construction."""
    if not in_existence:
        return []
    trainer = trainer_under_construction()
    return [DCPCallback()] if trainer is None or _has_plugin(trainer) else []


def _has_plugin(trainer: Trainer) -> bool:
    return isinstance(unwrapped(trainer.strategy.checkpoint_io), DCPCheckpointIO)
