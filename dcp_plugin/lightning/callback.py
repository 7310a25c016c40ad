"""The callback that promotes the trainer's strategy. Users need not know it: an entry point brings it.

The rule: a Trainer without :class:`DCPCheckpointIO` is as if this package did not exist. It gets no callback; if
Lightning ever hides which Trainer is asking, it gets one that takes itself out at ``setup``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

from lightning_utilities.core.rank_zero import rank_zero_warn

from dcp_plugin.errors import CheckpointError
from dcp_plugin.lightning._lightning import (
    put_callback_first,
    step_of_loggers,
    take_callback_out,
    trainer_under_construction,
    unwrapped,
)
from dcp_plugin.lightning._packages import Package, has_base, package_behind
from dcp_plugin.lightning.checkpoint_callbacks import promote_callbacks
from dcp_plugin.lightning.hooks import OthersHooks, between_steps, tell, telling
from dcp_plugin.lightning.io import DCPCheckpointIO, in_existence
from dcp_plugin.lightning.strategy import promote
from dcp_plugin.lightning.uploads import upload_directories

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


@functools.cache
def dcp_callback_class(package: Package) -> type[Any]:
    """The callback, as a subclass of the ``Callback`` of one of Lightning's packages."""

    class DCPCallback(package.pytorch.Callback):  # type: ignore[misc, name-defined]
        """Promotes the strategy of a trainer that has :class:`DCPCheckpointIO` among its plugins, and tells the
        trainer's loggers what each save cost.

        ``setup`` is the first hook on all ranks and the last moment before Lightning decides how to restore.

        Args:
            log_metrics: Give the loggers ``checkpoint/blocked_seconds`` and the like, see
                :mod:`dcp_plugin.lightning.reporting`.
        """

        def __init__(self, log_metrics: bool = True) -> None:
            super().__init__()
            self.log_metrics = log_metrics

        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            if not _has_plugin(trainer):
                take_callback_out(trainer, self)
                return
            _refuse_mixture(trainer, self)
            promote(trainer.strategy)
            _say_if_wrapped(trainer)
            _report_saves(trainer, self.log_metrics)
            _watch_hooks(trainer, self)

        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            """A safe moment for what became due since the last one: a save has been published in the background."""
            strategy: Any = trainer.strategy
            tell(trainer, "on_train_batch_end")
            strategy.dcp_checkpoint_io.afterwards.settle()

    for name in between_steps(package):
        if name not in vars(DCPCallback):
            setattr(DCPCallback, name, telling(name))
    DCPCallback.__module__, DCPCallback.__qualname__ = package.classes, "DCPCallback"
    return DCPCallback


def callbacks_for_new_trainer(package: Package) -> list[Any]:
    """What the entry point of a package gives to its Trainer under construction."""
    if not in_existence:
        return []
    trainer = trainer_under_construction()
    if trainer is not None and not _has_plugin(trainer):
        return []
    if trainer is not None:
        promote_callbacks(trainer)  # a resume from "last" asks them before any hook is called
        if any(isinstance(callback, dcp_callback_class(package)) for callback in cast(Any, trainer).callbacks):
            return []
    return [dcp_callback_class(package)()]


def _has_plugin(trainer: Trainer) -> bool:
    return isinstance(unwrapped(trainer.strategy.checkpoint_io), DCPCheckpointIO)


def _report_saves(trainer: Trainer, log_metrics: bool) -> None:
    strategy: Any = trainer.strategy
    io: DCPCheckpointIO = strategy.dcp_checkpoint_io
    if not trainer.is_global_zero:
        return
    io.on_saved = (lambda report: report.log(trainer.loggers, step_of_loggers(trainer))) if log_metrics else None
    upload_directories(trainer.loggers)
    if io.config.async_save:
        io.hold_back(trainer.loggers)


def _watch_hooks(trainer: Trainer, mine: Any) -> None:
    strategy: Any = trainer.strategy
    io: DCPCheckpointIO = strategy.dcp_checkpoint_io
    io.others = None
    if io.config.staging == "lazy":
        put_callback_first(trainer, mine)
        io.others = OthersHooks(trainer, mine)


def _refuse_mixture(trainer: Trainer, mine: Any) -> None:
    """A Trainer calls the hooks of the other package's callbacks, but does not know them for what they are: it adds a
    ModelCheckpoint of its own, and never resumes from theirs. Lightning refuses a module of the other package itself.

    Raises:
        CheckpointError: A callback that concerns checkpoints is of the other package.
    """
    package, callbacks = package_behind(trainer), cast(Any, trainer).callbacks
    for callback in (mine, *(other for other in callbacks if has_base(type(other), "Checkpoint"))):
        theirs = package_behind(callback)
        if theirs is not package:
            raise CheckpointError(
                f"this Trainer is of `{package.name}` and its {type(callback).__name__} of `{theirs.name}`. Import "
                f"both from `{package.name}` (for DCPCallback: from {package.classes})."
            )


def _say_if_wrapped(trainer: Trainer) -> None:
    if not isinstance(trainer.strategy.checkpoint_io, DCPCheckpointIO):
        rank_zero_warn(
            f"{type(trainer.strategy.checkpoint_io).__name__} around DCPCheckpointIO has no effect: all ranks "
            "save, not the plugin on rank 0. For saves in the background use DCPCheckpointIO(async_save=True)."
        )
