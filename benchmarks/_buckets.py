"""A bucket to measure against, and the ways to save to it and to load from it.

A peer's path is the beginning of its keys. Credentials and address come from the environment, which all clients read.
"""

from __future__ import annotations

import http.client
import io
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

import numpy as np

from benchmarks._peer import IO_THREADS, OURS, Peer, State
from benchmarks.peers.ceiling import local_bytes

RAW = "raw obstore"
BUCKET, REGION = "bench", "us-east-1"
STREAMS = 16
"""Requests in flight, of everybody who can be told."""
PART = 8 << 20
"""Bytes of a part, which is what the S3 clients take by themselves."""


class Scene(NamedTuple):
    """What is between the clients and the server."""

    said: str
    script: str


SCENES = {
    "loopback": Scene("loopback", "_s3_server.py"),
    "link": Scene("a link of 1 Gbit/s and 20 ms", "_link.py"),
}


def missing(scene: str) -> str:
    """What a scene needs and this machine lacks, or nothing."""
    if scene != "link" or (os.access("/dev/net/tun", os.R_OK | os.W_OK) and os.geteuid() == 0 and which("ip")):
        return ""
    return "it needs root, /dev/net/tun and the command ip"


@contextmanager
def served(scene: str) -> Iterator[str]:
    """The address of an empty bucket server that ends with the block."""
    script = Path(__file__).with_name(SCENES[scene].script)
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin and server.stdout
        endpoint = server.stdout.readline().strip()
        if not endpoint:
            raise SystemExit(f"the server did not start ({script.name} says why)")
        yield endpoint
        server.stdin.close()


def use(endpoint: str) -> None:
    """Tell all clients of this process where the bucket is."""
    os.environ.update(
        AWS_ENDPOINT_URL=endpoint, AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench", AWS_REGION=REGION,
        AWS_DEFAULT_REGION=REGION, AWS_ALLOW_HTTP="true", AWS_EC2_METADATA_DISABLED="true",
        AWS_CONFIG_FILE=os.devnull, AWS_SHARED_CREDENTIALS_FILE=os.devnull,
    )  # fmt: skip
    os.environ.pop("AWS_PROFILE", None)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)


def counts() -> dict[str, int]:
    """What the server has been asked for so far: ``requests``, ``bytes_in``, ``bytes_out``, and each method's."""
    asked = http.client.HTTPConnection(os.environ["AWS_ENDPOINT_URL"].removeprefix("http://"))
    asked.request("GET", "/-/counts")
    said: dict[str, int] = json.loads(asked.getresponse().read())
    asked.close()
    return {"requests": 0, "bytes_in": 0, "bytes_out": 0, **said}


def url(path: Path) -> str:
    return f"s3://{BUCKET}/{path}"


@cache
def store(unsigned: bool = True) -> Any:
    from obstore.store import S3Store

    return S3Store(BUCKET, unsigned_payload=unsigned)


def remove(path: Path) -> None:
    """All objects whose keys begin with a path."""
    import obstore

    keys = [found["path"] for page in obstore.list(store(), f"{path}/") for found in page]
    if keys:
        obstore.delete(store(), keys)


# --- the raw ceiling: one object per thread, straight from one block of memory and straight into the tensors

_blocks: dict[int, memoryview] = {}


def _prepare_raw(state: State) -> None:
    if id(state) not in _blocks:
        _blocks.clear()
        _blocks[id(state)] = memoryview(b"".join(local_bytes(state)))


