"""Values of which each rank has its own, under one name: PerRank, and the loaders and samplers of torchdata."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.nodes import IterableWrapper, Loader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import dcp_plugin as dcp
from dcp_plugin.errors import CheckpointMismatch
from tests import launch
from tests.launch import on_ranks
from tests.messages import warned
from tests.objects import Holder

State = dict[str, Any]


class Stream(IterableDataset[int]):
    """Rank ``r`` of ``n`` reads the samples ``r``, ``r + n``, ``r + 2 n`` ..."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        assert get_worker_info() is None
        while self.read < 100:
            self.read += 1
            yield self.read * 100 + dist.get_rank()

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]


def _loader(batches: int = 0) -> Any:
    loader = StatefulDataLoader(Stream(), batch_size=2)
    for _ in zip(range(batches), loader, strict=False):
        pass
    return loader


class OwnState(StatefulDataLoader[int]):
    """Stores all ranks under one name, as torchtitan's loader does."""

    def state_dict(self) -> dict[str, Any]:
        return {f"of_rank_{dist.get_rank()}": "position"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


def _value(rank: int) -> State:
    batch = (torch.full((2,), rank), f"of {rank}")
    return {"rng": torch.full((5,), rank, dtype=torch.uint8), "batch": batch, "count": rank}


def _is_value_of(rank: int, value: State) -> bool:
    return bool((value["rng"] == rank).all()) and value["batch"][1] == f"of {rank}" and value["count"] == rank


@on_ranks(2)
def test_each_rank_gets_its_own_value_back(tmp_path: Path) -> None:
    rank = dist.get_rank()
    dcp.save({"extra": dcp.PerRank(_value(rank)), "step": 7}, tmp_path / "checkpoint")
    state: State = {"extra": dcp.PerRank(_value(9)), "step": 0}
    rng = state["extra"].value["rng"]
    report = dcp.load(state, tmp_path / "checkpoint")
    assert _is_value_of(rank, state["extra"].value) and state["step"] == 7
    assert state["extra"].value["rng"] is rng, "tensors are filled in place"
    assert not report.missing and not report.unexpected


@on_ranks(2)
def test_a_loader_of_each_rank_goes_on_where_it_was(tmp_path: Path) -> None:
    loader = _loader(batches=1 + dist.get_rank())
    dcp.save({"data": {"loader": loader}}, tmp_path / "checkpoint")
    state = {"data": {"loader": _loader()}}
    dcp.load(state, tmp_path / "checkpoint")
    first = next(iter(state["data"]["loader"]))
    assert first.tolist() == [(3 + 2 * dist.get_rank() + number) * 100 + dist.get_rank() for number in range(2)]


@on_ranks(2)
def test_samplers_and_nodes_of_torchdata_keep_a_position_of_each_rank(tmp_path: Path) -> None:
    rank = dist.get_rank()

    def make() -> State:
        nodes = Loader(IterableWrapper(range(10 * rank, 10 * rank + 9)))
        sampler = StatefulDistributedSampler(range(100), num_replicas=2, rank=rank, shuffle=False)
        return {"nodes": nodes, "sampler": sampler, "own": OwnState(Stream())}

    state = make()
    assert [number for _, number in zip(range(2 + rank), state["nodes"], strict=False)] == [[0, 1], [10, 11, 12]][rank]
    state["sampler"].yielded = 5 + rank
    dcp.save(state, tmp_path / "checkpoint")
    again = make()
    dcp.load(again, tmp_path / "checkpoint")
    assert next(iter(again["nodes"])) == [2, 13][rank]
    assert again["sampler"].next_yielded == 5 + rank
    values = dcp.inspect(tmp_path / "checkpoint").values
    assert {"own.of_rank_0", "own.of_rank_1"} <= set(values), "a class with a state_dict of its own decides itself"
    assert f"sampler.{rank}.yielded" in values


def _save_values(path: Path) -> None:
    rank = dist.get_rank()
    dcp.save({"extra": dcp.PerRank(_value(rank)), "data": _loader(batches=1 + rank)}, path, step=1)


def _save_extra(path: Path) -> None:
    dcp.save({"extra": dcp.PerRank(_value(dist.get_rank()))}, path)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks."""
    path = tmp_path_factory.mktemp("two") / "checkpoint"
    launch.run(_save_values, 2, path)
    return path


@pytest.fixture
def of_three(tmp_path: Path) -> Path:
    """Checkpoints of three ranks: of everything, and of ``extra`` alone."""
    launch.run(_save_values, 3, tmp_path / "all")
    launch.run(_save_extra, 3, tmp_path / "extra")
    return tmp_path


def _refused(path: Path) -> str:
    state: State = {"extra": dcp.PerRank(_value(9)), "data": _loader()}
    with pytest.raises(CheckpointMismatch) as caught:
        dcp.load(state, path)
    assert _is_value_of(9, state["extra"].value), "nothing is overwritten"
    return str(caught.value)


@on_ranks(3)
def test_more_ranks_than_entries_are_an_error_that_names_key_rank_and_way_out(of_two: Path) -> None:
    message = _refused(of_two)
    assert "'extra' has the values of 2 ranks, and none for rank 2: " in message
    assert "'data' has the positions of 2 ranks in the data, which 3 ranks divide otherwise" in message
    assert "with strict=False, or in a resume_or_init. Else load on 2 ranks" in message


@on_ranks(2)
def test_fewer_ranks_get_their_own_values(of_three: Path) -> None:
    state: State = {"extra": dcp.PerRank(_value(9))}
    report = dcp.load(state, of_three / "extra")
    assert _is_value_of(dist.get_rank(), state["extra"].value) and not report.unexpected


@on_ranks(2)
def test_positions_in_the_data_are_refused_on_fewer_ranks(of_three: Path) -> None:
    message = _refused(of_three / "all")
    assert "'data' has the positions of 3 ranks in the data" in message and "'extra'" not in message


@on_ranks(3)
def test_without_strict_ranks_without_an_entry_keep_their_values(of_two: Path) -> None:
    state: State = {"extra": dcp.PerRank(_value(9)), "data": _loader()}
    report = dcp.load(state, of_two, strict=False)
    rank = dist.get_rank()
    assert _is_value_of(rank if rank < 2 else 9, state["extra"].value)
    assert next(iter(state["data"])).tolist() == [100 + rank, 200 + rank], "the data starts at the beginning"
    assert f"data.{rank}" in report.missing


def _resume(root: Path) -> list[str]:
    state: State = {"extra": dcp.PerRank(_value(9)), "data": _loader()}
    with warned() as messages:
        assert dcp.resume_or_init(state, root).how == "resumed"
    rank = dist.get_rank()
    assert _is_value_of(rank if rank < 2 else 9, state["extra"].value)
    first = (3 + 2 * rank if dist.get_world_size() == 2 else 1) * 100 + rank
    assert next(iter(state["data"])).tolist() == [first, first + 100]
    return [message for message in messages if str(root) in message]


def test_a_resume_on_other_ranks_goes_on_with_a_warning(of_two: Path) -> None:
    """As in the framework packages: new ranks start anew, and so does the data."""
    assert launch.run(_resume, 2, of_two.parent) == [[], []]
    (about_data, about_extra), *others = launch.run(_resume, 3, of_two.parent)
    assert "'extra' has the values of 2 ranks, and none for rank 2: these keep their own. To continue" in about_extra
    assert "'data' has the positions of 2 ranks in the data, which 3 ranks divide otherwise" in about_data
    assert others == [[], []], "rank 0 warns"
    ((about_data,),) = launch.run(_resume, 1, of_two.parent)
    assert "'data' has the positions of 2 ranks in the data" in about_data


@on_ranks(2)
def test_some_ranks_may_have_the_value(tmp_path: Path) -> None:
    rank = dist.get_rank()
    state: State = {"extra": dcp.PerRank(_value(rank)), "data": _loader(1)} if rank == 1 else {"step": 3}
    dcp.save(state, tmp_path / "checkpoint")
    again: State = {"extra": dcp.PerRank(_value(9)), "data": _loader()} if rank == 1 else {"step": 0}
    dcp.load(again, tmp_path / "checkpoint")
    assert _is_value_of(1, again["extra"].value) if rank == 1 else again["step"] == 3


@pytest.mark.one_of("options")
@pytest.mark.parametrize("options", [{}, {"async_save": True}, {"async_save": True, "staging": "lazy"}], ids=str)
@on_ranks(2)
def test_saves_of_every_kind_replace_the_values(tmp_path: Path, options: dict[str, Any]) -> None:
    rank, model = dist.get_rank(), torch.nn.Linear(2, 2)
    checkpointer = dcp.Checkpointer(**options)
    extra = dcp.PerRank(_value(rank))
    for added in (0, 10):
        extra.value = _value(rank + added)
        checkpointer.save({"model": model, "extra": extra}, tmp_path / "checkpoint")
    extra.value = _value(9)
    checkpointer.close()
    state = {"model": model, "extra": dcp.PerRank(_value(9))}
    dcp.load(state, tmp_path / "checkpoint")
    assert _is_value_of(rank + 10, state["extra"].value)


@pytest.mark.one_of(count=2)
@pytest.mark.parametrize("kind", ["tensor", "number", "stateful", "nested", "empty"])
@on_ranks(2)
def test_values_of_every_kind(tmp_path: Path, kind: str) -> None:
    def make(rank: int) -> Any:
        counter = Holder({"count": rank})
        nested = {"counter": counter, "rng": torch.full((3,), rank), "data": {"n": rank}}
        kinds = {"tensor": torch.full((3,), rank), "number": rank, "stateful": counter, "nested": nested}
        return kinds.get(kind, {})

    def said(value: Any) -> str:
        return repr(vars(value) if isinstance(value, Holder) else value)

    rank = dist.get_rank()
    dcp.save({"a": {"of_rank": dcp.PerRank(make(rank))}}, tmp_path / "checkpoint")
    target = dcp.PerRank(make(9))
    dcp.load({"a": {"of_rank": target}}, tmp_path / "checkpoint")
    if kind == "nested":
        assert target.value["counter"].state == {"count": rank} and target.value["data"] == {"n": rank}
        assert target.value["rng"].tolist() == [rank] * 3
    else:
        assert said(target.value) == said(make(rank))


def test_modules_are_refused(tmp_path: Path) -> None:
    for value in (torch.nn.Linear(2, 2), {"net": torch.nn.Linear(2, 2)}, dcp.PerRank(1)):
        with pytest.raises(dcp.CheckpointError, match="in a PerRank, which takes"):
            dcp.save({"extra": dcp.PerRank(value)}, tmp_path / "checkpoint")


def test_tools_and_stock_show_the_entries_of_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    launch.run(_save_extra, 2, path)
    assert sorted(dcp.read(path)) == [f"extra.{rank}.{name}" for rank in (0, 1) for name in ("batch", "count", "rng")]
    assert {tensor.key for tensor in dcp.inspect(path).tensors} == {"extra.0.rng", "extra.1.rng"}
    dcp.export(path, tmp_path / "exported.pt", format="torch")
    exported = torch.load(tmp_path / "exported.pt")
    state = {"extra": {str(rank): {"rng": torch.zeros(5, dtype=torch.uint8), "count": 9} for rank in (0, 1)}}
    torch.distributed.checkpoint.load(state, checkpoint_id=path, no_dist=True)
    for rank in (0, 1):
        assert _is_value_of(rank, exported["extra"][str(rank)])
        assert state["extra"][str(rank)]["count"] == rank and bool((state["extra"][str(rank)]["rng"] == rank).all())


@on_ranks(2)
def test_a_partial_load_selects_and_leaves_out(tmp_path: Path) -> None:
    rank = dist.get_rank()
    dcp.save({"extra": dcp.PerRank(_value(rank)), "data": _loader(2), "step": 1}, tmp_path / "checkpoint")
    state: State = {"extra": dcp.PerRank(_value(9)), "data": _loader(), "step": 0}
    dcp.load(state, tmp_path / "checkpoint", dcp.PartialLoad(include="extra.*.rng"))
    assert state["extra"].value["rng"].tolist() == [rank] * 5 and state["extra"].value["count"] == 9
    dcp.load(state, tmp_path / "checkpoint", dcp.PartialLoad(exclude=("extra.*", "data.*")))
    assert state["extra"].value["count"] == 9 and state["step"] == 1
    assert next(iter(state["data"])).tolist() == [100 + rank, 200 + rank]


@on_ranks(3)
def test_a_partial_load_on_another_number_of_ranks(of_two: Path) -> None:
    state: State = {"extra": dcp.PerRank(_value(9)), "data": _loader()}
    dcp.load(state, of_two, dcp.PartialLoad(include="extra.*.rng", exclude="data.*", missing="ignore"))
    assert state["extra"].value["rng"].tolist() == [min(dist.get_rank(), 2) if dist.get_rank() < 2 else 9] * 5


def test_a_list_of_all_ranks_is_not_taken_for_the_values_of_each(tmp_path: Path) -> None:
    dcp.save({"extra": [torch.ones(2), torch.zeros(2)]}, tmp_path / "ck")
    value = torch.full((2,), 9.0)
    with pytest.raises(CheckpointMismatch, match=r"extra\.0 is not in the checkpoint as extra"):
        dcp.load({"extra": dcp.PerRank(value)}, tmp_path / "ck")
    assert value.tolist() == [9.0, 9.0]


@on_ranks(2)
def test_one_value_for_all_ranks_is_taken_by_each(tmp_path: Path) -> None:
    """As in a checkpoint from before the value was marked."""
    dcp.save({"extra": _value(4), "list": [{"a": torch.zeros(2)}, {"a": torch.ones(2)}]}, tmp_path / "checkpoint")
    state: State = {
        "extra": dcp.PerRank(_value(9)),
        "list": dcp.PerRank([{"a": torch.zeros(2)}, {"a": torch.zeros(2)}]),
    }
    with warned() as messages:
        dcp.load(state, tmp_path / "checkpoint")
    assert _is_value_of(4, state["extra"].value) and state["list"].value[1]["a"].tolist() == [1, 1]
    assert any("one value of 'extra' for all ranks" in message for message in messages) == (dist.get_rank() == 0)


@on_ranks(2)
def test_a_checkpointer_of_one_rank_has_one_entry(tmp_path: Path) -> None:
    rank = dist.get_rank()
    alone = dcp.Checkpointer(solo=True)
    alone.save({"extra": dcp.PerRank(_value(rank))}, tmp_path / f"of-{rank}")
    state: State = {"extra": dcp.PerRank(_value(9))}
    alone.load(state, tmp_path / f"of-{rank}")
    assert _is_value_of(rank, state["extra"].value) and "extra.0.count" in dcp.inspect(tmp_path / f"of-{rank}").values


def _warnings_of(*saves: State, path: Path) -> list[str]:
    with warned() as messages, closing(dcp.Checkpointer()) as checkpointer:
        for state in saves:
            checkpointer.save(state, path)
    return messages


@on_ranks(2)
def test_values_that_differ_give_one_warning_at_the_first_save(tmp_path: Path) -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    batch = (torch.full((2,), rank), torch.ones(2))
    nanogpt = {"step": 3, "extra": {"rng": torch.get_rng_state(), "batch": batch, "same": torch.ones(9)}}
    said = _warnings_of(nanogpt, nanogpt, path=tmp_path / "checkpoint")
    assert len(said) == (rank == 0), said
    if rank == 0:
        assert "extra.rng (ranks 0 and 1)" in said[0] and "extra.batch (ranks 0 and 1)" in said[0]
        assert "dcp_plugin.PerRank(value)" in said[0] and "extra.same" not in said[0]


@on_ranks(2)
def test_a_large_tensor_and_a_stateful_that_differ_give_a_warning(tmp_path: Path) -> None:
    rank = dist.get_rank()
    large = torch.randn(2_000_000, generator=torch.Generator().manual_seed(rank))
    named = Holder({"count": f"shard {rank}"})
    said = _warnings_of({"large": large, "named": named}, path=tmp_path / "checkpoint")
    assert [("large (" in message, "named.count (" in message) for message in said] == [(True, True)] * (rank == 0)


@on_ranks(2)
def test_what_may_differ_gives_no_warning(tmp_path: Path) -> None:
    rank = dist.get_rank()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[1].running_mean.fill_(rank)  # type: ignore[operator, union-attr]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state: State = {
        "step": rank,
        "loss": 0.1 * rank,
        "deep": {"er": {"loss": torch.tensor(0.1 * rank), "losses": [0.1 * rank, 0.5]}},
        "counter": Holder({"count": rank}),
        "model": model,
        "optim": optimizer,
        "as_dict": model.state_dict(),
        "own": dcp.PerRank(_value(rank)),
        f"expert{rank}": {"weights": torch.full((3,), rank)},
        "same": {"rng": torch.ones(5), "text": "a", "set": {"a", "b"}},
    }
    assert _warnings_of(state, path=tmp_path / "checkpoint") == []


@on_ranks(2)
def test_a_warning_that_is_an_error_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    state = {"rng": torch.full((4,), dist.get_rank())}
    with pytest.raises(dcp.CheckpointError, match="PerRank"), warnings.catch_warnings(action="error"):
        dcp.save(state, tmp_path / "checkpoint")
