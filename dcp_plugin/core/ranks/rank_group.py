"""Collectives of several ranks, after which every rank has the result, or every rank has raised.

The group is a gloo group of its own, so that a background save cannot interfere with the trainer's collectives. Its
timeout detects a rank that died or hangs; :class:`RankFailure` then names the step.

A ``combine`` has three exchanges. First, each rank sends rank 0 a digest of 8 bytes for its call
(:class:`~dcp_plugin.core.ranks.collectives.Call`), and rank 0 answers if all are equal. Then each rank sends its
result, or its failure as a value. Last, rank 0 combines the results and sends the outcome to all. If the digests
differ, all ranks raise a :class:`CheckpointMismatch` that names two different calls.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from dcp_plugin.core import errors
from dcp_plugin.core.errors import CheckpointError, CheckpointMismatch, RankFailure, first_line, some
from dcp_plugin.core.ranks.collectives import Attempt, Call, Ranks, by_text, current_call, name_of, together, verb_of
from dcp_plugin.core.ranks.meeting import meet
from dcp_plugin.core.tensors.host_memory import host_bytes

T = TypeVar("T")
R = TypeVar("R")

_ABSENT = -1
"""Length in the header of a rank that has not arrived."""
_CUT = 0.01
"""Seconds added to the remaining timeout. gloo truncates a timeout to milliseconds and would give up too early."""
_making_group = threading.Lock()
"""Lock for making a group. Two threads that make groups at the same time would confuse torch's count of groups."""


