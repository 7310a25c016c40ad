"""How often to save: the interval at which saves and what failures undo cost the least together.

A save costs the training its cost each time; a failure undoes what was trained since the last save. The interval that
makes the sum smallest is that of J. W. Young, "A first order approximation to the optimum checkpoint interval",
CACM 17(9), 1974, ``sqrt(2 * cost * MTBF)``, with the terms of higher order of J. T. Daly, "A higher order estimate of
the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22(3), 2006. Each tier has its
own cost and its own failures, and so its own interval (A. Benoit et al., "Towards optimal multi-level checkpointing",
IEEE Transactions on Computers 66(7), 2017); that of the durable tier is a whole number of saves.

Nothing here reads a clock or a file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PRIOR_SECONDS = 86_400.0
"""Before anything is known, a job counts as having failed once in a day of training."""
BEYOND_LOCAL = 0.1
"""The share of failures that take what the nodes hold with them: processes die more often than nodes are lost."""


@dataclass(frozen=True)
class SaveCost:
    """What one save costs the training, in seconds."""

    blocked_seconds: float
    """The training waited, for the call or for an earlier save."""
    slowed_seconds: float = 0.0
    """Its steps took longer meanwhile, all together."""
    flight_seconds: float = 0.0
    """From the call until it is complete."""

    @property
    def seconds(self) -> float:
        """What the training loses by one save."""
        return self.blocked_seconds + self.slowed_seconds


@dataclass(frozen=True)
class Failures:
    """What is known of how a job ends."""

    seconds: float = 0.0
    """Of training, of all its runs."""
    count: int = 0
    """How many of its runs ended without saying goodbye."""

    @property
    def mtbf_seconds(self) -> float:
        """Mean seconds of training between two failures. One failure within :data:`PRIOR_SECONDS` is added to what was
        seen: its weight fades as the job goes on."""
        return (PRIOR_SECONDS + self.seconds) / (1 + self.count)


@dataclass(frozen=True)
class SaveInterval:
    """A proposal of how often to save, see :meth:`dcp_plugin.Checkpointer.proposed_interval`."""

    seconds: float
    """Of training between two saves."""
    steps: int | None
    """The same in steps; None if nobody has measured any."""
    durable_every: int
    """Which of the saves go on to the durable tier; 1 if there is no other."""
    cost_seconds: float
    """What the training loses by one save."""
    mtbf_seconds: float
    """Mean seconds of training between two failures."""

    @property
    def lost_share(self) -> float:
        """The share of the time that goes into saves and into what failures undo, beside the time of restarts."""
        return self.cost_seconds / (self.seconds + self.cost_seconds) + self.seconds / 2 / self.mtbf_seconds

    def figures(self) -> dict[str, float]:
        """For loggers."""
        return {
            "checkpoint/proposed_interval_seconds": self.seconds,
            "checkpoint/cost_seconds": self.cost_seconds,
            "checkpoint/mtbf_seconds": self.mtbf_seconds,
        }


def cheapest_seconds(cost: float, mtbf: float) -> float:
    """Seconds of training between two saves that cost so many seconds each, by Daly's estimate."""
    if cost >= 2 * mtbf:
        return mtbf
    small = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(small) / 3 + small / 9) - cost


def propose(
    cost: SaveCost, failures: Failures, step_seconds: float | None = None, drain: SaveCost | None = None
) -> SaveInterval:
    """The cheapest interval.

    Args:
        cost: Of a save to the first tier.
        step_seconds: What a step takes.
        drain: What it costs to bring a save from the nodes to the durable tier; None if the first tier is that.

    Returns:
        Never so often that saves would wait for each other.
    """
    local = max(cheapest_seconds(cost.seconds, failures.mtbf_seconds), cost.flight_seconds - cost.blocked_seconds)
    durable_every = 1
    if drain is not None and local > 0:
        durable = cheapest_seconds(drain.seconds, failures.mtbf_seconds / BEYOND_LOCAL)
        durable_every = max(1, round(durable / local), math.ceil(drain.flight_seconds / local))
    steps = max(1, round(local / step_seconds)) if step_seconds else None
    return SaveInterval(local, steps, durable_every, cost.seconds, failures.mtbf_seconds)
