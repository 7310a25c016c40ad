"""The cheapest interval between saves.

It minimises the cost of saves plus the training that failures undo. Each save costs the training some seconds; a
failure undoes the steps since the last save. The formula is that of J. W. Young, "A first order approximation to the
optimum checkpoint interval", CACM 17(9), 1974, ``sqrt(2 * cost * MTBF)``, with the terms of higher order of J. T. Daly,
"A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems
22(3), 2006. ``dcp_plugin.json`` of each checkpoint counts the failures of its run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SaveCost:
    """Cost of a save, in seconds of training."""

    blocked_seconds: float
    """Seconds for which the training waited, for the call or for an earlier save."""
    slowed_seconds: float = 0.0
    """Seconds by which the save slowed the steps of the training, in sum."""
    flight_seconds: float = 0.0
    """Seconds from the call until the save is complete."""

    @property
    def seconds(self) -> float:
        """Seconds that the training loses by one save."""
        return self.blocked_seconds + self.slowed_seconds


@dataclass(frozen=True)
class SaveInterval:
    """Proposed interval between saves, see :meth:`dcp_plugin.Checkpointer.proposed_interval`."""

    seconds: float
    """Seconds of training between two saves."""
    steps: int | None
    """Steps between two saves; None before the first measurement of a step."""
    durable_every: int
    """Number of saves per copy to the durable tier; 1 if no other tier exists."""
    cost_seconds: float
    """Seconds that the training loses by one save."""
    mtbf_seconds: float
    """Mean seconds of training between two failures."""

    @property
    def lost_share(self) -> float:
        """Share of the time lost to saves and to steps that failures undo, without the time of restarts."""
        return self.cost_seconds / (self.seconds + self.cost_seconds) + self.seconds / 2 / self.mtbf_seconds

    def figures(self) -> dict[str, float]:
        """Return the values for loggers, by name."""
        return {
            "checkpoint/proposed_interval_seconds": self.seconds,
            "checkpoint/cost_seconds": self.cost_seconds,
            "checkpoint/mtbf_seconds": self.mtbf_seconds,
        }


def cheapest_seconds(cost: float, mtbf: float) -> float:
    """Return the seconds of training between two saves of ``cost`` seconds each, by Daly's estimate."""
    if cost >= 2 * mtbf:
        return mtbf
    small = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(small) / 3 + small / 9) - cost


def propose(
    cost: SaveCost, mtbf_seconds: float, step_seconds: float | None = None, drain_seconds: float = 0.0
) -> SaveInterval:
    """Return the interval with the lowest cost.

    Args:
        cost: Cost of a save to the first tier.
        step_seconds: Duration of a step.
        drain_seconds: Duration of the copy of a save from the nodes to the durable tier. ``cost`` includes the steps
            that it slows.

    Returns:
        The interval. It is long enough that no save waits for an earlier one, and no copy for an earlier copy.
    """
    seconds = max(cheapest_seconds(cost.seconds, mtbf_seconds), cost.flight_seconds - cost.blocked_seconds)
    durable_every = max(1, math.ceil(drain_seconds / seconds)) if seconds > 0 else 1
    steps = max(1, round(seconds / step_seconds)) if step_seconds else None
    return SaveInterval(seconds, steps, durable_every, cost.seconds, mtbf_seconds)
