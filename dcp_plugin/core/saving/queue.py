"""Asynchronous saves: their handles, their threads, and the order in which they run.

Each asynchronous save has one thread. The writer gives the thread a function with the stages of the save. The next save
or load waits for that thread (:meth:`~dcp_plugin.core.saving.writers.Writer.wait_for_ranks`). It waits until the save
has ended or a keeper has taken it over. So the saves of a checkpointer run their collectives one after another, in the
same order on all ranks.

The speed of a rank's thread must not decide whether the rank raises: the other ranks would continue into collectives
that the rank never joins. So errors of earlier saves are raised only after every rank has waited for the same saves.

One thread at a time calls a checkpointer. A second thread would use the same host copy, and ranks would run collectives
in different orders, so its call is refused. A callback of a save that would wait for that save is refused, too.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from dcp_plugin.core import events
from dcp_plugin.core.errors import CheckpointError, SaveFailed, logger
from dcp_plugin.core.interrupts import interrupts_held
from dcp_plugin.core.paths import Where
from dcp_plugin.core.ranks.collectives import Call, together
from dcp_plugin.core.tensors._torch import before_threads_end
from dcp_plugin.core.tensors.host_memory import device_of_thread
from dcp_plugin.core.types import public_class

THREAD = "dcp-save"


@public_class()
class SaveHandle:
    """Save in flight.

    :meth:`wait` raises the error of the save. If no caller waits, the checkpointer raises the error in its next
    ``save``, ``load``, ``wait`` or ``close``. The error of a save that a keeper writes is not raised by ``save`` and
    ``load``. Each error is raised once.

    Example:
        >>> import dcp_plugin, torch
        >>> checkpointer = dcp_plugin.Checkpointer(async_save=True)
        >>> handle = checkpointer.save({"weights": torch.ones(3)}, "run/step-1", step=1)
        >>> handle.on_published(lambda event: print(event.path.name, "is published"))
        >>> handle.wait()
        step-1 is published
        >>> checkpointer.close()
    """

    def __init__(self, path: Where, step: int | None) -> None:
        self.path = path
        self.step = step
        self.skipped = False
        """True if the save was skipped, because another one was in flight (``when_busy="skip"``)."""
        self._finished: events.SaveFinished | None = None
        self._is_staged = False
        # States of a save, in the order in which it reaches them. Only a save that a keeper writes reaches the three in
        # the middle before it ends. The end sets all that are left. A local failure sets ``_local`` earlier.
        self._copy_ended = threading.Event()
        self._handed_over = threading.Event()
        self._written = threading.Event()
        self._local = threading.Event()
        self._done = threading.Event()
        self._local_error: Exception | None = None
        self._error: Exception | None = None
        self._error_was_raised = False
        self._callbacks: deque[Callable[[events.SaveFinished], object]] = deque()

    def staged(self) -> bool:
        """Return whether the state is copied, so that training may change it.

        True when ``save`` returns, unless staging is lazy. A copy that failed is never staged: training may change the
        state at once, and :meth:`wait` raises the error. :meth:`wait_staged` waits for either.
        """
        return self._is_staged

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the state may be changed in any way: it is copied, or the copy has failed.

        Steps of optimizers wait by themselves.

        Raises:
            TimeoutError: The state is still being copied after ``timeout`` seconds.
        """
        if not self._copy_ended.wait(timeout):
            raise TimeoutError(f"the state for {self.path} has not been copied within {timeout} s; the copy goes on")

    def wait_local(self, timeout: float | None = None) -> None:
        """Wait until the save is complete in ``keeper.dir``. Any thread may call this.

        The save is complete when each node has its part and the copies that ``keeper.replicas`` asks for. Without
        ``keeper.dir`` this is :meth:`wait`.

        Raises:
            SaveFailed: The save cannot become complete locally. It may still become durable.
            TimeoutError: The save is not complete within ``timeout`` seconds. It continues.
            CheckpointError: As :meth:`wait`.
        """
        self._refuse_in_callback("wait for it")
        if not self._local.wait(timeout):
            raise TimeoutError(f"the save of {self.path} is not complete locally within {timeout} s; the save goes on")
        if self._local_error is not None:
            raise self._local_error

    def done(self) -> bool:
        """Return whether the save has ended: published, failed or skipped."""
        return self._done.is_set()

    def exception(self) -> Exception | None:
        """Return the error of an ended save without raising it."""
        return self._error

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the save is published. Any thread may call this.

        Raises:
            SaveFailed: The save failed; on every rank.
            TimeoutError: The save has not ended within ``timeout`` seconds. It continues.
            CheckpointError: A callback of this save, or a subscriber of its events, calls this.
        """
        self._refuse_in_callback("wait for it")
        if not self._done.wait(timeout):
            raise TimeoutError(f"the save of {self.path} has not ended within {timeout} s, and goes on")
        if (error := self._take_error()) is not None:
            raise error

    def on_published(self, callback: Callable[[events.SaveFinished], object], *, first: bool = False) -> None:
        """Call ``callback`` on this rank when the checkpoint is published; never if the save fails or is skipped.

        Callbacks run in the order in which they were added, in the thread that saves, after the subscribers of
        :mod:`dcp_plugin.core.events` and before :meth:`done`. So a wait for the save waits for its callbacks. The error
        of a callback is logged; the checkpoint is complete. A callback cannot wait for the save or begin another save.
        If the checkpoint is already published, ``callback`` runs in this call, which raises its error.

        Args:
            callback: Called with the :class:`~dcp_plugin.core.events.SaveFinished` of this save.
            first: Call it before the callbacks that were added earlier.
        """
        add = self._callbacks.appendleft if first else self._callbacks.append
        add(callback)
        if self._finished is not None:
            for waiting in self._take_callbacks():
                waiting(self._finished)

    def _take_callbacks(self) -> Iterator[Callable[[events.SaveFinished], object]]:
        """Yield each callback once, even if two threads iterate.

        This uses no lock: a signal handler may wait for the save while the interrupted thread holds the lock, and a
        forked process would inherit a locked lock.
        """
        with suppress(IndexError):
            while True:
                yield self._callbacks.popleft()

    def _refuse_in_callback(self, action: str) -> None:
        """Raise CheckpointError if this is called in a callback of the save in flight."""
        if events.is_in_subscriber() and not self.done():
            raise CheckpointError(
                f"cannot {action} while {self.path} is being saved: this is a subscriber of events, and a save waits "
                f"for its subscribers. Do it in the training thread, or in another thread."
            )

    def _take_error(self) -> Exception | None:
        """Return the error of an ended save, for a caller that will raise it; None after the first call."""
        if self._error is None or self._error_was_raised:
            return None
        self._error_was_raised = True
        return self._error


class RunningSave(SaveHandle):
    """Save in flight, for the code that runs it and for integrations: the object that users get as a SaveHandle.

    The methods ``set_...`` are those of a writer, as those of ``concurrent.futures.Future`` are.
    """

    refuse_in_callback = SaveHandle._refuse_in_callback

    @property
    def finished(self) -> events.SaveFinished | None:
        """Event of the published checkpoint; None before that, and for a save that failed or was skipped."""
        return self._finished

    @property
    def copy_ended(self) -> threading.Event:
        """Event that is set once the state is copied, or will not be copied any more."""
        return self._copy_ended

    def wait_turn(self) -> None:
        """Wait until the save is handed over to a keeper, or has ended. Then it runs no more collectives, and the next
        save may run its own."""
        self._handed_over.wait()

    def wait_done(self, timeout: float | None = None) -> bool:
        """Wait until the save has ended. Raise nothing.

        Returns:
            True if the save has ended; False after ``timeout`` seconds.
        """
        return self._done.wait(timeout)

    def set_copying(self) -> None:
        """Mark the state as not copied yet. If a keeper cannot take the copy, another writer copies the state again,
        and calls this a second time."""
        self._is_staged = False
        self._copy_ended.clear()

    def set_staged(self, error: Exception | None = None) -> None:
        """Mark the state as copied, or with ``error`` the copy as failed. Training goes on in both cases."""
        if not self._copy_ended.is_set():
            self._is_staged |= error is None  # a forked process ends a save again whose copy was complete
            self._copy_ended.set()

    def set_handed_over(self) -> None:
        """Mark the save as handed over to a keeper."""
        self._handed_over.set()

    def set_written(self) -> None:
        """Mark the host copy as written. Called by the thread that follows a save of a keeper. For any other save, the
        copy counts as written when the save ends."""
        self._written.set()

    def set_local(self, error: Exception | None = None) -> None:
        """Mark the save as complete locally, or with ``error`` as failed there."""
        if not self._local.is_set():
            self._local_error = error
            self._local.set()

    def set_published(self, event: events.SaveFinished) -> None:
        """Mark the checkpoint as published: run the callbacks, then end the save."""
        self._finished = event
        events.call_each(self._take_callbacks(), event)
        self._end()

    def set_durable(self, event: events.SaveFinished) -> None:
        """Mark a checkpoint that was complete locally as copied to its path."""
        self._finished = event

    def set_failed(self, error: Exception) -> None:
        """Mark the save as failed. Called on every rank."""
        self._error = error
        self._end()

    def set_skipped(self) -> None:
        """Mark the save as skipped."""
        self.skipped = True
        self._end()

    def set_left_to_parent(self) -> None:
        """Mark the save as failed in a forked process: only the parent ends it.

        The thread events are new, because they may have been locked at the fork.
        """
        self._copy_ended, self._done, self._local = threading.Event(), threading.Event(), threading.Event()
        self._handed_over, self._written = threading.Event(), threading.Event()
        self.set_failed(
            SaveFailed(
                f"the process from which this process was forked is saving {self.path}; only that process can wait for "
                f"the save"
            )
        )

    def _end(self) -> None:
        self._callbacks.clear()
        self.set_staged(self._error)
        self._handed_over.set()
        self._written.set()
        self.set_local(self._error)
        self._done.set()


class SaveQueue:
    """Asynchronous saves of a checkpointer that no caller has waited for, oldest first."""

    def __init__(self) -> None:
        self._saves: dict[RunningSave, threading.Thread] = {}
        self._calling = threading.RLock()
        self._beginning: RunningSave | None = None
        self._process = os.getpid()
        self.closes_at: float | None = None  # monotonic time at which the training stops waiting for keepers
        self.warns_at_exit = True  # True if this rank warns at the end of a program that does not wait

    def __reduce__(self) -> tuple[type[SaveQueue], tuple[()]]:
        """Pickle as an empty queue: a copy has no saves in flight."""
        return SaveQueue, ()

    @property
    def is_inherited(self) -> bool:
        """True in a process that was forked from the one that made the checkpointer."""
        return self._process != os.getpid()

    @property
    def handles(self) -> list[RunningSave]:
        """Every save that no caller has waited for."""
        return list(self._saves)

    @property
    def in_flight(self) -> list[RunningSave]:
        """Every save that has not ended, and the save that a call is about to begin."""
        beginning = self._beginning
        saves = self.handles if beginning is None or beginning in self.handles else [*self.handles, beginning]
        return [handle for handle in saves if not handle.done()]

    @property
    def is_free(self) -> bool:
        """True if the next save would begin without waiting for an earlier one."""
        return all(handle._written.is_set() for handle in self.handles)

    @property
    def is_saving(self) -> bool:
        """True while a save is in flight that a restart would not find yet."""
        return any(not handle._local.is_set() for handle in self.in_flight)

    def wait_recoverable(self) -> None:
        """Wait until a load would find every save in flight, or the save has failed. Raise nothing."""
        for handle in self.handles:
            handle._local.wait()

    def wait_written(self) -> None:
        """Wait until every host copy is written, or its save has ended. Then the next save may overwrite the copy."""
        for handle in self.handles:
            handle._written.wait()

    @contextmanager
    def call(self, action: str) -> Iterator[None]:
        """Reserve the checkpointer for the calling thread.

        Raises:
            CheckpointError: Another thread is in a call; or the caller is a subscriber of a save in flight; or the
                process was forked from the one that made the checkpointer.
        """
        if self.is_inherited:
            raise CheckpointError(
                f"cannot {action}: this Checkpointer belongs to process {self._process}, from which this process was "
                "forked. Make a Checkpointer in this process."
            )
        is_reserved = False
        try:
            with interrupts_held():
                is_reserved = self._calling.acquire(blocking=False)
            if not is_reserved:
                raise CheckpointError(
                    f"cannot {action}: another thread is in a call of the same Checkpointer. Only one thread at a time "
                    f"may save, load, wait or close. Give each thread its own Checkpointer, or wait for a save with "
                    f"its handle."
                )
            for handle in self.in_flight:
                handle.refuse_in_callback(action)
            yield
        finally:
            if is_reserved:
                self._calling.release()

    @contextmanager
    def beginning(self, handle: RunningSave) -> Iterator[None]:
        """Enclose a call that saves. An error of the call ends the save, unless the save is already in flight.

        Raises:
            CheckpointError: As :meth:`call`; or the same thread is in another call that saves.
        """
        with self.call(f"save {handle.path}"):
            if self._beginning is not None:
                raise CheckpointError(
                    f"cannot save {handle.path} during the save of {self._beginning.path}: code that this save "
                    f"called, or a signal handler, uses the same Checkpointer. Save before or after."
                )
            self._beginning = handle
            try:
                yield
            except BaseException as error:
                if handle not in self.handles:
                    handle.set_failed(_as_exception(error, handle.path))
                raise
            finally:
                self._beginning = None

    def start(
        self,
        handle: RunningSave,
        call: Call,
        save: Callable[[], events.SaveFinished],
        in_keeper: bool = False,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        """Run ``save`` in a thread, as a part of ``call``, and end the save with its result or its error.

        If no thread can be started, ``save`` runs in this call, since the other ranks wait for this rank.

        If this call raises, on Ctrl-C for example, :attr:`handles` tells whether the save goes on. A save that is not
        among them never runs.

        Args:
            call: The call whose collectives ``save`` runs.
            in_keeper: True if the save goes on without this process after the handover.
            on_start: Called when the save is entered into :attr:`handles`, while SIGINT is held back.
        """
        returning, take_device = threading.Event(), device_of_thread()

        def run() -> None:
            returning.wait(0.1)  # else the thread takes the GIL while thread.start() waits for it
            try:
                take_device()
                with together(call):
                    event = save()
                handle.set_published(event)
            except BaseException as error:  # otherwise callers would wait forever
                failure = _as_exception(error, handle.path)
                try:
                    logger.error("the background save of %s failed: %s", handle.path, failure)
                    logger.debug("the background save failed here:", exc_info=failure)
                    _without_our_frames(failure)
                finally:
                    handle.set_failed(failure)

        thread = threading.Thread(target=run, name=THREAD, daemon=in_keeper)  # wait_at_exit() waits
        _wait_when_the_program_ends()
        with interrupts_held():
            self._saves[handle] = thread
            _unattended.add(self)
            on_start()
            try:
                thread.start()
            except Exception:  # the process has as many threads as it may have
                pass
            finally:
                returning.set()
        if thread.ident is None:
            run()

    def wait_for_all(self) -> list[RunningSave]:
        """Wait until every save has ended.

        Returns:
            The saves that have ended, the same on every rank.
        """
        ended = self.handles
        for handle in ended:
            handle.wait_done()  # after a join that Ctrl-C interrupts, a thread counts as ended
            _join(self._saves[handle])
        self._saves.clear()
        _unattended.discard(self)
        return ended

    def drop_succeeded(self) -> None:
        """Drop the saves that succeeded. Failed saves stay until a caller waits for them."""
        for handle in self.handles:
            if handle.done() and handle.exception() is None:
                _join(self._saves.pop(handle))
        if not self._saves:
            _unattended.discard(self)

    def end_in_fork(self) -> None:
        """End the saves in a forked process, in which no thread would end them and a wait would never return."""
        for handle in self.handles:
            if not handle.done():
                handle.set_left_to_parent()
        self._saves.clear()

    def wait_at_exit(self) -> None:
        """Wait for the saves in flight at the end of a program that has not waited for them.

        After an error another rank may have died, and the launcher will restart this rank soon. So the wait then ends
        when keepers have taken over the saves.
        """
        if hasattr(sys, "last_value"):
            for handle in self.handles:
                handle.wait_turn()
            if any(not handle.done() for handle in self.handles):
                return
        for handle in self.handles:
            if self.warns_at_exit and not handle.done():
                logger.warning(
                    "the program ends while %s is being saved; it exits when the save is on disk. To see whether a "
                    "save succeeded, wait for its handle, or close the Checkpointer.",
                    handle.path,
                )
        for handle in self.wait_for_all():
            if (error := handle._take_error()) is not None:
                logger.error(
                    "%s was NOT saved, and the program ended without waiting for the save: %s", handle.path, error
                )


def _join(thread: threading.Thread) -> None:
    if thread.ident is not None:  # else it could not be started, and the caller ran in its place
        thread.join()


def _as_exception(error: BaseException, path: Where) -> Exception:
    """Return ``error``; SaveFailed in place of an error that is no ``Exception``, such as Ctrl-C."""
    if isinstance(error, Exception):
        return error
    failure = SaveFailed(f"cannot save {path}: the writer thread raised {type(error).__name__} ({error})")
    failure.__cause__ = error
    return failure


def _without_our_frames(failure: Exception) -> None:
    """Drop the frames of the thread from errors with a sufficient message.

    So a traceback shows the line at which the caller gets the error. The innermost frame of an OSError stays, and so do
    all frames of another cause.
    """
    error: BaseException | None = failure
    while isinstance(error, (CheckpointError, OSError)):
        innermost = error.__traceback__ if isinstance(error, OSError) else None
        while innermost is not None and innermost.tb_next is not None:
            innermost = innermost.tb_next
        error.__traceback__ = innermost
        error = error.__cause__ or error.__context__


def let_training_go_first() -> None:
    """Schedule the thread of a save, and the threads that it starts, so that they do not preempt a running thread.

    Without this the thread would preempt the training after each write. A lower priority would do more harm: on busy
    cores a thread that rarely runs keeps the GIL while it does not run, and the training waits for the GIL.

    A save calls this after its copy, for which the training may be waiting.
    """
    if threading.current_thread().name != THREAD:  # no thread could be started: this is a thread of the training
        return
    with suppress(AttributeError, OSError):  # not on Linux, or not permitted
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def first_unreported(ended: list[RunningSave]) -> Exception | None:
    """Return the first error that no caller has got, with later errors as notes. The caller raises it."""
    first: Exception | None = None
    for handle in ended:
        error = handle._take_error()
        if first is not None and error is not None:
            first.add_note(f"And the save of {handle.path} failed: {error}")
        first = first or error
    return first


_unattended: set[SaveQueue] = set()  # queues with saves that no caller has waited for


def wait_until_staged() -> None:
    """Wait until no save in flight in this process copies the memory of a state. Called before parameters change."""
    for queue in tuple(_unattended):
        for handle in queue.handles:
            handle.wait_staged()


def _end_all_in_fork() -> None:
    for queue in tuple(_unattended):
        queue.end_in_fork()
    _unattended.clear()


os.register_at_fork(after_in_child=_end_all_in_fork)


@functools.cache
def _wait_when_the_program_ends() -> None:
    def wait_for_all() -> None:
        for queue in tuple(_unattended):
            queue.wait_at_exit()

    before_threads_end(wait_for_all)
