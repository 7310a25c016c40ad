"""Learning rate schedules across numbers of processes.

Accelerate steps a schedule once per process at every optimizer step, and users give it a horizon in those units
(``num_training_steps * num_processes``). So its position means another moment of the training when the number of
processes changes. The rule: the moment stays. A schedule saved after 30 optimizer steps on 4 processes (position
120) goes on at position 60 on 2, with the horizon that the script gave it for 2.

There is no way to ask a schedule for its state at a position; many know their next value only from the last one. So
a fresh one is stepped there.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from accelerate.scheduler import AcceleratedScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

_SCHEDULED = {"lr", "initial_lr", "max_lr", "min_lr", "momentum", "base_momentum", "max_momentum", "betas"}
"""The fields of a param group that schedules set."""


def capture(scheduler: AcceleratedScheduler, num_processes: int) -> dict[str, Any]:
    return {"state": scheduler.state_dict(), "stride": stride(scheduler, num_processes)}


def stride(scheduler: AcceleratedScheduler, num_processes: int) -> int:
    """How often the schedule is stepped per optimizer step."""
    return 1 if scheduler.split_batches or not scheduler.step_with_optimizer else num_processes


@dataclass
class Restoring:
    """One schedule while a checkpoint is loaded. Make it before the optimizer is loaded, which overwrites the rates
    that the schedule starts from."""

    scheduler: AcceleratedScheduler
    stride: int

    def __post_init__(self) -> None:
        inner = self.scheduler.scheduler
        self._fresh = getattr(inner, "last_epoch", None) == 0 and not isinstance(inner, ReduceLROnPlateau)
        groups = inner.optimizer.param_groups if self._fresh else []
        self._rates = [{field: group[field] for field in _SCHEDULED & group.keys()} for group in groups]

    def finish(self, saved: dict[str, Any]) -> str:
        """Bring the schedule to the saved moment. Returns what has to be said about it, if anything."""
        inner, state = self.scheduler.scheduler, saved["state"]
        if saved["stride"] == self.stride:
            inner.load_state_dict(state)
            return ""
        name = type(inner).__name__
        if not self._fresh:
            inner.load_state_dict(state)
            return (
                f"{name} goes on at position {state.get('last_epoch')}, counted in steps of {saved['stride']} per "
                f"optimizer step; it is now stepped {self.stride} times: a schedule on a metric, or one that has "
                f"already been stepped, cannot be converted"
            )
        position = state["last_epoch"] * self.stride // saved["stride"]
        for group, rates in zip(inner.optimizer.param_groups, self._rates, strict=True):
            group.update(rates)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "call optimizer.step() before lr_scheduler.step()"
            for _ in range(position):
                inner.step()
        return f"{name} goes on at position {position} instead of {state['last_epoch']}, which is the same moment"
