"""Ranks that hold different layers under one name: missing and unexpected keys are judged on the union over ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dcp_plugin as dcp
from dcp_plugin.core.ranks.collectives import said_by_ranks
from dcp_plugin.core.ranks.rank_group import RankGroup
from tests import launch
from tests.launch import gathered, on_ranks

SPLITS = {"halves": ([0, 1], [2, 3]), "one and three": ([0], [1, 2, 3]), "crossed": ([3, 1], [0, 2])}


class Layer(nn.Linear):
    """A layer whose weights and state tell its number."""

    def __init__(self, number: int) -> None:
        super().__init__(4, 4)
        nn.init.constant_(self.weight, number + 1)
        nn.init.constant_(self.bias, -number - 1)


class Stage(nn.Module):
    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Layer(number) for number in numbers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class Hooked(Stage):
    """A stage whose pre-hook knows the names that an old release gave to its layers."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__(numbers)
        self.register_load_state_dict_pre_hook(_rename)


def _rename(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    for number in module.layers:  # type: ignore[union-attr]
        for name in ("weight", "bias"):
            if (old := f"blocks.{number}.{name}") in state:
                state[f"layers.{number}.{name}"] = state.pop(old)


def _trained(stage: Stage) -> dict[str, Any]:
    """The stage with an optimizer whose moments tell the layers' numbers."""
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.0, weight_decay=0.0)
    for number, layer in stage.layers.items():
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, float(number) + 1)
    optimizer.step()
    return {"model": stage, "optim": optimizer}


def _blank(stage: Stage) -> dict[str, Any]:
    for parameter in stage.parameters():
        nn.init.zeros_(parameter)
    return {"model": stage, "optim": torch.optim.AdamW(stage.parameters())}


def _assert_restored(state: dict[str, Any]) -> None:
    for number, layer in state["model"].layers.items():
        for sign, parameter in ((1, layer.weight), (-1, layer.bias)):
            moment = state["optim"].state[parameter]["exp_avg"]
            assert (_local(parameter) == sign * (int(number) + 1)).all()
            torch.testing.assert_close(_local(moment), torch.full_like(_local(moment), 0.1 * (int(number) + 1)))
            assert state["optim"].param_groups[0]["lr"] == 0.0


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _mine(split: str) -> list[int]:
    return SPLITS[split][dist.get_rank()] if dist.is_initialized() else [0, 1, 2, 3]


def _save(path: Path, split: str) -> None:
    dcp.save({**_trained(Stage(_mine(split))), "step": 1}, path)


