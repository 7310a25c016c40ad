"""Lists of modules, optimizers or schedulers under one name, as the stages of an interleaved pipeline are."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

import dcp_plugin as dcp
from tests import launch
from tests.compare import assert_same, full_state
from tests.launch import on_ranks

INTERLEAVED = {0: [[0], [2]], 1: [[1], [3]]}
"""The layers of each stage, by rank."""


class Stage(nn.Module):
    """Some of the layers of a model, and a buffer that all stages have."""

    def __init__(self, layers: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(4, 4) for number in layers})
        self.register_buffer("rope", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x + self.rope


def _stages(split: list[list[int]], seed: int, shards: int = 0) -> dict[str, Any]:
    """A trained state. Each layer and its moments depend on its number and the seed alone."""
    parts = [Stage(layers) for layers in split]
    for part in parts:
        for number, layer in part.layers.items():
            torch.manual_seed(100 * seed + int(number))
            layer.reset_parameters()  # type: ignore[operator]
    if shards:
        mesh = init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("pp", "dp"))
        parts = [fully_shard(part, mesh=mesh["dp"]) for part in parts]
    optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1 * seed) for part in parts]
    schedulers = [LambdaLR(optimizer, lambda step: 0.5**step) for optimizer in optimizers]
    for part, optimizer, scheduler in zip(parts, optimizers, schedulers, strict=True) if seed == 1 else ():
        for number, layer in part.layers.items():
            for parameter in layer.parameters():
                parameter.grad = torch.full_like(parameter, int(number) + 1)
        optimizer.step()
        scheduler.step()
    return {"model": parts, "optim": optimizers, "sched": schedulers}


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    """What torchtitan's ModelWrapper and OptimizersContainer store: the merged state dicts of all parts, by FQN."""
    flat: dict[str, Any] = {}
    for part, optimizer in zip(state["model"], state["optim"], strict=True):
        flat |= {f"model.{key}": value for key, value in part.state_dict().items()}
        options = stock.state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
        moments = get_optimizer_state_dict(part, optimizer, options=options) if optimizer.state else {}
        flat |= {f"optim.{key}": value for key, value in moments.items()}
    return full_state(flat)


def _save(path: Path, split: Any, shards: int = 0) -> None:
    dcp.save(_stages(split, 1, shards), path)


def _load(path: Path, split: list[list[int]], shards: int = 0) -> None:
    right, state = _stages(split, 1, shards), _stages(split, 2, shards)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = dcp.load(state, path)
    assert not report.missing
    assert not report.unexpected
    assert_same(_flat(state), _flat(right))
    assert [scheduler.state_dict() for scheduler in state["sched"]] == [s.state_dict() for s in right["sched"]]


def _save_interleaved(path: Path) -> None:
    _save(path, INTERLEAVED[dist.get_rank()])


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lists") / "interleaved"
    launch.run(_save_interleaved, 2, path)
    return path


@on_ranks(2)
def test_an_interleaved_pipeline_loads_what_it_saved(interleaved: Path) -> None:
    _load(interleaved, INTERLEAVED[dist.get_rank()])


@on_ranks(2)
def test_a_pipeline_of_another_split_loads_it(interleaved: Path) -> None:
    _load(interleaved, [[[0, 1]], [[2], [3]]][dist.get_rank()])


@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[3, 1], [0, 2]]])
def test_one_rank_loads_it(interleaved: Path, split: list[list[int]]) -> None:
    _load(interleaved, split)


@on_ranks(4)
def test_stages_that_are_sharded_inside_load_from_one_rank_and_to_one(tmp_path: Path, interleaved: Path) -> None:
    split = INTERLEAVED[dist.get_rank() // 2]
    _load(interleaved, split, shards=2)
    dcp.save(_stages(split, 1, shards=2), tmp_path / "c")
    _load(tmp_path / "c", [[0], [1, 2, 3]])


@pytest.mark.parametrize("names", [{"model"}, {"model", "optim"}, {"model", "optim", "sched"}])
def test_the_keys_are_those_of_the_complete_model(tmp_path: Path, interleaved: Path, names: set[str]) -> None:
    """A list loads from single objects, and single objects load from a list."""
    whole = {name: value[0] for name, value in _stages([[0, 1, 2, 3]], 2).items() if name in names}
    dcp.load(whole, interleaved)
    right = _stages([[0, 1, 2, 3]], 1)
    assert_same(full_state(whole["model"].state_dict()), full_state(right["model"][0].state_dict()))
    dcp.save(whole, tmp_path / "c")
    state = {name: value for name, value in _stages([[0, 1], [2, 3]], 2).items() if name in names}
    report = dcp.load(state, tmp_path / "c")
    assert not report.missing
    assert not report.unexpected


def test_stock_loads_the_keys_that_torchtitan_has(interleaved: Path) -> None:
    right = _flat(_stages([[0, 1], [2, 3]], 1))
    loaded = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0 for key, value in right.items()}
    stock.load(loaded, checkpoint_id=interleaved)
    assert_same(loaded, right)


def test_one_optimizer_may_train_all_modules_of_a_list(tmp_path: Path) -> None:
    for seed in (1, 2):
        state = _stages([[0], [1]], seed)
        parameters = [parameter for part in state["model"] for parameter in part.parameters()]
        one = torch.optim.AdamW(parameters)
        if seed == 1:
            one.step()
            dcp.save({"model": state["model"], "optim": one}, tmp_path / "c")
        else:
            dcp.load({"model": state["model"], "optim": one}, tmp_path / "c")
            assert len(one.state) == 4
    assert "optim.state.layers.1.weight.exp_avg" in dcp.read(tmp_path / "c")


