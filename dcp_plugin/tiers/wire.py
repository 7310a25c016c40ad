"""Requests and ranges of files between processes of one job: ranks and their keeper, keepers, and ranks that load.

A request is a name with arguments. The reply is a value, or the exception that the other end raised.

Processes of one host use a Unix socket, and both ends must belong to the same user. Hosts use TCP, and each end first
proves that it knows the key of the job (HMAC-SHA256 over random numbers of both ends). As in process groups, nothing is
encrypted. Messages are :mod:`~dcp_plugin.tiers.plain`, and bytes of files follow a message without a copy.

Every wait on the other end is bounded.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from dcp_plugin.core.errors import SaveFailed
from dcp_plugin.core.ranks.collectives import Attempt
from dcp_plugin.tiers import plain

BUSY = "busy"
"""Marker that a server sends while it works on a request."""
BEAT = 2.0
"""Seconds between two markers."""
_LENGTH = struct.Struct("!Q")
_NUMBER = 32
_MOST_MESSAGE = 1 << 32
_HANDSHAKE_SECONDS = 20.0
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 10,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 4,
    socket.TCP_USER_TIMEOUT: 30_000,
}
"""After about 30 seconds of a dead link, what waits on it fails."""

Address = str | tuple[str, int]
"""The path of a Unix socket, or a host and a port."""
NO_ADDRESS: Address = ("127.0.0.1", 0)
"""The address of a keeper whose job has one node, which no other keeper needs."""


class KeeperLost(SaveFailed):
    """A keeper has missed its deadline. It may be stopped, and continue at any time."""


plain.CLASSES[KeeperLost.__name__] = KeeperLost


def new_key() -> bytes:
    """Return a new secret for one job."""
    return secrets.token_bytes(_NUMBER)


def _name_of(key: bytes) -> bytes:
    """Return a name of a key, which reveals nothing about the key."""
    return hashlib.sha256(b"dcp_plugin key" + key).digest()[:8]


class Channel:
    """One connection. One thread at a time uses it.

    All methods raise OSError if the other end is gone, and TimeoutError, which is one, if it does not answer.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.settimeout(None)
        self.heard = 0.0
        """Time of the last sign of life of the other end, on the monotonic clock; 0 if there was none."""

    def ask(self, seconds: float, what: str, *args: Any) -> Attempt[Any]:
        """Return the reply to a request: a value, or the failure of the other end.

        Args:
            seconds: Seconds in which the other end has to give a sign of life, now and on this connection later.
        """
        self._socket.settimeout(seconds)
        self.send((what, args))
        return self.reply()

    def reply(self) -> Attempt[Any]:
        """Return the next reply on the connection, as :meth:`ask` does."""
        answer, value = BUSY, None
        while answer == BUSY:
            answer, value = self.receive()
            self.heard = time.monotonic()
        return Attempt(None, value) if answer == "error" else Attempt(value)

    def send(self, message: Any) -> None:
        body = plain.encode(message)
        self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> Any:
        """Return the next message."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > _MOST_MESSAGE:
            raise OSError(errno.EPROTO, "not a message")
        try:
            return plain.decode(self._exactly(length))
        except ValueError as error:
            raise OSError(errno.EPROTO, f"not a message: {error}") from error

    def send_file(self, file: int, offset: int, count: int) -> None:
        """Send a range of an open file, from the page cache, without a copy."""
        with open(file, "rb", buffering=0, closefd=False) as source:
            try:
                sent = self._socket.sendfile(source, offset, count) if count else 0
            except ValueError:  # another thread has closed the socket
                raise OSError(errno.EBADF, "the channel is closed") from None
            if sent < count:
                raise OSError(errno.EIO, "the file is shorter than it was")

    def receive_into(self, memory: Sequence[memoryview]) -> None:
        """Fill the pieces of memory in turn."""
        for piece in memory:
            while len(piece):
                count = self._socket.recv_into(piece)
                if not count:
                    raise ConnectionResetError("the other end has closed")
                piece = piece[count:]

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        self.receive_into([memoryview(data)])
        return data

    def close(self) -> None:
        shut(self._socket)
        self._socket.close()


def connect(address: Address, key: bytes = b"", timeout: float = 10.0) -> Channel:
    """Connect to a :class:`~dcp_plugin.tiers.server.Server`.

    Args:
        key: Of the job; empty for the Unix socket of the keeper of this node.
        timeout: Seconds until both ends have authenticated.

    Raises:
        TimeoutError: The other end is there, and does not answer.
        OSError: No process listens, or it does not know the key, or is another user's.
    """
    deadline = time.monotonic() + timeout
    if isinstance(address, str):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.settimeout(timeout)
    else:
        connection = socket.create_connection(address, timeout)
    try:
        if isinstance(address, str):
            connection.connect(address)
            _refuse_other_user(connection)
        else:
            _prove(connection, key, deadline, address)
    except BlockingIOError as error:  # more connections wait than the kernel queues
        connection.close()
        raise TimeoutError(errno.ETIMEDOUT, "the other end accepts no connection") from error
    except BaseException:
        connection.close()
        raise
    return Channel(connection)


def _prove(connection: socket.socket, key: bytes, deadline: float, address: Address) -> None:
    """Prove to the other end, which proves it as well, that this process knows the key of the job."""
    _tune(connection)
    mine = secrets.token_bytes(_NUMBER)
    try:
        theirs = _read(connection, _NUMBER, deadline)
        connection.sendall(_name_of(key) + mine + _proof(key, b"client", theirs, mine))
        proof = _read(connection, _NUMBER, deadline)
    except ConnectionResetError:
        reason = f"{address} closed the handshake: its keeper has just ended, or is of another job"
        raise PermissionError(errno.EACCES, reason) from None
    if not hmac.compare_digest(proof, _proof(key, b"server", theirs, mine)):
        raise PermissionError(errno.EACCES, f"{address} is of another job")


def accept(connection: socket.socket, keys: Sequence[bytes]) -> Channel:
    """Return a connection that another process has made with :func:`connect`, after its proof of the key.

    Args:
        keys: The keys of the jobs that may connect over TCP.

    Raises:
        OSError: The proof is wrong, or the process belongs to another user.
    """
    connection.settimeout(_HANDSHAKE_SECONDS)
    if connection.family == socket.AF_UNIX:
        _refuse_other_user(connection)
        return Channel(connection)
    _tune(connection)
    mine = secrets.token_bytes(_NUMBER)
    connection.sendall(mine)
    answer = _read(connection, 8 + 2 * _NUMBER, time.monotonic() + _HANDSHAKE_SECONDS)
    name, theirs, proof = answer[:8], answer[8 : 8 + _NUMBER], answer[8 + _NUMBER :]
    key = next((key for key in keys if _name_of(key) == name), None)
    if key is None or not hmac.compare_digest(proof, _proof(key, b"client", mine, theirs)):
        raise PermissionError(errno.EACCES, "another job")
    connection.sendall(_proof(key, b"server", mine, theirs))
    return Channel(connection)


def _proof(key: bytes, who: bytes, server: bytes, client: bytes) -> bytes:
    return hmac.new(key, who + server + client, hashlib.sha256).digest()


def _read(connection: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionResetError
        data += piece
    return data


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _refuse_other_user(connection: socket.socket) -> None:
    """Refuse a connection of another user; the kernel names the user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    if struct.unpack("3i", credentials)[1] != os.geteuid():
        raise PermissionError(errno.EACCES, "the other end of the socket is another user's")


def shut(connection: socket.socket) -> None:
    """Wake the thread that waits in a connection: it ends."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def own_address() -> str:
    """Return the address of this host that the other hosts of the job can probably reach: that of the interface that
    leads to ``MASTER_ADDR``."""
    for target in filter(None, (os.environ.get("MASTER_ADDR", ""), socket.gethostname())):
        with suppress(OSError):
            family, _, _, _, where = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(where)  # sends nothing
                address = str(probe.getsockname()[0])
            if not address.startswith("127.") and address != "::1":
                return address
    return "127.0.0.1"
