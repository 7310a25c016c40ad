"""Save timing: measure the cost of saves and the duration of steps, and decide when to save.

The interval of ``save_interval="auto"`` is the cheapest one (:mod:`dcp_plugin.saving.cheapest_interval`).

Rank 0 decides by its clock, and broadcasts its decision in a *meeting*: whether to save now, and the number of calls
until the next meeting. Between two meetings a call compares two numbers. The next meeting is halfway to the moment at
which a save will be due. So an interval of any length has few meetings, and no meeting is late if steps become twice as
slow.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcp_plugin import events
from dcp_plugin.calls import Call, together
from dcp_plugin.config import CheckpointConfig
from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.paths import Where
from dcp_plugin.ranks import Ranks

if TYPE_CHECKING:
    from dcp_plugin.saving.cheapest_interval import SaveCost, SaveInterval

PRIOR_SECONDS = 86_400.0
"""Seconds of training to one failure that are assumed before the first measurement."""
FIRST_SECONDS = 60.0
"""Seconds until the first save with ``"auto"``: the cost of a save is unknown before it."""
_APART_SECONDS = 60.0
"""Most seconds between two meetings."""
_SLACK = 0.01
"""Part of the interval by which a save may come earlier, in place of one more meeting."""


@dataclass(frozen=True)
class Failures:
    """Failures of a run so far."""

    seconds: float = 0.0
    """Seconds of training until the newest save, without steps that a failure has undone."""
    count: int = 0
    """Number of times that the training has resumed from a checkpoint."""

    @property
    def mtbf_seconds(self) -> float:
        """Mean seconds of training between two failures.

        One assumed failure within :data:`PRIOR_SECONDS` is added to the measurements. Its weight decreases with time.
        """
        return (PRIOR_SECONDS + self.seconds) / (1 + self.count)


class SaveTiming:
    """Measures steps and saves of a checkpointer, and decides when its saves are due.

    Args:
        config: Has the interval, and the file to which rank 0 writes events.
        is_saving: Returns True while a save is in flight that a restart would not find yet.
        clock: Seconds, from any origin.
    """

    def __init__(
        self, config: CheckpointConfig, is_saving: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._is_saving = is_saving
        self._wanted, self._events = config.save_interval, config.events
        self.clock = clock
        self._quiet: deque[float] = deque(maxlen=101)  # seconds of steps without a save in flight
        self._busy: deque[float] = deque(maxlen=101)  # seconds of steps with a save in flight, or right after a save
        self._newest: deque[float] = deque(maxlen=9)  # seconds of the newest steps of both kinds
        self._blocked: deque[float] = deque(maxlen=9)
        self._flights: deque[float] = deque(maxlen=9)
        self._busy_steps = self._saves = 0
        self._ended: float | None = None  # time at which the last step ended
        self._paused = self._waited = 0.0
        self._saved = False  # whether a save has begun since the last step ended
        self._failures = Failures()
        self._earlier = Failures()  # until the training began
        self._loaded: tuple[Where, Mapping[str, float]] | None = None  # loaded checkpoint, and its record of failures
        self._began: float | None = None  # time of the first call of due()
        self._since = 0.0  # time at which the training continued after the last save
        self._drains: deque[float] = deque(maxlen=9)  # seconds from complete locally to durable
        self._answered: tuple[int, bool] | None = None
        self._calls_left = 0  # calls of due() until the next meeting

    @property
    def step_seconds(self) -> float | None:
        """Median duration of a step."""
        steps = self._quiet or self._busy
        return statistics.median(steps) if steps else None

    @property
    def cost(self) -> SaveCost | None:
        """Median cost of a save; None before the first save. The median hides the slow first save."""
        if not self._saves:
            return None
        slower = 0.0
        if self._quiet and self._busy:
            slower = max(0.0, statistics.median(self._busy) - statistics.median(self._quiet))
        from dcp_plugin.saving.cheapest_interval import SaveCost  # few programs ask for an interval

        return SaveCost(
            statistics.median_low(self._blocked),
            slower * self._busy_steps / self._saves,
            statistics.median_low(self._flights),
        )

    @property
    def proposal(self) -> SaveInterval | None:
        """Proposal from all measurements so far. A save in flight counts when it is complete, with its slower steps."""
        if (cost := self.cost) is None:
            return None
        from dcp_plugin.saving.cheapest_interval import propose  # few programs ask for an interval

        drain_seconds = statistics.median_low(self._drains) if self._drains else 0.0
        return propose(cost, self._failures.mtbf_seconds, self.step_seconds, drain_seconds)

    def step_ended(self) -> None:
        """Measure a step for :attr:`proposal`, in place of :meth:`due`."""
        now, is_saving = self.clock(), self._is_saving()
        if self._ended is not None:
            is_busy = is_saving or self._saved
            seconds = now - self._ended - self._paused
            (self._busy if is_busy else self._quiet).append(seconds)
            self._newest.append(seconds)
            self._busy_steps += is_busy
        self._ended, self._paused, self._saved = now, 0.0, is_saving

    def due(self, step: int, ranks: Callable[[], Ranks]) -> bool:
        """Return whether to save after this step; see :meth:`dcp_plugin.Checkpointer.due`."""
        if self._answered is not None and self._answered[0] == step:
            return self._answered[1]
        self.step_ended()
        if self._began is None:
            self._began = self._since = self.clock()
        self._answered = step, False
        if self._calls_left > 0:
            self._calls_left -= 1
        elif self._wanted is not None:
            self._answered = step, self._meet(step, ranks())
        return self._answered[1]

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
        now = self.clock()
        step_seconds = statistics.median(self._newest) if self._newest else None  # earlier steps may have been faster
        interval = self._wanted
        if interval == "auto":
            interval = FIRST_SECONDS if (proposed := self.proposal) is None else proposed.seconds
        assert interval is not None, "without save_interval the ranks do not meet"
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
            self._saved, self._since = True, self.clock()
        else:
            self._waited += seconds

    def loaded(self, path: Where, training: Mapping[str, float]) -> None:
        """Remember the last load before the training begins. It is a resume if the run saves to the same folder.

        Args:
            training: The record that :meth:`record` made for the checkpoint; empty without a record.
        """
        if self._began is None:
            self._loaded = path, training

    def record(self, path: Where) -> dict[str, float]:
        """Return the record of the run's failures for the summary of a save; empty if the loop never calls due."""
        if self._began is None:
            return {}
        if self._loaded is not None:
            loaded, training = self._loaded
            if loaded.parent == path.parent and training:
                self._earlier = Failures(max(0.0, training["seconds"]), max(0, int(training["failures"])) + 1)
            self._loaded = None
        self._failures = Failures(self._earlier.seconds + self.clock() - self._began, self._earlier.count)
        return {"seconds": self._failures.seconds, "failures": self._failures.count}

    def published(self, event: events.SaveFinished) -> None:
        """Record a published save. Runs in the thread that saves."""
        local = event.seconds if event.local_seconds is None else event.local_seconds
        waited, self._waited = self._waited, 0.0
        self._blocked.append(event.blocked_seconds + waited)
        self._flights.append(local)
        self._saves += 1
        if event.local_seconds is not None and event.tier == "durable":
            self._drains.append(event.seconds - local)
        if event.rank == 0 and self._began is not None and (proposal := self.proposal) is not None:
            figures = (proposal.seconds, proposal.steps, proposal.cost_seconds, proposal.mtbf_seconds)
            events.emit(events.IntervalProposed(event.path, event.step, *figures), self._events)

    def ended(self) -> None:
        """Record that the training has ended. Another one may follow; the time until its first step is no step."""
        self._earlier = self._failures
        self._began = self._answered = None
        self._ended, self._paused, self._waited, self._saved = None, 0.0, 0.0, False
        self._calls_left = 0
