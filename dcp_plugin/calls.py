"""A call that all ranks make together, such as a save: what has to be the same on all of them, and who makes it.

Ranks that make different calls would take each other's messages for their own: one checkpoint would mix two steps. So
each rank sends 8 bytes that stand for its call with the first message of every exchange (:mod:`dcp_plugin.ranks`).
While a rank waits for the others, a warning names the ranks that have not come, and the line of the caller.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from dcp_plugin.paths import Where, resolved

logger = logging.getLogger("dcp_plugin")

REPORT_AFTER = 30.0
"""Seconds after which a rank logs the names of the ranks that it waits for."""
_INTERNAL = {
    *("dcp_plugin", "torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers"),
    *("contextlib", "functools"),
}
"""Top-level packages whose frames are not the caller's."""


class Call:
    """One call of this rank that all ranks make together.

    Args:
        action: What every rank has to do, for the question "does every rank call save?".
        what: What this rank does, for messages such as "rank 1 saves run/step-10 (step 10)".
        keys: What has to be the same on all ranks. Two ranks make the same call if they have a key in common. Without
            keys any two calls are the same.
    """

    def __init__(self, action: str, what: str, keys: Sequence[str] = ()) -> None:
        self.action, self.what, self.keys = action, what, tuple(keys)
        self.caller = _caller()
        self.has_met = False
        """Whether all ranks have come to this call."""

    @classmethod
    def save(cls, path: Where, step: int | None) -> Call:
        """A save of one step to one path. Ranks may reach that through different links."""
        paths = dict.fromkeys(map(str, (resolved(path), path)))
        what = f"saves {path}" + ("" if step is None else f" (step {step})")
        return cls("call save", what, [f"save {one} {step}" for one in paths])

    @classmethod
    def load(cls, path: object) -> Call:
        """A load. Each node may have a copy of the checkpoint at a path of its own: the load compares what it opens."""
        return cls("call load", f"loads {path}", ["load"])

    def digest(self, step: str) -> int:
        """8 bytes that stand for this call and a step of it."""
        text = f"{verb_of(step)} {''.join(self.keys[:1])}"
        return int.from_bytes(
            hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).digest(), signed=True
        )

    def still_waiting(self, missing: str) -> str:
        """A sentence that names the missing ranks. It asks no question once all ranks have come to this call."""
        return f"still waiting for {missing}" + ("." if self.has_met else f"; does every rank {self.action}?")

    def report(self, missing: str) -> None:
        """Log the names of the missing ranks, if there are any."""
        if missing:
            logger.warning("%s (called at %s)", self.still_waiting(missing), self.caller)

    @contextmanager
    def reporting(self, missing: Callable[[], str]) -> Iterator[None]:
        """Wait for the other ranks inside the block; :data:`REPORT_AFTER` seconds later, log the missing ones.

        Args:
            missing: Returns the names of the missing ranks; empty to log nothing. Another thread calls it while the
                block waits.
        """
        if self.has_met:
            yield
            return
        timer = threading.Timer(REPORT_AFTER, lambda: self.report(missing()))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        self.has_met = True


def verb_of(step: str) -> str:
    """The first word of a step such as "write run/step-10". Ranks may write the rest of it in different ways."""
    return step.partition(" ")[0]


_current: ContextVar[Call | None] = ContextVar("dcp_plugin_call", default=None)


def current_call(step: str) -> Call:
    """The call that this thread makes. Outside of one, the step alone."""
    return _current.get() or Call(step, f"is about to {step}")


@contextmanager
def together(call: Call) -> Iterator[None]:
    """Exchange messages with other ranks inside the block as a part of this call."""
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)


def _caller() -> str:
    """File and line of the innermost frame that belongs to the user's program."""
    frame = sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in _INTERNAL:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
