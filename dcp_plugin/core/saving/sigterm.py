"""Handler of SIGTERM with a grace period (SLURM, Kubernetes): finish the saves in flight, then act as before.

It is active only with ``finish_on_sigterm=True``. After the saves it calls the previous handler; without one, the
signal ends the process. Children that inherit the handler (workers of a DataLoader, which are ended with SIGTERM) have
no saves of their own to wait for.

The handler interrupts the main thread anywhere: in the middle of ``save``, or while the thread holds a lock that the
save needs (of a log, of a progress bar). The handler therefore does not wait. A thread waits and then raises the signal
again, and the training continues until then. A second signal meanwhile has no effect: torchrun and SLURM both send one.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
import weakref
from contextlib import suppress
from types import FrameType
from typing import Any, Literal

from dcp_plugin.core.errors import warn
from dcp_plugin.core.saving.queue import RunningSave, SaveQueue

_watched: weakref.WeakKeyDictionary[SaveQueue, float] = weakref.WeakKeyDictionary()
"""Queues, and the seconds after which SIGTERM takes effect in any case."""
_previous: Any = None
_stage: Literal["", "finishing", "finished"] = ""
"""Progress of the response to a SIGTERM."""


def watch(queue: SaveQueue, limit: float) -> None:
    """Finish the saves of ``queue`` before SIGTERM takes effect, until :func:`forget`. A second call does nothing.

    Args:
        limit: Seconds after which SIGTERM takes effect in any case.
    """
    global _previous, _stage
    if queue in _watched:
        return
    ours = signal.getsignal(signal.SIGTERM) is _finish_then_chain
    if not ours and threading.current_thread() is not threading.main_thread():
        warn(
            "finish_on_sigterm has no effect: Python handles signals only in the main thread, and this is another "
            "thread",
            stacklevel=3,
        )
        return
    _watched[queue] = limit
    if not ours:
        _previous, _stage = signal.signal(signal.SIGTERM, _finish_then_chain), ""


def forget(queue: SaveQueue) -> None:
    """Stop watching ``queue``. The last call restores the handler of SIGTERM, unless ours was replaced."""
    if queue not in _watched:
        return
    del _watched[queue]
    ours = signal.getsignal(signal.SIGTERM) is _finish_then_chain
    if ours and not _watched and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _previous or signal.SIG_DFL)


def _finish_then_chain(number: int, frame: FrameType | None) -> None:
    global _stage
    if _stage == "finishing":
        return
    ours = signal.getsignal(signal.SIGTERM) is _finish_then_chain
    in_flight, limit = _in_flight()
    if not _stage and in_flight:
        _stage = "finishing"
        if ours and _start(in_flight, limit):
            return
        try:  # a handler that calls ours may end the process as soon as ours returns
            _finish(in_flight, limit)
        finally:
            _stage = ""
    _stage = ""
    if callable(_previous):
        _previous(number, frame)
    elif ours and _previous != signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _in_flight() -> tuple[list[RunningSave], float]:
    busy = [(queue.in_flight, limit) for queue, limit in tuple(_watched.items())]
    return [save for saves, _ in busy for save in saves], max((limit for saves, limit in busy if saves), default=0.0)


def _start(saves: list[RunningSave], limit: float) -> bool:
    """Start the waiting thread without ``threading``, whose locks the main thread may hold."""

    def finish_and_give_again() -> None:
        global _stage
        _finish(saves, limit)
        _stage = "finished"
        signal.pthread_kill(main, signal.SIGTERM)

    main = _thread.get_ident()  # handlers run in the main thread
    try:
        _thread.start_new_thread(finish_and_give_again, ())
    except RuntimeError:  # too many threads, or the interpreter is about to end
        return False
    return True


def _finish(saves: list[RunningSave], limit: float) -> None:
    """Poll the saves instead of waiting: the interrupted code may hold the lock of a handle's event."""
    began = time.monotonic()
    _say(f"finishing the save of {', '.join(str(save.path) for save in saves)} first, for at most {limit:g} s")
    while not all(save.done() for save in saves) and time.monotonic() - began < limit:
        time.sleep(0.02)
    for save in saves:
        how = f"was NOT saved: {save.exception()}" if save.exception() else "is saved"
        _say(f"{save.path} {how if save.done() else f'is not saved yet after {limit:g} s, and is given up'}")


def _say(line: str) -> None:
    with suppress(OSError):  # the reader (torchrun, srun) may have ended
        os.write(2, f"SIGTERM: {line}\n".encode())


def _forget_all() -> None:
    """Forget all saves in a forked process; the handler stays for saves of that process."""
    global _stage
    _watched.clear()
    _stage = ""


os.register_at_fork(after_in_child=_forget_all)
