"""A bucket server whose own cost is small, for measuring clients: what moto (all in Python) takes would hide them.

``python -m benchmarks._s3_server`` prints the address that it listens on and serves until its input ends. Any bucket
is there. Objects are in memory, so nothing is left of them afterwards. Bytes are received into it and sent from it by
``sendfile``; Python sees the headers only. It speaks as much of the protocol of S3 as
the clients of ``benchmarks/`` ask for, conditional writes included, and checks no signatures and no checksums.
A copy shares the memory of its source, as a store does that copies by reference.

``GET /-/counts`` tells what has been asked for since the server began.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from mmap import mmap
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape


class Refused(Exception):
    """Answered with a status and a code of S3."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class Memory:
    """The bytes of a body. Memory that objects no longer need is used again: new pages would cost more than receiving
    into old ones (0.8 against 2.5 GB/s)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = _free_memory[max(12, (size - 1).bit_length())]
        with suppress(IndexError):
            self.fd, self.bytes = self._free.pop()
            return
        self.fd, capacity = os.memfd_create("object"), 1 << max(12, (size - 1).bit_length())
        os.truncate(self.fd, capacity)
        self.bytes = mmap(self.fd, capacity)

    def __del__(self) -> None:
        self._free.append((self.fd, self.bytes))


@dataclass(frozen=True)
class Object:
    """Pieces of memory, one per part: what is completed, copied or replaced moves no bytes."""

    pieces: list[Memory]
    meta: dict[str, str] = field(default_factory=dict)
    etag: str = field(default_factory=lambda: f'"{next(_numbers):032x}"')
    modified: float = field(default_factory=time.time)

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


@dataclass
class Upload:
    bucket: str
    key: str
    meta: dict[str, str]
    parts: dict[int, Object] = field(default_factory=dict)


@dataclass
class Request:
    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]

    @property
    def meta(self) -> dict[str, str]:
        return {name: value for name, value in self.headers.items() if name.startswith(("x-amz-meta-", "content-type"))}


_numbers = itertools.count(1)
_free_memory: defaultdict[int, list[tuple[int, mmap]]] = defaultdict(list)
_lock = threading.Lock()
_buckets: dict[str, dict[str, Object]] = {}
_uploads: dict[str, Upload] = {}
_counts: Counter[str] = Counter()


class Connection:
    """One client. Requests come one after another, and each is answered before the next is read."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._ahead = b""  # received, not yet used

    def serve(self) -> None:
        with suppress(ConnectionError, EOFError), self._socket:
            while True:
                self._answer(self._head())

    def _more(self) -> None:
        received = self._socket.recv(1 << 16)
        if not received:
            raise EOFError
        self._ahead += received

    def _until(self, end: bytes) -> bytes:
        while (at := self._ahead.find(end)) < 0:
            self._more()
        found, self._ahead = self._ahead[:at], self._ahead[at + len(end) :]
        return found

    def _head(self) -> Request:
        first, *lines = self._until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        address = urlsplit(target)
        bucket, _, key = unquote(address.path).lstrip("/").partition("/")
        return Request(method, bucket, key, dict(parse_qsl(address.query, keep_blank_values=True)), headers)

    def body(self, request: Request) -> Memory:
        """All of the body, in memory."""
        if request.headers.get("expect", "").lower() == "100-continue":
            self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        plain = int(request.headers.get("content-length", 0))
        memory = Memory(int(request.headers.get("x-amz-decoded-content-length", plain)))
        _counts["bytes_in"] += memory.size
        with memoryview(memory.bytes)[: memory.size] as into:
            if "x-amz-decoded-content-length" not in request.headers:
                self._receive(into)
                return memory
            at = 0
            while size := int(self._until(b"\r\n").partition(b";")[0], 16):  # aws-chunked
                with into[at : at + size] as chunk:
                    self._receive(chunk)
                self._until(b"\r\n")
                at += size
        while self._until(b"\r\n"):  # trailing checksums
            pass
        return memory

    def _receive(self, into: memoryview) -> None:
        at = min(len(self._ahead), len(into))
        into[:at] = self._ahead[:at]
        self._ahead = self._ahead[at:]
        while at < len(into):
            with into[at:] as rest:
                received = self._socket.recv_into(rest)
            if not received:
                raise EOFError
            at += received

    def _answer(self, request: Request) -> None:
        body = self.body(request)
        try:
            status, headers, pieces = _handle(request, body)
        except Refused as refused:
            status, headers, pieces = refused.status, {}, f"<Error><Code>{refused.code}</Code></Error>".encode()
        size = len(pieces) if isinstance(pieces, bytes) else sum(count for _, _, count in pieces)
        told = {"content-length": str(size), "connection": "keep-alive", **headers}
        if isinstance(pieces, bytes) and pieces:
            told.setdefault("content-type", "application/xml")
        lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{lines}\r\n".encode()
        if request.method == "HEAD":
            pieces = b""
        self._socket.sendall(head + pieces if isinstance(pieces, bytes) else head)
        if not isinstance(pieces, bytes):
            _counts["bytes_out"] += size
            for memory, at, count in pieces:
                while count:
                    sent = os.sendfile(self._socket.fileno(), memory.fd, at, count)
                    at, count = at + sent, count - sent


