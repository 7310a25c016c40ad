"""What people and loggers hear of a save: that it is there, and what it cost. On rank 0, in the training's thread.

Loggers get ``checkpoint/blocked_seconds`` (what the training waited for), ``checkpoint/seconds`` (until it was on
disk), ``checkpoint/gigabytes`` (of the whole checkpoint) and ``checkpoint/gb_per_second`` at the step that was saved,
in one call of ``log_metrics`` per save. They do not pass through the trainer's own metrics, so nothing is monitored,
shown in the progress bar or stored in a checkpoint because of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from dcp_plugin.errors import CheckpointError
from dcp_plugin.lightning.io import DCPCheckpointIO
from dcp_plugin.progress import SaveFinished
from dcp_plugin.storage import commit
from dcp_plugin.storage.summary import Summary


class Reports:
    """From the beginning of a run of the trainer to its end.

    Args:
        to_loggers: Whether loggers get figures of each save.
    """

    def __init__(self, trainer: Any, io: DCPCheckpointIO, to_loggers: bool) -> None:
        self._trainer = trainer
        self._io = io
        self._to_loggers = to_loggers
        self._held: list[Any] = []
        if trainer.is_global_zero:
            io.listeners.append(self._saved)
            if io.config.async_save:
                self._held = [logger for logger in trainer.loggers if _hold(logger, io)]

    def end(self) -> None:
        if self._saved in self._io.listeners:
            self._io.listeners.remove(self._saved)
        held, self._held = self._held, []
        for logger in held:
            del logger.after_save_checkpoint

    def _saved(self, event: SaveFinished) -> None:
        size, rate = _gigabytes(event), 0.0
        if event.seconds:
            rate = size / event.seconds
        rank_zero_info(
            f"Saved {event.path}: {size:.3g} GB in {event.seconds:.2f} s ({rate:.2f} GB/s), the training waited "
            f"{event.blocked_seconds:.2f} s."
        )
        if not self._to_loggers:
            return
        figures = {
            "checkpoint/blocked_seconds": event.blocked_seconds,
            "checkpoint/seconds": event.seconds,
            "checkpoint/gigabytes": size,
            "checkpoint/gb_per_second": rate,
        }
        for logger in self._trainer.loggers:
            logger.log_metrics(figures, step=event.step)


def _hold(logger: Any, io: DCPCheckpointIO) -> bool:
    """Have a logger told of a checkpoint when it is there. ``ModelCheckpoint`` tells as soon as a save has begun; some
    loggers then upload what they find at its paths."""
    if "after_save_checkpoint" in vars(logger):
        return False
    tell: Callable[[Any], None] = logger.after_save_checkpoint
    logger.after_save_checkpoint = lambda callback: io.afterwards.in_training(lambda event: tell(callback))
    return True


def _gigabytes(event: SaveFinished) -> float:
    """Of the whole checkpoint. It may be gone by now: then this rank's share."""
    try:
        return Summary.read(event.path / commit.SUMMARY).payload_bytes / 1e9
    except CheckpointError:
        return event.bytes / 1e9
