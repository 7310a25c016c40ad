"""A call that all ranks make together, such as a save: the arguments that must be equal, and the caller's line.

If ranks made different calls, each would misread the messages of the others, and a checkpoint could mix two steps. Each
rank sends a digest of its call before its results (:mod:`dcp_plugin.core.ranks.rank_group`). While a rank waits, a
warning names the ranks that have not arrived and the line of the caller.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from dcp_plugin.core.paths import Where, resolved

logger = logging.getLogger("dcp_plugin")

REPORT_AFTER = 30.0
"""Seconds after which a waiting rank logs the names of the missing ranks."""
_INTERNAL = {
    *("dcp_plugin", "torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers"),
    *("contextlib", "functools"),
}
"""Top-level packages whose frames are not part of the user's program."""


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
