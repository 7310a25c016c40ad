"""The faults of networks and stores that a :class:`~tests.faults.proxy.Proxy` makes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from tests.faults.proxy import Fault, Hangup, Request


@dataclass
class Answer(Fault):
    """The store refuses: 500 InternalError, 503 SlowDown, 403 AccessDenied, 404 NoSuchBucket, 400 ExpiredToken, ...

    Args:
        though_done: It says so when it has done what was asked.
    """

    status: int
    code: str
    though_done: bool = False

    def arrived(self, request: Request, closed: threading.Event) -> bytes | None:
        self._request = request
        return None if self.though_done else self._answer(request)

    def done(self) -> bytes | None:
        return self._answer(self._request) if self.though_done else None

    def _answer(self, request: Request) -> bytes:
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
