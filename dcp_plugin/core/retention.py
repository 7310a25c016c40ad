"""The retention policy: rules that select the checkpoints of a run that stay.

Saves, ``prune`` and the rotation of the frameworks use the same rules. Deletion itself is in
:mod:`dcp_plugin.core.runs.deletion`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dcp_plugin.core.paths import Where
from dcp_plugin.core.types import CheckpointState, public_class

_States = Iterable[CheckpointState]

NEWEST = "the newest of its run"
"""The reason to keep a checkpoint whatever the rules say."""


@public_class()
@dataclass(frozen=True)
class Retention:
    """Rules for the checkpoints of a run that stay. A checkpoint stays if any rule keeps it.

    A checkpoint also stays if no rule can judge it. ``every_steps`` judges checkpoints with a step, ``best`` those with
    the metric, ``newest`` and ``younger_than`` all. Independent of the rules, the newest complete checkpoint and others
    of its step stay, and the base of each checkpoint that stays (``trainable_only``).

    Raises:
        ValueError: No rule, which would delete every checkpoint but the newest; or a value out of range.

    Example:
        >>> import dcp_plugin
        >>> policy = dcp_plugin.Retention(newest=1, every_steps=2)
        >>> for step in range(1, 6):
        ...     dcp_plugin.save({"step": step}, f"run/step-{step}", step=step, keep_last=policy)
        >>> [state.step for state in dcp_plugin.list_checkpoints("run")]
        [2, 4, 5]
    """

    newest: int | None = None
    """Number of the newest checkpoints that stay."""
    every_steps: int | None = None
    """Checkpoints whose step is a multiple of this number stay."""
    best: tuple[str, Literal["min", "max"], int] | None = None
    """A metric, which of its values is best, and the number of checkpoints with the best values that stay."""
    younger_than: float | None = None
    """Checkpoints that were saved less than this number of seconds ago stay."""

    def __post_init__(self) -> None:
        if self.best is not None:
            metric, mode, count = self.best
            object.__setattr__(self, "best", (metric, mode, count))  # YAML gives a list
            if mode not in ("min", "max"):
                raise ValueError(f"mode={mode!r}: it is 'min' or 'max'")
        counts = {"newest": self.newest, "every_steps": self.every_steps, "best": self.best and self.best[2]}
        for name, number in counts.items():
            if number is not None and (not isinstance(number, int) or number < 1):
                raise ValueError(f"{name}={number}: it is a number from 1 on")
        if all(value is None for value in vars(self).values()):
            raise ValueError("say what to keep: newest, every_steps, best or younger_than")

    def reasons(self, checkpoints: Sequence[CheckpointState]) -> dict[Where, list[str]]:
        """Return why each of a run's complete checkpoints stays; an empty list if it may be deleted."""
        why: dict[Where, list[str]] = {state.path: [] for state in checkpoints}
        ordered = sorted(checkpoints, key=lambda state: state.time)
        judged: set[Where] = set()
        unknown: list[str] = []

        def rule(judges: _States, keeps: _States, reason: Callable[[CheckpointState], str]) -> None:
            judged.update(state.path for state in judges)
            for state in keeps:
                why[state.path].append(reason(state))

        if self.newest is not None:
            rule(ordered, ordered[-self.newest :], lambda state: f"among the last {self.newest}")
        if self.younger_than is not None:
            since = time.time() - self.younger_than
            young = [state for state in ordered if state.time > since]
            rule(ordered, young, lambda state: f"younger than {self.younger_than} s")
        if (every := self.every_steps) is not None:
            unknown.append("step")
            with_step = [state for state in ordered if state.step is not None]
            multiples = [state for state in with_step if (state.step or 0) % every == 0]
            rule(with_step, multiples, lambda state: f"step {state.step} is a multiple of {every}")
        if self.best is not None:
            metric, mode, count = self.best
            unknown.append(f"metric {metric}")
            newest_first = reversed(ordered)  # sorted() is stable, so the newer of two equal values is better
            with_metric = [state for state in newest_first if metric in state.metrics]
            numbers = [state for state in with_metric if not math.isnan(state.metrics[metric])]
            sign = 1 if mode == "min" else -1
            best = sorted(numbers, key=lambda state: sign * state.metrics[metric])[:count]
            rule(with_metric, best, lambda state: f"best {metric}: {state.metrics[metric]:g}")
        for path in why.keys() - judged:
            why[path].append(f"it has no {' and no '.join(unknown)} to decide by")
        for state in ordered:
            if state is ordered[-1]:
                why[state.path].append(NEWEST)
            elif state.step is not None and state.step == ordered[-1].step:
                why[state.path].append(f"of the same step as {ordered[-1].path.name}")
        return why

    def select(self, checkpoints: Sequence[CheckpointState]) -> list[CheckpointState]:
        """Return the checkpoints of one run to delete, in the order in which to delete them.

        Checkpoints that are not complete are never selected.
        """
        complete = [state for state in checkpoints if state.committed]
        why = self.reasons(complete)
        newest_first = sorted(complete, key=lambda state: state.time, reverse=True)
        return [state for state in newest_first if not why[state.path]]
