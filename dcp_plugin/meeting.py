"""Ranks meet before they make a group of their own, so that a rank that does not come is named, and in time.

Making a group waits for each rank in turn, in torch's own ways: who is missing is not said, or only to the next rank,
and what hangs with the rank that hosts the store hangs for ever. So each rank first puts its name down in the store of
the default process group. The last one to come ends the meeting. So does the first one to have waited too long, with
the names of the missing ranks: then nobody meets there any more, and a rank that comes later is told at once, instead
of waiting for those that have left. However it ends, all ranks read the same, and count the same meetings.

A rank makes four short requests of the store. The names of the missing are looked for only when there are some.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dcp_plugin import calls
from dcp_plugin.calls import current_call
from dcp_plugin.errors import RankFailure, some
from dcp_plugin.tensors._torch import default_store

T = TypeVar("T")

_ALL = b"all"
_MOST_NAMED = 8
_ROUNDED = 0.1
"""Seconds by which a store may come back too early."""
_GRACE = 3.0
"""Seconds in which a rank that has waited long enough has to learn from the store who is missing."""

_WHY = "A rank that is missing died, hung, or raised elsewhere: its own log has the reason."
_held: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""By default process group: how many meetings there have been. All ranks have the same."""


def meet(timeout: float) -> None:
    """Wait until all ranks of the default process group have called this. Collective.

    Args:
        timeout: Seconds to wait for them.

    Raises:
        RankFailure: Some do not come, or have given up before this rank came; naming the missing ranks. Or the store of
            the process group is gone, or does not answer.
    """
    world = dist.group.WORLD
    assert world is not None, "there is a default process group"
    number = _held[world] = _held.get(world, 0) + 1
    meeting = _Meeting(default_store(), f"dcp_plugin/meeting/{number}", dist.get_rank(), dist.get_world_size(), timeout)
    grace = lambda: _GRACE if meeting.has_come else 0.0  # noqa: E731
    within_timeout(meeting.attend, timeout, grace)


def within_timeout(requests: Callable[[], T], timeout: float, grace: Callable[[], float] = lambda: 0.0) -> T:
    """Make requests of the store of the default process group, and return what they return.

    A thread makes them: requests of a store whose host hangs never return, and Ctrl-C comes only between two of them.

    Args:
        grace: Returns further seconds to wait when the timeout is over.

    Raises:
        RankFailure: The store is gone, or does not answer; or the requests raise it.
    """
    rank = dist.get_rank()
    answers: list[T] = []
    failures: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            answers.append(requests())
        except BaseException as error:
            failures.append(error)
        ended.set()

    threading.Thread(target=run, name="dcp-meet", daemon=True).start()
    if not ended.wait(timeout) and not ended.wait(grace()):
        raise RankFailure(
            f"rank {rank} could not meet the other ranks within {timeout:g} s: the store of the process group "
            f"does not answer. {_HOST} hangs, or cannot be reached any more."
        )
    if not failures:
        return answers[0]
    if isinstance(failures[0], RankFailure):
        raise failures[0]
    reason = (str(failures[0]).strip() or type(failures[0]).__name__).splitlines()[0]
    raise RankFailure(
        f"rank {rank} could not meet the other ranks: the store of the process group failed ({reason}). "
        f"{_HOST} has ended, or the process group is not one of real ranks."
    ) from failures[0]


_HOST = "The process that hosts it, which is rank 0 unless a launcher does,"


class _Meeting:
    """One meeting, as one rank attends it."""

    def __init__(self, store: Any, key: str, rank: int, size: int, timeout: float) -> None:
        self._store, self._key, self._size, self._timeout = store, key, size, timeout
        self._call = current_call("save or load")  # here, since the thread that attends has no current call
        self.rank = rank
        self.has_come = False
        """Whether the store has answered this rank."""

    def attend(self) -> None:
        """
        Raises:
            RankFailure: Some do not come, or have given up.
        """
        deadline = time.monotonic() + self._timeout
        store, end = self._store, f"{self._key}/end"
        store.set(self._name_of(self.rank), "here")
        come = store.add(f"{self._key}/come", 1)
        self.has_come = True
        if come > self._size:  # the store has outlived an earlier process group: its meetings say nothing about ours
            return
        if come == self._size:
            store.compare_set(end, "", _ALL.decode())
        if not self._has_ended(min(deadline, time.monotonic() + calls.REPORT_AFTER)):
            self._report()
        if not self._has_ended(deadline):
            missing = self._missing(self._size - store.add(f"{self._key}/come", 0))
            if missing:
                store.compare_set(end, "", missing)  # whose end is the first is the end of all
            else:  # the last one comes in this moment
                store.wait([end], timedelta(seconds=_GRACE / 2))
        said = store.get(end)
        if not said:  # that of a fake process group
            raise RuntimeError("it keeps nothing")
        if said != _ALL:
            raise RankFailure(
                f"rank {self.rank} could not meet the other ranks: {self._call.still_waiting(said.decode())} They have "
                f"waited {self._timeout:g} s for {said.decode()}. {_WHY}"
            )

    def _has_ended(self, deadline: float) -> bool:
        """Wait for the end of the meeting; False if it has not come at the deadline."""
        try:
            self._store.wait([f"{self._key}/end"], timedelta(seconds=max(0.01, deadline - time.monotonic())))
        except RuntimeError:  # of its own class in some stores, and without a text that could be relied on in others
            if time.monotonic() < deadline - _ROUNDED:
                raise
            return False
        return True

    def _report(self) -> None:
        """Log the missing ranks, on the first rank that has come."""
        if any(self._has(rank, rank + 1) for rank in range(self.rank)):
            return
        self._call.report(self._missing(self._size - self._store.add(f"{self._key}/come", 0)))

    def _name_of(self, rank: int) -> str:
        return f"{self._key}/{rank}"

    def _missing(self, count: int) -> str:
        """The missing ranks, for a message."""
        names = [f"rank {rank}" for rank in _absent(self._has, 0, self._size)]
        more = count - len(names)
        return some(names) + (f", and {more} more" if len(names) == _MOST_NAMED and more > 0 else "")

    def _has(self, first: int, last: int) -> bool:
        return bool(self._store.check([self._name_of(rank) for rank in range(first, last)]))


def _absent(has: Callable[[int, int], bool], first: int, last: int) -> list[int]:
    """The first few of the ranks from ``first`` to before ``last`` that are not there.

    It asks for halves: twenty questions find the one that is missing among a thousand.
    """
    if has(first, last):
        return []
    if last - first == 1:
        return [first]
    middle = (first + last) // 2
    found = _absent(has, first, middle)
    return found if len(found) >= _MOST_NAMED else (found + _absent(has, middle, last))[:_MOST_NAMED]
