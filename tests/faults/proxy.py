"""A proxy between a client and an object store: it notes every request, and makes the faults of ``network.py``.

It passes HTTP/1.1 on as it comes, the ``Host`` header too, so that signatures stay right, and holds no body whole::

    with Proxy(server.url) as proxy:
        proxy.on(where("PUT", ".metadata"), Answer(503, "SlowDown"), times=2)
        save_to(proxy.url)
        assert proxy.count(where("PUT", ".metadata")) == 3
"""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPMessage, parse_headers
from typing import Any, BinaryIO
from urllib.parse import parse_qsl, unquote, urlsplit

_PIECE = 1 << 18


@dataclass
class Request:
    """One request, as far as it has come. ``sent`` and ``received`` count the bytes of its two bodies.

    ``status`` is the server's, or that of a fault that answers; 0 if there was none.
    """

    number: int
    method: str
    path: str
    query: dict[str, str]
    headers: HTTPMessage = field(repr=False)
    status: int = 0
    sent: int = 0
    received: int = 0

    @property
    def range(self) -> str:
        return str(self.headers.get("Range", ""))


Matches = Callable[[Request], bool]


def where(method: str = "", path: str = "", query: str = "") -> Matches:
    """The requests with this method, whose path (that of the URL, before any ``?``) ends so, and that ask for this."""
    return lambda request: (
        method in ("", request.method) and request.path.endswith(path) and (not query or query in request.query)
    )


class Hangup(Exception):
    """The client's connection is closed: by RST (``reset``) or by FIN."""

    def __init__(self, reset: bool) -> None:
        self.reset = reset


class Fault:
    """What happens to a request at each moment of it; here: nothing."""

    def arrived(self, request: Request, closed: threading.Event) -> bytes | None:
        """The head has arrived. What is returned is the whole answer: then the server is not asked.

        ``closed`` is set when the proxy ends.
        """
        return None

    def done(self) -> bytes | None:
        """The server has done what was asked; the client has not heard of it. What is returned is the whole answer
        instead of the server's."""
        return None

    def upload(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        return pieces

    def download(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        return pieces

    def answered(self) -> None:
        """The client's kernel has all of the answer."""


@dataclass
class _Rule:
    matches: Matches
    fault: Fault
    skip: int
    times: int | None


class Proxy:
    """A proxy before ``target``, at ``url`` until its block ends. ``requests`` are in the order in which they came."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self.target = (parts.hostname, parts.port)
        self.requests: list[Request] = []
        self.closed = threading.Event()
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Connection)
        self._server.proxy = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()

    def on(self, matches: Matches, fault: Fault, skip: int = 0, times: int | None = 1) -> None:
        """Do this to the requests that match: after the first ``skip`` of them to ``times`` (None: to all).

        A request gets one fault: that of the first rule that wants it.
        """
        with self._lock:
            self._rules.append(_Rule(matches, fault, skip, times))

    def count(self, matches: Matches) -> int:
        return sum(map(matches, list(self.requests)))

    def forget(self) -> None:
        """There are no rules, and no request was noted."""
        with self._lock:
            self.requests, self._rules = [], []

    def note(self, method: str, target: str, headers: HTTPMessage) -> tuple[Request, Fault]:
        path, _, query = target.partition("?")
        with self._lock:
            asked = dict(parse_qsl(query, keep_blank_values=True))
            request = Request(len(self.requests), method, unquote(path), asked, headers)
            self.requests.append(request)
            for rule in self._rules:
                if rule.times == 0 or not rule.matches(request):
                    continue
                if rule.skip:
                    rule.skip -= 1
                    continue
                rule.times = None if rule.times is None else rule.times - 1
                return request, rule.fault
        return request, Fault()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    proxy: Proxy


class _Connection(socketserver.StreamRequestHandler):
    """A client's connection, and for each of its requests one to the server."""

    server: _Server
    disable_nagle_algorithm = True

    def handle(self) -> None:
        try:
            while self._pass_on():
                pass
        except Hangup as hangup:
            if hangup.reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()  # with the file below, this is what sends the RST
        except OSError:
            pass  # the client has been killed, or the server

    def finish(self) -> None:
        with suppress(OSError):
            super().finish()

    def _pass_on(self) -> bool:
        """One request; whether there may be another."""
        if not (line := self.rfile.readline()):
            return False
        method, target, _ = line.decode("latin-1").split()
        headers = parse_headers(self.rfile)
        request, fault = self.server.proxy.note(method, target, headers)
        if headers.get("Expect"):
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            del headers["Expect"]
        body = _body(self.rfile, headers)
        if (answer := fault.arrived(request, self.server.proxy.closed)) is not None:
            for _ in body:
                pass
            self.wfile.write(answer)
            return True
        with socket.create_connection(self.server.proxy.target) as server, server.makefile("rb") as answers:
            server.sendall(_head(line, headers))
            for piece in fault.upload(body):
                request.sent += len(piece)
                server.sendall(_framed(piece, headers))
            server.sendall(_end(headers))
            return self._answer(answers, request, fault)

    def _answer(self, source: BinaryIO, request: Request, fault: Fault) -> bool:
        if not (line := source.readline()):
            raise Hangup(reset=True)
        headers = parse_headers(source)
        request.status = int(line.split()[1])
        if (instead := fault.done()) is not None:
            self.wfile.write(instead)
            return True
        bodiless = request.method == "HEAD" or request.status in (204, 304)
        self.wfile.write(_head(line, headers))
        for piece in fault.download(iter(()) if bodiless else _body(source, headers)):
            request.received += len(piece)
            self.wfile.write(_framed(piece, headers))
        self.wfile.write(b"" if bodiless else _end(headers))
        fault.answered()
        return headers.get("Connection", "").lower() != "close"


def _head(line: bytes, headers: HTTPMessage) -> bytes:
    return line + b"".join(f"{name}: {value}\r\n".encode("latin-1") for name, value in headers.items()) + b"\r\n"


def _body(source: Any, headers: HTTPMessage) -> Iterator[bytes]:
    """The pieces of a body, as they come, without what stands between chunks."""
    if not headers.get("Transfer-Encoding"):
        yield from _pieces(source, int(headers.get("Content-Length", 0)))
        return
    while size := int(source.readline().split(b";")[0], 16):
        yield from _pieces(source, size)
        source.readline()
    source.readline()


def _pieces(source: Any, size: int) -> Iterator[bytes]:
    while size:
        if not (piece := source.read1(min(size, _PIECE))):
            raise Hangup(reset=True)
        size -= len(piece)
        yield piece


def _framed(piece: bytes, headers: HTTPMessage) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece) if headers.get("Transfer-Encoding") else piece


def _end(headers: HTTPMessage) -> bytes:
    return b"0\r\n\r\n" if headers.get("Transfer-Encoding") else b""
