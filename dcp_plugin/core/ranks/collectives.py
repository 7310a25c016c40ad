"""Work that ranks do together: every rank gets the result, or every rank raises.

The rule of this module: a bare collective never follows work that may fail on one rank alone. Such work runs inside a
method of :class:`Ranks`, which turns an exception on any rank into the same exception on all ranks. Without the rule,
the other ranks would wait in a collective that the failed rank never joins.

Stages of saves and loads receive a :class:`Ranks` and do not ask how many processes it is.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist

from dcp_plugin.core.ranks.launcher import Launch

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
    processes. :func:`~dcp_plugin.core.ranks.groups.of_default_group` returns the one or the other."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.launch: Launch | None = None
        """The launch of this process if it has several processes without a process group; else None."""

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
        """Do the same as :meth:`combine`, but rank ``i`` returns only item ``i`` of the list that ``combine`` made."""
        return combine([work()])[0]

    def agree(self, step: str, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank. Each rank returns its own result; if ``work`` fails on a rank, all ranks
        raise."""
        own_result: list[T] = []  # stays on this rank: the result may be large or impossible to pickle
        self.combine(step, lambda: own_result.append(work()), lambda results: None)
        return own_result[0]

    def all_come_to(self, step: str, within: float) -> bool:
        """Return whether every rank calls this within ``within`` seconds. If one does not, the group is closed.

        A rank in the middle of another step, such as a save, counts as absent. Its step fails.
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