def test_a_key_with_two_values_names_both_objects(tmp_path: Path) -> None:
    state = _stages([[0], [1]], 1)
    state["model"][1].rope += 1
    with pytest.raises(dcp.CheckpointMismatch, match=r"numbers 0 and 1 of the list 'model' .* key model\.rope"):
        dcp.save(state, tmp_path / "c")
    schedulers = [LambdaLR(optimizer, lambda step: 1.0) for optimizer in state["optim"]]
    schedulers[1].step()
    with pytest.raises(dcp.CheckpointMismatch, match=r"of the list 'sched' .* key sched\."):
        dcp.save({"sched": schedulers}, tmp_path / "c")


def test_a_parameter_that_two_modules_have_is_loaded_into_both(tmp_path: Path) -> None:
    """Each has memory and moments of its own, which stay apart."""
    _save(tmp_path / "c", [[0], [0, 1]])
    state = _stages([[0], [0, 1]], 2)
    dcp.load(state, tmp_path / "c")
    assert_same(_flat(state), _flat(_stages([[0], [0, 1]], 1)))
    first, second = (part.layers["0"].weight for part in state["model"])
    of_first, of_second = state["optim"][0].state[first], state["optim"][1].state[second]
    assert torch.equal(first, second)
    assert of_first["exp_avg"].data_ptr() != of_second["exp_avg"].data_ptr()


class Hooked(Stage):
    """A stage whose code sees its state dict, and knows only the keys of its own layers."""

    def __init__(self, layers: list[int]) -> None:
        super().__init__(layers)
        self.seen: list[set[str]] = []
        self.register_load_state_dict_pre_hook(self._see)

    def _see(self, module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        self.seen.append(set(state))


class Overriding(Stage):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        assert strict
        return super().load_state_dict(state_dict, strict, assign)


@pytest.mark.parametrize("classes", [(Hooked, Hooked), (Overriding, Stage), (Stage, Overriding), (Hooked, Overriding)])
def test_code_of_each_module_gets_the_keys_of_its_own(tmp_path: Path, classes: tuple[type[Stage], type[Stage]]) -> None:
    _save(tmp_path / "c", [[0], [0, 1]])
    parts = [cls(layers) for cls, layers in zip(classes, ([0], [0, 1]), strict=True)]
    dcp.load({"model": parts}, tmp_path / "c")
    for part, right in zip(parts, _stages([[0], [0, 1]], 1)["model"], strict=True):
        assert_same(part.state_dict(), right.state_dict())
        assert getattr(part, "seen", []) in ([], [set(right.state_dict())])


def test_a_partial_load_finds_a_submodule_in_a_list(tmp_path: Path) -> None:
    _save(tmp_path / "c", [[0, 1]])
    parts = _stages([[0], [1]], 2)["model"]
    partial = dcp.PartialLoad.submodule(parts[1].layers["1"], "model.layers.1.")
    report = dcp.load({"model": parts}, tmp_path / "c", partial)
    assert sorted(report.loaded) == ["model.layers.1.bias", "model.layers.1.weight"]


@pytest.mark.parametrize("options", [{"async_save": True}, {"async_save": True, "staging": "lazy"}])
def test_other_saves_take_lists_too(tmp_path: Path, options: dict[str, Any]) -> None:
    checkpointer = dcp.Checkpointer(dcp.CheckpointConfig(**options))
    checkpointer.save(_stages([[0], [1]], 1), tmp_path / "c").wait()
    checkpointer.close()
    _load(tmp_path / "c", [[0, 1]])


def test_a_warm_start_fills_the_modules_of_a_list(tmp_path: Path) -> None:
    _save(tmp_path / "c", [[0, 1]])
    state = _stages([[0], [1]], 2)
    dcp.resume_or_init(state, tmp_path / "run", init_from=tmp_path / "c")
    assert_same(full_state(state["model"][1].state_dict()), full_state(_stages([[1]], 1)["model"][0].state_dict()))


def test_an_empty_list_is_a_value(tmp_path: Path) -> None:
    dcp.save({"losses": [], "model": nn.Linear(1, 1)}, tmp_path / "c")
    state = {"losses": None, "model": nn.Linear(1, 1)}
    dcp.load(state, tmp_path / "c")
    assert state["losses"] == []


def test_numbered_state_is_not_taken_by_every_optimizer_of_a_list(tmp_path: Path) -> None:
    first, target = _stages([[0], [1]], 1), _stages([[0], [1]], 2)
    numbered = {name: first[name][0].state_dict() for name in ("model", "optim")}
    torch.save(numbered, tmp_path / "numbered.pt")
    with pytest.raises(dcp.CheckpointMismatch, match="which only one optimizer can take"):
        dcp.load({name: target[name] for name in ("model", "optim")}, tmp_path / "numbered.pt")


def test_moments_of_a_tied_weight_reach_both_parts(tmp_path: Path) -> None:
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    optimizer = torch.optim.AdamW(tied.parameters())
    tied(torch.ones(4)).sum().backward()
    optimizer.step()
    dcp.save({"model": tied, "optim": optimizer}, tmp_path / "c")
    parts = [nn.ModuleDict({number: nn.Linear(4, 4, bias=False)}) for number in ("0", "1")]
    optimizers = [torch.optim.AdamW(part.parameters()) for part in parts]
    dcp.load({"model": parts, "optim": optimizers}, tmp_path / "c")
    right = full_state(optimizer.state[tied[0].weight])
    for part, loaded in zip(parts, optimizers, strict=True):
        (weight,) = part.parameters()
        assert_same(full_state(loaded.state[weight]), right)
