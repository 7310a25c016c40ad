"""What an error advises works: each test does literally what the message says."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

import dcp_plugin as dcp
from tests.compare import assert_same


class AppState(Stateful):
    """As in torch's tutorial on DCP."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def _trained(seed: int, classes: int = 3) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(OrderedDict(net=nn.Linear(2, 4), head=nn.Linear(4, classes)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    _step(model, optimizer)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    slots = {f"{n}.{slot}": v for n, s in optimizer.state_dict()["state"].items() for slot, v in s.items()}
    return {**model.state_dict(), **slots, "lr": torch.tensor(optimizer.param_groups[0]["lr"])}


def _advice(call: Any, pattern: str) -> str:
    with pytest.raises(dcp.CheckpointMismatch) as raised:
        call()
    found = re.search(pattern, str(raised.value))
    assert found, str(raised.value)
    return found[1]


def _filled_in(text: str, **objects: Any) -> Any:
    """The code of a hint, in which an ellipsis stands for the object that is called like its key."""
    return eval(re.sub(r"'(\w+)': …", lambda name: f"'{name[1]}': objects['{name[1]}']", text), {"objects": objects})


@pytest.mark.parametrize("by", ["stock", "ours"])
def test_the_state_of_the_tutorial_loads_into_a_model_and_its_optimizer(by: str, tmp_path: Path) -> None:
    saved, (model, optimizer) = _trained(0), _trained(1)
    if by == "stock":
        stock.save({"app": AppState(*saved)}, checkpoint_id=tmp_path / "ck", no_dist=True)
    else:
        dcp.save({"app": AppState(*saved)}, tmp_path / "ck")
    said = _advice(lambda: dcp.load({"model": model, "optim": optimizer}, tmp_path / "ck"), r"load\((\{.*\}), …\)")
    dcp.load(_filled_in(said, model=model, optim=optimizer), tmp_path / "ck")
    assert_same(_state(model, optimizer), _state(*saved))
    (model, _) = _trained(1)
    said = _advice(lambda: dcp.load({"model": model}, tmp_path / "ck"), r"load\((\{.*\}), …\)")
    dcp.load(_filled_in(said, model=model), tmp_path / "ck")
    assert_same(model.state_dict(), saved[0].state_dict())


def test_a_model_and_its_optimizer_load_into_the_state_of_the_tutorial(tmp_path: Path) -> None:
    saved, (model, optimizer) = _trained(0), _trained(1)
    dcp.save({"model": saved[0], "optim": saved[1]}, tmp_path / "ck")
    said = _advice(lambda: dcp.load({"app": AppState(model, optimizer)}, tmp_path / "ck"), r"(rename=\{.*?\})")
    partial = eval(f"dcp.PartialLoad({said})", {"dcp": dcp})
    dcp.load({"app": AppState(model, optimizer)}, tmp_path / "ck", partial=partial)
    assert_same(_state(model, optimizer), _state(*saved))


def test_an_optimizer_of_another_name_in_stocks_checkpoint(tmp_path: Path) -> None:
    saved, (model, optimizer) = _trained(0), _trained(1)
    nested = get_state_dict(*saved)
    stock.save({"model": nested[0], "optimizer": nested[1]}, checkpoint_id=tmp_path / "ck", no_dist=True)
    state = {"model": model, "optim": optimizer}
    said = _advice(lambda: dcp.load(state, tmp_path / "ck"), r"(rename=\{.*?\})")
    dcp.load(state, tmp_path / "ck", partial=eval(f"dcp.PartialLoad({said})", {"dcp": dcp}))
    assert_same(_state(model, optimizer), _state(*saved))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_head_with_other_classes_keeps_its_values_and_trains(dtype: torch.dtype, tmp_path: Path) -> None:
    saved, (model, optimizer) = _trained(0), _trained(1, classes=5)
    model.to(dtype)
    before = {name: value.clone() for name, value in model.head.state_dict().items()}
    dcp.save({"model": saved[0], "optim": saved[1]}, tmp_path / "ck")
    for state, exclude in (
        ({"model": model}, ["model.head.*"]),
        ({"model": model, "optim": optimizer}, ["model.head.*", "optim.state.head.*"]),
    ):
        report = dcp.load(state, tmp_path / "ck", partial=dcp.PartialLoad(exclude=exclude, cast=True))
        assert not report.missing and not report.unexpected
        assert_same(model.head.state_dict(), before)
        assert_same(model.net.state_dict(), {n: v.to(dtype) for n, v in saved[0].net.state_dict().items()})
    if dtype is torch.float32:
        _step(model, optimizer)


def test_no_advice_where_it_would_not_help(tmp_path: Path) -> None:
    dcp.save({"model": nn.Linear(2, 3), "n": 1}, tmp_path / "ck")
    for state, never in (({"model": nn.Linear(3, 4)}, "exclude"), ({"net": {"x": 1}}, "finds"), ({"app": 1}, "rename")):
        with pytest.raises(dcp.CheckpointMismatch) as raised:
            dcp.load(state, tmp_path / "ck")
        assert never not in str(raised.value)
