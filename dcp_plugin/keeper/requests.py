"""Requests to another process of the job: of a rank to its keeper, between keepers, and between ranks that load.

A request is a name with arguments. The reply is a value, or the exception that the other end raised. Every request gets
its connection, its deadlines and its reply here.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from typing import Any

from dcp_plugin.errors import CheckpointError, SaveFailed
from dcp_plugin.keeper.local_checkpoints import shown
from dcp_plugin.keeper.wire import Address, Channel, connect
from dcp_plugin.ranks import Attempt

BUSY = "busy"
"""Marker that a server sends while it works on a request."""
BEAT = 2.0
"""Seconds between two markers."""

logger = logging.getLogger("dcp_plugin.keeper")


class KeeperLost(SaveFailed):
    """A keeper has missed its deadline. It may be stopped, and continue at any time."""


class Requests:
    """Requests to one server over one connection, which the first of them opens. One thread at a time makes them.

    Args:
        key: Key of the job; empty for the Unix socket of the keeper of this node.
        connect_seconds: Seconds until both ends have authenticated.
    """

    def __init__(self, address: Address, key: bytes = b"", connect_seconds: float = 10.0) -> None:
        self._address, self._key, self._connect_seconds = address, key, connect_seconds
        self._channel: Channel | None = None
        self.heard = 0.0
        """Time of the last sign of life of the other end, on the monotonic clock; 0 if there was none."""

    def connect(self) -> Channel:
        """Return the connection, on which bytes follow some requests. Raises OSError."""
        if self._channel is None:
            self._channel = connect(self._address, self._key, self._connect_seconds)
        return self._channel

    def ask(self, seconds: float, what: str, *args: Any) -> Attempt[Any]:
        """Return the reply to a request: a value, or the failure of the other end.

        Args:
            seconds: Seconds in which the other end has to give a sign of life.

        Raises:
            TimeoutError: It gives none.
            OSError: The connection has failed.
        """
        channel = self.connect()
        channel.timeout(seconds)
        channel.send((what, args))
        return self.reply(channel)

    def reply(self, channel: Channel) -> Attempt[Any]:
        """Return the next reply on the connection, as :meth:`ask` does."""
        answer, value = BUSY, None
        while answer == BUSY:
            answer, value = channel.receive()
            self.heard = time.monotonic()
        return Attempt(None, value) if answer == "error" else Attempt(value)

    def close(self) -> None:
        """Close the connection: later requests fail."""
        if self._channel is not None:
            self._channel.close()


def sendable(error: Exception) -> Exception:
    """Return an exception for another process: of a class that it knows, and without paths through descriptors."""
    if isinstance(error, CheckpointError):
        return type(error)(shown(str(error)))
    if isinstance(error, OSError):
        name = None if error.filename is None else shown(str(error.filename))
        return OSError(error.errno or errno.EIO, error.strerror or str(error), name)
    logger.error("a request has failed", exc_info=error)
    return SaveFailed(
        f"a request to the keeper on {socket.gethostname()} has failed: {type(error).__name__}: {shown(str(error))}"
    )
