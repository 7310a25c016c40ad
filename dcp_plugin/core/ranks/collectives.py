"""Work that ranks do together: every rank gets the result, or every rank raises.

The rule of this module: a bare collective never follows work that may fail on one rank alone. Such work runs inside a
method of :class:`Ranks`, which turns an exception on any rank into the same exception on all ranks. Without the rule,
the other ranks would wait in a collective that the failed rank never joins.

Stages of saves and loads receive a :class:`Ranks` and do not ask how many processes it is.

A :class:`Call` is what all ranks do together, such as a save: the arguments that must be equal, and the caller's line.
If ranks made different calls, each would misread the messages of the others, and a checkpoint could mix two steps. Each
rank sends a digest of its call before its results (:mod:`dcp_plugin.core.ranks.rank_group`). While a rank waits, a
warning names the ranks that have not arrived and the line of the caller.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist

from dcp_plugin.core.errors import CheckpointMismatch, logger
from dcp_plugin.core.paths import Where, resolved
from dcp_plugin.core.ranks.launcher import Launch

T = TypeVar("T")
R = TypeVar("R")

REPORT_AFTER = 30.0
"""Seconds after which a waiting rank logs the names of the missing ranks."""
_INTERNAL = {
    *("dcp_plugin", "torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers"),
    *("contextlib", "functools"),
}
"""Top-level packages whose frames are not part of the user's program."""


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


class Call:
    """One rank's part in a call that all ranks make together.

    Args:
        action: Verb for the question "does every rank call save?".
        what: Description for messages such as "rank 1 saves run/step-10 (step 10)".
        keys: Values to compare between ranks. Two ranks make the same call if they have a key in common. Calls without
            keys are all the same.
    """

    def __init__(self, action: str, what: str, keys: Sequence[str] = ()) -> None:
        self.action, self.what, self.keys = action, what, tuple(keys)
        self.caller = _caller()
        self.has_met = False
        """True if all ranks have joined this call."""

    @classmethod
    def save(cls, path: Where, step: int | None) -> Call:
        """Make the call for a save. Ranks may name the same path through different links."""
        paths = dict.fromkeys(map(str, (resolved(path), path)))
        description = f"saves {path}" + ("" if step is None else f" (step {step})")
        return cls("call save", description, [f"save {path_text} {step}" for path_text in paths])

    @classmethod
    def load(cls, path: object) -> Call:
        """Make the call for a load. Paths may differ, since each node may have a copy; the load compares the saves."""
        return cls("call load", f"loads {path}", ["load"])

    def digest(self, step: str) -> int:
        """Return 8 bytes that identify this call and a step of it, as an integer."""
        # The first key alone, which is the path without links: different links to it give equal digests.
        text = f"{verb_of(step)} {''.join(self.keys[:1])}"
        return int.from_bytes(
            hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).digest(), signed=True
        )

    def still_waiting(self, missing: str) -> str:
        """Return a sentence that names the missing ranks. It asks if they make this call, unless all have joined it."""
        return f"still waiting for {missing}" + ("." if self.has_met else f"; does every rank {self.action}?")

    def report(self, missing: str) -> None:
        """Log the names of the missing ranks, if there are any."""
        if missing:
            logger.warning("%s (called at %s)", self.still_waiting(missing), self.caller)

    @contextmanager
    def reporting(self, missing: Callable[[], str]) -> Iterator[None]:
        """Log the missing ranks if the block, which waits for the other ranks, takes over :data:`REPORT_AFTER` seconds.

        Args:
            missing: Returns the names of the missing ranks; empty to log nothing. A timer thread calls it during the
                block.
        """
        if self.has_met:
            yield
            return
        timer = threading.Timer(REPORT_AFTER, lambda: self.report(missing()))
        timer.daemon = True
        with suppress(RuntimeError):  # no more threads can be started: the wait is not reported
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
        self.has_met = True


def verb_of(step: str) -> str:
    """Return the first word of a step such as "write run/step-10". The path in it may differ between ranks."""
    return step.partition(" ")[0]


_current: ContextVar[Call | None] = ContextVar("dcp_plugin_call", default=None)


def current_call(step: str) -> Call:
    """Return the call that this thread makes. Outside of a call, return a call that consists of the step."""
    return _current.get() or Call(step, f"is about to {step}")


@contextmanager
def together(call: Call) -> Iterator[None]:
    """Make ``call`` the current call of this thread inside the block.

    Each public call opens the block once. The thread of a background save opens it once more, for the call that began
    the save.
    """
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)


def _caller() -> str:
    """Return file and line of the innermost frame of the user's program."""
    frame = sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in _INTERNAL:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def refuse_differences(settings: list[dict[str, Any]]) -> None:
    """Check that all ranks have the same settings. Ranks with different settings would wait for each other in different
    collectives.

    Raises:
        CheckpointMismatch: Settings differ. The message names the first rank that differs from rank 0.
    """
    for rank, other in enumerate(settings):
        differ = [
            f"{name}={settings[0][name]!r} and {value!r}" for name, value in other.items() if value != settings[0][name]
        ]
        if differ:
            raise CheckpointMismatch(f"rank 0 and rank {rank} are configured differently: {', '.join(differ)}")
