"""A bucket is what a directory is: stock reads and writes there, and other tools; and little is asked of it.

What of this holds on a disk too is tested from the same bodies elsewhere (``tests/places.py``).
"""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from botocore.session import Session
from s3torchconnector import S3ClientConfig, S3ReaderConstructor
from s3torchconnector.dcp import S3StorageReader, S3StorageWriter
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp_plugin as dcp
from dcp_plugin.core.format.packed import END, end_of, new_token, packed, time_of
from dcp_plugin.core.format.summary import time_after
from dcp_plugin.core.media.objects.client import MemoryClient, client_of
from dcp_plugin.core.paths import as_path
from tests import launch, programs
from tests.compare import assert_same, same_bytes
from tests.damage import flip_byte
from tests.faults.network import Answer
from tests.faults.proxy import Proxy, Request
from tests.foreign import LIGHTNING, LIGHTNING_WEIGHTS, hugging_face
from tests.object_server import Bucket
from tests.places import save_file as save_torch_file

MIB = 1 << 20


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
    assert_same(_plain(found), _plain(expected))


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
    # Its usual reader wants no range twice, and tensors with the same bytes are one item.
    reader = S3StorageReader("us-east-1", f"{bucket.url}/run/step", _Connector.client, S3ReaderConstructor.sequential())
    target = _stock_state(-1)
    stock.load(target, storage_reader=reader, no_dist=True)
    _assert_same(target, _stock_state(3))


class _Connector:
    client = S3ClientConfig(force_path_style=True)


@pytest.mark.one_of
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
    _train_on(run, "step-3")
    assert sorted(one.path.name for one in dcp.list_checkpoints(run)) == ["step-1", "step-9"]
    _save(run / "step-3", 3)
    _save(run / "step-1", 8)
    assert not [name for name in os.listdir(run / "step-1") if name.startswith("dcp_plugin-")]
    _assert_is_here(run / "step-1", 8)
    flip_byte(next((run / "step-3").glob("__*")))
    assert not dcp.verify(run / "step-3").ok
    with pytest.raises(dcp.CheckpointCorrupt, match="step-3"):
        dcp.load(_state(-1), run / "step-3")


def _train_on(run: str | Path, name: str) -> None:
    """Load a checkpoint of a run, and save another one, with what did not change linked or copied."""
    path = f"{run}/{name}"
    state = _state(-1)
    with closing(dcp.Checkpointer(keep_last=2)) as checkpointer:
        checkpointer.load(state, path)
        checkpointer.save(state, f"{run}/step-9", step=9)
    target = _state(-1)
    dcp.load(target, f"{run}/step-9")
    _assert_same(target, state)


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
    _train_on(there, "step-3")
    assert sorted(one.path.name for one in dcp.list_checkpoints(there)) == ["step-1", "step-9"]
    _files().put(f"{run}/step-3/", f"{bucket.name}/run/step-3/", recursive=True)
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
    assert proxy.count(_is_of_data) <= 3, "values; tensors; and once more what two keys have in common"
    assert len(proxy.requests) <= 6
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


def test_a_save_asks_nothing_twice(bucket: Bucket, proxy: Proxy) -> None:
    checkpointer = dcp.Checkpointer()
    checkpointer.save(_state(1), f"{bucket.url}/run/step-1")  # asks the store for conditional requests, once
    proxy.forget()
    checkpointer.save(_state(2), f"{bucket.url}/run/step-2")
    listings = [request for request in proxy.requests if "list-type" in request.query]
    assert len(listings) == 3, "what is at the path, the records beside it, and the data files of all ranks"
    assert len(proxy.requests) <= 14, [str(request) for request in proxy.requests]


def test_all_requests_to_a_bucket_that_botocore_makes_share_a_session(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Session] = []

    class Counted(Session):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr("botocore.session.Session", Counted)
    path: Any = as_path(f"{bucket.url}/run")
    for _ in range(3):
        assert client_of(path).further.unfinished_uploads("run") == []
    assert len(made) == 1


def test_a_recorded_time_after_that_of_a_name_has_a_later_name() -> None:
    for milliseconds in range(1_700_000_000_000, 1_900_000_000_000, 199_999_999):
        later = time_after(time_of(new_token(milliseconds / 1000)))
        assert time_of(new_token(later)) == (milliseconds + 1) / 1000


