"""What stock DCP brings back into a state of containers, we bring back too, in both directions: with the same values,
bytes and classes. Stock saves and loads with its own planner and storage, next to ours."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp_plugin as dcp
from dcp_plugin.core.format.keys import encode_state, flatten
from dcp_plugin.core.storage.stock.stock_save import ShardedSavePlanner
from tests.compare import same_tree
from tests.conformance.interchange import STATES as CONTAINERS
from tests.conformance.interchange import Saved, file_in_memory, tensor
from tests.launch import on_ranks
from tests.ways import LOADS, SAVES

STATES = {
    name.replace("_", " "): CONTAINERS[name]
    for name in (
        "tuple", "tuple_in_a_list", "list_of_tuples", "tuples_in_tuples", "lists", "nothing", "list_of_nothing",
        "classes", "counter", "number_keys", "file_in_memory",
    )
}  # fmt: skip


@pytest.mark.one_of(count=4)
@pytest.mark.parametrize("name", STATES)
def test_whoever_saved_it_whoever_loads_it(tmp_path: Path, name: str) -> None:
    state = STATES[name]
    for saver, save in SAVES.items():
        path = tmp_path / saver
        save(state(1), path)
        for loader, load in LOADS.items():
            found = state(0)
            load(found, path)
            assert same_tree(found, state(1)), f"saved by {saver}, loaded by {loader}: {found}"


@pytest.mark.parametrize("name", STATES)
def test_a_stateful_object_gets_what_stock_gives_it(tmp_path: Path, name: str) -> None:
    state = STATES[name]
    for saver in ("stock", "ours"):
        path = tmp_path / saver
        SAVES[saver]({"one": Saved(state(1)), "none": Saved({})}, path)
        for loader in ("stock", "ours"):
            one, none = Saved(state(0)), Saved({})
            LOADS[loader]({"one": one, "none": none}, path)
            assert none.given == {}, f"saved by {saver}, loaded by {loader}"
            got = one.given or {}
            assert got.keys() == state(1).keys()
            assert all(same_tree(got[key], value) for key, value in state(1).items()), f"{saver}, {loader}: {got}"


class _OfEarlierVersions(ShardedSavePlanner):
    """Up to 0.1.0, tuples with tensors were walked."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        leaves, paths = flatten(state_dict, lambda _, value: bool(value))
        self._state, self._paths = encode_state(leaves), paths


@pytest.mark.parametrize("name", ["tuple", "tuple in a list", "list of tuples", "tuples in tuples"])
def test_tuples_that_earlier_versions_walked_are_read(tmp_path: Path, name: str) -> None:
    state, path = STATES[name], tmp_path / "checkpoint"
    stock.save(state(1), storage_writer=dcp.ShardedWriter(path), planner=_OfEarlierVersions())
    walked, _ = flatten(state(1), lambda _, value: bool(value))
    stored = {tensor.key for tensor in dcp.inspect(path).tensors}
    assert stored == {key for key, leaf in walked.items() if torch.is_tensor(leaf)}
    for loader in ("our planner, our reader", "ours"):
        found = state(0)
        LOADS[loader](found, path)
        assert same_tree(found, state(1)), loader
    one = Saved(state(0))
    stateful = tmp_path / "stateful"
    stock.save({"one": state(1)}, storage_writer=dcp.ShardedWriter(stateful), planner=_OfEarlierVersions())
    dcp.load({"one": one}, stateful)
    assert same_tree(one.given, state(1))


