"""Save timing: measure the duration of steps, and decide when to save.

Rank 0 decides by its clock. It broadcasts in a *meeting* whether to save now, and the number of calls until the next
meeting. Between two meetings a call only compares two numbers. The next meeting is halfway to the time at which a save
becomes due. An interval of any length therefore has few meetings, and no meeting is late if steps become twice as slow.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from dcp_plugin.core.errors import CheckpointMismatch
from dcp_plugin.core.ranks.collectives import Call, Ranks, together

_APART_SECONDS = 60.0
"""Maximal seconds between two meetings."""
_SLACK = 0.01
"""Part of the interval by which a save may come earlier, in place of one more meeting."""


class SaveTiming:
    """Measurement of the steps between the saves of a checkpointer, and decision when its saves are due.

    Args:
        interval: Seconds between two saves.
        is_saving: Returns True while a save is in flight that a restart would not find yet.
        clock: Seconds, from any origin.
    """

    def __init__(
        self, interval: float, is_saving: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._is_saving, self._interval = is_saving, interval
        self.clock = clock
        self._steps: deque[float] = deque(maxlen=9)  # seconds of the newest steps: earlier ones may have been faster
        self._ended: float | None = None  # time at which the last step ended
        self._paused = 0.0  # seconds of the current step in calls that save, or that wait for a save
        self._since = 0.0  # time at which the training continued after the last save
        self._answered: tuple[int, bool] | None = None
        self._calls_left = 0  # calls of due() until the next meeting

    @property
    def step_seconds(self) -> float | None:
        """Median duration of the newest steps; None before the first measurement."""
        return statistics.median(self._steps) if self._steps else None

    def due(self, step: int, ranks: Callable[[], Ranks]) -> bool:
        """Return whether to save after this step; see :meth:`dcp_plugin.Checkpointer.due`."""
        if self._answered is not None and self._answered[0] == step:
            return self._answered[1]
        self._step_ended()
        self._answered = step, False
        if self._calls_left > 0:
            self._calls_left -= 1
        else:
            self._answered = step, self._meet(step, ranks())
        return self._answered[1]

    def _step_ended(self) -> None:
        now = self.clock()
        if self._ended is None:  # the training begins
            self._since = now
        else:
            self._steps.append(now - self._ended - self._paused)
        self._ended, self._paused = now, 0.0

    def _meet(self, step: int, ranks: Ranks) -> bool:
        with together(Call("call due", f"asks whether to save after step {step}", ["due"])):
            front_step, due, calls_left = ranks.from_zero("decide whether to save", lambda: (step, *self._decide()))
        if front_step != step:
            raise CheckpointMismatch(
                f"rank 0 asks whether to save after step {front_step}, but rank {ranks.rank} after step {step}"
            )
        self._calls_left = calls_left
        return due

    def _decide(self) -> tuple[bool, int]:
        """Return whether to save now, and the number of calls until the next meeting. Runs on rank 0."""
        now, interval, step_seconds = self.clock(), self._interval, self.step_seconds
        remaining = interval - (now - self._since)
        due = not self._is_saving() and remaining <= max(_SLACK * interval, (step_seconds or 0.0) / 2)
        if due:
            self._since, remaining = now, interval
        if not step_seconds:
            return due, 0
        return due, max(0, int(min(remaining / 2, _APART_SECONDS) / step_seconds) - 1)

    def paused(self, seconds: float, saving: bool) -> None:
        """Record that the training was in a call that saves, or that waits for a save."""
        self._paused += seconds
        if saving:
            self._since = self.clock()

    def ended(self) -> None:
        """Record that the training has ended. The time until the first step of another training is no step."""
        self._ended = self._answered = None
        self._paused, self._calls_left = 0.0, 0
