"""A bucket is what a directory is: stock reads and writes there, other tools' files are found, few requests are made.

What of this holds on a disk too is tested from the same bodies elsewhere (``tests/places.py``).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from s3torchconnector import S3ClientConfig
from s3torchconnector.dcp import S3StorageReader, S3StorageWriter
from torch import nn
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp_plugin as dcp
from dcp_plugin.format.packed import new_token
from dcp_plugin.media.objects.client import MemoryClient
from tests import launch
from tests.compare import same_bytes
from tests.faults.proxy import Proxy, Request
from tests.object_server import Bucket

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Stock warns where there is no process group; and fsspec remembers what it has listed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    fsspec.filesystem("memory").store.clear()


def _state(seed: int = 0) -> dict[str, Any]:
    """A module, a view, an alias, and values of every kind; with ``seed=-1`` a target for it."""
    torch.manual_seed(max(seed, 0))
    table = torch.randn(40, 30) if seed >= 0 else torch.zeros(40, 30)
    module = nn.Linear(30, 20)
    value = {"bytes": b"\0\1" * 50, "list": [1, {"two": 2.0}], "step": seed} if seed >= 0 else {}
    view = table[:, 3:9] if seed >= 0 else torch.zeros(40, 6)
    again = table if seed >= 0 else torch.zeros(40, 30)
    return {"model": module, "tensors": {"table": table, "again": again, "view": view}, "value": value}


def _stock_state(seed: int) -> dict[str, Any]:
    state = _state(seed)
    state["model"] = {key: value.detach().clone() for key, value in state["model"].state_dict().items()}
    if seed < 0:
        state["model"] = {key: torch.zeros_like(value) for key, value in state["model"].items()}
        state["value"] = {"bytes": b"", "list": [0, {"two": 0.0}], "step": 0}
    return state


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    module = state["model"]
    tensors = module.state_dict() if isinstance(module, nn.Module) else module
    return {**{f"model.{key}": value for key, value in tensors.items()}, **state["tensors"], **state["value"]}


def _assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    ours, theirs = _plain(found), _plain(expected)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        same = same_bytes(ours[key], value) if isinstance(value, torch.Tensor) else ours[key] == value
        assert same, key


def _assert_is_here(path: str | Path, seed: int) -> None:
    """It loads, is intact, and says which it is."""
    target = _state(-1)
    dcp.load(target, path)
    _assert_same(target, _state(seed))
    assert dcp.verify(path).ok
    assert dcp.inspect(path).step in (seed, None)


def _save(path: str | Path, seed: int, **options: Any) -> None:
    dcp.save(_state(seed), path, step=seed, **options)


def _read_by_stock(path: str | Path, seed: int) -> None:
    reader = FsspecReader(path) if isinstance(path, str) else stock.FileSystemReader(path)
    target = _stock_state(-1)
    stock.load(target, storage_reader=reader, no_dist=True)
    _assert_same(target, _stock_state(seed))


def _files() -> Any:
    """What a user copies with."""
    return fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)


# Standard


def test_stock_reads_what_we_wrote_to_a_bucket_also_when_it_was_overwritten(bucket: Bucket) -> None:
    for seed in (1, 2, 3):
        _save(f"{bucket.url}/run/step", seed)
        _read_by_stock(f"{bucket.url}/run/step", seed)
    reader = S3StorageReader("us-east-1", f"{bucket.url}/run/step", _Connector.client)
    target = _stock_state(-1)
    stock.load(target, storage_reader=reader, no_dist=True)
    _assert_same(target, _stock_state(3))


class _Connector:
    client = S3ClientConfig(force_path_style=True)


@pytest.mark.parametrize("threads", [1, 3])
def test_what_stock_and_s3torchconnector_wrote_is_read(bucket: Bucket, threads: int) -> None:
    writers = {
        "fsspec": lambda path: FsspecWriter(path, thread_count=threads),
        "each": lambda path: FsspecWriter(path, single_file_per_rank=False),
        "connector": lambda path: S3StorageWriter("us-east-1", path, _Connector.client, thread_count=threads),
    }
    for name, writer in writers.items():
        path = f"{bucket.url}/run/{name}"
        stock.save(_stock_state(4), storage_writer=writer(path), no_dist=True)
        _assert_is_here(path, 4)
        assert dcp.inspect(path).format == "stock"


def test_stock_saves_over_ours_and_we_over_stocks(bucket: Bucket) -> None:
    path = f"{bucket.url}/run/step"
    for seed in (1, 3):
        _save(path, seed)
        assert dcp.inspect(path).format == "dcp_plugin"
        _assert_is_here(path, seed)
        stock.save(_stock_state(seed + 1), storage_writer=FsspecWriter(path), no_dist=True)
        assert dcp.inspect(path).format == "stock"
        _assert_is_here(path, seed + 1)
    _save(path, 5)
    _save(path, 6)
    _assert_is_here(path, 6)
    tokens = {name.partition("-")[2] for name in map(os.path.basename, _files().find(path)) if "-" in name}
    assert len(tokens) <= 3, "what was replaced is deleted by the save after it"


def test_a_bucket_that_was_copied_to_a_disk_is_a_run_there(bucket: Bucket, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        _save(f"{bucket.url}/run/step-{step}", step)
    _save(f"{bucket.url}/run/step-1", 4)  # so that there are objects of a replaced save
    run = tmp_path / "run"
    _files().get(f"{bucket.name}/run/", f"{run}/", recursive=True)
    assert dcp.latest(run) == run / "step-1"
    assert [one.step for one in dcp.list_checkpoints(run)] == [2, 3, 4]
    for name, seed in (("step-1", 4), ("step-2", 2), ("step-3", 3)):
        _assert_is_here(run / name, seed)
        _read_by_stock(run / name, seed)
    with dcp.Checkpointer(run, keep_last=2) as checkpointer:
        checkpointer.load(_state(-1), run / "step-3")
        checkpointer.save(_state(3), step=7)
    newest = dcp.latest(run)
    assert newest is not None and dcp.inspect(newest).bytes_reused == 0, "what is in one file with others is not linked"
    _save(run / "step-1", 8)
    assert not [name for name in os.listdir(run / "step-1") if name.startswith("dcp_plugin-")]
    _assert_is_here(run / "step-1", 8)
    _damage(next((run / "step-3").glob("__*")))
    assert not dcp.verify(run / "step-3").ok
    with pytest.raises(dcp.CheckpointCorrupt, match="step-3"):
        dcp.load(_state(-1), run / "step-3")


def _damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_run_that_was_copied_to_a_bucket_is_a_run_there(bucket: Bucket, tmp_path: Path) -> None:
    run, there = tmp_path / "run", f"{bucket.url}/run"
    for step in (1, 2, 3):
        _save(run / f"step-{step}", step)
    for step in (3, 1, 2):  # the times of the objects are in another order than the saves
        _files().put(f"{run}/step-{step}/", f"{bucket.name}/run/step-{step}/", recursive=True)
    assert dcp.latest(there) == f"{there}/step-3"
    assert [one.step for one in dcp.list_checkpoints(there)] == [1, 2, 3]
    for step in (1, 2, 3):
        _assert_is_here(f"{there}/step-{step}", step)
        _read_by_stock(f"{there}/step-{step}", step)
    _save(f"{there}/step-1", 4)
    assert dcp.latest(there) == f"{there}/step-1"
    _save(f"{there}/step-1", 5)
    _assert_is_here(f"{there}/step-1", 5)
    names = {os.path.basename(name) for name in _files().find(f"{bucket.name}/run/step-1")}
    assert "dcp_plugin.json" not in names, "nothing is left of what was copied"
    with dcp.Checkpointer(there, keep_last=2) as checkpointer:
        checkpointer.save(_state(6), step=6)
    assert len(dcp.list_checkpoints(there)) <= 3
    file = next(name for name in _files().find(f"{bucket.name}/run/step-3") if "__" in name)
    data = bytearray(_files().cat_file(file))
    data[len(data) // 2] ^= 1
    _files().pipe_file(file, bytes(data))
    with pytest.raises(dcp.CheckpointCorrupt, match="step-3"):
        dcp.load(_state(-1), f"{there}/step-3")


@pytest.mark.parametrize("scheme", ["s3", "memory"])
def test_our_reader_and_writer_take_urls_and_stock_planners(bucket: Bucket, scheme: str) -> None:
    path = f"{bucket.url}/run/step" if scheme == "s3" else "memory://run/step"
    for seed in (1, 2):
        stock.save(_stock_state(seed), storage_writer=dcp.ShardedWriter(path), no_dist=True)
        target = _stock_state(-1)
        stock.load(target, storage_reader=dcp.ShardedReader(path), no_dist=True)
        _assert_same(target, _stock_state(seed))
        _read_by_stock(path, seed)
    assert isinstance(dcp.latest(path.rpartition("/")[0]), str)


# Reading


def _is_of_data(request: Request) -> bool:
    return request.method == "GET" and request.path.endswith(".distcp")


def test_opening_takes_three_requests_and_a_listing_one_for_each_row(bucket: Bucket, proxy: Proxy) -> None:
    for step in range(1, 7):
        _save(f"{bucket.url}/run/step-{step}", step)
    proxy.forget()
    dcp.inspect(f"{bucket.url}/run/step-3")
    assert len(proxy.requests) <= 3
    proxy.forget()
    dcp.load(_state(-1), f"{bucket.url}/run/step-3")
    assert proxy.count(_is_of_data) <= 2, "values and tensors of one file"
    assert len(proxy.requests) <= 5
    proxy.forget()
    assert dcp.latest(f"{bucket.url}/run") == f"{bucket.url}/run/step-6"
    assert len(proxy.requests) <= 1 + 5
    proxy.forget()
    assert len(dcp.list_checkpoints(f"{bucket.url}/run")) == 6
    assert len(proxy.requests) <= 1 + 6
    stock.save(_stock_state(1), storage_writer=FsspecWriter(f"{bucket.url}/stock"), no_dist=True)
    proxy.forget()
    dcp.inspect(f"{bucket.url}/stock")
    assert len(proxy.requests) <= 3


def test_the_newest_of_a_thousand_is_found_by_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("memory")
    _save("memory://run/0", 1)
    objects = {path: bytes(file.getbuffer()) for path, file in files.store.items() if path.startswith("/run/0/")}
    (token,) = {path.split("/")[3].removeprefix("dcp_plugin-") for path in objects if "/dcp_plugin-" in path}
    for number in range(1, 1000):
        other = new_token(2e9 - (number - 500) ** 2)  # the newest is in the middle
        for path, data in objects.items():
            changed = data.replace(token.encode(), other.encode()) if path.endswith(".metadata") else data
            files.pipe_file(path.replace("/run/0/", f"/run/{number}/").replace(token, other), changed)
    asked: list[str] = []
    for name in ("below", "head", "read", "directly_below"):
        monkeypatch.setattr(MemoryClient, name, _counted(getattr(MemoryClient, name), asked))
    assert dcp.latest("memory://run") == "memory://run/500"
    assert asked.count("below") <= 2 and len(asked) <= 5
    asked.clear()
    assert len(dcp.list_checkpoints("memory://run")) == 1000
    assert len(asked) <= 1000 + 5


def _counted(method: Callable[..., Any], asked: list[str]) -> Callable[..., Any]:
    def counted(*arguments: Any) -> Any:
        asked.append(method.__name__)
        return method(*arguments)

    return counted


def test_neighbours_are_read_together(bucket: Bucket, proxy: Proxy) -> None:
    small = {f"{number:03}": torch.randn(30, 30) for number in range(300)}
    values = {f"{number:03}": number for number in range(100)}
    dcp.save({"small": small, "values": values}, f"{bucket.url}/small")
    stock.save({"small": small}, storage_writer=FsspecWriter(f"{bucket.url}/stock"), no_dist=True)
    for name, most in (("small", 5), ("stock", 8)):
        proxy.forget()
        target = {key: torch.zeros(30, 30) for key in small}
        dcp.load({"small": target}, f"{bucket.url}/{name}", partial=dcp.PartialLoad(include=["small.*"]))
        assert all(same_bytes(target[key], small[key]) for key in small)
        assert proxy.count(_is_of_data) <= most


def _save_shards(url: str) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (4,))
    tall, wide = torch.randn(4096, 256), torch.randn(2048, 512)
    state = {"tall": distribute_tensor(tall, mesh, [Shard(0)]), "wide": distribute_tensor(wide, mesh, [Shard(0)])}
    dcp.save({"tensors": state}, f"{url}/shards")
    dcp.save({"tensors": {"all": distribute_tensor(tall, mesh, [Replicate()])}}, f"{url}/replicas")


def _load_shards(url: str) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    tall, wide = torch.randn(4096, 256), torch.randn(2048, 512)
    rank = dist.get_rank()
    for key, expected, dim in (("tall", tall, 0), ("wide", wide, 1)):
        target = distribute_tensor(torch.zeros_like(expected), mesh, [Shard(dim)])
        report = dcp.load({"tensors": {key: target}}, f"{url}/shards", partial=dcp.PartialLoad([f"tensors.{key}"]))
        assert same_bytes(target.to_local().contiguous(), expected.chunk(2, dim)[rank].contiguous())
        if key == "tall":
            assert report.bytes_read <= 1.02 * expected.nbytes / 2
        dist.barrier()
        if rank == 0:
            Path(os.environ["MARKS"], key).touch()


def _load_replicas(url: str) -> None:
    torch.manual_seed(0)
    expected = torch.randn(4096, 256)
    target = torch.zeros_like(expected)
    dcp.load({"tensors": {"all": target}}, f"{url}/replicas")
    assert same_bytes(target, expected)


def test_ranks_fetch_what_they_need_and_replicas_each_byte_once(
    bucket: Bucket, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARKS", str(tmp_path))
    launch.run(_save_shards, 4, bucket.url)
    proxy.forget()
    launch.run(_load_shards, 2, bucket.url)
    fetched = [request for request in proxy.requests if _is_of_data(request)]
    assert sum(request.received for request in fetched) <= 1.02 * 4 * MIB + 2 * 4 * MIB
    assert len(fetched) <= 40, "columns of 2048 rows are no request for each row"
    proxy.forget()
    launch.run(_load_replicas, 2, bucket.url)
    assert sum(request.received for request in proxy.requests if _is_of_data(request)) <= 1.02 * 4 * MIB
