"""Tensors that only the target or only the checkpoint has, in data and ``Stateful`` objects: filled, or restored.

The corpus *containers* of ``tests/conformance`` compares strict loads with stock; here is what stock has no word for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp_plugin as dcp
from tests.conformance.containers import Box, LayersApp
from tests.launch import on_ranks
from tests.messages import warned

Load = Callable[[dict[str, Any], Path], Any]


def _t(value: float, count: int = 2) -> torch.Tensor:
    return torch.full((count,), float(value))


def _resume(state: dict[str, Any], root: Path) -> Any:
    return dcp.resume_or_init(state, root)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {"box": Box(a=_t(1), b=_t(2), m={"c": _t(3)}), "map": {"a": _t(4), "b": _t(5)}, "list": [_t(6), _t(7)]}
    dcp.save(state, tmp_path / "step-1")
    return tmp_path


def test_a_resume_hands_over_other_shapes_and_extra_tensors(saved: Path) -> None:
    state = {"box": Box(a=_t(0, 7), m={}), "map": {"a": _t(0)}, "list": [_t(0, 2)]}
    with warned() as messages:
        _resume(state, saved)
    assert messages == []
    assert state["box"].content.keys() == {"a", "b", "m"}
    assert [state["box"].content["a"].tolist(), state["box"].content["m"]["c"].tolist()] == [[1, 1], [3, 3]]
    assert state["map"]["b"].tolist() == [5, 5]
    assert len(state["list"]) == 2


def test_a_resume_names_tensors_that_the_checkpoint_lacks_in_one_warning(saved: Path) -> None:
    state = {"box": Box(a=_t(0), new=_t(0), m={"new": _t(0)}), "list": [_t(0), _t(0), _t(0)]}
    with warned() as messages:
        _resume(state, saved)
    (message,) = messages
    assert "box.new, box.m.new, list.2: they are not restored" in message
    assert "new" not in state["box"].content
    assert len(state["list"]) == 2


def test_a_load_names_all_that_does_not_fit_and_overwrites_nothing(saved: Path) -> None:
    box, own = Box(a=_t(0, 7), b=_t(0), m={"new": _t(0)}), _t(0)
    with pytest.raises(dcp.CheckpointMismatch) as raised:
        dcp.load({"box": box, "list": [own, _t(0), _t(0)]}, saved / "step-1")
    for part in (
        "box.a has shape (7,) here and (2,) in the checkpoint",
        "box.m.new",
        "list.2 is not in the checkpoint",
    ):
        assert part in str(raised.value)
    assert own.tolist() == [0, 0]
    assert box.content["b"].tolist() == [0, 0]


def test_a_load_that_is_not_strict_leaves_what_the_checkpoint_lacks_as_it_is(saved: Path) -> None:
    box, values = Box(a=_t(0, 7), new=_t(9), b=_t(0), m={"c": _t(0)}), [_t(0), _t(0), _t(9)]
    state = {"box": box, "list": values}
    report = dcp.load(state, saved / "step-1", strict=False)
    assert report.missing == ["box.new", "list.2"]
    assert box.content["a"].tolist() == [1, 1]
    assert box.content["new"].tolist() == [9, 9]
    assert [each.tolist() for each in state["list"]] == [[6, 6], [7, 7], [9, 9]]


def test_a_mapping_reads_its_own_tensors_and_one_warning_names_the_others(saved: Path) -> None:
    state = {"map": {"a": _t(0)}, "list": [_t(0)]}
    with warned() as messages:
        dcp.load(state, saved / "step-1")
    (message,) = messages
    assert "map.b, list.1: they are not loaded" in message
    assert state["map"].keys() == {"a"}
    assert len(state["list"]) == 1
    ignoring = dcp.PartialLoad(unexpected="ignore")
    with warned() as messages:
        dcp.load(state, saved / "step-1", ignoring)
    assert messages == []


def test_a_mapping_reads_no_bytes_of_tensors_that_it_does_not_have(tmp_path: Path) -> None:
    dcp.save({"map": {"a": _t(1), "b": torch.zeros(1 << 20)}}, tmp_path / "c")
    report = dcp.load({"map": {"a": _t(0)}}, tmp_path / "c", dcp.PartialLoad(unexpected="ignore"))
    assert report.bytes_read < 1 << 20


@pytest.mark.parametrize("options", [{"strict": False}, {"partial": dcp.PartialLoad(unexpected="ignore")}])
def test_a_stateful_is_not_handed_what_it_has_not_if_that_is_ignored(saved: Path, options: dict[str, Any]) -> None:
    box = Box(a=_t(0), m={"c": _t(0)})
    with warned() as messages:
        dcp.load({"box": box}, saved / "step-1", **options)
    (message,) = messages
    assert "box.b: they are not loaded" in message
    assert box.content.keys() == {"a", "m"}


def test_an_app_state_with_fewer_layers_loads(tmp_path: Path) -> None:
    dcp.save({"app": LayersApp(3)}, tmp_path / "c")
    app = LayersApp(2)
    with warned() as messages:
        dcp.load({"app": app}, tmp_path / "c", strict=False)
    assert len(messages) == 1


def test_a_stateful_that_was_handed_more_judges_it(saved: Path) -> None:
    class Strict(Box):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError(f"what is {sorted(state)}?")

    with pytest.raises(ValueError, match=r"what is \['a', 'b', 'm'\]"):
        dcp.load({"box": Strict(a=_t(0))}, saved / "step-1")


def test_the_order_of_a_restored_mapping_is_that_of_the_save(tmp_path: Path) -> None:
    dcp.save({"map": {"z": _t(1), "a": _t(2), "k": _t(3)}}, tmp_path / "step-1")
    state: dict[str, Any] = {"map": Box(k=_t(0))}
    _resume(state, tmp_path)
    assert list(state["map"].content) == ["z", "a", "k"]


def _shard(fill: float, group: int) -> DTensor:
    """A tensor that is sharded over the two ranks of a group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("group", "shard"))
    return distribute_tensor(torch.full((4,), float(fill)), mesh["shard"], [Shard(0)])


