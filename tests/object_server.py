"""A real S3 server for the tests: moto's, in a process of its own on a free port of the loopback.

It ends with the process that started it, however that one ends: its standard input is a pipe that closes then.

What stores promise and moto does not is added: conditions that hold when the object is stored; a change only when all
of the body has arrived, and with the SHA-256 that was sent with it.

By hand, with the server's address as the only line that it prints::

    python -m tests.object_server
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Server:
    """An S3 server and what a client has to know of it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def environment(self) -> dict[str, str]:
        """The variables with which obstore, botocore and s3fs come here, past any proxy that the machine has."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "AKIATHEKEYOFTHETESTS",
            "AWS_SECRET_ACCESS_KEY": "the-secret-of-the-tests",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def new_bucket(self) -> Bucket:
        bucket = Bucket(self, f"bucket-{uuid.uuid4().hex}")
        self.ask("PUT", bucket.name)
        return bucket

    def ask(self, method: str, path: str) -> bytes:
        """The body of the answer to a request without a signature, which moto does not check."""
        request = urllib.request.Request(f"{self.url}/{path}", method=method)
        with _NO_PROXY.open(request, timeout=60) as answer:
            return bytes(answer.read())


@dataclass(frozen=True)
class Bucket:
    """A bucket, and what no client of ours can ask of one."""

    server: Server
    name: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def unfinished_uploads(self) -> list[str]:
        """The keys of multipart uploads that were neither completed nor aborted."""
        found = ElementTree.fromstring(self.server.ask("GET", f"{self.name}?uploads"))
        return [str(key.text) for key in found.iterfind("{*}Upload/{*}Key")]


@contextmanager
def serving() -> Iterator[Server]:
    """A server of one's own, until the block or this process ends.

    Raises:
        AssertionError: It did not start; why is on stderr.
    """
    command = [sys.executable, "-m", "tests.object_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url, "moto's server did not start"
            yield Server(url)
        finally:
            process.kill()


class _Strict:
    """A WSGI application before moto's, for what stores promise and moto does not."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self._changing = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return self._application(environ, start_response)
        if not environ.get("wsgi.input_terminated"):  # not chunked
            length = int(environ.get("CONTENT_LENGTH") or 0)
            body = environ["wsgi.input"].read(length)
            if wrong := "IncompleteBody" if len(body) != length else _wrong_digest(environ, body):
                told = f"<Error><Code>{wrong}</Code></Error>".encode()
                start_response("400 Bad Request", [("Content-Length", str(len(told)))])
                return [told]
            environ |= {"wsgi.input": io.BytesIO(body), "wsgi.input_terminated": True}  # werkzeug copies it no more
        if "partNumber=" in environ["QUERY_STRING"]:  # changes no object yet
            return self._application(environ, start_response)
        with self._changing:
            return self._application(environ, start_response)


def _wrong_digest(environ: Mapping[str, Any], body: bytes) -> str:
    """The error's code, if the body is not the one that these headers were made for."""
    signed, given = environ.get("HTTP_X_AMZ_CONTENT_SHA256", ""), environ.get("HTTP_X_AMZ_CHECKSUM_SHA256")
    if len(signed) != 64 and not given:  # UNSIGNED-PAYLOAD, or in pieces with signatures of their own
        return ""
    digest = hashlib.sha256(body)
    if len(signed) == 64 and signed != digest.hexdigest():
        return "XAmzContentSHA256Mismatch"
    return "BadDigest" if given and base64.b64decode(given) != digest.digest() else ""


class _Bytes(io.BytesIO):
    """An object's content that is read without copies, and by who is reading when the object is deleted."""

    def close(self) -> None:
        pass


def _without_copies() -> None:
    """Moto keeps a file for each object, and reads all of it for each range of it."""
    from moto.s3.models import FakeKey

    def content(key: Any) -> bytes:
        return bytes(key._value_buffer.getvalue())  # the same bytes: nothing has written into the buffer

    def keep(key: Any, content: bytes | str) -> None:
        key._value_buffer = _Bytes(content.encode() if isinstance(content, str) else content)
        key.contentsize = len(content)

    FakeKey.value = property(content, keep)  # type: ignore[method-assign, assignment]


def main() -> None:
    import logging

    from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    _without_copies()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # no line for each request
    application = _Strict(create_backend_app("s3"))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    sys.stdin.read()
    os._exit(0)  # waits for no connection


if __name__ == "__main__":
    main()
