"""The callback that promotes the trainer's strategy. An entry point adds it; users need not know it.

A Trainer without :class:`DCPCheckpointIO` behaves as if this package did not exist. It gets no callback. If Lightning
ever hides which Trainer is asking, the Trainer gets a callback that removes itself at ``setup``.

With ``staging="lazy"`` Lightning also calls this callback first in every hook. A lazy copy may continue during the next
forward and backward pass, until an optimizer steps. Lightning calls hooks between steps. A callback that writes weights
(averages, target networks) does so in a hook, often through ``.data``, which changes no version counter. This callback
therefore waits for the copy before every hook that another callback or the module overrides, and need not find out
which of these hooks write.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

from lightning_utilities.core.overrides import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from dcp_plugin.core.errors import CheckpointError
from dcp_plugin.core.staging.guard import wait_until_copied
from dcp_plugin.integration.lightning_packages import PACKAGES, Package, has_base, home_of, package_behind
from dcp_plugin.lightning import _lightning
from dcp_plugin.lightning.io import DCPCheckpointIO, in_existence
from dcp_plugin.lightning.live_load import open_directories
from dcp_plugin.lightning.model_checkpoint import (
    WHERE_IT_SAVES,
    plugin_of,
    promote_callbacks,
    upload_directories,
    with_directory,
)
from dcp_plugin.lightning.strategy import LightningAdapter, dcp_strategy_class

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


@functools.cache
def dcp_callback_class(package: Package) -> type[Any]:
    """Return the class of the callback, derived from the ``Callback`` of one of Lightning's packages."""

    class DCPCallback(package.pytorch.Callback):  # type: ignore[misc, name-defined]
        """Callback that promotes the strategy of a trainer with a :class:`DCPCheckpointIO` among its plugins, and
        reports the cost of each save to the trainer's loggers.

        ``setup`` is the first hook on all ranks and the last hook before Lightning decides how to restore.

        Args:
            log_metrics: Log ``checkpoint/blocked_seconds`` and the other figures of :mod:`dcp_plugin.lightning.io`.
        """

        def __init__(self, log_metrics: bool = True) -> None:
            super().__init__()
            self.log_metrics = log_metrics
            self.writing_hooks: set[str] = set()
            """Hooks of the module and of other callbacks that may write weights, with ``staging="lazy"``."""

        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            if plugin_of(trainer) is None:
                _lightning.take_out(trainer, self)
                return
            _refuse_mixture(trainer, self)
            trainer.strategy.__class__ = dcp_strategy_class(type(trainer.strategy))
            promote_callbacks(trainer)  # before the callbacks' own setup, which refuses links in a store
            _warn_if_wrapped(trainer)
            _refuse_interval_without_place(trainer, stage)
            _report_saves(trainer, self.log_metrics)
            _watch_hooks(trainer, self)

        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            """Run the actions that became due when a save was published in the background. Here they are safe."""
            _before_others(self, "on_train_batch_end", trainer)
            io_of(trainer).post_commit.settle()

    for name in between_steps(package):
        if name not in vars(DCPCallback):
            setattr(DCPCallback, name, functools.partialmethod(_before_others, name))
    DCPCallback.__module__, DCPCallback.__qualname__ = package.classes, "DCPCallback"
    return DCPCallback


def callbacks_for_new_trainer(name: str) -> list[Any]:
    """Return the callbacks that the entry point of the package ``name`` adds to a Trainer under construction."""
    if not in_existence:
        return []
    open_directories()  # Fabric alone may have been imported when the plugin was made
    callback_class = dcp_callback_class(next(package for package in PACKAGES if package.name == name))
    if (trainer := _lightning.trainer_under_construction()) is not None:
        if plugin_of(trainer) is None:
            return []
        promote_callbacks(trainer)  # a resume from "last" calls the callbacks before Lightning calls any hook
        if any(isinstance(callback, callback_class) for callback in cast(Any, trainer).callbacks):
            return []
    return [callback_class()]


def io_of(trainer: Any) -> DCPCheckpointIO:
    """Return the plugin of a promoted strategy."""
    return cast(LightningAdapter, trainer.strategy.dcp_adapter).io


def _report_saves(trainer: Trainer, log_metrics: bool) -> None:
    io = io_of(trainer)
    if not trainer.is_global_zero:
        return

    def log(figures: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=_lightning.step_of_loggers(trainer))

    io.on_saved = log if log_metrics else None
    upload_directories(trainer.loggers)
    if io.config.async_save:
        io.hold_back(trainer.loggers)


