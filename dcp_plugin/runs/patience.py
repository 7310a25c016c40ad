"""Repetition of reads that fail with a transient error of the file system."""

from __future__ import annotations

import errno
from collections.abc import Callable
from time import monotonic, sleep
from typing import TypeVar

from dcp_plugin.errors import CheckpointUnreadable
from dcp_plugin.paths import Where

LOST_AND_FOUND = "lost+found"
"""Directory that mkfs makes at the top of a volume. Only root can read it."""
_MAY_PASS = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN}
_PATIENCE = 10.0
_PAUSE = 0.5

T = TypeVar("T")


class Patience:
    """Retry of reads that fail with a transient error, for 10 s in total."""

    def __init__(self) -> None:
        self._until: float | None = None

    def read(self, read: Callable[[], T]) -> T:
        """Return the result of ``read``.

        Raises:
            OSError, CheckpointUnreadable: The last failure of ``read``.
        """
        while True:
            try:
                return read()
            except (OSError, CheckpointUnreadable) as error:
                if not may_pass(error):
                    raise
                now = monotonic()
                if self._until is None:
                    self._until = now + _PATIENCE
                if now >= self._until:
                    raise
            sleep(_PAUSE)


def may_pass(error: Exception) -> bool:
    """Return whether the file system failed with an error after which the same read may succeed."""
    return _code_of(error) in _MAY_PASS


def _code_of(error: Exception) -> int | None:
    cause = error if isinstance(error, OSError) else error.__cause__
    return cause.errno if isinstance(cause, OSError) else None


def cannot_read(path: Where, error: Exception) -> CheckpointUnreadable:
    """Return the error to raise for a path that cannot be read, with its errno."""
    if isinstance(error, CheckpointUnreadable):
        return error
    code = _code_of(error) or 0
    return CheckpointUnreadable(f"{path} cannot be read: [Errno {code}] {getattr(error, 'strerror', None) or error}")
