"""The proxy makes the fault that it is told to make, and a client of a store meets it."""

from __future__ import annotations

import signal
import subprocess
import sys
from datetime import timedelta
from typing import Any

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError, PermissionDeniedError
from obstore.store import ObjectStore, S3Store

from tests.faults.network import Answer, Call, Cut, Flip, Ignore, Silence, Slow
from tests.faults.proxy import Fault, Proxy, where
from tests.object_server import Bucket

MIB = 1 << 20
CONTENT = bytes(range(256)) * 4096


@pytest.fixture
def store(bucket: Bucket, proxy: Proxy) -> ObjectStore:
    made = _store(bucket)
    obstore.put(made, "x", CONTENT)
    proxy.forget()
    return made


def _store(bucket: Bucket, **client: Any) -> ObjectStore:
    backoff = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=2), "base": 2}
    retries: Any = {"max_retries": 2, "backoff": backoff, "retry_timeout": timedelta(seconds=60)}
    client["allow_http"] = True
    return S3Store(bucket.name, retry_config=retries, client_options=client)  # type: ignore[arg-type]


def _names(store: ObjectStore) -> list[str]:
    return [entry["path"] for page in obstore.list(store) for entry in page]


def test_every_request_is_noted(store: ObjectStore, proxy: Proxy) -> None:
    obstore.get_range(store, "x", start=10, length=20)
    obstore.put(store, "a/b c", b"0" * 6 * MIB, chunk_size=5 * MIB, max_concurrency=1)
    read, create, *parts, complete = proxy.requests
    assert (read.method, read.status, read.range, read.sent, read.received) == ("GET", 206, "bytes=10-29", 0, 20)
    assert create.path.endswith("/a/b c") and create.query == {"uploads": ""}
    assert [part.sent for part in parts] == [5 * MIB, MIB] and complete.method == "POST"
    assert proxy.count(where("PUT", "b c", "partNumber")) == 2


@pytest.mark.parametrize(
    ("status", "code", "error", "requests"),
    [
        (500, "InternalError", GenericError, 3),
        (503, "SlowDown", GenericError, 3),
        (403, "AccessDenied", PermissionDeniedError, 1),
        (404, "NoSuchBucket", FileNotFoundError, 1),
        (400, "ExpiredToken", GenericError, 1),
        (403, "RequestTimeTooSkewed", PermissionDeniedError, 1),
    ],
)
def test_a_store_that_refuses(
    store: ObjectStore, proxy: Proxy, status: int, code: str, error: type[Exception], requests: int
) -> None:
    proxy.on(where(path="/x"), Answer(status, code), times=None)
    with pytest.raises(error, match=code):
        obstore.get(store, "x")
    with pytest.raises(error, match=code):
        obstore.put(store, "x", CONTENT)
    assert [request.status for request in proxy.requests] == [status] * 2 * requests
    obstore.put(store, "y", CONTENT)


def test_a_rule_is_for_some_of_the_requests(store: ObjectStore, proxy: Proxy) -> None:
    proxy.on(where("HEAD"), Answer(503, "SlowDown"), skip=1, times=2)
    for _ in range(3):
        obstore.head(store, "x")
    assert [request.status for request in proxy.requests] == [200, 503, 503, 200, 200]


@pytest.mark.parametrize(("moment", "stored"), [("before", False), ("after", True)])
def test_a_client_that_hears_nothing_cannot_tell_whether_it_was_done(
    bucket: Bucket, store: ObjectStore, proxy: Proxy, moment: Any, stored: bool
) -> None:
    proxy.on(where("PUT"), Cut(moment))
    with pytest.raises(GenericError):
        obstore.put(store, "new", b"1", mode="create")
    assert _names(store) == (["new", "x"] if stored else ["x"])


def test_a_client_that_asks_again_meets_what_it_has_stored(store: ObjectStore, proxy: Proxy) -> None:
    proxy.on(where("PUT"), Cut("after", reset=False))
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "new", b"1", mode="create")
    assert [request.status for request in proxy.requests] == [200, 412]


