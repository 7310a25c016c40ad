"""Ranks that act together: every rank gets the result, or every rank raises.

The rule of this module: work that may fail on one rank alone is never followed by a bare collective. It runs inside
one of the methods of :class:`Ranks`, which turn an exception on any rank into the same exception on all. Break the
rule and the ranks that succeeded wait in a collective that the failed one never joins.

A rank that dies or hangs is noticed by the timeout of the group; :class:`RankFailure` then says during which step.
The group is gloo and ours alone, so that a background save never meets the trainer's collectives.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from dcp_plugin import errors
from dcp_plugin.errors import CheckpointError, RankFailure

T = TypeVar("T")
R = TypeVar("R")


def pack(value: Any, level: int = 1) -> bytes:
    """A value that is large and repeats itself, compressed for its way to other ranks.

    Args:
        level: Of zlib, from 1 (fast) to 9 (small).
    """
    return zlib.compress(pickle.dumps(value), level)


def unpack(data: bytes) -> Any:
    """The inverse of :func:`pack`, for bytes that another rank of this job has sent: it unpickles."""
    return pickle.loads(zlib.decompress(data))


@dataclass(frozen=True)
class _Failure:
    """An exception on its way to other ranks. Only our own classes arrive as themselves, others as text."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        if isinstance(error, CheckpointError):
            return cls(type(error).__name__, str(error))
        return cls("", f"{type(error).__name__}: {error}")

    def to_error(self, step: str) -> CheckpointError:
        kind: type[CheckpointError] | None = getattr(errors, self.kind, None)
        return kind(self.text) if kind else CheckpointError(f"could not {step}: {self.text}")


