"""Optimizer state that each rank has for itself: by rank on the disk, back on the same layout, refused on another."""

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
from dcp_plugin.core.format.keys import LocalSlot
from tests import launch
from tests.launch import gathered, on_ranks
from tests.layouts import wrap


class Codes(torch.optim.Optimizer):
    """Keeps what quantizing optimizers keep: codes and scales of its own shard, as plain tensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            local, gradient = (
                one.to_local() if isinstance(one, DTensor) else one for one in (parameter, parameter.grad)
            )
            state = self.state[parameter]
            if not state:
                state.update(step=torch.zeros(()), codes=torch.zeros(local.shape, dtype=torch.uint8))
                state.update(scale=torch.zeros(2), seed=dist.get_rank(), kind="linear")
            state["step"] += 1
            state["codes"].copy_((gradient.abs() * 10 + dist.get_rank()).to(torch.uint8))
            state["scale"].fill_(gradient.abs().sum().item() + dist.get_rank())
            local.sub_(0.1 * gradient)


def _build(seed: int, layout: str = "fsdp2") -> tuple[nn.Module, Codes]:
    torch.manual_seed(seed)
    model = wrap(layout, nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), unit="0")  # 3 rows: shards of 2 and 1
    return model, Codes(model.parameters())


def _slots(model: nn.Module, optimizer: Codes) -> dict[str, Any]:
    return {
        f"{name}.{slot}": _told(value) if isinstance(value, torch.Tensor) else value
        for name, parameter in model.named_parameters()
        for slot, value in optimizer.state[parameter].items()
    }


def _told(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A tensor as dtype, shape and numbers, to go through a pipe."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.dtype, tuple(tensor.shape), local.tolist()


def _train(model: nn.Module, optimizer: Codes) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _save(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = _build(0)
    _train(model, optimizer)
    checkpointer = dcp.Checkpointer(**options)
    for _ in range(3):
        _train(model, optimizer)
        checkpointer.save({"model": model, "optim": optimizer}, path).wait()
    checkpointer.close()
    return _slots(model, optimizer)


def _load(path: Path, layout: str = "fsdp2") -> dict[str, Any]:
    model, optimizer = _build(1, layout)
    dcp.load({"model": model, "optim": optimizer}, path)
    found = _slots(model, optimizer)
    _train(model, optimizer)
    return found


@pytest.mark.one_of
@pytest.mark.parametrize("options", [{}, {"async_save": True}, {"async_save": True, "staging": "lazy"}])
def test_each_rank_gets_its_own_back(tmp_path: Path, options: dict[str, Any]) -> None:
    saved = launch.run(_save, 2, tmp_path / "c", options)
    assert saved[0]["0.weight.scale"] != saved[1]["0.weight.scale"]
    for mine, loaded in zip(saved, launch.run(_load, 2, tmp_path / "c"), strict=True):
        assert loaded == mine
    keys = [one.key for one in dcp.inspect(tmp_path / "c").tensors]
    assert "optim.state.0.weight.step" in keys  # the same on all ranks: once
    assert "optim.state.1.weight.codes.rank1(2,0:3,8)" in keys
    assert "optim.state.1.weight.codes" not in keys


def test_replicas_of_the_same_shard_take_it_too(tmp_path: Path) -> None:
    saved = launch.run(_save, 2, tmp_path / "c", {})
    for rank, loaded in enumerate(launch.run(_load, 4, tmp_path / "c", "hsdp")):
        assert loaded == saved[rank % 2]


@pytest.fixture
def of_two(tmp_path: Path) -> Path:
    """A checkpoint of two ranks."""
    launch.run(_save, 2, tmp_path / "c", {})
    return tmp_path / "c"


@on_ranks(3)
def test_another_layout_is_refused_by_name_and_can_be_left_out(of_two: Path) -> None:
    model, optimizer = _build(1)
    state = {"model": model, "optim": optimizer}
    with pytest.raises(dcp.CheckpointMismatch, match=r"optim\.state\.0\.weight\.codes.*It cannot be cut anew"):
        dcp.load(state, of_two)
    own = ["optim.*.codes", "optim.*.scale", "optim.*.seed"]
    report = dcp.load(state, of_two, partial=dcp.PartialLoad(exclude=own))
    assert "optim.state.0.weight.step" in report.loaded
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = dcp.load(state, of_two, strict=False)
    assert "optim.state.0.weight.codes" in report.missing


@on_ranks(2)
def test_state_that_is_still_equal_everywhere_is_known_by_its_shape(tmp_path: Path) -> None:
    model, optimizer = _build(0)
    for parameter in model.parameters():
        codes = torch.zeros_like(parameter.to_local(), dtype=torch.uint8)  # type: ignore[attr-defined]
        optimizer.state[parameter] = {"codes": codes}
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "c")
    keys = [one.key for one in dcp.inspect(tmp_path / "c").tensors]
    assert "optim.state.0.weight.codes.rank0(0,0:4,4)" in keys
    assert "optim.state.1.bias.codes.rank1(2:3)" in keys  # of one element, while rank 0 has two


@pytest.mark.parametrize("box", [((), ()), ((0,), (4,)), ((2, 0), (3, 8))])
def test_the_name_of_a_slot_tells_rank_and_part(box: Any) -> None:
    slot = LocalSlot("inner.codes", 12, box)
    assert LocalSlot.parse(str(slot)) == slot
    assert LocalSlot.parse("inner.codes") is None


class Dotted(Codes):
    """Has dots in the names of its slots."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["inner.codes"], state["inner.deep.scale"] = state["codes"] + 1, state["scale"] + 1