Answer = tuple[int, dict[str, str], "bytes | list[tuple[Memory, int, int]]"]


def _handle(request: Request, body: Memory) -> Answer:
    if request.bucket == "-":
        return 200, {"content-type": "application/json"}, json.dumps(_counts).encode()
    with _lock:
        _counts["requests"] += 1
        _counts[request.method] += 1
        objects = _buckets.setdefault(request.bucket, {})
        match request.method, "uploadId" in request.query, bool(request.key):
            case "PUT", part, True:
                return _put(request, body, objects, _uploads_of(request) if part else None)
            case "POST", _, _:
                return _post(request, body.bytes[: body.size], objects)
            case "DELETE", True, _:
                _uploads.pop(request.query["uploadId"], None)
                return 204, {}, b""
            case "DELETE", _, _:
                objects.pop(request.key, None)
                return 204, {}, b""
            case "GET" | "HEAD", False, True:
                return _get(request, objects)
            case "GET", True, _:
                return _xml("ListPartsResult", _parts(_uploads_of(request)))
            case "GET", _, _ if "uploads" in request.query:
                named = "".join(
                    f"<Upload><Key>{escape(upload.key)}</Key><UploadId>{name}</UploadId></Upload>"
                    for name, upload in _uploads.items()
                    if upload.bucket == request.bucket
                )
                return _xml("ListMultipartUploadsResult", named + "<IsTruncated>false</IsTruncated>")
            case "GET", _, _ if request.bucket:
                return _list(request, objects)
    return 200, {}, b""  # of a bucket: made, or asked for


def _xml(name: str, inside: str) -> Answer:
    said = f'<?xml version="1.0" encoding="UTF-8"?><{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    return 200, {}, f"{said}{inside}</{name}>".encode()


def _uploads_of(request: Request) -> Upload:
    if request.query["uploadId"] not in _uploads:
        raise Refused(404, "NoSuchUpload")
    return _uploads[request.query["uploadId"]]


def _parts(upload: Upload) -> str:
    return "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{part.etag}</ETag><Size>{part.size}</Size></Part>"
        for number, part in sorted(upload.parts.items())
    )


def _check(request: Request, there: Object | None) -> None:
    """The conditions of a write."""
    if request.headers.get("if-none-match") == "*" and there:
        raise Refused(412, "PreconditionFailed")
    if wanted := request.headers.get("if-match"):
        if not there:
            raise Refused(404, "NoSuchKey")
        if wanted.strip('"') != there.etag.strip('"'):
            raise Refused(412, "PreconditionFailed")


def _put(request: Request, body: Memory, objects: dict[str, Object], upload: Upload | None) -> Answer:
    made = Object([body], request.meta)
    source = request.headers.get("x-amz-copy-source")
    if source:
        bucket, _, key = unquote(source).lstrip("/").partition("/")
        if key not in _buckets.get(bucket, {}):
            raise Refused(404, "NoSuchKey")
        copied = _buckets[bucket][key]
        made = Object(copied.pieces, copied.meta)
    if upload:
        upload.parts[int(request.query["partNumber"])] = made
    else:
        _check(request, objects.get(request.key))
        objects[request.key] = made
    if source:
        return _xml("CopyObjectResult", f"<ETag>{made.etag}</ETag><LastModified>{_time(made)}</LastModified>")
    return 200, {"etag": made.etag}, b""


