"""The ranks that save and load together: those of the default process group, or this process alone.

A checkpointer makes its groups at their first use (:class:`RankGroups`). Only a process that is not alone imports the
collectives of several ranks.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from dcp_plugin.core.ranks.collectives import Ranks, refuse_differences
from dcp_plugin.core.ranks.launcher import this_launch, warn_without_group


def of_default_group(timeout: float, patience: float | None = None) -> Ranks:
    """Return a new gloo group of all ranks of the default process group. Collective.

    Without a default group, or with a group of one rank, return this process alone. Warn if its launcher has started
    several processes that have no group.

    Args:
        timeout: Seconds after which a collective of the group fails.
        patience: Seconds to wait for the first meeting; ``timeout`` if omitted.

    Raises:
        RankFailure: Ranks do not join within the timeout. The message names them.
    """
    alone = Ranks()
    if not (dist.is_available() and dist.is_initialized()):
        alone.launch = this_launch()
        if alone.launch is not None:
            warn_without_group(alone.launch)
        return alone
    if dist.get_world_size() == 1:
        return alone
    from dcp_plugin.core.ranks.rank_group import RankGroup  # a process alone needs no collectives

    return RankGroup.joined(timeout, patience)


class RankGroups:
    """The groups of one checkpointer: the group of saves, and a second group for calls while saves are in flight.

    Args:
        settings: The settings that must be equal on every rank, by name.
        timeout: Timeout of each group, in seconds.
        solo: True if this process acts alone, without groups.
        needs_second: True if calls communicate while saves are in flight, which requires the second group.
    """

    def __init__(self, settings: dict[str, Any], timeout: float, solo: bool, needs_second: bool) -> None:
        self._settings, self._timeout, self.solo, self._needs_second = settings, timeout, solo, needs_second
        self.group_of_saves: Ranks | None = None  # None before the first use
        self._group_of_calls: Ranks | None = None

    @property
    def held(self) -> int:
        """Number of usable groups of several processes, which :meth:`close` leaves."""
        return sum(
            ranks is not None and ranks.size > 1 and ranks.usable
            for ranks in (self.group_of_saves, self._group_of_calls)
        )

    def for_saves(self) -> Ranks:
        """Return the group of saves. It is made at the first use, and again after a failure or with a new default
        group. Collective."""
        if self.solo:
            return Ranks()
        if self.group_of_saves is None or not self.group_of_saves.usable:
            ranks = of_default_group(self._timeout)
            try:
                ranks.combine("compare the configurations", lambda: self._settings, refuse_differences)
            except Exception:
                ranks.close()
                raise
            self.group_of_saves = ranks
        return self.group_of_saves

    def for_calls(self) -> Ranks:
        """Return the group in which the calling thread may communicate while saves are in flight. Collective."""
        if self.solo or not self._needs_second:
            return self.for_saves()
        if self.group_of_saves is None:
            self.for_saves()  # first, since it compares the configurations
        if self._group_of_calls is None or not self._group_of_calls.usable:
            self._group_of_calls = of_default_group(self._timeout)
        return self._group_of_calls

    def close(self) -> None:
        """Leave both groups."""
        for ranks in (self.group_of_saves, self._group_of_calls):
            if ranks is not None:
                ranks.close()
        self.group_of_saves = self._group_of_calls = None
