"""Hooks of others, before which a lazy copy is complete: averages are swapped in and target networks updated in them.

A lazy copy may go on while the next forward and backward run, until a step of an optimizer. Between steps Lightning
calls hooks: a callback that writes weights does so in one of them, often through ``.data``, which no version counts.
So the copy is waited for before every hook that somebody else has, and nobody needs to know which of them write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_utilities.core.overrides import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info

from dcp_plugin.lightning._packages import Package, has_base, home_of, package_behind
from dcp_plugin.staging.guard import wait_until_copied

_WRITE_NO_WEIGHTS = (
    "BasePredictionWriter", "Checkpoint", "DeviceStatsMonitor", "EarlyStopping", "GradientAccumulationScheduler",
    "LearningRateMonitor", "ModelSummary", "ProgressBar", "ThroughputMonitor", "Timer",
)  # fmt: skip
_NOT_BETWEEN_STEPS = ("on_save_checkpoint", "on_load_checkpoint", "on_exception")
WHERE_MODEL_CHECKPOINT_SAVES = ("on_train_batch_end", "on_train_epoch_end", "on_validation_end")


def between_steps(package: Package) -> Iterator[str]:
    """The hooks of callbacks in which weights may be written."""
    for name in dir(package.pytorch.Callback):
        if name.startswith("on_") and name not in _NOT_BETWEEN_STEPS:
            yield name


class OthersHooks:
    """What hooks a trainer's module and callbacks have, besides Lightning's own harmless ones.

    Args:
        mine: The callback that is called first and tells of every hook.
    """

    def __init__(self, trainer: Any, mine: Any) -> None:
        package, module = package_behind(trainer), trainer.lightning_module
        callbacks = [other for other in trainer.callbacks if other is not mine]
        names = list(between_steps(package))
        after = {name for name in names if is_overridden(name, module, package.pytorch.LightningModule)}
        savers = [other for other in callbacks if has_base(type(other), "Checkpoint")]
        self._after_a_save = after | {name for name in names if any(_has_own(other, name) for other in savers)}
        self._any = after | {name for name in names if any(_has_own(other, name) for other in callbacks)}
        self._saving_in = ""
        waits = sorted(self._after_a_save.intersection(WHERE_MODEL_CHECKPOINT_SAVES))
        if waits:
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
    others = trainer.strategy.dcp_checkpoint_io.others
    if others is not None:
        others.about_to_be_called(name)


def telling(name: str) -> Callable[..., None]:
    """A hook of the callback that is called first."""

    def hook(self: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        tell(trainer, name)

    hook.__name__ = hook.__qualname__ = name
    return hook


def _has_own(callback: Any, name: str) -> bool:
    """Whether a callback has a hook that could write weights; also one given to the instance."""
    if name in vars(callback):
        return True
    classes = (cls for cls in type(callback).__mro__ if "promoted_by_dcp_plugin" not in vars(cls))
    owner = next((cls for cls in classes if name in vars(cls)), None)
    if owner is None or owner.__name__ == "Callback":
        return False
    return home_of(owner) is None or not any(has_base(owner, harmless) for harmless in _WRITE_NO_WEIGHTS)