def _post(request: Request, body: bytes, objects: dict[str, Object]) -> Answer:
    where = f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
    if "uploads" in request.query:
        name = f"upload-{next(_numbers)}"
        _uploads[name] = Upload(request.bucket, request.key, request.meta)
        return _xml("InitiateMultipartUploadResult", f"{where}<UploadId>{name}</UploadId>")
    named = [(element.tag.rpartition("}")[2], element.text or "") for element in ElementTree.fromstring(body).iter()]
    if "delete" in request.query:
        keys = [text for tag, text in named if tag == "Key"]
        for key in keys:
            objects.pop(key, None)
        return _xml("DeleteResult", "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys))
    upload = _uploads_of(request)
    numbers = [int(text) for tag, text in named if tag == "PartNumber"]
    if not set(numbers) <= set(upload.parts):
        raise Refused(400, "InvalidPart")
    _check(request, objects.get(request.key))
    made = Object([piece for number in numbers for piece in upload.parts[number].pieces], upload.meta)
    objects[request.key] = made
    del _uploads[request.query["uploadId"]]
    return _xml("CompleteMultipartUploadResult", f"{where}<ETag>{made.etag}</ETag>")


def _get(request: Request, objects: dict[str, Object]) -> Answer:
    found = objects.get(request.key)
    if not found:
        raise Refused(404, "NoSuchKey")
    _check(request, None if request.headers.get("if-none-match") == "*" else found)
    headers = {"content-type": "binary/octet-stream", **found.meta, "etag": found.etag, "accept-ranges": "bytes"}
    headers["last-modified"] = formatdate(found.modified, usegmt=True)
    begin, end, status = 0, found.size, 200
    if wanted := request.headers.get("range"):
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        begin = int(first) if first else max(0, found.size - int(last))
        end = min(found.size, int(last) + 1) if first and last else found.size
        if begin >= found.size:
            raise Refused(416, "InvalidRange")
        status, headers["content-range"] = 206, f"bytes {begin}-{end - 1}/{found.size}"
    pieces, at = [], 0
    for piece in found.pieces:
        low, high = max(begin, at) - at, min(end, at + piece.size) - at
        if low < high:
            pieces.append((piece, low, high - low))
        at += piece.size
    return status, headers, pieces


def _time(found: Object) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.modified))


def _list(request: Request, objects: dict[str, Object]) -> Answer:
    query = request.query
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    limit = int(query.get("max-keys", 1000))
    after = query.get("continuation-token", query.get("start-after", query.get("marker", "")))
    encoded = quote if query.get("encoding-type") == "url" else escape
    keys = sorted(objects)
    at = max(bisect_left(keys, prefix), bisect_right(keys, after))
    rows: list[str] = []
    last = ""
    while at < len(keys) and keys[at].startswith(prefix) and len(rows) < limit:
        key = last = keys[at]
        at += 1
        folder, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
        if found:
            last = prefix + folder + delimiter
            rows.append(f"<CommonPrefixes><Prefix>{encoded(last)}</Prefix></CommonPrefixes>")
            at = bisect_left(keys, last[:-1] + chr(ord(last[-1]) + 1))
            last += "\U0010ffff"
            continue
        there = objects[key]
        rows.append(
            f"<Contents><Key>{encoded(key)}</Key><LastModified>{_time(there)}</LastModified><ETag>{there.etag}</ETag>"
            f"<Size>{there.size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        )
    more = at < len(keys) and keys[at].startswith(prefix)
    told = f"<Name>{request.bucket}</Name><Prefix>{encoded(prefix)}</Prefix><KeyCount>{len(rows)}</KeyCount>"
    told += f"<MaxKeys>{limit}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>"
    if "encoding-type" in query:
        told += "<EncodingType>url</EncodingType>"
    if more:
        told += f"<NextContinuationToken>{escape(last)}</NextContinuationToken>"
    return _xml("ListBucketResult", told + "".join(rows))


def main() -> None:
    listening = socket.create_server((sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1", 0), backlog=256)
    print("http://{}:{}".format(*listening.getsockname()), flush=True)

    def accept() -> None:
        while True:
            connected, _ = listening.accept()
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=Connection(connected).serve, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