def _load(state: dict[str, Any], root: Path) -> Any:
    return dcp.load(state, root / "step-1")


@pytest.mark.one_of
@on_ranks(4)
@pytest.mark.parametrize("load", [_load, _resume])
def test_what_is_a_shard_on_other_ranks_is_theirs(tmp_path: Path, load: Load) -> None:
    group = dist.get_rank() // 2
    dcp.save({"experts": {f"e{group}": _shard(group + 1, group)}}, tmp_path / "step-1")
    for target in (
        {f"e{group}": _shard(0, group)},
        {f"e{1 - group}": _shard(0, group)},
        Box(**{f"e{group}": _shard(0, group)}),
    ):
        with warned() as messages:
            load({"experts": target}, tmp_path)
        assert messages == []
        ((name, tensor),) = (target.content if isinstance(target, Box) else target).items()
        assert (tensor.to_local() == int(name[1]) + 1).all()


@on_ranks(2)
@pytest.mark.parametrize("load", [_load, _resume])
def test_what_is_in_a_module_of_another_rank_is_its(tmp_path: Path, load: Load) -> None:
    rank = dist.get_rank()
    names = ("body", "head")
    dcp.save({"model": {names[rank]: torch.nn.Linear(2, 2)}, "step": 5}, tmp_path / "step-1")
    inner = torch.nn.Linear(2, 2) if rank == 0 else {}
    state = {"model": {"body": inner} if rank == 0 else inner, "step": 0}
    load(state, tmp_path)
    if rank == 1:
        assert set(state["model"]) == {"head"}


@on_ranks(2)
def test_tensors_that_no_rank_has_are_handed_to_a_stateful(tmp_path: Path) -> None:
    rank = dist.get_rank()
    if rank == 0:
        dcp.Checkpointer(solo=True).save({"box": Box(a=_t(1), b=_t(2), c=_t(3))}, tmp_path / "step-1")
    dist.barrier()
    box = Box(**{("a", "b")[rank]: _t(0)})
    dcp.load({"box": box}, tmp_path / "step-1")
    assert {key: value.tolist() for key, value in box.content.items()} == {
        ("a", "b")[rank]: [rank + 1] * 2,
        "c": [3, 3],
    }
    dcp.resume_or_init({"box": box}, tmp_path)
    assert box.content.keys() == {"a", "b", "c"}
