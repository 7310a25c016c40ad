"""What the tests rely on in the S3 server that they start: its promises are those of a store."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import urllib.request
from subprocess import PIPE, Popen
from typing import Any

import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import S3Store, from_url

from tests import launch
from tests.faults.network import Flip
from tests.faults.proxy import Proxy, where
from tests.object_server import Bucket, serving

MIB = 1 << 20


BOTH = pytest.mark.parametrize("bucket", ["s3", pytest.param("azure", marks=pytest.mark.long)], indirect=True)


@BOTH
def test_of_eight_processes_one_creates_an_object_and_one_replaces_it(bucket: Bucket) -> None:
    program = textwrap.dedent("""
        import obstore, os, sys
        from obstore.exceptions import AlreadyExistsError, PreconditionError
        from obstore.store import from_url
        store = from_url(sys.argv[1])
        print("ready", flush=True)
        for previous in sys.stdin:
            try:
                mode = {"e_tag": previous.strip()} if previous.strip() else "create"
                obstore.put(store, "one", os.urandom(1000), mode=mode)
                print("won", flush=True)
            except (AlreadyExistsError, PreconditionError):
                print("lost", flush=True)
    """)
    command = [sys.executable, "-c", program, bucket.url]
    racers = [Popen(command, stdin=PIPE, stdout=PIPE, text=True, bufsize=1) for _ in range(8)]
    assert {_said(racer) for racer in racers} == {"ready"}
    previous = ""
    for _ in range(10):
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write(previous + "\n")
        assert sorted(_said(racer) for racer in racers) == ["lost"] * 7 + ["won"]
        previous = str(obstore.head(from_url(bucket.url), "one")["e_tag"])
    for racer in racers:
        racer.communicate()


def _said(process: Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _put_own(url: str) -> None:
    import torch.distributed as dist

    obstore.put(from_url(url), f"of rank {dist.get_rank()}", b"")


def test_ranks_come_to_the_bucket(bucket: Bucket) -> None:
    launch.run(_put_own, 2, bucket.url)
    assert [entry["path"] for entry in next(iter(obstore.list(from_url(bucket.url))))] == ["of rank 0", "of rank 1"]


@BOTH
def test_ranges_of_an_object_made_of_parts(bucket: Bucket) -> None:
    content = os.urandom(12 * MIB)
    store = from_url(bucket.url)
    obstore.put(store, "a/b", content, chunk_size=5 * MIB)
    assert bytes(obstore.get_range(store, "a/b", start=5 * MIB - 3, length=7)) == content[5 * MIB - 3 :][:7]
    if bucket.url.startswith("s3"):
        assert bytes(obstore.get(store, "a/b", options={"range": {"suffix": 9}}).bytes()) == content[-9:]
    pieces = obstore.get_ranges(store, "a/b", starts=[0, 7 * MIB], lengths=[4, 5])
    assert [bytes(piece) for piece in pieces] == [content[:4], content[7 * MIB :][:5]]
    assert obstore.head(store, "a/b")["size"] == len(content)


@BOTH
def test_a_listing_of_more_than_a_page(bucket: Bucket) -> None:
    store = from_url(bucket.url)
    for number in range(1001):
        obstore.put(store, f"run/{number % 7}/{number}", b"")
    assert sum(len(chunk) for chunk in obstore.list(store, "run")) == 1001
    found = obstore.list_with_delimiter(store, "run")
    assert (found["common_prefixes"], found["objects"]) == ([f"run/{n}" for n in range(7)], [])
    obstore.delete(store, [entry["path"] for chunk in obstore.list(store) for entry in chunk])
    assert list(obstore.list(store)) == []


@BOTH
def test_a_reader_has_the_object_that_it_has_asked_for_when_it_is_replaced(bucket: Bucket) -> None:
    store = from_url(bucket.url)
    obstore.put(store, "x", b"a" * 20 * MIB, use_multipart=False)
    reading = obstore.get(store, "x").stream(min_chunk_size=1)
    first = bytes(next(reading))
    obstore.delete(store, "x")
    assert first + b"".join(map(bytes, reading)) == b"a" * 20 * MIB


@pytest.mark.parametrize("options", [{}, {"unsigned_payload": "true", "checksum_algorithm": "sha256"}], ids=str)
def test_an_upload_that_arrives_changed_is_refused(bucket: Bucket, proxy: Proxy, options: Any) -> None:
    store = S3Store(bucket.name, config=options)
    proxy.on(where("PUT"), Flip(5, up=True))
    with pytest.raises(GenericError, match=r"BadDigest|XAmzContentSHA256Mismatch"):
        obstore.put(store, "x", b"0123456789")
    proxy.on(where("PUT", query="partNumber"), Flip(5, up=True))
    with pytest.raises(GenericError, match=r"BadDigest|XAmzContentSHA256Mismatch"):
        obstore.put(store, "x", b"0" * 6 * MIB, chunk_size=5 * MIB)
    assert list(obstore.list(store)) == [] and bucket.unfinished_uploads() == []


def test_an_upload_whose_client_dies_is_not_there(bucket: Bucket) -> None:
    script = f"""
import os, obstore, signal
from obstore.store import from_url
def pieces():
    yield b"0" * (6 << 20)
    os.kill(os.getpid(), signal.SIGKILL)
obstore.put(from_url("{bucket.url}"), "x", pieces(), chunk_size=5 << 20)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == -9
    assert list(obstore.list(from_url(bucket.url))) == []
    assert bucket.unfinished_uploads() == ["x"]


def test_a_part_of_a_body_is_no_object(bucket: Bucket) -> None:
    address = bucket.server.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as client:
        client.sendall(f"PUT /{bucket.name}/x HTTP/1.1\r\nHost: s3\r\nContent-Length: 100\r\n\r\nhalf".encode())
        client.shutdown(socket.SHUT_WR)
        assert b"IncompleteBody" in client.makefile("rb").read()
    assert list(obstore.list(from_url(bucket.url))) == []


@BOTH
def test_a_proxy_that_the_machine_has_is_not_asked(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    obstore.put(from_url(bucket.url), "x", b"")
    assert bucket.server.new_bucket().url != bucket.url


def test_the_server_ends_with_the_process_that_started_it() -> None:
    script = """
import os, signal
from tests.object_server import serving
with serving() as server:
    print(server.url, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    with Popen([sys.executable, "-c", script], stdout=PIPE, stderr=PIPE, text=True) as process:
        said, _ = process.communicate()  # until the server has gone, too: it has the same stderr
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(said.strip())
    with serving() as other:
        assert other.new_bucket().unfinished_uploads() == []