class Ranks:
    """A group of ranks, or this process alone.

    Args:
        group: A gloo process group over all ranks, or ``None`` for this process alone.
        timeout: Seconds after which a rank that waits for the others gives up (the group enforces it).
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = 1800.0) -> None:
        self._group = group
        self._world = dist.group.WORLD if group is not None else None
        self._timeout = timeout
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    @classmethod
    def of_default_group(cls, timeout: float) -> Ranks:
        """All ranks of the default process group, in a new gloo group; this process alone if there is none.

        Collective.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        return cls(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)), timeout)

    @property
    def usable(self) -> bool:
        """False once a rank failed, once closed, and when the default process group it was made from has changed."""
        exists = dist.is_available() and dist.is_initialized()
        if self._group is None:
            return self._world is None and not (exists and dist.get_world_size() > 1)
        return exists and dist.group.WORLD is self._world

    @property
    def holds_group(self) -> bool:
        """Whether there is a group to leave. This process alone has none, nor is one left of a default group that is
        gone."""
        return self._group is not None and self.usable

    def close(self) -> None:
        """Leave the group. Ranks that still wait in it fail now and not at their timeout."""
        if self.holds_group:
            dist.destroy_process_group(self._group)
        self._group = None

    def from_zero(self, step: str, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0; every rank returns its result or raises its exception."""
        if self._world is None:
            return work()
        outcome = self._attempt(work) if self.rank == 0 else None
        return cast(T, self._unwrap(step, self._broadcast(step, outcome)))

    def combine(self, step: str, work: Callable[[], T], combine: Callable[[list[T]], R]) -> R:
        """Run ``work`` on every rank, then ``combine`` on rank 0 over all results in the order of ranks.

        Every rank returns what ``combine`` returned, or raises what any of them raised.
        """
        if self._world is None:
            return combine([work()])
        mine, outcome = self._run(step, work, combine)
        return cast(R, self._unwrap(step, self._broadcast(step, outcome), mine))

    def scatter(self, step: str, work: Callable[[], T], combine: Callable[[list[T]], list[R]]) -> R:
        """Like :meth:`combine`, but rank ``i`` returns item ``i`` of the list that ``combine`` returned."""
        if self._world is None:
            return combine([work()])[0]
        mine, outcome = self._run(step, work, combine)
        parts = [outcome] * self.size if isinstance(outcome, _Failure) else outcome
        box: list[Any] = [None]
        self._collective(step, lambda: dist.scatter_object_list(box, parts, src=0, group=self._group))
        return cast(R, self._unwrap(step, box[0], mine))

    def agree(self, step: str, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank. Each returns its own result, unless ``work`` failed anywhere."""
        if self._world is None:
            return work()
        mine: list[T] = []  # stays on this rank: it may be large, or not travel at all
        failure, outcome = self._run(step, lambda: mine.append(work()), lambda results: None)
        self._unwrap(step, self._broadcast(step, outcome), failure)
        return mine[0]

    def all_come_to(self, step: str, within: float) -> bool:
        """Whether every rank calls this within so many seconds. If not, the group is of no further use.

        A rank that is in the middle of another step, a save for one, does not count as come, and has its step fail.
        """
        patience, self._timeout = self._timeout, min(self._timeout, within)

        def all_mean_this(said: list[str]) -> bool:
            if said != [step] * self.size:
                raise CheckpointError(f"some ranks came to {step} while others were elsewhere")
            return True

        try:
            return self.combine(step, lambda: step, all_mean_this) is True
        except CheckpointError:
            return False
        finally:
            self._timeout = patience

    def exchange(self, step: str, buffers: Mapping[int, torch.Tensor], group: Sequence[int]) -> None:
        """Among some ranks: each fills the others' buffer under its own number with its own. All know the sizes."""
        others = [rank for rank in group if rank != self.rank]

        def pass_on() -> None:
            under_way = []
            for rank, buffer in buffers.items():
                if rank == self.rank:
                    under_way += [dist.isend(buffer, group=self._group, group_dst=other) for other in others]
                else:
                    under_way.append(dist.irecv(buffer, group=self._group, group_src=rank))
            for work in under_way:
                assert work is not None, "this rank belongs to the group"
                work.wait()

        self._collective(step, pass_on)

    def _run(self, step: str, work: Callable[[], Any], combine: Callable[[list[Any]], Any]) -> tuple[Any, Any]:
        """This rank's result or exception; and on rank 0 what ``combine`` made of all, or the failure."""
        try:
            mine = work()
        except Exception as error:
            mine = error
        results = self._gather(step, _Failure.of(mine) if isinstance(mine, Exception) else mine)
        if results is None:
            return mine, None
        failed = {rank: result for rank, result in enumerate(results) if isinstance(result, _Failure)}
        return mine, _merge(failed) if failed else self._attempt(lambda: combine(results))

    @staticmethod
    def _attempt(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            return _Failure.of(error)

    @staticmethod
    def _unwrap(step: str, outcome: Any, mine: Any = None) -> Any:
        if isinstance(outcome, _Failure):
            told_already = isinstance(mine, CheckpointError) and str(mine) in outcome.text
            raise outcome.to_error(step) from (mine if isinstance(mine, Exception) and not told_already else None)
        return outcome

    # The collectives. An exception inside one means that a rank is gone, never that its work failed.

    def _gather(self, step: str, value: Any) -> list[Any] | None:
        results: list[Any] | None = [None] * self.size if self.rank == 0 else None
        # The barrier is what names the missing ranks on rank 0; gather alone would only time out. It does not know
        # the timeout of its group.
        limit = timedelta(seconds=self._timeout)
        self._collective(step, lambda: dist.monitored_barrier(self._group, limit, wait_all_ranks=True))
        data = pickle.dumps(value)
        self._collective(step, lambda: self._send_to_zero(data, results))
        return results

    def _send_to_zero(self, data: bytes, results: list[Any] | None) -> None:
        """A gather in which each rank sends as many bytes as it has. ``gather_object`` makes all ranks send as many as
        the longest, and tells all of them how long everybody's are."""
        length = torch.tensor([len(data)])
        if results is None:
            dist.gather(length, group=self._group, group_dst=0)
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), group=self._group, group_dst=0)
            return
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.gather(length, lengths, group=self._group, group_dst=0)
        buffers = [torch.empty(int(count), dtype=torch.uint8) for count in lengths[1:]]
        arriving = [
            dist.irecv(buffer, group=self._group, group_src=rank) for rank, buffer in enumerate(buffers, start=1)
        ]
        for work in arriving:
            assert work is not None
            work.wait()
        results[:] = pickle.loads(data), *(pickle.loads(buffer.numpy().data) for buffer in buffers)

    def _broadcast(self, step: str, value: Any) -> Any:
        box = [value]
        self._collective(step, lambda: dist.broadcast_object_list(box, src=0, group=self._group))
        return box[0]

    def _collective(self, step: str, call: Callable[[], Any]) -> None:
        if self._group is None:
            raise RankFailure(f"rank {self.rank} cannot {step}: an earlier failure has closed the group of ranks.")
        try:
            call()
        except Exception as error:
            self.close()
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RankFailure(
                f"rank {self.rank} lost another rank while the ranks had to {step} (limit {self._timeout:g} s): "
                f"{reason}. A rank died, hung or raised elsewhere; its own log has the reason."
            ) from error


def _merge(failed: dict[int, _Failure]) -> _Failure:
    """One failure for all: of our class if they share one. Names at most eight ranks."""
    kinds = {failure.kind for failure in failed.values()}
    said = [f"rank {rank}: {failure.text}" for rank, failure in failed.items()]
    if len({failure.text for failure in failed.values()}) == 1 and len(failed) > 1:
        said = [f"{len(failed)} ranks ({', '.join(map(str, list(failed)[:8]))}): {said[0].partition(': ')[2]}"]
    text = "; ".join(said[:8]) + (f"; and {len(said) - 8} more ranks" if len(said) > 8 else "")
    return _Failure(kinds.pop() if len(kinds) == 1 else "", text)