def test_the_newest_of_a_thousand_is_found_by_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("memory")
    _save("memory://run/0", 1)
    objects = {path: bytes(file.getbuffer()) for path, file in files.store.items() if path.startswith("/run/0/")}
    whole = objects.pop("/run/0/.metadata")
    end = end_of(whole)
    assert end is not None
    token, length = end
    metadata, summary = whole[: -END - length], whole[-END - length : -END]
    for number in range(1, 1000):
        other = new_token(2e9 - (number - 500) ** 2)  # the newest is in the middle
        for path, data in objects.items():
            moved = path.replace(f"dcp_plugin-{token}", f"dcp_plugin-{other}")
            files.pipe_file(moved.replace("/run/0/", f"/run/{number}/"), data)
        files.pipe_file(f"/run/{number}/.metadata", packed(metadata, summary, other))
    asked: list[str] = []

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            before = len(asked)
            result = method(*arguments)
            asked[before:] = [method.__name__]  # not what it has asked itself
            return result

        return call

    for name in ("below", "head", "read", "directly_below"):
        monkeypatch.setattr(MemoryClient, name, counted(getattr(MemoryClient, name)))
    assert dcp.latest("memory://run") == "memory://run/500"
    assert asked.count("below") <= 2 and len(asked) - asked.count("below") <= 5
    asked.clear()
    assert len(dcp.list_checkpoints("memory://run")) == 1000
    assert len(asked) <= 1000 + 5


def test_the_next_save_completes_a_removal_that_the_store_refused_halfway(monkeypatch: pytest.MonkeyPatch) -> None:
    run = as_path(f"memory://{uuid.uuid4().hex}/run")
    _save(str(run / "step-1"), 1)
    delete = MemoryClient.delete

    def deletes_only_metadata(client: MemoryClient, keys: Iterable[str]) -> None:
        if [key.rpartition("/")[2] for key in keys] != [".metadata"]:
            raise OSError("the store does not answer")
        delete(client, keys)

    monkeypatch.setattr(MemoryClient, "delete", deletes_only_metadata)
    with pytest.raises(dcp.CheckpointError, match="Delete it again"):
        dcp.Checkpointer().remove(str(run / "step-1"))
    monkeypatch.undo()
    _save(str(run / "step-2"), 2)
    assert list(dcp.list_checkpoints(str(run))) and not list(client_of(run).below("run/step-1"))


def test_keys_that_are_no_paths_change_nothing(bucket: Bucket, tmp_path: Path) -> None:
    run = f"{bucket.url}/run"
    for step in (1, 2):
        dcp.save({"step": step}, f"{run}/step-{step}", step=step)
    for key in ("run//log.txt", "run/./a", "run/step-1/..", "run/a%01b", "run/step-1/%7F", "run/step-1//x"):
        bucket.server.ask("PUT", f"{bucket.name}/{key}")
    assert dcp.latest(run) == f"{run}/step-2" and len(dcp.list_checkpoints(run)) == 2
    dcp.save({"step": 3}, f"{run}/step-1", step=3)
    assert dcp.latest(run) == f"{run}/step-1"
    assert len(dcp.copy(run, tmp_path / "copy").copied) == 2 and dcp.verify(run).ok
    dcp.prune(run, keep_last=1)
    (run_left,) = dcp.tools.list_runs(run)
    assert [one.step for one in run_left.checkpoints] == [3]
    dcp.Checkpointer().remove(f"{run}/step-1")
    assert not dcp.list_checkpoints(run)


def test_a_copy_of_a_run_leaves_out_objects_that_are_no_checkpoint(bucket: Bucket, tmp_path: Path) -> None:
    run = as_path(f"{bucket.url}/run")
    dcp.save({"step": 1}, run / "step-1", step=1)
    for name in ("notes", "data.bin", "train.tar", "logs/events"):
        client_of(run).put((run / name).key, b"no checkpoint")  # type: ignore[arg-type, union-attr]
    for name in ("epoch-1.ckpt", "epoch-2.ckpt"):
        save_torch_file(LIGHTNING, run / name)
    for target in (tmp_path / "copy", as_path(f"{bucket.url}/copy")):
        copied = {path.name for path in dcp.copy(run, target).copied}
        assert copied == {"step-1", "epoch-1.ckpt", "epoch-2.ckpt"}


