"""Work that ranks do together: every rank gets the result, or every rank raises.

The rule of this module: a bare collective never follows work that may fail on one rank alone. Such work runs inside a
method of :class:`Ranks`, which turns an exception on any rank into the same exception on all ranks. Without this rule,
the other ranks would wait in a collective that the failed rank never joins.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist

from dcp_plugin.core.errors import CheckpointMismatch
from dcp_plugin.core.ranks.launcher import Launch, this_launch, warn_without_group

T = TypeVar("T")
R = TypeVar("R")


def pack(value: Any, level: int = 1) -> bytes:
    """Compress a large, repetitive value in order to send it to other ranks.

    Args:
        level: Level of zlib, from 1 (fast) to 9 (small).
    """
    return zlib.compress(pickle.dumps(value), level)


def unpack(data: bytes) -> Any:
    """Invert :func:`pack`. This unpickles, so ``data`` must come from another rank of this job."""
    return pickle.loads(zlib.decompress(data))


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """Result of a stage on this rank: its value, or its failure.

    A rank that raised alone would leave the other ranks waiting. So a failure is kept as a value, and later stages are
    skipped. :meth:`get` raises it inside a method of :class:`Ranks`, on all ranks together.
    """

    value: T | None
    failure: Exception | None = None

    @classmethod
    def of(cls, stage: Callable[[], T]) -> Attempt[T]:
        try:
            return cls(stage())
        except Exception as error:
            return cls(None, error)

    def get(self) -> T:
        """Return the value of the stage.

        Raises:
            Exception: The exception that the stage raised.
        """
        if self.failure is not None:
            raise self.failure
        return cast(T, self.value)

    def then(self, stage: Callable[[T], R]) -> Attempt[R]:
        """Run the next stage on the value. Return its result, or the failure of this attempt."""
        return Attempt.of(lambda: stage(self.get())) if self.failure is None else Attempt(None, self.failure)


class Ranks:
    """The ranks of a job: several processes, or this process alone. This base class is the process alone, for which
    ``combine`` and ``scatter`` are plain calls; :class:`~dcp_plugin.core.ranks.rank_group.RankGroup` is several
    processes."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.launch: Launch | None = None
        """The launch of this process, if its processes are several and have no process group; else None."""

    @classmethod
    def of_default_group(cls, timeout: float, patience: float | None = None) -> Ranks:
        """Put all ranks of the default process group into a new gloo group; without one, return this process alone.
        Warn if its launcher has started several processes.

        Collective.

        Args:
            timeout: Seconds after which a collective of the group fails.
            patience: Seconds to wait for the first meeting; ``timeout`` if omitted.

        Raises:
            RankFailure: Ranks do not join within the timeout. The message names them.
        """
        alone = cls()
        if not (dist.is_available() and dist.is_initialized()):
            alone.launch = this_launch()
            if alone.launch is not None:
                warn_without_group(alone.launch)
            return alone
        if dist.get_world_size() == 1:
            return alone
        from dcp_plugin.core.ranks.rank_group import RankGroup  # a process alone needs no collectives

        return RankGroup.joined(timeout, patience)

    @property
    def usable(self) -> bool:
        """False after a failure of a rank, after :meth:`close`, and if the default process group has changed."""
        return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)

    def close(self) -> None:
        """Leave the group. Ranks that wait in it fail now instead of at their timeout."""

    def from_zero(self, step: str, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 after all ranks have joined. Every rank returns its result or raises its exception."""
        return self.combine(step, lambda: None, lambda results: work())

    def combine(self, step: str, work: Callable[[], T], combine: Callable[[list[T]], R]) -> R:
        """Run ``work`` on every rank, then ``combine`` on rank 0 over all results in the order of ranks.

        Every rank returns the result of ``combine``, or raises if any rank or ``combine`` raised.
        """
        return combine([work()])

    def scatter(self, step: str, work: Callable[[], T], combine: Callable[[list[T]], list[R]]) -> R:
        """Do the same as :meth:`combine`, but return on rank ``i`` item ``i`` of the list that ``combine`` returned."""
        return combine([work()])[0]

    def agree(self, step: str, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank. Each rank returns its own result; if ``work`` fails on a rank, all ranks
        raise."""
        own_result: list[T] = []  # stays on this rank: the result may be large or impossible to pickle
        self.combine(step, lambda: own_result.append(work()), lambda results: None)
        return own_result[0]

    def all_come_to(self, step: str, within: float) -> bool:
        """Return whether every rank calls this within ``within`` seconds. If not, the group is closed.

        A rank in the middle of another step, such as a save, counts as absent; its collective fails.
        """
        return True

    def exchange(self, step: str, messages: Sequence[tuple[int, torch.Tensor]], group: Sequence[int]) -> None:
        """Broadcast messages among some ranks. Each rank sends its own messages to all others and receives theirs.

        Args:
            messages: Sender and memory of each message. Senders and sizes must be equal on all ranks of the group.
            group: The ranks that take part.
        """


def said_by_ranks(lines: list[list[str]]) -> list[str]:
    """Return the lines of all ranks without duplicates. A line that only some ranks have starts with their names."""
    ranks_by_text = by_text(dict(enumerate(lines)))
    return [text if len(ranks) == len(lines) else f"{name_of(ranks)}: {text}" for text, ranks in ranks_by_text.items()]


def by_text(lines: dict[int, list[str]]) -> dict[str, list[int]]:
    """Return the ranks that have each line."""
    ranks: dict[str, list[int]] = {}
    for rank, texts in lines.items():
        for text in dict.fromkeys(texts):
            ranks.setdefault(text, []).append(rank)
    return ranks


def name_of(ranks: list[int]) -> str:
    """Return the ranks in words, with at most eight spans: ``"rank 1"``, ``"ranks 0-3, 8"``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    names = ["-".join(map(str, span)) for span in spans[:8]]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}{', …' if len(spans) > 8 else ''}"


class RankGroups:
    """The groups of one checkpointer: the group of saves, and a second group for calls while saves are in flight.

    Args:
        settings: The settings that must be equal on every rank, by name.
        timeout: Timeout of each group, in seconds.
        solo: True if this process acts alone, without groups.
        aside: True if calls communicate while saves are in flight, which requires the second group.
    """

    def __init__(self, settings: dict[str, Any], timeout: float, solo: bool, aside: bool) -> None:
        self._settings, self._timeout, self.solo, self._needs_aside = settings, timeout, solo, aside
        self.known: Ranks | None = None  # the group of saves; None before the first use
        self._aside: Ranks | None = None

    @property
    def held(self) -> int:
        """Number of groups to leave: those of several processes, unless the default group is gone."""
        return sum(ranks is not None and ranks.size > 1 and ranks.usable for ranks in (self.known, self._aside))

    def main(self) -> Ranks:
        """Return the group of saves. It is made at the first use, and again after a failure or with a new default
        group. Collective."""
        if self.solo:
            return Ranks()
        if self.known is None or not self.known.usable:
            ranks = Ranks.of_default_group(self._timeout)
            try:
                ranks.combine("compare the configurations", lambda: self._settings, _refuse_differences)
            except Exception:
                ranks.close()
                raise
            self.known = ranks
        return self.known

    def front(self) -> Ranks:
        """Return the group in which the calling thread may communicate while saves are in flight. Collective."""
        if self.solo or not self._needs_aside:
            return self.main()
        if self.known is None:
            self.main()  # first, since it compares the configurations
        if self._aside is None or not self._aside.usable:
            self._aside = Ranks.of_default_group(self._timeout)
        return self._aside

    def close(self) -> None:
        """Leave both groups."""
        for ranks in (self.known, self._aside):
            if ranks is not None:
                ranks.close()
        self.known = self._aside = None


def _refuse_differences(settings: list[dict[str, Any]]) -> None:
    """Check that all ranks have the same settings. With different settings, ranks would wait for each other in
    different collectives.

    Raises:
        CheckpointMismatch: Settings differ. The message names the first rank that differs from rank 0.
    """
    for rank, other in enumerate(settings):
        differ = [
            f"{name}={settings[0][name]!r} and {value!r}" for name, value in other.items() if value != settings[0][name]
        ]
        if differ:
            raise CheckpointMismatch(f"rank 0 and rank {rank} are configured differently: {', '.join(differ)}")
