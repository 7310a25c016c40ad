"""Saves that go on while training does: their handles, their threads, and the moments at which one has to wait.

A save in the background is one thread, which copies what is still to be copied, waits for the thread of the save
before it, and writes. So saves of one checkpointer talk to the other ranks one after another, in the same order
everywhere.

Whether a rank raises may not depend on how fast its own thread was: others would go on, into collectives that it never
joins. So the errors of earlier saves are raised only where every rank has waited for the same saves.

One thread calls a checkpointer. A second one at the same time would take the same host copy, and ranks would meet in
another order each: it is refused. So is a subscriber of events that would wait for the save that waits for it.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dcp_plugin import events
from dcp_plugin._python import before_threads_end
from dcp_plugin.errors import CheckpointError, SaveFailed

logger = logging.getLogger("dcp_plugin")

THREAD = "dcp-save"


class SaveHandle:
    """A save under way.

    :meth:`wait` raises what the save raised. An error that nobody asked for is raised by the checkpointer at the
    next save, at ``wait`` or at ``close``; whoever gets it first has taken it.
    """

    def __init__(self, path: Path, step: int | None) -> None:
        self.path = path
        self.step = step
        self.skipped = False
        """Whether there is no such save, because another one was in flight (``when_busy="skip"``)."""
        self._staged = threading.Event()
        self._done = threading.Event()
        self._error: Exception | None = None
        self._told = False

    def staged(self) -> bool:
        """Whether training may change the state again. True when ``save`` returns, unless staging is lazy."""
        return self._staged.is_set()

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the state may be changed in any way. Steps of optimizers wait by themselves.

        Raises:
            TimeoutError: It is still being copied after ``timeout`` seconds.
        """
        if not self._staged.wait(timeout):
            raise TimeoutError(f"the state for {self.path} has not been copied within {timeout} s; it goes on")

    def done(self) -> bool:
        """Whether the save has ended: published, failed or skipped."""
        return self._done.is_set()

    def exception(self) -> Exception | None:
        """The error of an ended save, without raising it."""
        return self._error

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the save is published. From any thread.

        Raises:
            SaveFailed: It failed; on every rank.
            TimeoutError: It has not ended within ``timeout`` seconds. It goes on.
            CheckpointError: A subscriber of events waits for a save that waits for it.
        """
        self._refuse_a_subscriber("wait for it")
        if not self._done.wait(timeout):
            raise TimeoutError(f"the save of {self.path} has not ended within {timeout} s; it goes on")
        if self._error is not None and not self._told:
            self._told = True
            raise self._error

    def _refuse_a_subscriber(self, what: str) -> None:
        if events.is_telling() and not self._done.is_set():
            raise CheckpointError(
                f"cannot {what} while {self.path} is being saved: this is a subscriber of events, and a save waits "
                "for its subscribers. Do it in the thread that trains, or in a thread of its own."
            )

    def _end(self, error: Exception | None = None) -> None:
        self._error = error
        self._staged.set()
        self._done.set()

    def _skip(self) -> None:
        self.skipped = True
        self._end()


class Background:
    """The saves in flight of one checkpointer, oldest first."""

    def __init__(self) -> None:
        self._saves: deque[tuple[SaveHandle, threading.Thread]] = deque()
        self._calling = threading.RLock()
        self._beginning: SaveHandle | None = None
        self.speaks = True
        """Whether this rank warns at the end of a program that does not wait."""

    def __reduce__(self) -> tuple[type[Background], tuple[()]]:
        """A copy has no saves in flight."""
        return Background, ()

    @property
    def handles(self) -> list[SaveHandle]:
        """Every save that nobody has waited for."""
        return [handle for handle, _ in self._saves]

    @property
    def in_flight(self) -> list[SaveHandle]:
        """Every save that has not ended, with the one that a call is about to begin."""
        beginning = self._beginning
        saves = self.handles if beginning is None or beginning in self.handles else [*self.handles, beginning]
        return [handle for handle in saves if not handle.done()]

    @contextmanager
    def call(self, what: str) -> Iterator[None]:
        """While active, the calling thread has the checkpointer for itself.

        Raises:
            CheckpointError: Another thread has it; or the caller is a subscriber that a save in flight waits for.
        """
        if not self._calling.acquire(blocking=False):
            raise CheckpointError(
                f"cannot {what}: another thread is in a call of the same Checkpointer. One thread at a time may save, "
                "load, wait and close: give each thread a Checkpointer of its own, or wait for a save with its handle."
            )
        try:
            for handle in self.in_flight:
                handle._refuse_a_subscriber(what)
            yield
        finally:
            self._calling.release()

    @contextmanager
    def beginning(self, handle: SaveHandle) -> Iterator[None]:
        """The call that saves. What it raises ends the save, unless that is in flight already.

        Raises:
            CheckpointError: As :meth:`call`; or it comes from within another save of the same thread.
        """
        with self.call(f"save {handle.path}"):
            if self._beginning is not None:
                raise CheckpointError(
                    f"cannot save {handle.path} from within the save of {self._beginning.path}: something that it "
                    "called, or a signal handler, saves with the same Checkpointer. Save before or after."
                )
            self._beginning = handle
            try:
                yield
            except BaseException as error:
                if handle not in self.handles:
                    handle._end(error if isinstance(error, Exception) else _ended_by(error, handle.path))
                raise
            finally:
                self._beginning = None

    def start(self, handle: SaveHandle, copy: Callable[[], None], write: Callable[[], None]) -> None:
        """Run ``copy`` and, when the saves before have ended, ``write``, in a thread.

        ``copy`` says nothing of its failure: ``write`` does, which all ranks learn of together.

        If this raises, Ctrl-C for one, either the save is among :attr:`handles` and goes on, or neither runs.
        """
        before = self._saves[-1][0] if self._saves else None
        decided = threading.Lock()  # for whoever comes first: the thread that runs, or an error here
        returning = threading.Event()

        def run() -> None:
            returning.wait(0.1)  # else this takes the interpreter's lock while start() waits for a sign of life
            if not decided.acquire(blocking=False):
                return
            try:
                copy()
                handle._staged.set()
                _let_training_go_first()
                if before is not None:
                    before._done.wait()
                write()
            except BaseException as error:  # nobody else would end what others wait for
                failure = error if isinstance(error, Exception) else _ended_by(error, handle.path)
                logger.error("the background save of %s failed: %s", handle.path, failure)
                handle._end(failure)
            else:
                handle._end()

        thread = threading.Thread(target=run, name=THREAD)
        _attend_when_the_program_ends()
        try:
            self._saves.append((handle, thread))
            _unattended.add(self)
            thread.start()
        except BaseException:
            if decided.acquire(blocking=False) and handle in self.handles:
                self._saves.pop()
            raise
        finally:
            returning.set()

    def wait_for_all_but(self, count: int) -> list[SaveHandle]:
        """Wait for the oldest saves until ``count`` are left; for all of them if one of those failed.

        Returns:
            What was waited for, the same on every rank.
        """
        ended: list[SaveHandle] = []
        while len(self._saves) > count:
            handle, thread = self._saves[0]
            handle._done.wait()  # a join that Ctrl-C has interrupted takes the thread for ended from then on
            thread.join()
            self._saves.popleft()
            ended.append(handle)
            if handle.exception() is not None:
                count = 0
        if not self._saves:
            _unattended.discard(self)
        return ended

    def leave_to_the_parent(self) -> None:
        """In a process that was forked: nobody here ends these saves. To wait for one would be for ever."""
        for handle in self.handles:
            if not handle.done():
                handle._staged, handle._done = threading.Event(), threading.Event()  # those may have been locked
                handle._end(SaveFailed(f"{handle.path} is being saved by the process from which this one was forked"))
        self._saves.clear()

    def attend_late(self) -> None:
        """The program ends, and nobody has waited for the saves in flight."""
        for handle in self.handles:
            if self.speaks and not handle.done():
                logger.warning(
                    "the program ends while %s is being saved; it goes on until that is on disk. Wait for it, or close "
                    "what saves, to be told whether it succeeded.",
                    handle.path,
                )
        for handle in self.wait_for_all_but(0):
            if handle.exception() is not None and not handle._told:
                handle._told = True
                logger.error("%s was NOT saved, and the program ended without asking: %s", handle.path, handle._error)


def _ended_by(error: BaseException, path: Path) -> SaveFailed:
    failure = SaveFailed(f"cannot save {path}: {type(error).__name__} was raised in the thread that saves ({error})")
    failure.__cause__ = error
    return failure


def _let_training_go_first() -> None:
    """This thread, and those it starts, no longer push a running thread off its core when a write has ended.

    A lower priority would do more harm than good: where all cores are busy, a thread that rarely runs keeps the
    interpreter's lock while it does not, and the training waits for that.
    """
    with suppress(AttributeError, OSError):  # not on Linux, or not permitted
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def raise_first_untold(ended: list[SaveHandle]) -> None:
    """Raise the errors that nobody has been told of: the first, with those of later saves as notes."""
    untold = [handle for handle in ended if handle._error is not None and not handle._told]
    for handle in untold:
        handle._told = True
    if untold:
        error = untold[0]._error
        assert error is not None
        for handle in untold[1:]:
            error.add_note(f"And the save of {handle.path} failed: {handle._error}")
        raise error


_unattended: set[Background] = set()
"""Those with saves that nobody has waited for yet."""


def _leave_all_to_the_parent() -> None:
    for background in tuple(_unattended):
        background.leave_to_the_parent()
    _unattended.clear()


os.register_at_fork(after_in_child=_leave_all_to_the_parent)


@functools.cache
def _attend_when_the_program_ends() -> None:
    def attend() -> None:
        for background in tuple(_unattended):
            background.attend_late()

    before_threads_end(attend)
