"""The callback that promotes the trainer's strategy. Users need not know it: an entry point brings it.

A Trainer without :class:`DCPCheckpointIO` is as if this package did not exist. It gets no callback; if Lightning ever
hides which Trainer is asking, it gets one that takes itself out at ``setup``.

With ``staging="lazy"`` the callback also comes first in every hook. A lazy copy may go on while the next forward and
backward run, until a step of an optimizer. Between steps Lightning calls hooks, and a callback that writes weights
(averages, target networks) does so in one of them, often through ``.data``, which no version counts. So the copy is
waited for before every hook that anybody else has, and nobody needs to know which of them write.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from lightning_utilities.core.overrides import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from dcp_plugin.errors import CheckpointError
from dcp_plugin.integration.lightning_packages import PACKAGES, Package, has_base, home_of, package_behind
from dcp_plugin.lightning import _lightning
from dcp_plugin.lightning.io import DCPCheckpointIO, in_existence
from dcp_plugin.lightning.loading import name_ours_in_errors
from dcp_plugin.lightning.model_checkpoint import WHERE_IT_SAVES, promote_callbacks, upload_directories, with_directory
from dcp_plugin.lightning.strategy import LightningAdapter, promote
from dcp_plugin.staging.guard import wait_until_copied

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
                :mod:`dcp_plugin.lightning.io`.
        """

        def __init__(self, log_metrics: bool = True) -> None:
            super().__init__()
            self.log_metrics = log_metrics

        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            if not _has_plugin(trainer):
                _lightning.take_out(trainer, self)
                return
            _refuse_mixture(trainer, self)
            promote(trainer.strategy)
            promote_callbacks(trainer)  # before their own setup, which refuses to link in a store
            _warn_if_wrapped(trainer)
            _refuse_interval_without_place(trainer, stage)
            _report_saves(trainer, self.log_metrics)
            _watch_hooks(trainer, self)

        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            """A safe moment for what became due since the last one: a save has been published in the background."""
            tell(trainer, "on_train_batch_end")
            io_of(trainer).post_commit.settle()

    for name in between_steps(package):
        if name not in vars(DCPCallback):
            setattr(DCPCallback, name, functools.partialmethod(_before_others, name))
    DCPCallback.__module__, DCPCallback.__qualname__ = package.classes, "DCPCallback"
    return DCPCallback


def callbacks_for_new_trainer(name: str) -> list[Any]:
    """What the entry point of the package of this name gives to its Trainer under construction."""
    if not in_existence:
        return []
    name_ours_in_errors()  # Fabric alone may have been imported when the plugin was made
    callback_class = dcp_callback_class(next(package for package in PACKAGES if package.name == name))
    if (trainer := _lightning.trainer_under_construction()) is not None:
        if not _has_plugin(trainer):
            return []
        promote_callbacks(trainer)  # a resume from "last" asks them before any hook is called
        if any(isinstance(callback, callback_class) for callback in cast(Any, trainer).callbacks):
            return []
    return [callback_class()]


def io_of(trainer: Any) -> DCPCheckpointIO:
    """The plugin of a promoted strategy."""
    return cast(LightningAdapter, trainer.strategy.dcp_adapter).io


def _has_plugin(trainer: Trainer) -> bool:
    return isinstance(_lightning.unwrapped(trainer.strategy.checkpoint_io), DCPCheckpointIO)


def _report_saves(trainer: Trainer, log_metrics: bool) -> None:
    io = io_of(trainer)
    if not trainer.is_global_zero:
        return
    io.on_saved = (
        (lambda report: report.log(trainer.loggers, _lightning.step_of_loggers(trainer))) if log_metrics else None
    )
    upload_directories(trainer.loggers)
    if io.config.async_save:
        io.hold_back(trainer.loggers)


def _watch_hooks(trainer: Trainer, mine: Any) -> None:
    io = io_of(trainer)
    io.others = None
    if io.config.staging == "lazy":
        _lightning.put_first(trainer, mine)
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


def _warn_if_wrapped(trainer: Trainer) -> None:
    if not isinstance(trainer.strategy.checkpoint_io, DCPCheckpointIO):
        rank_zero_warn(
            f"{type(trainer.strategy.checkpoint_io).__name__} around DCPCheckpointIO has no effect: all ranks "
            "save, not the plugin on rank 0. For saves in the background use DCPCheckpointIO(async_save=True)."
        )


def _refuse_interval_without_place(trainer: Trainer, stage: str) -> None:
    """Raises ValueError for a ``save_interval`` in a fit in which nothing would be saved by it."""
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
    """The hooks of callbacks in which weights may be written."""
    others = {"on_save_checkpoint", "on_load_checkpoint", "on_exception"}
    return [name for name in dir(package.pytorch.Callback) if name.startswith("on_") and name not in others]


class OthersHooks:
    """The hooks in which a trainer's module and callbacks may write weights: all but Lightning's own harmless ones.

    Args:
        mine: The callback that is called first in every hook.
    """

    def __init__(self, trainer: Any, mine: Any) -> None:
        package, module = package_behind(trainer), trainer.lightning_module
        callbacks = [other for other in trainer.callbacks if other is not mine]
        names = between_steps(package)
        after = {name for name in names if is_overridden(name, module, package.pytorch.LightningModule)}
        savers = [other for other in callbacks if has_base(type(other), "Checkpoint")]
        self._after_a_save = after | {name for name in names if any(_has_own(other, name) for other in savers)}
        self._any = after | {name for name in names if any(_has_own(other, name) for other in callbacks)}
        self._saving_in = ""
        if waits := sorted(self._after_a_save.intersection(WHERE_IT_SAVES)):
            rank_zero_info(
                f"staging='lazy': a save in {' or '.join(waits)} returns when the state is copied, since code of "
                f"{type(module).__name__}, or of a callback that saves, comes after it and may write weights."
            )

    def about_to_be_called(self, name: str) -> None:
        """Every hook of this name follows, of callbacks first."""
        if name in self._any:
            wait_until_copied()

    @contextmanager
    def of_model_checkpoint(self, name: str) -> Iterator[None]:
        """While a ``ModelCheckpoint`` or one of its like is in a hook of its own."""
        self._saving_in = name
        try:
            yield
        finally:
            self._saving_in = ""

    def saved(self) -> None:
        """A save has returned. ``ModelCheckpoint`` comes last among callbacks: what is left of the hook is the
        module's, and those of its like. Anybody else who saves may write as soon as that returns."""
        if not self._saving_in or self._saving_in in self._after_a_save:
            wait_until_copied()


def tell(trainer: Any, name: str) -> None:
    """All hooks of this name are about to be called."""
    if (others := io_of(trainer).others) is not None:
        others.about_to_be_called(name)


def _before_others(self: Any, name: str, trainer: Any, *args: Any, **kwargs: Any) -> None:
    """A hook of the callback that comes first."""
    tell(trainer, name)


def _has_own(callback: Any, name: str) -> bool:
    """Whether a callback has a hook that could write weights; also one given to the instance."""
    if name in vars(callback):
        return True
    classes = (cls for cls in type(callback).__mro__ if "promoted_by_dcp_plugin" not in vars(cls))
    owner = next((cls for cls in classes if name in vars(cls)), None)
    if owner is None or owner.__name__ == "Callback":
        return False
    return home_of(owner) is None or not has_base(owner, *_WRITE_NO_WEIGHTS)
