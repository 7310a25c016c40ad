"""What people and loggers hear of a save: that it is there, and what it cost. On rank 0, in the training's thread.

A line of text for each save. Loggers get ``checkpoint/blocked_seconds`` (what the training waited for),
``checkpoint/seconds`` (until it was on disk), ``checkpoint/gigabytes`` (of the whole checkpoint) and
``checkpoint/gb_per_second`` (of what was written, not of what was linked) in one call of ``log_metrics`` per save. They
do not pass through the trainer's own
metrics, so nothing is monitored, shown in the progress bar or stored because of them. The step is the one at which
loggers are told, which with saves in the background is a few after the one that was saved: many loggers want steps in
order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info

from dcp_plugin.errors import CheckpointError
from dcp_plugin.events import SaveFinished
from dcp_plugin.media.disk import LocalDisk
from dcp_plugin.storage.open import summary_of

if TYPE_CHECKING:
    from dcp_plugin.lightning.post_commit import Afterwards


@dataclass(frozen=True)
class Report:
    """A save that is published."""

    event: SaveFinished
    gigabytes: float
    linked: float = 0.0
    """Gigabytes of these that have not changed since the last checkpoint."""

    @classmethod
    def of(cls, event: SaveFinished) -> Report:
        try:
            summary = summary_of(LocalDisk().open(event.path))
        except CheckpointError:  # deleted already: then this rank's share
            return cls(event, event.bytes / 1e9)
        return cls(event, summary.payload_bytes / 1e9, int(summary.reused.get("bytes", 0)) / 1e9)

    @property
    def gb_per_second(self) -> float:
        return max(0.0, self.gigabytes - self.linked) / self.event.seconds if self.event.seconds else 0.0

    def say(self) -> None:
        linked = f", {_in_words(self.linked)} of it linked," if self.linked else ""
        rank_zero_info(
            f"Saved {self.event.path}: {_in_words(self.gigabytes)}{linked} in {self.event.seconds:.2f} s "
            f"({_in_words(self.gb_per_second)}/s). The training waited {self.event.blocked_seconds:.2f} s."
        )

    def log(self, loggers: list[Any], step: int) -> None:
        figures = {
            "checkpoint/blocked_seconds": self.event.blocked_seconds,
            "checkpoint/seconds": self.event.seconds,
            "checkpoint/gigabytes": self.gigabytes,
            "checkpoint/gb_per_second": self.gb_per_second,
        }
        for logger in loggers:
            logger.log_metrics(figures, step=step)


def _in_words(gigabytes: float) -> str:
    return f"{gigabytes:.2f} GB" if gigabytes >= 1 else f"{gigabytes * 1000:.1f} MB"


def tell_later(loggers: list[Any], afterwards: Afterwards) -> None:
    """Have loggers told of a checkpoint when it is there, until :func:`tell_at_once`. ``ModelCheckpoint`` tells them as
    soon as a save has begun; some then upload what they find at its paths, or miss it."""
    for logger in loggers:
        if "after_save_checkpoint" not in vars(logger):
            logger.after_save_checkpoint = _Later(logger.after_save_checkpoint, afterwards)


def tell_at_once(loggers: list[Any]) -> None:
    for logger in loggers:
        if isinstance(vars(logger).get("after_save_checkpoint"), _Later):
            del logger.after_save_checkpoint


@dataclass(frozen=True)
class _Later:
    """Tells a logger of a callback as it was at the save.

    ``ModelCheckpoint`` hands out a weak proxy of itself. When the logger looks at it, its ``best_model_path`` may be of
    the next save, which is not there yet.
    """

    tell: Any
    afterwards: Afterwards
    stand_ins: dict[int, Any] = field(default_factory=dict)
    """One for each callback: loggers keep what they are told of until the end, by its identity."""

    def __call__(self, callback: Any) -> None:
        as_it_is = {name: dict(v) if isinstance(v, dict) else v for name, v in callback.__dict__.items()}
        kind, whose = callback.__class__, id(callback.__dict__)

        def told(event: SaveFinished) -> None:
            stand_in = self.stand_ins.setdefault(whose, kind.__new__(kind))
            stand_in.__dict__.update(as_it_is)
            self.tell(stand_in)

        self.afterwards.in_training(told)