@on_ranks(2)
def test_models_with_the_same_names_slots_with_dots_and_one_row(tmp_path: Path) -> None:
    path = tmp_path / "c"

    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        gen, disc = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)), nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))
        fully_shard(gen, mesh=init_device_mesh("cpu", (2,)))
        fully_shard(disc, mesh=init_device_mesh("cpu", (2,)))
        optimizers = Dotted(gen.parameters()), torch.optim.AdamW(disc.parameters())
        return {"gen": gen, "disc": disc, "optim_g": optimizers[0], "optim_d": optimizers[1]}

    saved, target = build(0), build(1)
    for name in ("gen", "disc"):
        saved[name](torch.ones(2, 4)).sum().backward()
    saved["optim_g"].step()
    saved["optim_d"].step()
    checkpointer = dcp.Checkpointer()
    for _ in range(2):
        checkpointer.save(saved, path)
    assert checkpointer._saving.exchange.repeated
    checkpointer.close()
    dcp.load(target, path)
    for model, optimizer in (("gen", "optim_g"), ("disc", "optim_d")):
        of_saved, of_target = (_slots(state[model], state[optimizer]) for state in (saved, target))
        plain = {key for key, value in of_saved.items() if key.rpartition(".")[2] not in ("exp_avg", "exp_avg_sq")}
        assert {key: of_target[key] for key in plain} == {key: of_saved[key] for key in plain}
    keys = [one.key for one in dcp.inspect(path).tensors]
    assert "optim_g.state.1.weight.inner.codes.rank0(0,0:1,8)" in keys  # one row, all of it on rank 0
    assert not [key for key in keys if key.startswith("optim_d.") and ".rank" in key]


@on_ranks(2)
def test_a_save_without_the_model_and_a_load_of_one_slot(tmp_path: Path) -> None:
    path = tmp_path / "c"
    model, optimizer = _build(0)
    _train(model, optimizer)
    dcp.save({"model": model, "optim": optimizer}, path, exclude=("model.*",))
    before = _slots(model, optimizer)
    _train(model, optimizer)
    report = dcp.load({"model": model, "optim": optimizer}, path, partial=dcp.PartialLoad(include="optim.*"))
    assert _slots(model, optimizer) == before
    assert "optim.state.0.weight.codes" in report.loaded
    codes = dcp.PartialLoad(include="optim.*.codes")
    assert {key.rpartition(".")[2] for key in dcp.load({"model": model, "optim": optimizer}, path, codes).loaded} == {
        "codes"
    }


@on_ranks(2)
def test_under_ddp_the_state_of_rank_0_is_that_of_all(tmp_path: Path) -> None:
    model, optimizer = _build(0, "ddp")
    _train(model, optimizer)
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "c")
    saved = gathered(_slots(model, optimizer))
    assert saved[0] != saved[1]
    model, optimizer = _build(1, "ddp")
    dcp.load({"model": model, "optim": optimizer}, tmp_path / "c")
    assert _slots(model, optimizer) == saved[0]
