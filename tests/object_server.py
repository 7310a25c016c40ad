"""Real object stores for the tests, in processes of their own on free ports of the loopback: moto's S3, and azurite.

They end with the process that started them, however that one ends: their standard input is a pipe that closes then.

What stores promise and moto does not is added: conditions that hold when the object is stored; a change only when all
of the body has arrived, and with the SHA-256 that was sent with it. Azurite (Azure Blob) is for where it is installed::

    npm install --prefix .venv azurite

A server by hand, with its address as the only line that it prints::

    python -m tests.object_server
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import io
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests import programs
from tests.limits import HANG

_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_LOOPBACK = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


@dataclass(frozen=True)
class Server:
    """An S3 server and what a client has to know of it."""

    url: str

    def environment(self, through: str = "") -> dict[str, str]:
        """The variables with which obstore, botocore and s3fs come here, or ``through`` a proxy of the tests.

        No proxy that the machine has is asked.
        """
        return _LOOPBACK | {
            "AWS_ENDPOINT_URL": through or self.url,
            "AWS_ACCESS_KEY_ID": "AKIATHEKEYOFTHETESTS",
            "AWS_SECRET_ACCESS_KEY": "the-secret-of-the-tests",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def new_bucket(self) -> Bucket:
        bucket = Bucket(self, f"s3://bucket-{uuid.uuid4().hex}")
        self.ask("PUT", bucket.name)
        return bucket

    def ask(self, method: str, path: str, headers: Mapping[str, str] | None = None) -> bytes:
        """The body of the answer. Moto checks no signature."""
        request = urllib.request.Request(f"{self.url}/{path}", method=method, headers=dict(headers or {}))
        with _NO_PROXY.open(request, timeout=HANG) as answer:
            return bytes(answer.read())


class AzureServer(Server):
    """Azurite, with the account that every one of them has."""

    _account = "devstoreaccount1"
    _key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

    def environment(self, through: str = "") -> dict[str, str]:
        return _LOOPBACK | {
            "AZURE_STORAGE_ACCOUNT_NAME": self._account,
            "AZURE_STORAGE_ACCOUNT_KEY": self._key,
            "AZURE_STORAGE_ENDPOINT": f"{through or self.url}/{self._account}",
            "AZURE_ALLOW_HTTP": "true",
        }

    def new_bucket(self) -> Bucket:
        bucket = Bucket(self, f"az://bucket-{uuid.uuid4().hex}")
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        signed = "\n".join(f"{name}:{value}" for name, value in headers.items())
        text = "PUT" + 12 * "\n" + f"{signed}\n/{self._account}/{self._account}/{bucket.name}\nrestype:container"
        digest = hmac.new(base64.b64decode(self._key), text.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {self._account}:{base64.b64encode(digest).decode()}"
        self.ask("PUT", f"{self._account}/{bucket.name}?restype=container", headers)
        return bucket


@dataclass(frozen=True)
class Bucket:
    """A bucket, and what obstore cannot ask of one."""

    server: Server
    url: str

    @property
    def name(self) -> str:
        return self.url.partition("://")[2]

    def unfinished_uploads(self) -> list[str]:
        """The keys of multipart uploads that were neither completed nor aborted (S3)."""
        found = ElementTree.fromstring(self.server.ask("GET", f"{self.name}?uploads"))
        return [str(key.text) for key in found.iterfind("{*}Upload/{*}Key")]


@contextmanager
def serving() -> Iterator[Server]:
    """An S3 server of one's own, until the block or this process ends.

    Raises:
        AssertionError: It did not start; why is on stderr.
    """
    with _started([programs.PYTHON, "-m", "tests.object_server"]) as url:
        yield Server(url)


@contextmanager
def serving_azure() -> Iterator[AzureServer]:
    """The same with azurite, where :func:`why_no_azure` has no reason against it."""
    azurite = [str(_azurite()), "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    # Azurite does not look at its standard input: a shell does.
    shell = ["sh", "-c", '"$@" & cat > /dev/null; kill $!', "sh"]
    with _started([*shell, *azurite, "--blobHost", "127.0.0.1", "--blobPort", "0"], "listens on ") as url:
        yield AzureServer(url)


def why_no_azure() -> str:
    """Why azurite cannot be started here; empty if it can."""
    return "" if _azurite() else "needs azurite: npm install --prefix .venv azurite"


def _azurite() -> str | None:
    return shutil.which("azurite-blob", path=f"{Path(sys.prefix, 'node_modules/.bin')}{os.pathsep}{os.environ['PATH']}")


@contextmanager
def _started(command: Sequence[str], before: str = "") -> Iterator[str]:
    """The address that the command prints, behind these words, when it can be asked."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        found = (re.search(rf"{before}(http://[\d.]+:\d+)", line) for line in process.stdout)
        url = next((match[1] for match in found if match), None)
        assert url, f"{command} did not start"
        try:
            yield url
        finally:
            process.stdin.close()
            process.stdout.read()  # until it has gone


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