def _watch_hooks(trainer: Trainer, dcp_callback: Any) -> None:
    io = io_of(trainer)
    io.hooks_after_saves, dcp_callback.writing_hooks = None, set()
    if io.config.staging == "lazy":
        _lightning.put_first(trainer, dcp_callback)
        io.hooks_after_saves, dcp_callback.writing_hooks = _writing_hooks(trainer, dcp_callback)


def _refuse_mixture(trainer: Trainer, dcp_callback: Any) -> None:
    """Refuse callbacks of the other Lightning package that concern checkpoints.

    A Trainer calls the hooks of such a callback, but does not recognise its class. The Trainer adds its own
    ModelCheckpoint, and never resumes from the other's checkpoints. Lightning itself refuses modules of the other
    package.

    Raises:
        CheckpointError: A callback that concerns checkpoints is of the other package.
    """
    package, callbacks = package_behind(trainer), cast(Any, trainer).callbacks
    for callback in (dcp_callback, *(other for other in callbacks if has_base(type(other), "Checkpoint"))):
        theirs = package_behind(callback)
        if theirs is not package:
            raise CheckpointError(
                f"this Trainer is of `{package.name}` and its {type(callback).__name__} of `{theirs.name}`. Import "
                f"both from `{package.name}` (for DCPCallback: from {package.classes})."
            )


def _warn_if_wrapped(trainer: Trainer) -> None:
    if not isinstance(trainer.strategy.checkpoint_io, DCPCheckpointIO):
        rank_zero_warn(
            f"{type(trainer.strategy.checkpoint_io).__name__} around DCPCheckpointIO has no effect: all ranks "
            "save, not the plugin on rank 0. For saves in the background use DCPCheckpointIO(async_save=True)."
        )


def _refuse_interval_without_place(trainer: Trainer, stage: str) -> None:
    """Refuse a ``save_interval`` in a fit without a directory to save in.

    Raises:
        ValueError: No callback of the trainer has a directory.
    """
    if io_of(trainer).config.save_interval is not None and stage == "fit" and not with_directory(trainer):
        raise ValueError(
            "save_interval saves in the dirpath of a ModelCheckpoint, and this Trainer has none: add one, as "
            "ModelCheckpoint(DIRECTORY), or take save_interval out."
        )


_WRITE_NO_WEIGHTS = (
    "BasePredictionWriter", "Checkpoint", "DeviceStatsMonitor", "EarlyStopping", "GradientAccumulationScheduler",
    "LearningRateMonitor", "ModelSummary", "ProgressBar", "ThroughputMonitor", "Timer",
)  # fmt: skip


def between_steps(package: Package) -> list[str]:
    """Return the names of the callback hooks in which weights may be written."""
    outside_steps = {"on_save_checkpoint", "on_load_checkpoint", "on_exception"}
    return [name for name in dir(package.pytorch.Callback) if name.startswith("on_") and name not in outside_steps]


def _writing_hooks(trainer: Any, dcp_callback: Any) -> tuple[set[str], set[str]]:
    """Return the hooks in which code that comes after a ``ModelCheckpoint`` may write weights, and all hooks that may
    write weights. Harmless hooks of Lightning's own are left out.

    Args:
        dcp_callback: The callback that Lightning calls first in every hook.
    """
    package, module = package_behind(trainer), trainer.lightning_module
    callbacks = [other for other in trainer.callbacks if other is not dcp_callback]
    names = between_steps(package)
    of_module = {name for name in names if is_overridden(name, module, package.pytorch.LightningModule)}
    savers = [other for other in callbacks if has_base(type(other), "Checkpoint")]
    after_a_save = of_module | {name for name in names if any(_has_own(other, name) for other in savers)}
    if waits := sorted(after_a_save.intersection(WHERE_IT_SAVES)):
        rank_zero_info(
            f"staging='lazy': a save in {' or '.join(waits)} returns when the state is copied, since code of "
            f"{type(module).__name__}, or of a callback that saves, comes after it and may write weights."
        )
    of_callbacks = {name for name in names if any(_has_own(other, name) for other in callbacks)}
    return after_a_save, of_module | of_callbacks


def _before_others(self: Any, name: str, trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Implement a hook of the callback that Lightning calls first: wait for the lazy copy if another hook of this name
    may write weights."""
    if name in self.writing_hooks:
        wait_until_copied()


def _has_own(callback: Any, name: str) -> bool:
    """Return whether a callback, by its class or on the instance, has a hook of this name that could write weights."""
    if name in vars(callback):
        return True
    classes = (cls for cls in type(callback).__mro__ if "promoted_by_dcp_plugin" not in vars(cls))
    owner = next((cls for cls in classes if name in vars(cls)), None)
    if owner is None or owner.__name__ == "Callback":
        return False
    return home_of(owner) is None or not has_base(owner, *_WRITE_NO_WEIGHTS)