@dataclass(frozen=True)
class _Failure:
    """An exception that travels to other ranks. Exceptions of this package keep their class; others arrive as text."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        if isinstance(error, CheckpointError):
            public_kind = next(kind for kind in type(error).__mro__ if vars(errors).get(kind.__name__) is kind)
            return cls(public_kind.__name__, str(error))
        return cls("", f"{type(error).__name__}: {error}")


class RankGroup(Ranks):
    """Several processes, in a gloo group of their own.

    Args:
        group: A gloo process group over all ranks.
        timeout: Seconds after which a rank that waits for the others gives up (the group enforces it).
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        super().__init__()
        self._group: dist.ProcessGroup | None = group
        self._world = dist.group.WORLD
        self._timeout = timeout
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @classmethod
    def joined(cls, timeout: float, patience: float | None) -> RankGroup:
        """Return a new group, see :func:`~dcp_plugin.core.ranks.groups.of_default_group`."""
        with _making_group:
            meet(timeout if patience is None else patience)
            try:
                group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
            except Exception as error:
                raise _lost(dist.get_rank(), "connect", timeout, error) from error
        return cls(group, timeout)

    @property
    def usable(self) -> bool:
        return self._group is not None and dist.is_initialized() and dist.group.WORLD is self._world

    def close(self) -> None:
        last_reference, self._group = [self._group] if self.usable else [], None
        if last_reference:
            dist.destroy_process_group(*last_reference)
            # The destructor of a gloo group waits 20 ms for its threads. Another thread waits in place of the caller.
            # It does not when no more threads can be started, or the interpreter ends and would never run them.
            with suppress(RuntimeError):
                if not sys.is_finalizing():
                    threading.Thread(target=last_reference.clear, name="gloo-close").start()

    def combine(self, step: str, work: Callable[[], T], combine: Callable[[list[T]], R]) -> R:
        own_failure, outcome = self._run(step, work, combine)
        return cast(R, _unwrap(step, self._collective(step, lambda: self._send_to_all(outcome)), own_failure))

    def scatter(self, step: str, work: Callable[[], T], combine: Callable[[list[T]], list[R]]) -> R:
        own_failure, outcome = self._run(step, work, combine)
        parts = [outcome] * self.size if isinstance(outcome, _Failure) else outcome
        box: list[Any] = [None]
        self._collective(step, lambda: dist.scatter_object_list(box, parts, src=0, group=self._group))
        return cast(R, _unwrap(step, box[0], own_failure))

    def all_come_to(self, step: str, within: float) -> bool:
        timeout, self._timeout = self._timeout, min(self._timeout, within)
        try:
            # A call of its own: its digest differs from that of a save, so a rank inside of a save counts as absent.
            with together(Call(step, f"is about to {step}", [step])):
                self.agree(step, lambda: None)
        except CheckpointError:
            return False
        finally:
            self._timeout = timeout
        return True

    def exchange(self, step: str, messages: Sequence[tuple[int, torch.Tensor]], group: Sequence[int]) -> None:
        peers = [rank for rank in group if rank != self.rank]

        def pass_on() -> None:
            under_way = []
            # All transfers start before the first wait. Each message has a tag, since one sender may have several.
            for tag, (sender, message) in enumerate(messages):
                if sender == self.rank:
                    under_way += [dist.isend(message, group=self._group, group_dst=to, tag=tag) for to in peers]
                else:
                    under_way.append(dist.irecv(message, group=self._group, group_src=sender, tag=tag))
            for work in under_way:
                assert work is not None, "this rank belongs to the group"
                work.wait()

        self._collective(step, pass_on)

    def _run(
        self, step: str, work: Callable[[], Any], combine: Callable[[list[Any]], Any]
    ) -> tuple[Exception | None, Any]:
        """Run ``work`` on every rank, and ``combine`` on rank 0.

        Returns:
            This rank's exception, if any; and, on rank 0, the result of ``combine`` or the failure.

        Raises:
            CheckpointMismatch: Ranks make different calls. All ranks raise it, the message names two calls, and the
                group is closed.
            RankFailure: A rank died, or did not join within the timeout.
        """
        own = Attempt.of(work)
        call = current_call(step)
        data = b"" if (value := _to_send(own)) is None else pickle.dumps(value)
        # An exception of the methods that communicate means that a rank is gone, never that its work has failed.
        is_same, lengths = self._collective(step, lambda: self._meet(call, call.digest(step), len(data)))
        if not is_same:
            self._refuse_other_calls(step, call)
        results = self._collective(step, lambda: self._send_to_zero(data, lengths))
        if results is None:
            return own.failure, None
        failed = {rank: result for rank, result in enumerate(results) if isinstance(result, _Failure)}
        # combine() may fail as well, on rank 0 alone, so its failure is sent like a result.
        return own.failure, _merge(failed) if failed else _to_send(Attempt.of(lambda: combine(results)))

    def _meet(self, call: Call, digest: int, length: int) -> tuple[bool, list[int]]:
        """Wait until all ranks have joined a call.

        Args:
            digest: 8 bytes that identify the call.
            length: Size of this rank's message for rank 0, in bytes.

        Returns:
            True if the digests of all ranks are equal; and, on rank 0, the lengths of all ranks.
        """
        header = torch.tensor([digest, length], dtype=torch.int64, device="cpu")
        answer = torch.zeros(1, dtype=torch.int64, device="cpu")
        headers = torch.full((self.size, 2), _ABSENT, dtype=torch.int64, device="cpu")
        if self.rank == 0:
            headers[0] = header
            arriving = self._receive({rank: headers[rank] for rank in self._others})
            # gloo fills the headers while this thread waits, so the reporting thread can read from them which ranks
            # are missing.
            with call.reporting(lambda: _absent(headers)):
                self._wait_for(arriving, call, lambda: _absent(headers))
            answer[0] = bool((headers[:, 0] == digest).all())
            for sent in [dist.isend(answer, group=self._group, group_dst=rank) for rank in self._others]:
                cast(dist.Work, sent).wait()
        else:
            sent = dist.isend(header, group=self._group, group_dst=0)
            answered = dist.irecv(answer, group=self._group, group_src=0)
            # Only one rank reports that rank 0 is missing.
            with call.reporting(lambda: "rank 0" if self.rank == 1 else ""):
                self._wait_for({0: sent}, call, lambda: "rank 0")
                self._wait_for({0: answered}, call, lambda: "rank 0")
        return bool(answer.item()), headers[:, 1].tolist()

    @property
    def _others(self) -> range:
        """The ranks other than rank 0."""
        return range(1, self.size)

    def _receive(self, messages: Mapping[int, torch.Tensor]) -> dict[int, dist.Work]:
        """Start to receive messages from some ranks. An error names the rank."""
        arriving: dict[int, dist.Work] = {}
        for rank, message in messages.items():
            with _naming(rank):
                arriving[rank] = cast(dist.Work, dist.irecv(message, group=self._group, group_src=rank))
        return arriving

    def _wait_for(self, works: Mapping[int, dist.Work | None], call: Call, missing: Callable[[], str]) -> None:
        """Wait for the messages of some ranks. The timeout applies to all of them together."""
        deadline = time.monotonic() + self._timeout
        for rank, work in works.items():
            try:
                with _naming(rank):
                    remaining = max(0.001, deadline - time.monotonic())
                    cast(dist.Work, work).wait(timedelta(seconds=remaining + _CUT))
            except RuntimeError as error:
                if time.monotonic() < deadline:
                    raise
                raise RuntimeError(call.still_waiting(missing())) from error

    def _refuse_other_calls(self, step: str, call: Call) -> None:
        """Exchange the descriptions of calls whose digests differ.

        Equal calls may have different digests: links give one path different names.

        Raises:
            CheckpointMismatch: The calls differ.
        """
        calls: list[Any] = [None] * self.size
        self._collective(step, lambda: dist.all_gather_object(calls, (call.what, call.keys, step), group=self._group))
        if difference := _difference(calls):
            self.close()
            raise CheckpointMismatch(difference)

    def _send_to_zero(self, data: bytes, lengths: list[int]) -> list[Any] | None:
        """Gather messages of different lengths on rank 0. ``gather_object`` would first exchange all lengths between
        all ranks, and pad all messages to the longest.

        Args:
            lengths: On rank 0, the lengths of all messages. An empty message represents None.
        """
        if self.rank > 0:
            if data:
                # A bytearray, because torch warns of memory that cannot be written.
                dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), group=self._group, group_dst=0)
            return None
        buffers = [host_bytes(length) for length in lengths]
        arriving = self._receive({rank: buffers[rank] for rank in self._others if lengths[rank]})
        for rank, work in arriving.items():
            with _naming(rank):
                work.wait()
        messages = [memoryview(data), *(buffer.numpy().data for buffer in buffers[1:])]
        return [pickle.loads(message) if len(message) else None for message in messages]

    def _send_to_all(self, outcome: Any) -> Any:
        """Broadcast a value of rank 0, and return it. None, the usual value, takes one message: a length of 0.

        ``broadcast_object_list`` would take three times as long.
        """
        data = b"" if outcome is None else pickle.dumps(outcome)
        length = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        dist.broadcast(length, src=0, group=self._group)
        if not length.item():
            return None
        message = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else host_bytes(int(length.item()))
        dist.broadcast(message, src=0, group=self._group)
        return outcome if self.rank == 0 else pickle.loads(message.numpy().data)

    def _collective(self, step: str, exchange: Callable[[], T]) -> T:
        """Run collectives of the group. A failure closes the group.

        Use only collectives whose name in c10d has at most 15 characters (``broadcast_``, ``scatter_``). If two worker
        threads of a gloo group finish operations with longer names at the same moment, they free a buffer twice
        (``ProcessGroupGloo::runLoop``), and the process dies of SIGSEGV.

        Raises:
            RankFailure: A rank has failed, or does not answer.
        """
        if self._group is None:
            raise RankFailure(f"rank {self.rank} cannot {step}: an earlier failure has closed the group of ranks.")
        try:
            return exchange()
        except Exception as error:
            self.close()
            raise _lost(self.rank, step, self._timeout, error) from error


