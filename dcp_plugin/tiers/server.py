"""Server for requests of other processes: in a keeper for ranks and other keepers, in a loading rank for other ranks.

One table has the answer to each request. The rule: while the server works on a request, the other end gets signs of
life, so that slow work is not taken for a dead server.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dcp_plugin.core.errors import SaveFailed
from dcp_plugin.tiers.wire import BEAT, BUSY, Address, Channel, accept, shut

_MOST_UNPROVEN = 64
"""Most connections that have not authenticated yet. A further one ends the oldest, so that silent connections of other
users cannot use up the descriptors that ranks need."""
_PAUSE = 0.05


class Server:
    """Server with a thread for each connection, which answers requests until :meth:`close`.

    Args:
        address: The path of a Unix socket to make, or a host and a port. Port 0 is any free port.
        keys: The keys of the jobs that may connect over TCP. The caller may add keys later. Empty for a Unix socket.
        calls: Name of a request -> function of the arguments. The reply is its result, or the exception that it raises.
        streams: Name of a request -> function of the connection and the arguments. It replies itself, and sends or
            receives bytes on the connection. Its exception ends the connection.
    """

    def __init__(
        self,
        address: Address,
        keys: Collection[bytes],
        calls: Mapping[str, Callable[..., Any]],
        streams: Mapping[str, Callable[..., None]],
    ) -> None:
        self._keys, self._calls, self._streams = keys, calls, streams
        self._open: set[socket.socket] = set()
        self._unproven: dict[socket.socket, None] = {}
        """Connections that have not authenticated yet, the oldest first. The values have no meaning."""
        self._closed = False
        if isinstance(address, str):
            self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            with suppress(FileNotFoundError):
                os.unlink(address)
            self._listening.bind(address)
            os.chmod(address, 0o600)
            self._made = os.stat(address)
            self._listening.listen(128)
            self.address: Address = address
        else:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            self._listening = socket.create_server(address, family=family, backlog=128)
            self.address = (address[0], self._listening.getsockname()[1])
        threading.Thread(target=self._accept, name="dcp-serve", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listening.accept()[0]
                self._unproven[connection] = None
                for oldest in list(self._unproven)[:-_MOST_UNPROVEN]:
                    shut(oldest)
                    self._unproven.pop(oldest, None)
                threading.Thread(target=self._serve, args=(connection,), name="dcp-serve", daemon=True).start()
            except (OSError, RuntimeError):  # no more descriptors or threads: a state that passes
                if self._closed:
                    return
                time.sleep(_PAUSE)

    def _serve(self, connection: socket.socket) -> None:
        self._open.add(connection)
        try:
            channel = accept(connection, tuple(self._keys))
            self._unproven.pop(connection, None)
            while True:
                what, args = channel.receive()
                if what in self._streams:
                    self._streams[what](channel, *args)
                else:
                    self._reply(channel, what, args)
        except OSError:
            pass
        finally:
            self._open.discard(connection)
            self._unproven.pop(connection, None)
            connection.close()

    def _reply(self, channel: Channel, what: str, args: tuple[Any, ...]) -> None:
        """Send the reply to a request, and signs of life until the reply exists."""
        replies: list[tuple[str, Any]] = []
        worker = threading.Thread(
            target=lambda: replies.append(self._answer(what, args)), name="keeper-asked", daemon=True
        )
        worker.start()
        worker.join(BEAT)
        while worker.is_alive():
            channel.send((BUSY, None))
            worker.join(BEAT)
        channel.send(replies[0])

    def _answer(self, what: str, args: tuple[Any, ...]) -> tuple[str, Any]:
        try:
            if what not in self._calls:
                raise SaveFailed(f"a keeper has no request {what!r}")
            return "ok", self._calls[what](*args)
        except Exception as error:
            return "error", error

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._closed = True
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for connection in tuple(self._open):
            shut(connection)
        if isinstance(self.address, str):
            with suppress(OSError):  # unless another server has taken its place
                if os.path.samestat(os.stat(self.address), self._made):
                    os.unlink(self.address)


def send_range(channel: Channel, path: Path | None, offset: int, count: int) -> None:
    """Reply with the number of bytes of a range that exist in a file, and send them. None is a file that is not
    served."""
    try:
        if path is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        channel.send(("error", error))
        return
    try:
        count = max(0, min(count, os.fstat(file).st_size - offset))
        channel.send(("ok", count))
        channel.send_file(file, offset, count)
    finally:
        os.close(file)