def test_verify_reads_neighbours_together_and_finds_each_changed_one(bucket: Bucket, proxy: Proxy) -> None:
    url = f"{bucket.url}/run/step-1"
    dcp.save({f"w{number}": torch.full((1000 + number,), 1.0 * number) for number in range(200)}, url, step=1)
    proxy.forget()
    report = dcp.verify(url)
    assert report.ok and report.items == 200
    assert len(proxy.requests) < 30, [str(request) for request in proxy.requests]
    path: Any = as_path(url)
    (data,) = [found for found in client_of(path).below(path.key) if found.key.endswith(".distcp")]
    content = bytearray(data.size)
    client_of(path).read(data.key, 0, [memoryview(content)], None)
    index = dcp.ShardedReader(url).index
    for key in ("w7", "w150"):
        location = index[key].chunks[0].location
        content[location.offset + location.payload_offset] ^= 1
    client_of(path).put(data.key, bytes(content))
    errors = dcp.verify(url).errors
    assert len(errors) == 2 and "w7 in" in errors[0] and "w150 in" in errors[1]


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
    replica = torch.zeros_like(tall)
    dcp.load({"tensors": {"all": replica}}, f"{url}/replicas")
    assert same_bytes(replica, tall)


def test_ranks_fetch_what_they_need_and_replicas_each_byte_once(bucket: Bucket, proxy: Proxy) -> None:
    launch.run(_save_shards, 4, bucket.url)
    proxy.forget()
    launch.run(_load_shards, 2, bucket.url)
    fetched = [request for request in proxy.requests if _is_of_data(request)]
    shards = [request for request in fetched if "/shards/" in request.path]
    assert len(shards) <= 40, "columns of 2048 rows are no request for each row"
    replicas = sum(request.received for request in fetched if "/replicas/" in request.path)
    assert 4 * MIB <= replicas <= 1.02 * 4 * MIB


# Foreign sources


_SOURCES = ("hf", "sharded", "bin", "last.ckpt", "weights.pt", "hf/model.safetensors", "accelerate")


def _write_sources(root: Path, weights: dict[str, torch.Tensor]) -> None:
    for name in ("hf", "bin", "accelerate"):
        (root / name).mkdir(parents=True)
    save_file(weights, root / "hf" / "model.safetensors")
    (root / "hf" / "config.json").write_text("{}")
    hugging_face(root / "sharded", *({key: weights[key] for key in list(weights)[number::3]} for number in range(3)))
    torch.save(weights, root / "bin" / "pytorch_model.bin")
    torch.save(weights, root / "weights.pt")
    torch.save({**LIGHTNING_WEIGHTS, "state_dict": weights, "global_step": 5, "loops": {}}, root / "last.ckpt")
    save_file(weights, root / "accelerate" / "model.safetensors")
    (root / "accelerate" / "random_states_0.pkl").write_bytes(b"")