def _load(path: Path, split: str) -> None:
    state = {**_blank(Stage(_mine(split))), "step": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = dcp.load(state, path)
    assert not report.missing
    assert not report.unexpected
    _assert_restored(state)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks, of which each has half of the layers."""
    path = tmp_path_factory.mktemp("stages") / "halves"
    launch.run(_save, 2, path, "halves")
    return path


@pytest.mark.one_of
@pytest.mark.parametrize("split", SPLITS)
@on_ranks(2)
def test_stages_load_what_stages_saved(halves: Path, split: str) -> None:
    _load(halves, split)


def test_one_rank_loads_what_two_stages_saved(halves: Path) -> None:
    _load(halves, "all")


def test_two_stages_load_what_one_rank_saved(tmp_path: Path) -> None:
    _save(tmp_path / "c", "all")
    launch.run(_load, 2, tmp_path / "c", "one and three")


@on_ranks(4)
def test_stages_that_are_sharded_inside(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    stage, other = (Stage(SPLITS[split][mesh.get_local_rank("stage")]) for split in ("halves", "crossed"))
    for module in (stage, other):
        fully_shard(module, mesh=mesh["shard"])
    dcp.save(_trained(stage), tmp_path / "c")
    for target in (stage, other):
        state = _blank(target)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dcp.load(state, tmp_path / "c")
        _assert_restored(state)


def _refusal(path: Path, numbers: list[int], **more: Any) -> str:
    """A load of other layers fails on both ranks with this message, and overwrites nothing."""
    state = {**_blank(Stage(numbers)), **more}
    with pytest.raises(dcp.CheckpointMismatch) as raised:
        dcp.load(state, path)
    assert all((parameter == 0).all() for parameter in state["model"].parameters())
    messages = gathered(str(raised.value))
    assert messages[0] == messages[1]
    return str(raised.value)


@on_ranks(2)
def test_a_key_that_one_stage_misses_is_an_error_that_names_the_rank(halves: Path) -> None:
    message = _refusal(halves, [2, 3, 4] if dist.get_rank() else [0, 1])
    assert "rank 1: " in message
    assert "model.layers.4.weight is not in the checkpoint" in message
    assert "layers.0" not in message
    assert "rename=" not in message


@on_ranks(2)
def test_a_key_that_no_stage_takes_is_an_error(halves: Path) -> None:
    message = _refusal(halves, [3] if dist.get_rank() else [0, 1])
    assert "model.layers.2.weight is only in the checkpoint" in message
    assert "layers.0" not in message
    assert "layers.3" not in message


@on_ranks(2)
def test_no_rename_is_proposed_where_ranks_hold_different_keys(halves: Path) -> None:
    message = _refusal(halves, _mine("halves"), **({"epoch": 0} if dist.get_rank() else {}))
    assert "rank 1: " in message
    assert "epoch is not in the checkpoint" in message
    assert "rename=" not in message


def test_no_rename_is_proposed_that_would_lose_what_fits(tmp_path: Path) -> None:
    dcp.save(_trained(Stage([0])), tmp_path / "c")
    target = Stage([0])
    with pytest.raises(dcp.CheckpointMismatch, match="step is not in the checkpoint") as raised:
        dcp.load({"model": target, "step": 0}, tmp_path / "c")
    assert "rename=" not in str(raised.value)


@pytest.mark.one_of
@pytest.mark.parametrize("include", ["model.layers.3.*", "optim.*"])
@on_ranks(2)
def test_a_glob_may_match_on_one_rank_only(halves: Path, include: str) -> None:
    state = _blank(Stage(_mine("halves")))
    dcp.load(state, halves, dcp.PartialLoad(include=include))
    for number, layer in state["model"].layers.items():
        assert (layer.weight == (4 if (number, include) == ("3", "model.layers.3.*") else 0)).all()
    with pytest.raises(dcp.CheckpointMismatch, match=r"'model\.nothing\.\*' matches no key"):
        dcp.load(state, halves, dcp.PartialLoad(include=(include, "model.nothing.*")))


@pytest.fixture
def of_one_rank(tmp_path: Path) -> Path:
    """Checkpoints of all layers: under their names, under old names, and with a tensor of no layer."""
    whole = Stage([0, 1, 2, 3]).state_dict()
    dcp.save({"model": whole}, tmp_path / "new")
    dcp.save({"model": {key.replace("layers", "blocks"): value for key, value in whole.items()}}, tmp_path / "old")
    dcp.save({"model": {**whole, "stray": torch.zeros(1)}}, tmp_path / "stray")
    return tmp_path


@on_ranks(2)
def test_hooks_of_a_stage_see_what_no_other_stage_has(of_one_rank: Path) -> None:
    """Old names are handed to the hooks of all stages, and each takes its own; names of other stages to none."""
    for name in ("new", "old"):
        stage = Hooked(_mine("halves"))
        for parameter in stage.parameters():
            nn.init.zeros_(parameter)
        report = dcp.load({"model": stage}, of_one_rank / name)
        assert not report.unexpected
        for number, layer in stage.layers.items():
            assert (layer.weight == int(number) + 1).all()
    with pytest.raises(dcp.CheckpointMismatch, match=r"model\.stray: unexpected after the load hooks") as raised:
        dcp.load({"model": Hooked(_mine("halves"))}, of_one_rank / "stray")
    assert "layers" not in str(raised.value)


def test_a_thousand_ranks_with_one_finding_make_one_line() -> None:
    lines = [["all"]] * 1000
    lines[1:999] = [["all", "middle"]] * 998
    assert said_by_ranks(lines) == ["all", "ranks 1-998: middle"]


@on_ranks(2)
def test_ranks_that_hold_the_same_keys_ask_each_other_nothing(tmp_path: Path) -> None:
    steps: list[str] = []
    combine = RankGroup.combine

    def counted(self: RankGroup, step: str, *stages: Any) -> Any:
        steps.append(step)
        return combine(self, step, *stages)

    dcp.save({**_trained(Stage([0])), "values": {"n": 1}, "box": {"t": torch.ones(2)}}, tmp_path / "c")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankGroup, "combine", counted)
        dcp.load({**_blank(Stage([0])), "values": {"n": 0}, "box": {"t": torch.zeros(2)}}, tmp_path / "c")
    assert sum("with the state" in step for step in steps) == 1
    assert sum(step.startswith("apply") for step in steps) == 1


class Container(torch.optim.Optimizer):
    """Optimizers of the parts of a model behind flat names, as torchtitan has them. It has no groups of its own."""

    def __init__(self, stage: Stage) -> None:
        self.names = dict(stage.named_parameters())
        self.inner = torch.optim.AdamW(self.names.values(), lr=0.1)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        state, (group,) = self.inner.state, self.inner.param_groups
        flat = {f"param_groups.{name}.lr": group["lr"] for name in self.names}
        for name, parameter in self.names.items():
            flat |= {f"state.{name}.{slot}": value for slot, value in state.get(parameter, {}).items()}
        return flat

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.read = sorted(key for key in state_dict if key.startswith("state."))
        for name, parameter in self.names.items():
            slots = ("step", "exp_avg", "exp_avg_sq")
            self.inner.state[parameter] = {slot: state_dict[f"state.{name}.{slot}"] for slot in slots}
            self.inner.param_groups[0]["lr"] = state_dict[f"param_groups.{name}.lr"]


def _stage_of(mesh: Any, is_sharded: bool, split: str = "halves") -> Stage:
    stage = Stage(SPLITS[split][mesh.get_local_rank("stage")])
    return fully_shard(stage, mesh=mesh["shard"]) if is_sharded else stage


def _stepped(container: Container) -> Container:
    for name, parameter in container.names.items():
        parameter.grad = torch.full_like(parameter, float(name.split(".")[1]) + 1)
    container.step()
    return container


@pytest.mark.one_of
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize("is_stepped", [False, True])
@on_ranks()
def test_a_container_reads_the_moments_of_its_own_stage(
    tmp_path: Path, is_stepped: bool, restores: bool, world_size: int
) -> None:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("stage", "shard"))
    saved = _stage_of(mesh, world_size == 4)
    dcp.save({"model": saved, "optim": _stepped(Container(saved))}, tmp_path / "c")
    for split in ("halves", "crossed"):
        stage = _stage_of(mesh, world_size == 4, split)
        container = Container(stage)
        if is_stepped:
            _stepped(container)
        state = {"model": stage, "optim": container}
        if restores:
            dcp.resume_or_init(state, tmp_path, resume=tmp_path / "c")
        else:
            dcp.load(state, tmp_path / "c")
        mine = {f"state.{name}.{slot}" for name in container.names for slot in ("step", "exp_avg", "exp_avg_sq")}
        assert set(container.read) == mine
        for name, parameter in container.names.items():
            moment, number = container.inner.state[parameter]["exp_avg"], int(name.split(".")[1])
            assert type(moment) is (DTensor if world_size == 4 else torch.Tensor)
            torch.testing.assert_close(_local(moment), torch.full_like(_local(moment), 0.1 * (number + 1)))


@on_ranks(2)
def test_a_container_is_handed_what_no_stage_has(tmp_path: Path) -> None:
    stage = Stage(_mine("halves"))
    container = Container(stage)
    state_dict = container.state_dict
    container.state_dict = lambda: {**state_dict(), "counter": torch.ones(1)}  # type: ignore[method-assign]
    dcp.save({"model": stage, "optim": _stepped(container)}, tmp_path / "c")
    fresh, taken = Container(stage), {}
    fresh.load_state_dict = taken.update  # type: ignore[method-assign]
    dcp.load({"model": stage, "optim": fresh}, tmp_path / "c")
    assert taken["counter"] == 1
    assert "state.layers.3.weight.exp_avg" in taken or dist.get_rank() == 0
    assert "state.layers.3.weight.exp_avg" not in taken or dist.get_rank() == 1