def _save_raw(state: State, path: Path, unsigned: bool = True) -> None:
    import obstore

    block = _blocks[id(state)]
    share = -(-len(block) // IO_THREADS)

    def put(part: int) -> None:
        bytes_ = block[part * share : (part + 1) * share]
        obstore.put(store(unsigned), f"{path}/{part}", bytes_, chunk_size=PART, max_concurrency=STREAMS // IO_THREADS)

    with ThreadPoolExecutor(IO_THREADS) as pool:
        list(pool.map(put, range(IO_THREADS)))


def _load_raw(state: State, path: Path, drop: bool = False) -> None:
    import obstore

    views = local_bytes(state)
    ends = np.cumsum([len(view) for view in views]).tolist()
    share = -(-ends[-1] // IO_THREADS)

    def get(start: int) -> None:
        part, at = divmod(start, share)
        length = min(PART, share - at, ends[-1] - start)
        got = memoryview(obstore.get_range(store(), f"{path}/{part}", start=at, length=length))
        number = 0 if drop else int(np.searchsorted(ends, start, side="right"))
        while len(got) and not drop:
            offset = start - (ends[number] - len(views[number]))
            count = min(len(got), len(views[number]) - offset)
            np.copyto(np.frombuffer(views[number][offset : offset + count], np.uint8), got[:count])
            start, got, number = start + count, got[count:], number + 1

    starts = [at for part in range(IO_THREADS) for at in range(part * share, min((part + 1) * share, ends[-1]), PART)]
    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(get, starts))


def _raw() -> list[Peer]:
    import obstore  # noqa: F401

    made = partial(Peer, sharded=False, prepare=_prepare_raw)
    return [
        made(RAW, _save_raw, _load_raw),
        made(f"{RAW}, signed payload", partial(_save_raw, unsigned=False), _load_raw, only="save"),
        made(f"{RAW}, bytes dropped", _save_raw, partial(_load_raw, drop=True), only="load"),
    ]


# --- peers


def _ours() -> list[Peer]:
    """As it comes, parts are signed, so they have a SHA-256; and without."""
    import dcp_plugin

    def save(state: State, path: Path, **options: Any) -> None:
        dcp_plugin.save({"state": state}, url(path), io={"threads": IO_THREADS}, **options)

    def load(state: State, path: Path) -> None:
        dcp_plugin.load({"state": state}, url(path), io={"threads": IO_THREADS})

    unsigned = partial(save, storage_options={"unsigned_payload": True})
    return [Peer(OURS, save, load), Peer(f"{OURS}, unsigned payload", unsigned, load, only="save")]


def _stock() -> list[Peer]:
    """torch's own classes, over s3fs."""
    import s3fs  # noqa: F401
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    def save(state: State, path: Path) -> None:
        dcp.save({"state": state}, storage_writer=FsspecWriter(url(path), thread_count=IO_THREADS))

    def load(state: State, path: Path) -> None:
        dcp.load({"state": state}, storage_reader=FsspecReader(url(path)))

    return [Peer("stock, s3fs", save, load)]


def _s3torchconnector() -> list[Peer]:
    import torch.distributed.checkpoint as dcp
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

    config = S3ClientConfig(force_path_style=True, part_size=PART)

    def save(state: State, path: Path) -> None:
        writer = S3StorageWriter(region=REGION, path=url(path), s3client_config=config, thread_count=IO_THREADS)
        dcp.save({"state": state}, storage_writer=writer)

    def load(state: State, path: Path) -> None:
        dcp.load({"state": state}, storage_reader=S3StorageReader(REGION, url(path), s3client_config=config))

    return [Peer("s3torchconnector", save, load)]


def _boto3() -> list[Peer]:
    """The transfer manager with the same bytes, from memory and into memory."""
    import boto3
    from boto3.s3.transfer import TransferConfig

    config = TransferConfig(max_concurrency=STREAMS, multipart_chunksize=PART, multipart_threshold=PART)

    @cache
    def client() -> Any:
        return boto3.client("s3")

    def save(state: State, path: Path) -> None:
        client().upload_fileobj(io.BytesIO(_blocks[id(state)]), BUCKET, f"{path}/0", Config=config)

    def load(state: State, path: Path) -> None:
        got = io.BytesIO()
        client().download_fileobj(BUCKET, f"{path}/0", got, Config=config)
        at = 0
        for view in local_bytes(state):
            np.copyto(np.frombuffer(view, np.uint8), got.getbuffer()[at : at + len(view)])
            at += len(view)

    return [Peer("boto3's transfer manager", save, load, sharded=False, prepare=_prepare_raw)]


def _lightning() -> list[Peer]:
    """What ``Trainer.save_checkpoint`` and ``ckpt_path`` do with a URL: ``torch.save``, and ``s3fs``."""
    import s3fs  # noqa: F401
    from lightning.fabric.utilities.cloud_io import _atomic_save, _load

    def save(state: State, path: Path) -> None:
        _atomic_save({"state_dict": state}, f"{url(path)}/state.ckpt")

    def load(state: State, path: Path) -> None:
        for key, tensor in _load(f"{url(path)}/state.ckpt", weights_only=True)["state_dict"].items():
            state[key].copy_(tensor)

    return [Peer("torch.save, Lightning's URL path", save, load, sharded=False)]


def peers(
    benchmark: str, world: int, wanted: list[str] | None, say: Callable[[str], None] = lambda _: None
) -> list[Peer]:
    """Those that can take part, ours first. Those that are not installed are left out, and said to be."""
    makers: dict[str, Callable[[], list[Peer]]] = {
        OURS: _ours, RAW: _raw, "stock, s3fs": _stock, "s3torchconnector": _s3torchconnector,
        "boto3's transfer manager": _boto3, "torch.save, Lightning's URL path": _lightning,
    }  # fmt: skip
    found: list[Peer] = []
    for name, make in makers.items():
        if wanted is None or name in wanted or name in (OURS, RAW):
            try:
                found += make()
            except ImportError as error:
                say(f"left out: {name} ({error})")
    return [peer for peer in found if peer.only in ("", benchmark) and (world == 1 or peer.sharded)]


def key_of(peer: Peer) -> Path:
    """Where a peer's objects are. Variants of one share them."""
    return Path("".join(letter if letter.isalnum() else "-" for letter in peer.name.split(",")[0]))
