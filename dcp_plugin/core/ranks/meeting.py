"""A meeting of all ranks before they make a separate group, which names a missing rank within the timeout.

Torch waits for each rank in turn when it makes a group. It does not name the missing rank, or names it only to the next
rank. If the host of the store hangs, all ranks hang for ever. In a meeting:

- Each rank records its name in the store of the default process group.
- The last rank that arrives ends the meeting.
- The first rank whose timeout is over also ends it, with the names of the missing ranks. A rank that arrives later
  reads these names and fails at once, instead of waiting for ranks that have left.

In both cases all ranks read the same end, and their counts of meetings stay equal.

A rank makes four short requests to the store. It searches for missing names only if some ranks are missing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dcp_plugin.core.errors import RankFailure, first_line, some
from dcp_plugin.core.ranks import collectives
from dcp_plugin.core.ranks.collectives import current_call
from dcp_plugin.core.tensors._torch import default_store

T = TypeVar("T")

_ALL = b"all"
_MOST_NAMED = 8
_ROUNDED = 0.1
"""Seconds by which a store may return before its timeout."""
_GRACE = 3.0
"""Seconds after the timeout in which a rank may still read from the store which ranks are missing."""

_WHY = "A rank that is missing died, hung, or raised elsewhere: its own log has the reason."
_held: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Number of meetings by default process group, equal on all ranks."""


def meet(timeout: float) -> None:
    """Wait until all ranks of the default process group have called this function. Collective.

    Args:
        timeout: Seconds to wait for the other ranks.

    Raises:
        RankFailure: Some ranks do not arrive, or have given up before this rank arrived; the message names the missing
            ranks. Or the store of the process group is gone or does not answer.
    """
    world = dist.group.WORLD
    assert world is not None, "there is a default process group"
    # Each meeting has its own keys in the store: the end of an earlier meeting must not end this one.
    number = _held[world] = _held.get(world, 0) + 1
    meeting = _Meeting(default_store(), f"dcp_plugin/meeting/{number}", dist.get_rank(), dist.get_world_size(), timeout)
    grace = lambda: _GRACE if meeting.is_present else 0.0  # noqa: E731
    within_timeout(meeting.attend, timeout, grace)


def within_timeout(requests: Callable[[], T], timeout: float, grace: Callable[[], float] = lambda: 0.0) -> T:
    """Run requests to the store of the default process group in a thread, and return their result.

    Without the thread, a request to a store whose host hangs would never return, and Ctrl-C would only act between two
    requests.

    Args:
        grace: Returns additional seconds to wait after the timeout.

    Raises:
        RankFailure: The store is gone or does not answer, or the requests raise a RankFailure.
    """
    rank = dist.get_rank()
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(requests())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="dcp-meet", daemon=True).start()
    if not wait([answer], timeout).done and not wait([answer], grace()).done:
        raise RankFailure(
            f"rank {rank} could not meet the other ranks within {timeout:g} s: the store of the process group does "
            f"not answer. {_HOST} hangs or cannot be reached."
        )
    failure = answer.exception()
    if failure is None:
        return answer.result()
    if isinstance(failure, RankFailure):
        raise failure
    reason = first_line(failure)
    raise RankFailure(
        f"rank {rank} could not meet the other ranks: the store of the process group failed ({reason}). {_HOST} has "
        f"ended, or the process group has no real ranks."
    ) from failure


_HOST = "The process that hosts the store (a launcher or rank 0)"


class _Meeting:
    """One rank's part in a meeting."""

    def __init__(self, store: Any, key: str, rank: int, size: int, timeout: float) -> None:
        self._store, self._key, self._size, self._timeout = store, key, size, timeout
        self._call = current_call("save or load")  # set here, since the thread that runs attend() has no current call
        self.rank = rank
        self.is_present = False
        """True if the store has answered this rank."""

    def attend(self) -> None:
        """Record this rank in the store, and wait for the end of the meeting.

        Raises:
            RankFailure: Some ranks do not arrive, or have given up.
        """
        deadline = time.monotonic() + self._timeout
        store, end = self._store, f"{self._key}/end"
        store.set(self._name_of(self.rank), "here")
        come = store.add(f"{self._key}/come", 1)
        self.is_present = True
        if come > self._size:  # the store is older than this process group and has counts of earlier meetings
            return
        if come == self._size:
            store.compare_set(end, "", _ALL.decode())
        if not self._has_ended(min(deadline, time.monotonic() + collectives.REPORT_AFTER)):
            self._report()
        if not self._has_ended(deadline):
            missing = self._missing(self._size - store.add(f"{self._key}/come", 0))
            if missing:
                # The first end that a rank sets is valid for all ranks, so they cannot disagree about it.
                store.compare_set(end, "", missing)
            else:  # the last rank is arriving at this moment
                store.wait([end], timedelta(seconds=_GRACE / 2))
        text = store.get(end)
        if not text:  # the store of a fake process group
            raise RuntimeError("the store does not keep values")
        if text != _ALL:
            raise RankFailure(
                f"rank {self.rank} could not meet the other ranks: {self._call.still_waiting(text.decode())} They have "
                f"waited {self._timeout:g} s for {text.decode()}. {_WHY}"
            )

    def _has_ended(self, deadline: float) -> bool:
        """Wait for the end of the meeting until the deadline. Return whether it has ended."""
        try:
            self._store.wait([f"{self._key}/end"], timedelta(seconds=max(0.01, deadline - time.monotonic())))
        except RuntimeError:  # stores raise different classes with different texts at a timeout, so the clock decides
            if time.monotonic() < deadline - _ROUNDED:
                raise
            return False
        return True

    def _report(self) -> None:
        """Log the missing ranks, on the lowest rank that has arrived."""
        if any(self._has(rank, rank + 1) for rank in range(self.rank)):
            return
        self._call.report(self._missing(self._size - self._store.add(f"{self._key}/come", 0)))

    def _name_of(self, rank: int) -> str:
        return f"{self._key}/{rank}"

    def _missing(self, count: int) -> str:
        """Return the missing ranks as text for a message."""
        names = [f"rank {rank}" for rank in _absent(self._has, 0, self._size)]
        more = count - len(names)
        return some(names) + (f", and {more} more" if len(names) == _MOST_NAMED and more > 0 else "")

    def _has(self, first: int, last: int) -> bool:
        return bool(self._store.check([self._name_of(rank) for rank in range(first, last)]))


def _absent(has: Callable[[int, int], bool], first: int, last: int) -> list[int]:
    """Return the first few absent ranks in ``range(first, last)``.

    The search checks halves: twenty requests find one missing rank among a thousand.
    """
    if has(first, last):
        return []
    if last - first == 1:
        return [first]
    middle = (first + last) // 2
    absent = _absent(has, first, middle)
    return absent if len(absent) >= _MOST_NAMED else (absent + _absent(has, middle, last))[:_MOST_NAMED]
