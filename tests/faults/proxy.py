"""A proxy between a client and an object store: it notes every request, and makes the faults of networks and stores.

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
from typing import Any, BinaryIO, Literal
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

    def done(self) -> None:
        """The server has done what was asked; the client has not heard of it."""

    def upload(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        return pieces

    def download(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        return pieces

    def answered(self) -> None:
        """The client's kernel has all of the answer."""


@dataclass
class Answer(Fault):
    """The store refuses: 500 InternalError, 503 SlowDown, 403 AccessDenied, 404 NoSuchBucket, 400 ExpiredToken, ..."""

    status: int
    code: str

    def arrived(self, request: Request, closed: threading.Event) -> bytes:
        request.status = self.status
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f"<Error><Code>{self.code}</Code><Message>As the test wants it</Message><RequestId>1</RequestId></Error>"
        )
        head = f"HTTP/1.1 {self.status} No\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
        return (head if request.method == "HEAD" else head + body).encode()


@dataclass
class Cut(Fault):
    """The connection ends.

    Args:
        moment: "before" the server sees the request; "after" it has done it, which the client cannot tell from before;
            or in the answer's "body".
        at: For "body", after so many bytes.
        reset: By RST. False: by FIN, so that a body is cut short in an orderly way.
    """

    moment: Literal["before", "after", "body"]
    at: int = 0
    reset: bool = True

    def arrived(self, request: Request, closed: threading.Event) -> None:
        if self.moment == "before":
            raise Hangup(self.reset)

    def done(self) -> None:
        if self.moment == "after":
            raise Hangup(self.reset)

    def download(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        left = self.at
        for piece in pieces:
            yield piece[:left] if self.moment == "body" else piece
            left -= len(piece)
            if self.moment == "body" and left <= 0:
                raise Hangup(self.reset)


@dataclass
class Flip(Fault):
    """One bit of the byte at ``at`` is another, in the answer's body, or in the request's (``up``)."""

    at: int
    up: bool = False

    def upload(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        return self._flipped(pieces) if self.up else pieces

    def download(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        return pieces if self.up else self._flipped(pieces)

    def _flipped(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        here = self.at
        for piece in pieces:
            inside = 0 <= here < len(piece)
            yield piece[:here] + bytes([piece[here] ^ 1]) + piece[here + 1 :] if inside else piece
            here -= len(piece)


class Ignore(Fault):
    """The store takes no notice of these headers, say of the conditions of a PUT: some stores do not know them."""

    def __init__(self, *headers: str) -> None:
        self.headers = headers

    def arrived(self, request: Request, closed: threading.Event) -> None:
        for name in self.headers:
            del request.headers[name]


@dataclass
class Silence(Fault):
    """Nothing comes back for so many seconds, or until the proxy ends; then the connection is closed."""

    seconds: float | None = None

    def arrived(self, request: Request, closed: threading.Event) -> None:
        closed.wait(self.seconds)
        raise Hangup(reset=False)


class Slow(Fault):
    """Each body goes at so many bytes per second."""

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second

    def arrived(self, request: Request, closed: threading.Event) -> None:
        self._closed = closed

    def upload(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            for start in range(0, len(piece), 1 << 14):
                part = piece[start : start + (1 << 14)]
                self._closed.wait(len(part) / self.bytes_per_second)
                yield part

    download = upload


@dataclass
class Call(Fault):
    """A function is called, say one that kills the client, when a request has "arrived", is "done" or "answered"."""

    function: Callable[[], object]
    moment: Literal["arrived", "done", "answered"] = "arrived"

    def arrived(self, request: Request, closed: threading.Event) -> None:
        self._at("arrived")

    def done(self) -> None:
        self._at("done")

    def answered(self) -> None:
        self._at("answered")

    def _at(self, moment: str) -> None:
        if moment == self.moment:
            self.function()


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
        fault.done()
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
