"""SIGTERM with a grace period, as SLURM and Kubernetes send it: finish the saves in flight, then do as before.

Only for those who ask (``finish_on_sigterm=True``). Whatever handler was there is called afterwards; where there was
none, the process ends by the signal, as it would have done. Children that inherit the handler (the workers of a
DataLoader, which are ended with SIGTERM) have no saves of their own to wait for.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from types import FrameType
from typing import Any

from dcp_plugin.background import Background

_watched: list[Background] = []
_previous: Any = None
_owner = 0


def watch(background: Background) -> None:
    """Finish its saves before SIGTERM takes effect, until :func:`forget`. Does nothing a second time."""
    global _previous, _owner
    if background in _watched:
        return
    if threading.current_thread() is not threading.main_thread():
        warnings.warn("finish_on_sigterm has no effect: signals are handled in the main thread alone", stacklevel=3)
        return
    _watched.append(background)
    if signal.getsignal(signal.SIGTERM) is not _finish_then_chain:
        _previous, _owner = signal.signal(signal.SIGTERM, _finish_then_chain), os.getpid()


def forget(background: Background) -> None:
    """The last one to be forgotten gives SIGTERM back, unless somebody has put a handler before ours."""
    if background not in _watched:
        return
    _watched.remove(background)
    ours = signal.getsignal(signal.SIGTERM) is _finish_then_chain
    if ours and not _watched and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _previous or signal.SIG_DFL)


def _finish_then_chain(number: int, frame: FrameType | None) -> None:
    if os.getpid() == _owner:
        in_flight = [handle for background in _watched for handle in background.handles if not handle.done()]
        if in_flight:
            paths = ", ".join(str(handle.path) for handle in in_flight)
            os.write(2, f"SIGTERM: finishing the save of {paths} first\n".encode())
        # What was interrupted may hold the lock of a handle's event: look, and do not wait for it.
        while not all(handle.done() for handle in in_flight):
            time.sleep(0.02)
    if callable(_previous):
        _previous(number, frame)
    elif _previous != signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