def test_sources_of_other_tools_give_what_is_asked_for_by_few_requests(
    bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    weights = {f"layers.{number}.weight": torch.randn(400, 512) for number in range(12)}  # 800 KiB each
    _write_sources(tmp_path, weights)
    _files().put(f"{tmp_path}/", f"{bucket.name}/", recursive=True)
    nbytes = sum(weight.nbytes for weight in weights.values())
    for name in _SOURCES:
        url = f"{bucket.url}/{name}"
        proxy.forget()
        info = dcp.inspect(url)
        assert info.format == dcp.inspect(tmp_path / name).format
        assert len(info.tensors) == 12
        assert _received(proxy) <= MIB, f"{name}: nothing of a payload that is not asked for"
        assert len(proxy.requests) <= 8 + 12, name  # the zip of torch.save has a header before each tensor

        proxy.forget()
        model = nn.ModuleList([nn.Linear(512, 400, bias=False) for _ in range(12)])
        holder = nn.Module()
        holder.layers = model
        dcp.resume_or_init({"model": holder}, f"{bucket.url}/run", init_from=url)
        assert all(same_bytes(holder.state_dict()[key], weight) for key, weight in weights.items())
        assert _received(proxy) <= nbytes + MIB

        proxy.forget()
        target = {"layers.7.weight": torch.zeros(400, 512)}
        dcp.load({"model": target}, url, partial=dcp.PartialLoad(include=["model.layers.7.*"]))
        assert same_bytes(target["layers.7.weight"], weights["layers.7.weight"])
        assert _received(proxy) <= weights["layers.7.weight"].nbytes + MIB, name


def _received(proxy: Proxy) -> int:
    return sum(request.received for request in proxy.requests)


def test_a_run_of_another_tool_is_in_order_also_if_all_of_it_has_the_same_second(
    bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    run = {"pytorch-lightning_version": "2.6.0", "state_dict": {"w": torch.ones(9)}, "optimizer_states": []}
    for step in range(8, 13):
        folder = tmp_path / "accelerate" / "checkpoints" / f"checkpoint_{step}"
        folder.mkdir(parents=True)
        save_file({"w": torch.ones(9)}, folder / "model.safetensors")
        (folder / "random_states_0.pkl").write_bytes(b"")
        torch.save({**run, "global_step": step}, tmp_path / f"step={step}.ckpt")
    (tmp_path / "notes").write_text("newer than all of them, and no checkpoint")
    _files().put(f"{tmp_path}/", f"{bucket.name}/run/", recursive=True)
    proxy.forget()
    assert dcp.latest(f"{bucket.url}/run/accelerate") == f"{bucket.url}/run/accelerate/checkpoints/checkpoint_12"
    assert len(proxy.requests) <= 1 + 5
    _files().rm(f"{bucket.name}/run/accelerate", recursive=True)
    proxy.forget()
    assert dcp.latest(f"{bucket.url}/run") == f"{bucket.url}/run/step=12.ckpt"
    assert len(proxy.requests) <= 1 + 5, "not one for each file"


def test_the_fingerprint_of_a_source_is_that_of_its_copy(bucket: Bucket, tmp_path: Path) -> None:
    """It is what says whether a base that was moved is the base."""
    _write_sources(tmp_path, {f"{number}": torch.randn(300, 300) for number in range(5)})
    _files().put(f"{tmp_path}/", f"{bucket.name}/", recursive=True)
    for name in _SOURCES:
        readers = dcp.ShardedReader(f"{bucket.url}/{name}"), dcp.ShardedReader(tmp_path / name)
        assert readers[0].fingerprint == readers[1].fingerprint


def test_extra_states_with_tensors_come_from_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    state = {"weight": torch.randn(300, 300), "_extra_state": {"scale": torch.arange(5.0)}}
    torch.save({"state_dict": state}, tmp_path / "weights.pt")
    _files().put(str(tmp_path / "weights.pt"), f"{bucket.name}/weights.pt")
    target: dict[str, Any] = {"weight": torch.zeros(300, 300), "_extra_state": None}
    dcp.load({"model": target}, f"{bucket.url}/weights.pt")
    assert same_bytes(target["weight"], state["weight"])
    assert same_bytes(target["_extra_state"]["scale"], torch.arange(5.0))


# Credentials and options


_KEY, _SECRET, _TOKEN = "AKIATHEKEYNOBODYMAYREAD", "the-secret-nobody-may-read", "the-token-nobody-may-read"


@pytest.fixture
def told_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ACCESS_KEY_ID", _KEY), ("SECRET_ACCESS_KEY", _SECRET), ("SESSION_TOKEN", _TOKEN)):
        monkeypatch.setenv(f"AWS_{name}", value)


@pytest.mark.parametrize(
    ("status", "code", "way_out"),
    [
        (403, "AccessDenied", "rights"),
        (403, "SignatureDoesNotMatch", "secret key"),
        (403, "InvalidAccessKeyId", "does not know"),
        (400, "ExpiredToken", "expired"),
        (403, "RequestTimeTooSkewed", "clock"),
        (404, "NoSuchBucket", "no such bucket"),
        (301, "PermanentRedirect", "region"),
    ],
)
def test_what_a_store_refuses_is_told_once_with_the_way_out_and_without_secrets(
    bucket: Bucket, proxy: Proxy, told_secrets: None, status: int, code: str, way_out: str
) -> None:
    path, state = f"{bucket.url}/run/step", {"t": torch.ones(3)}
    dcp.save(state, path)
    proxy.forget()
    proxy.on(lambda request: True, Answer(status, code), times=None)
    missing = code == "NoSuchBucket"
    doors: dict[str, Callable[[], object]] = {
        "save": lambda: dcp.save(state, f"{bucket.url}/run/other"),
        "load": lambda: dcp.load(state, path),
        "inspect": lambda: dcp.inspect(path),
        "latest": lambda: dcp.latest(f"{bucket.url}/run"),
        "resume": lambda: dcp.resolve_resume("auto", f"{bucket.url}/run"),
    }
    for door, ask in doors.items():
        kind = dcp.SaveFailed if door == "save" else dcp.CheckpointNotFound if missing else dcp.CheckpointUnreadable
        with pytest.raises(kind) as raised:
            ask()
        said = str(raised.value)
        assert bucket.url in said and way_out in said
        chain, error = [], raised.value
        while error is not None:
            chain.append(f"{error!r} {error}")
            error = error.__cause__ or error.__context__
        assert not [word for word in (_KEY, _SECRET, _TOKEN) if word in " ".join(chain)]
    assert len(proxy.requests) <= 20, "what is refused is not asked for again and again"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"acess_key_id": _SECRET}, "acess_key_id"),
        ({"region": 7}, "region must be text"),
        ({"endpoint": "localhost:9000"}, "http://"),
        ({"client_options": {"timout": "1s"}}, "timout"),
        ({"retry_config": {"retries": 1}}, "retries"),
    ],
)
def test_an_option_that_is_none_is_named(bucket: Bucket, options: dict[str, Any], said: str) -> None:
    for ask in (
        lambda: dcp.save({"t": torch.ones(3)}, f"{bucket.url}/run/step", storage_options=options),
        lambda: dcp.load({"t": torch.ones(3)}, f"{bucket.url}/run/step", storage_options=options),
    ):
        with pytest.raises((ValueError, dcp.CheckpointError), match=said) as raised:
            ask()
        assert bucket.url in str(raised.value) and _SECRET not in str(raised.value)