def test_a_store_that_knows_no_conditions(store: ObjectStore, proxy: Proxy) -> None:
    proxy.on(where("PUT"), Ignore("If-None-Match", "If-Match"), times=2)
    for mode in ("create", {"e_tag": "another"}):
        assert obstore.put(store, "x", CONTENT, mode=mode)  # type: ignore[arg-type]
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "x", CONTENT, mode="create")


@pytest.mark.parametrize("reset", [True, False])
def test_a_body_that_is_cut_is_asked_for_again_from_there(store: ObjectStore, proxy: Proxy, reset: bool) -> None:
    proxy.on(where("GET"), Cut("body", at=100_000, reset=reset))
    assert bytes(obstore.get(store, "x").bytes()) == CONTENT
    first, second = proxy.requests
    assert first.received == 100_000 and second.range.startswith("bytes=") and first.range == ""


def test_a_flipped_bit_of_a_body_is_not_noticed_by_the_client(store: ObjectStore, proxy: Proxy) -> None:
    proxy.on(where("GET"), Flip(700_000))
    got = bytes(obstore.get(store, "x").bytes())
    assert [i for i, (a, b) in enumerate(zip(got, CONTENT, strict=True)) if a != b] == [700_000]


def test_silence_ends_by_the_clients_timeout(bucket: Bucket, store: ObjectStore, proxy: Proxy) -> None:
    proxy.on(where("GET"), Silence())
    assert bytes(obstore.get(_store(bucket, timeout="2s"), "x").bytes()) == CONTENT
    assert [request.status for request in proxy.requests] == [0, 200]


def test_a_slow_link_is_too_slow_for_a_timeout(bucket: Bucket, store: ObjectStore, proxy: Proxy) -> None:
    for fault in (Fault(), Slow(len(CONTENT) / 0.3)):
        proxy.forget()
        proxy.on(where(), fault, times=None)
        assert obstore.put(store, "x", CONTENT) and bytes(obstore.get(store, "x").bytes()) == CONTENT
    with pytest.raises(BaseError):
        obstore.put(_store(bucket, timeout="100ms"), "x", CONTENT)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@pytest.mark.parametrize(("moment", "stored"), [("arrived", False), ("done", True), ("answered", True)])
def test_a_client_is_killed_at_a_moment_of_a_request(
    bucket: Bucket, store: ObjectStore, proxy: Proxy, moment: Any, stored: bool
) -> None:
    script = "import obstore, sys; from obstore.store import from_url; input()\n"
    script += "obstore.put(from_url(sys.argv[1]), 'new', b'1'); input()"
    with subprocess.Popen([sys.executable, "-c", script, bucket.url], stdin=subprocess.PIPE) as client:
        proxy.on(where("PUT"), Call(lambda: _kill(client), moment))
        assert client.stdin is not None
        client.stdin.write(b"\n")
        client.stdin.flush()
        assert client.wait() == -signal.SIGKILL
    # Killed when the request had arrived, the client has sent all of it: as on a network, the server may do it still.
    assert "new" in _names(store) or not stored


def test_a_client_of_another_make_passes(bucket: Bucket, proxy: Proxy) -> None:
    """It waits for ``100 Continue``, and sends chunks with a checksum behind them."""
    import boto3
    from botocore.config import Config

    client = boto3.client("s3", config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}))
    client.put_object(Bucket=bucket.name, Key="boto", Body=CONTENT)
    assert client.get_object(Bucket=bucket.name, Key="boto")["Body"].read() == CONTENT
    upload = client.create_multipart_upload(Bucket=bucket.name, Key="part")
    assert bucket.unfinished_uploads() == ["part"]
    client.abort_multipart_upload(Bucket=bucket.name, Key="part", UploadId=upload["UploadId"])
    assert bucket.unfinished_uploads() == []