def test_mappings_that_torch_before_2_4_did_not_walk_are_read(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import _version

    def state(at: int) -> dict[str, Any]:
        return {"a": tensor(at), "cfg": {"lr": at, "more": {"b": at}}, "d": {"t": tensor(at), "e": {"f": at}}}

    path = tmp_path / "checkpoint"
    _version._derived_version = "2_3"
    try:
        stock.save({**state(1), "one": Saved(state(1)["cfg"])}, checkpoint_id=path)
    finally:
        _version._derived_version = None
    for loader in ("stock", "our planner, our reader", "ours"):
        found, one = state(0), Saved(state(0)["cfg"])
        LOADS[loader]({"one": one, **found}, path)
        LOADS[loader](found, path)
        assert same_tree(found, state(1)) and same_tree(one.given, state(1)["cfg"]), loader
    for loader in ("our planner, our reader", "ours"):
        with pytest.raises(BaseException, match=r"cfg\.other is not in the checkpoint"):
            LOADS[loader]({"cfg": {"lr": 0, "other": 0}}, path)


def test_what_is_wanted_and_not_there_is_still_missing(tmp_path: Path) -> None:
    for saver, save in SAVES.items():
        path = tmp_path / saver
        save({"a": tensor(1), "e": {}, "d": {"b": 1}}, path)
        for wanted in ({"e": {"x": 1}}, {"d": {"b": 1, "c": {"x": 1}}}, {"t": (tensor(0), 1)}, {"l": []}):
            for loader in ("our planner, our reader", "ours"):
                with pytest.raises(BaseException, match=r"is not in the checkpoint|has no|not there|missing"):
                    LOADS[loader](dict(wanted), path)


@pytest.mark.one_of
@on_ranks(1, 2)
def test_what_is_on_the_meta_device_gets_memory_and_the_values(tmp_path: Path, world_size: int) -> None:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def state(at: int) -> dict[str, Any]:
        sharded = distribute_tensor(torch.arange(10.0).reshape(5, 2) * at, mesh, [Shard(0)])
        return {"a": tensor(at), "l": [tensor(at), {"q": tensor(at)}], "t": (tensor(at), at), "d": {"s": sharded}}

    def meta() -> dict[str, Any]:
        found = state(0)
        sharded = found["d"]["s"]
        local = torch.empty_like(sharded.to_local(), device="meta")
        on_meta = DTensor.from_local(local, mesh, [Shard(0)], shape=sharded.shape, stride=sharded.stride())
        empty = torch.empty_like(tensor(0), device="meta")
        return {"a": empty, "l": [empty.clone(), {"q": empty.clone()}], "t": (empty.clone(), 0), "d": {"s": on_meta}}

    for saver, save in SAVES.items():
        save(state(1), tmp_path / saver)
        for loader, load in LOADS.items():
            found = meta()
            load(found, tmp_path / saver)
            assert same_tree(found, state(1)), f"saved by {saver}, loaded by {loader}: {found}"
    dcp.save({"one": Saved(state(1))}, tmp_path / "stateful")
    one = Saved(meta())
    dcp.load({"one": one}, tmp_path / "stateful")
    assert same_tree(one.given, state(1))


def test_a_default_device_of_meta_is_no_memory(tmp_path: Path) -> None:
    dcp.save({"a": tensor(1)}, tmp_path / "checkpoint")
    found = {"a": torch.empty_like(tensor(0), device="meta")}
    with torch.device("meta"):
        dcp.load(found, tmp_path / "checkpoint")
    assert same_tree(found["a"], tensor(1))


def test_a_file_in_memory_that_the_user_allows_stays_allowed(tmp_path: Path) -> None:
    dcp.save({"f": file_in_memory(1)}, tmp_path / "checkpoint")
    for allowed in ([], [io.BytesIO]):
        with torch.serialization.safe_globals(allowed):
            dcp.load({"f": file_in_memory(0)}, tmp_path / "checkpoint")
            assert (io.BytesIO in torch.serialization.get_safe_globals()) == bool(allowed)


@on_ranks(2)
@pytest.mark.parametrize("rows", [[2, 3, 4, 1], [10]], ids=["two shards each", "none on rank 1"])
def test_a_sharded_tensor_of_several_shards_or_none_is_filled(tmp_path: Path, rows: list[int]) -> None:
    """What some of its attributes refuse: they answer for one shard."""
    whole = torch.arange(30.0).reshape(10, 3)
    stock.save({"t": whole}, checkpoint_id=tmp_path / "ck")
    begins = [sum(rows[:number]) for number in range(len(rows))]
    shards = [
        ShardMetadata([begin, 0], [count, 3], placement=f"rank:{number % 2}/cpu")
        for number, (begin, count) in enumerate(zip(begins, rows, strict=True))
    ]
    target = sharded_tensor.zeros(EnumerableShardingSpec(shards), 10, 3)
    stock.load({"t": target}, storage_reader=dcp.ShardedReader(tmp_path / "ck"), planner=dcp.ShardedLoadPlanner())
    for shard in target.local_shards():
        begin, count = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        assert torch.equal(shard.tensor, whole[begin : begin + count])