def _settings(server: str, folder: Path) -> dict[str, tuple[dict[str, str], dict[str, Any]]]:
    """Ways to say which server it is and who asks: environment and storage_options."""
    keys = {"AWS_ACCESS_KEY_ID": _KEY, "AWS_SECRET_ACCESS_KEY": _SECRET}
    nowhere = "http://127.0.0.1:1"
    (folder / "credentials").write_text(f"[work]\naws_access_key_id={_KEY}\naws_secret_access_key={_SECRET}\n")
    (folder / "config").write_text(f"[profile work]\nregion=eu-north-1\nendpoint_url={server}\n")
    (folder / "default").write_text(
        f"[default]\naws_access_key_id={_KEY}\naws_secret_access_key={_SECRET}\nservices=mine\n"
        f"[services mine]\ns3=\n  endpoint_url={server}\n"
    )
    none = {"AWS_CONFIG_FILE": str(folder / "none"), "AWS_SHARED_CREDENTIALS_FILE": str(folder / "none")}
    profile = {"AWS_CONFIG_FILE": f"{folder}/config", "AWS_SHARED_CREDENTIALS_FILE": f"{folder}/credentials"}
    given = {"access_key_id": _KEY, "secret_access_key": _SECRET}
    return {
        "endpoint": ({**none, **keys, "AWS_ENDPOINT_URL": server}, {}),
        "endpoint of S3": ({**none, **keys, "AWS_ENDPOINT_URL": nowhere, "AWS_ENDPOINT_URL_S3": server}, {}),
        "profile": ({**profile, "AWS_PROFILE": "work"}, {}),
        "default profile": ({**none, "AWS_CONFIG_FILE": f"{folder}/default"}, {}),
        "options": (none, {**given, "endpoint": server}),
        "options before the environment": (
            {**none, **keys, "AWS_ENDPOINT_URL": nowhere}, {"endpoint": server, **given}
        ),
        "options with prefixes": (profile, {"aws_endpoint_url": server, **{f"aws_{one}": given[one] for one in given}}),
    }  # fmt: skip


def test_a_client_is_told_where_and_who_as_the_tools_of_aws_are(
    bucket: Bucket, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, (environment, options) in _settings(proxy.url, tmp_path).items():
        for known in [known for known in os.environ if known.startswith("AWS_")]:
            monkeypatch.delenv(known)
        for variable, text in environment.items():
            monkeypatch.setenv(variable, text)
        proxy.forget()
        dcp.save({"t": torch.ones(3)}, f"{bucket.url}/run/{name}", storage_options=options)
        signed = {str(request.headers.get("Authorization")) for request in proxy.requests}
        assert signed and all(_KEY in text for text in signed), name
        assert all("eu-north-1" in text for text in signed) == (name == "profile")
        found = dcp.latest(f"{bucket.url}/run", storage_options=options)
        assert isinstance(found, str) and "KEY" not in found


def test_without_obstore_a_disk_is_enough_and_a_url_says_what_to_install(tmp_path: Path) -> None:
    program = """
        import sys
        sys.modules["obstore"] = None
        import torch, dcp_plugin as dcp
        dcp.save({"t": torch.ones(3)}, sys.argv[1])
        dcp.load({"t": torch.zeros(3)}, sys.argv[1])
        print(sorted(name for name in ("obstore", "fsspec", "s3fs", "botocore") if sys.modules.get(name)))
        for ask in (dcp.latest, dcp.inspect):
            try:
                ask("s3://bucket/run")
            except Exception as error:
                print(type(error).__name__, error)
    """
    ended = programs.run("-c", program, tmp_path / "step", imported=programs.BARE)
    local, *refused = ended.stdout.splitlines()
    assert local == "[]"
    assert len(refused) == 2
    assert all("pip install 'dcp-plugin[objects]'" in line and "s3://bucket" in line for line in refused)
