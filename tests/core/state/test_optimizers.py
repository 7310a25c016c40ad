"""What a checkpoint has of an optimizer that is not one of torch's, or is now of another class."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch import nn, optim

import dcp_plugin
from dcp_plugin import CheckpointMismatch, PartialLoad
from dcp_plugin.core.tensors._torch_modules import slots_of_torch, unwrapped_optimizer
from tests.conformance.optimizers import Hybrid, ListOfStateDicts, MergedGroups, Several, SlotsOfTensors, SlowWeights
from tests.forge import change_summary
from tests.launch import on_ranks
from tests.layouts import build


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def _train(model: nn.Module, optimizer: Any, steps: int = 2) -> list[torch.Tensor]:
    for number in range(steps):
        model.zero_grad()
        model(torch.full((2, 3), number + 1.0)).square().sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _saved(path: Path, optimizer_of: Any) -> Path:
    model = _model()
    optimizer = optimizer_of(model)
    _train(model, optimizer)
    dcp_plugin.save({"model": model, "optim": optimizer}, path)
    return path


def _adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=0.1)


def _sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class MyAdamW(optim.AdamW):
    """A subclass that overrides nothing."""


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    ("saved", "loaded", "lacks"),
    [
        (_adamw, optim.Adamax, "the slot 'exp_inf'"),
        (_sgd, optim.AdamW, "the group field 'betas'"),
        (_adamw, optim.SGD, "the group field 'momentum'"),
    ],
)
def test_a_state_that_cannot_serve_another_class_is_refused(
    tmp_path: Path, saved: Any, loaded: Any, lacks: str, recorded: bool
) -> None:
    path = _saved(tmp_path / "ck", saved)
    if not recorded:
        change_summary(path, without=("optimizers",))  # as before classes were recorded
    model = _model()
    optimizer = loaded(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointMismatch, match=re.escape(lacks)) as caught:
        dcp_plugin.load({"model": model, "optim": optimizer}, path)
    assert loaded.__name__ in str(caught.value) and 'PartialLoad(exclude="optim.*")' in str(caught.value)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("options", [{"strict": False}, {"partial": PartialLoad(exclude="optim.*")}])
def test_the_ways_out_leave_the_optimizer_as_it_is(tmp_path: Path, options: dict[str, Any]) -> None:
    path, model = _saved(tmp_path / "ck", _sgd), _model()
    optimizer = _adamw(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp_plugin.load({"model": model, "optim": optimizer}, path, **options)
    assert not optimizer.state and "momentum" not in optimizer.param_groups[0]
    assert ["cannot serve 'optim'" in str(each.message) for each in caught] == [True] * ("strict" in options)
    _train(model, optimizer, 1)


@pytest.mark.parametrize("loaded", [optim.Adam, MyAdamW])
def test_a_state_that_serves_another_class_is_loaded_with_one_warning(tmp_path: Path, loaded: Any) -> None:
    path, model = _saved(tmp_path / "ck", _adamw), _model()
    optimizer = loaded(model.parameters())
    with pytest.warns(UserWarning, match=f"as the state of torch.optim.adamw.AdamW; .*{loaded.__name__}") as caught:
        dcp_plugin.load({"model": model, "optim": optimizer}, path)
    assert len(caught) == 1
    assert all(optimizer.state[parameter]["step"] == 2 for parameter in model.parameters())


@pytest.mark.parametrize("kind", [Several, ListOfStateDicts, Hybrid])
def test_a_layout_of_its_own_is_refused_by_a_plain_optimizer(tmp_path: Path, kind: Any) -> None:
    path, model = _saved(tmp_path / "ck", kind), _model()
    expected = f"{kind.__name__}, which cannot serve 'optim', of torch.optim.adamw.AdamW: it lacks the state and param_"
    with pytest.raises(CheckpointMismatch, match=re.escape(expected)):
        dcp_plugin.load({"model": model, "optim": _adamw(model)}, path)


def test_slots_that_stock_has_stored_in_parts_become_mappings_and_lists_again(tmp_path: Path) -> None:
    model = _model()
    optimizer = SlotsOfTensors(model.parameters())
    _train(model, optimizer)
    names, params = [name for name, _ in model.named_parameters()], list(model.parameters())
    state = {name: optimizer.state[p] for name, p in zip(names, params, strict=True)}
    group = {**{k: v for k, v in optimizer.param_groups[0].items() if k != "params"}, "params": names}
    saved = {"model": model.state_dict(), "optim": {"state": state, "param_groups": [group]}}
    stock.save(saved, checkpoint_id=tmp_path / "ck")
    model = _model()
    optimizer = SlotsOfTensors(model.parameters())
    dcp_plugin.load({"model": model, "optim": optimizer}, tmp_path / "ck")
    slots = optimizer.state[model[1].weight]
    assert slots["moments"].keys() == {"slow", "fast"} and torch.equal(
        slots["moments"]["slow"], torch.full((2, 4), 2.25)
    )
    assert [part.shape for part in slots["past"]] == [(2, 4), (2, 4)] and slots["step"] == 2


def test_an_unknown_class_is_refused_until_its_slots_are_known(tmp_path: Path) -> None:
    class OwnStep(optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    path, model = _saved(tmp_path / "ck", _adamw), _model()
    OwnStep.__bases__ = (optim.Adam,)  # now no subclass of the class that was saved
    optimizer = OwnStep(model.parameters())
    with pytest.raises(CheckpointMismatch, match="slots that are not known"):
        dcp_plugin.load({"model": model, "optim": optimizer}, path)
    _train(model, optimizer, 1)
    with pytest.warns(UserWarning, match="OwnStep"):
        dcp_plugin.load({"model": model, "optim": optimizer}, path)


def test_a_parameter_without_an_entry_starts_fresh_under_strict(tmp_path: Path) -> None:
    path, model = _saved(tmp_path / "ck", lambda model: optim.AdamW(model[0].parameters(), lr=0.1)), _model()
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="fresh optimizer state"):
        dcp_plugin.load({"model": model, "optim": optimizer}, path)
    assert all(parameter in optimizer.state for parameter in model[0].parameters())
    assert not any(parameter in optimizer.state for parameter in model[1].parameters())


@pytest.mark.parametrize("kind", [Several, ListOfStateDicts, MergedGroups, Hybrid])
def test_stock_reads_a_layout_of_its_own_as_it_stores_one(tmp_path: Path, kind: Any) -> None:
    import torch.distributed.checkpoint as dcp

    model = _model()
    optimizer = kind(model)
    _train(model, optimizer)
    dcp_plugin.save({"model": model, "optim": optimizer}, tmp_path / "ours")
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=tmp_path / "stock")
    right = _train(model, optimizer)
    for folder in ("ours", "stock"):
        for load in (dcp.load, dcp_plugin.load):
            fresh = _model()
            again = kind(fresh)
            # Stock reads no key that the target does not have, and stores numbers of parameters as text.
            if load is dcp.load or (folder == "stock" and kind is MergedGroups):
                _train(fresh, again)
            argument = "path" if load is dcp_plugin.load else "checkpoint_id"
            load({"model": fresh, "optim": again}, **{argument: tmp_path / folder})
            assert all(map(torch.equal, right, _train(fresh, again))), (folder, load.__module__)


def test_extra_keys_have_keys_of_their_own_and_are_the_targets_where_none_is_stored(tmp_path: Path) -> None:
    path = _saved(tmp_path / "own", lambda model: SlowWeights(model.parameters()))
    keys = {key for key in (tensor.key for tensor in dcp_plugin.inspect(path).tensors) if "slow" in key}
    assert keys == {f"optim.extra_state.slow.{number}" for number in range(4)}
    model = _model()
    plain = _saved(tmp_path / "plain", _sgd)
    optimizer = SlowWeights(model.parameters())
    with pytest.warns(UserWarning, match="SlowWeights"):
        dcp_plugin.load({"model": model, "optim": optimizer}, plain)  # its load_state_dict pops the keys
    assert optimizer.steps == 0 and len(optimizer.state) == 4


def _wrapped_by(framework: str, model: nn.Module, optimizer: optim.Optimizer) -> Any:
    if framework == "accelerate":
        from accelerate import Accelerator

        return Accelerator(cpu=True).prepare(optimizer)
    if framework == "fabric":
        from lightning.fabric import Fabric

        return Fabric(accelerator="cpu").setup(model, optimizer)[1]
    from lightning.pytorch.core.optimizer import LightningOptimizer

    return LightningOptimizer(optimizer)


@pytest.mark.parametrize("framework", ["accelerate", "fabric", "lightning"])
def test_wrappers_that_delegate_are_unwrapped_first(tmp_path: Path, framework: str) -> None:
    model = _model()
    optimizer = _adamw(model)
    _train(model, optimizer)
    wrapper = _wrapped_by(framework, model, optimizer)
    assert wrapper is not optimizer and unwrapped_optimizer(wrapper) is optimizer
    optimizer.state_dict = None  # type: ignore[method-assign, assignment]
    del optimizer.state_dict
    dcp_plugin.save({"model": model, "optim": wrapper}, tmp_path / "ck")
    assert json.loads((tmp_path / "ck/dcp_plugin.json").read_bytes())["optimizers"] == {
        "optim": "torch.optim.adamw.AdamW"
    }


@on_ranks(2)
def test_slices_of_fsdp1_are_refused_in_a_layout_of_its_own(tmp_path: Path) -> None:
    model, _ = build("fsdp1")
    optimizer = Several(model)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    with pytest.raises(CheckpointMismatch, match="FSDP1 cuts parameters"):
        dcp_plugin.save({"model": model, "optim": optimizer}, tmp_path / "ck")


@on_ranks(2)
def test_shards_that_name_no_parameter_need_a_target(tmp_path: Path) -> None:
    model, _ = build("fsdp2")
    optimizer = ListOfStateDicts(model)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    dcp_plugin.save({"model": model, "optim": optimizer}, tmp_path / "ck")
    model, _ = build("fsdp2", seed=1)
    with pytest.raises(CheckpointMismatch, match="names no parameter of its shape"):
        dcp_plugin.load({"model": model, "optim": ListOfStateDicts(model)}, tmp_path / "ck")


class Counting(optim.AdamW):
    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)

    def state_dict(self) -> Any:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: Any) -> None:
        state = dict(state_dict)
        self.steps = state.pop("steps")
        super().load_state_dict(state)


@on_ranks(2)
def test_extra_keys_travel_under_fsdp1_too(tmp_path: Path) -> None:
    model, _ = build("fsdp1")
    saved = Counting(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    saved.step()
    dcp_plugin.save({"model": model, "optim": saved}, tmp_path / "ck")
    model, _ = build("fsdp1", seed=1)
    loaded = Counting(model.parameters(), lr=0.1)
    dcp_plugin.load({"model": model, "optim": loaded}, tmp_path / "ck")
    assert loaded.steps == saved.steps == 1
    slots = [sum(map(len, optimizer.state.values())) for optimizer in (saved, loaded)]
    assert slots[0] == slots[1]


@pytest.mark.parametrize("name", [name for name in dir(optim) if isinstance(getattr(optim, name), type)])
def test_the_slots_that_we_know_are_those_that_torch_keeps(name: str) -> None:
    kind = getattr(optim, name)
    if not issubclass(kind, optim.Optimizer) or kind is optim.Optimizer:
        pytest.skip("no optimizer")
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = kind([parameter])
    parameter.grad = torch.ones(3, 2).to_sparse() if kind is optim.SparseAdam else torch.ones(3, 2)
    optimizer.step(lambda: torch.tensor(1.0))
    known = slots_of_torch(optimizer)
    assert known is not None and known <= optimizer.state[parameter].keys()
    assert known or not optimizer.state[parameter].keys() - {"momentum_buffer"}