def _to_send(attempt: Attempt[Any]) -> Any:
    """Return the value of an attempt, or its failure in the form for other ranks."""
    return attempt.value if attempt.failure is None else _Failure.of(attempt.failure)


def _unwrap(step: str, outcome: Any, own_failure: Exception | None) -> Any:
    """Return an outcome, or raise it if it is a failure. The cause is this rank's own exception, unless the outcome
    already contains its message."""
    if isinstance(outcome, _Failure):
        is_included = isinstance(own_failure, CheckpointError) and str(own_failure) in outcome.text
        kind: type[CheckpointError] | None = getattr(errors, outcome.kind, None)
        raise (kind(outcome.text) if kind else CheckpointError(f"could not {step}: {outcome.text}")) from (
            None if is_included else own_failure
        )
    return outcome


def _absent(headers: torch.Tensor) -> str:
    """Return the ranks whose header has not arrived, as text for a message."""
    lengths = headers[:, 1].tolist()
    return some([f"rank {rank}" for rank, length in enumerate(lengths) if length == _ABSENT])


@contextmanager
def _naming(rank: int) -> Iterator[None]:
    """Add the rank to an error of gloo, which names only an address."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"rank {rank}: {first_line(error)}") from error


def _lost(rank: int, step: str, timeout: float, error: Exception) -> RankFailure:
    reason = first_line(error)
    reason += "" if reason.endswith((".", "?")) else "."
    return RankFailure(
        f"rank {rank} lost another rank while the ranks had to {step} (limit {timeout:g} s): {reason} A rank died, "
        f"hung or raised elsewhere; its own log has the reason."
    )


def _difference(calls: list[tuple[str, tuple[str, ...], str]]) -> str:
    """Return a message about the first rank whose call differs from that of rank 0; empty if all calls are equal.

    Args:
        calls: For each rank, the call in words, its keys, and the current step.
    """
    call, keys, step = calls[0]
    for rank, (other, other_keys, other_step) in enumerate(calls):
        is_same = keys == other_keys or bool(set(keys) & set(other_keys))
        if is_same and verb_of(step) == verb_of(other_step):
            continue
        if is_same:
            call, other = f"{call} and has to {step}", f"{other} and has to {other_step}"
        return (
            f"rank {rank} {other[:1000]} and rank 0 {call[:1000]}: all ranks have to make the same calls in the same "
            f"order, with the same path and step. Have rank 0 choose these, and tell the others."
        )
    return ""


def _merge(failed: dict[int, _Failure]) -> _Failure:
    """Merge the failures of several ranks into one. The message names at most eight ranks.

    Its class is the one that all failures share. It is empty if they share only ``CheckpointError``, or if a class is
    not from this package.
    """
    classes = [cast(type[Exception], getattr(errors, failure.kind, Exception)) for failure in failed.values()]
    shared = next(base for base in classes[0].__mro__ if all(issubclass(other, base) for other in classes))
    kind = shared.__name__ if issubclass(shared, CheckpointError) and shared is not CheckpointError else ""
    ranks_by_text = by_text({rank: [failure.text] for rank, failure in failed.items()})
    messages = [f"{name_of(ranks)}: {text}" for text, ranks in ranks_by_text.items()]
    if len(messages) == 1 and len(failed) > 1:
        messages = [f"{len(failed)} ranks ({', '.join(map(str, list(failed)[:8]))}): {next(iter(ranks_by_text))}"]
    text = "; ".join(messages[:8]) + (f"; and {len(messages) - 8} more" if len(messages) > 8 else "")
    return _Failure(kind, text)
