"""Modules and optimizers of every kind keep every bit of their state, under the names of the unwrapped module."""

from __future__ import annotations

import collections
import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dcp_plugin as dcp
from dcp_plugin.core.state import apply_module, flatten_optimizer, gather_module, gather_optimizer
from dcp_plugin.core.state.module import materialise
from tests.compare import assert_same, full_state, same_bytes, same_tree
from tests.launch import on_ranks
from tests.layouts import Net, train, whole_state
from tests.objects import Holder

NAMES = list(Net().state_dict())


def _step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 6, generator=torch.Generator().manual_seed(3))).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _round_trip(path: Path, state: dict[str, Any], target: dict[str, Any], **options: Any) -> dcp.LoadReport:
    dcp.save(state, path)
    return dcp.load(target, path, **options)


# Names


@on_ranks(2)
def test_names_are_those_of_the_unwrapped_module_whatever_the_nesting() -> None:
    cpu = torch.device("cpu")

    def fsdp1(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(module, device_id=cpu, use_orig_params=True)

    def inner(wrap: Any) -> nn.Module:
        model = Net()
        model.block = wrap(model.block)
        return model

    wrapped = {
        "DDP": DistributedDataParallel(Net()),
        "checkpointing": inner(checkpoint_wrapper),
        "checkpointing in compile in DDP": DistributedDataParallel(torch.compile(inner(checkpoint_wrapper))),
        "compile around DDP": torch.compile(DistributedDataParallel(Net())),
        "compile inside": inner(torch.compile),
        "FSDP1 around checkpointing": fsdp1(inner(lambda block: fsdp1(checkpoint_wrapper(block)))),
        "checkpointing around FSDP1": fsdp1(inner(lambda block: checkpoint_wrapper(fsdp1(block)))),
        "FSDP1 in compile": torch.compile(fsdp1(inner(fsdp1))),
        "DDP inside a module": nn.ModuleDict({"net": DistributedDataParallel(Net())}),
        "FSDP2 in compile": torch.compile(fully_shard(Net(), mesh=init_device_mesh("cpu", (2,)))),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for how, model in wrapped.items():
            prefix = "net." if isinstance(model, nn.ModuleDict) else ""
            assert sorted(gather_module(model)) == sorted(prefix + name for name in NAMES), how
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            named = {name for group in gather_optimizer(model, optimizer)["param_groups"] for name in group["params"]}
            assert named == {prefix + name for name in NAMES if name != "steps"}, how
            values = {key: torch.ones_like(value) for key, value in full_state(gather_module(model)).items()}
            if "FSDP" not in how:
                apply_module(model, values)
                assert_same(full_state(gather_module(model)), values)


def test_a_module_of_ones_own_called_module_keeps_its_name(tmp_path: Path) -> None:
    model = nn.ModuleDict({"module": nn.ModuleDict({"module": nn.Linear(2, 2)})})
    assert list(gather_module(model)) == ["module.module.weight", "module.module.bias"]


# Meshes and wrappers beyond the matrix


@pytest.mark.one_of
@pytest.mark.parametrize(
    "target", ["root only", "submodule only", "grad op", "grad op flat", "no shard", "no shard flat"]
)
@on_ranks(2)
def test_every_sharding_strategy_of_fsdp1_and_partial_fsdp2_interchange(tmp_path: Path, target: str) -> None:
    cpu = torch.device("cpu")
    mesh = init_device_mesh("cpu", (2,))

    def part_only(model: nn.Module) -> nn.Module:
        fully_shard(model.block, mesh=mesh)  # the rest stays plain, as replicated as the user keeps it
        return model

    def fsdp1(**options: Any) -> Any:
        return lambda model: FullyShardedDataParallel(model, device_id=cpu, **options)

    wraps = {
        "root only": lambda model: fully_shard(model, mesh=mesh),
        "submodule only": part_only,
        "grad op": fsdp1(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True),
        "grad op flat": fsdp1(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
        "no shard": fsdp1(sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True),
        "no shard flat": fsdp1(sharding_strategy=ShardingStrategy.NO_SHARD),
    }
    warnings.simplefilter("ignore")

    def make(name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = wraps[name](Net())
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    saved = {}
    for name in wraps:
        model, optimizer = make(name, 0)
        train(model, optimizer, 2)
        dcp.save({"model": model, "optim": optimizer}, tmp_path / name)
        saved[name] = whole_state(model, optimizer)
    for source in wraps:
        model, optimizer = make(target, 1)
        dcp.load({"model": model, "optim": optimizer}, tmp_path / source)
        assert_same(saved[source], whole_state(model, optimizer))


# Optimizers


class RowColumn(torch.optim.Optimizer):
    """State that is not shaped like its parameter, and state that is no tensor, as in Adafactor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state.update(row=torch.zeros(p.shape[:1]), kind="factored", step=0)
                        state["col"] = torch.zeros(p.shape[-1:])
                    state["step"] += 1
                    state["row"] += p.grad.reshape(p.shape[0], -1).square().mean(1)
                    state["col"] += p.grad.reshape(-1, p.shape[-1]).square().mean(0)
                    p.data.sub_(p.grad, alpha=group["lr"])


OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "SGD momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "Adam amsgrad": lambda ps: torch.optim.Adam(ps, amsgrad=True),
    "AdamW tensor lr": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01)),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "Adafactor": torch.optim.Adafactor,
    "row and column": RowColumn,
    "NAdam": torch.optim.NAdam,
    "ASGD": torch.optim.ASGD,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_comes_back_into_a_fresh_one(tmp_path: Path, name: str) -> None:
    model, other = Net(), Net()
    optimizer, fresh = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    _step(model, optimizer)
    _round_trip(tmp_path / "ck", {"model": model, "optim": optimizer}, {"model": other, "optim": fresh})
    assert_same(_flat(other, fresh), _flat(model, optimizer))
    _step(model, optimizer)
    _step(other, fresh)
    assert_same(_flat(other, fresh), _flat(model, optimizer))
    assert_same(other.state_dict(), model.state_dict())


def _flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return flatten_optimizer(gather_optimizer(model, optimizer))


def _groups(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1, "name": "matrices"},
            {
                "params": [p for p in model.parameters() if p.ndim < 2],
                "weight_decay": 0.0,
                "lr": 0.5,
                "name": "vectors",
            },
        ]
    )


def test_several_groups_keep_their_hyper_parameters_in_another_order(tmp_path: Path) -> None:
    model, other = Net(), Net()
    optimizer, fresh = _groups(model), _groups(other)
    fresh.param_groups.reverse()
    _step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.123
    _round_trip(tmp_path / "ck", {"model": model, "optim": optimizer}, {"model": other, "optim": fresh})
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in fresh.param_groups] == [
        ("vectors", 0.5, 0.0),
        ("matrices", 0.123, 0.1),
    ]


def test_groups_that_were_different_cannot_become_one(tmp_path: Path) -> None:
    model, other = Net(), Net()
    fresh = torch.optim.AdamW(other.parameters())
    with pytest.raises(dcp.CheckpointMismatch, match="had different"):
        _round_trip(tmp_path / "ck", {"model": model, "optim": _groups(model)}, {"model": other, "optim": fresh})
    assert not fresh.state


def test_several_optimizers_of_one_model_are_told_apart_by_their_parameters(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, Any, Any]:
        model = Net()
        return model, torch.optim.Adam(model.inp.parameters()), torch.optim.SGD(model.out.parameters(), momentum=0.9)

    model, one, two = make()
    _step(model, one, two)
    other, fresh_one, fresh_two = make()
    _round_trip(
        tmp_path / "ck",
        {"model": model, "optim_0": one, "optim_1": two},
        {"model": other, "optim_1": fresh_two, "optim_0": fresh_one},
    )
    assert_same(_flat(other, fresh_one), _flat(model, one))
    assert_same(_flat(other, fresh_two), _flat(model, two))


def test_a_tensor_learning_rate_stays_the_same_tensor(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25))
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "ck")
    rate = optimizer.param_groups[0]["lr"]
    rate.fill_(9)
    dcp.load({"model": model, "optim": optimizer}, tmp_path / "ck")
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == 0.25
    plain = torch.optim.AdamW(model.parameters(), lr=3.0)
    dcp.load({"model": model, "optim": plain}, tmp_path / "ck")
    assert plain.param_groups[0]["lr"] == 0.25 and isinstance(plain.param_groups[0]["lr"], float)


def test_a_save_changes_nothing_not_even_a_fresh_optimizer(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "ck")
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert_same(before, model.state_dict())
    assert same_bytes(random, torch.get_rng_state())
    _step(model, optimizer)
    dcp.load({"model": model, "optim": optimizer}, tmp_path / "ck")
    assert not optimizer.state, "the checkpoint's optimizer had no state"


@on_ranks(2)
def test_a_save_of_a_fresh_optimizer_under_fsdp1_does_not_step_it(tmp_path: Path) -> None:
    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "ck")
    assert not optimizer.state


def test_an_optimizer_without_its_module_says_what_to_do(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    with pytest.raises(dcp.CheckpointMismatch, match="Add the module to the state"):
        dcp.save({"model": Net(), "optim": optimizer}, tmp_path / "ck")


def test_a_hook_and_state_of_no_parameter_in_a_load_of_a_part(tmp_path: Path) -> None:
    def make(seed: int, hooked: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=float(seed))
        model(torch.rand(1, 2)).sum().backward()
        optimizer.step()
        shared = {"seed": seed, "seen": torch.full((2,), seed), "by": {1: [seed]}}
        optimizer.state["shared"] = shared  # type: ignore[index]
        if hooked:
            optimizer.register_load_state_dict_post_hook(lambda one: calls.append(sorted(map(str, one.state))))
        return model, optimizer

    for hooked in (False, True):
        calls: list[Any] = []
        (model, saved), path = make(1, hooked), tmp_path / str(hooked)
        dcp.save({"model": model, "optim": saved}, path)
        right = saved.state_dict()
        other, loaded = make(2, hooked)
        before = copy.deepcopy(loaded.state_dict())
        part = dcp.PartialLoad(include=["optim.state.0.*", "optim.global_state.shared.se*"])
        dcp.load({"model": other, "optim": loaded}, path, partial=part)
        now = loaded.state_dict()
        for number in range(4):
            assert_same(now["state"][number], (right if number < 2 else before)["state"][number])
        found = now["state"]["shared"]
        assert (found["seed"], found["seen"].tolist(), found["by"]) == (1, [1, 1], {1: [2]})
        assert now["param_groups"] == before["param_groups"]
        dcp.load({"model": other, "optim": loaded}, path)
        assert loaded.state_dict()["state"]["shared"]["by"] == {1: [1]}
        assert loaded.param_groups[0]["lr"] == 1.0
        assert len(calls) == 2 * hooked


@on_ranks(1)
def test_an_optimizer_over_several_wrapped_modules_and_a_loose_parameter_resumes(tmp_path: Path) -> None:
    path = tmp_path / "ck"

    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        gen, disc = DistributedDataParallel(Net()), torch.compile(Net())
        heat = nn.Parameter(torch.rand(3))
        both = {"params": [*gen.parameters(), *disc.parameters()]}
        optimizer = torch.optim.Adam([both, {"params": [heat], "lr": 0.5}])
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            parameter.grad = torch.full_like(parameter, number + seed)
        optimizer.step()
        return {"nets": {"gen": gen}, "disc": disc, "optim": optimizer, "heat": heat}

    def slots(state: dict[str, Any]) -> list[Any]:
        return [full_state(slots) for slots in state["optim"].state.values()]

    first, second = make(1), make(2)
    dcp.save(first, path)
    dcp.load(second, path)
    for saved, loaded in zip(slots(first), slots(second), strict=True):
        assert_same(loaded, saved)
    assert [group["lr"] for group in second["optim"].param_groups] == [0.001, 0.5]
    assert same_bytes(second["heat"].detach(), first["heat"].detach())
    alone = {"heat": second["heat"], "optim": torch.optim.Adam([second["heat"]])}  # no module at all
    dcp.save(alone, path.with_name("alone"))
    dcp.load(alone, path.with_name("alone"))
    with pytest.raises(dcp.CheckpointMismatch, match="Rename the module"):
        dcp.save({"loose": second["disc"], **{k: v for k, v in second.items() if k != "disc"}}, path.with_name("no"))
    keys = {entry.key for entry in dcp.inspect(tmp_path / "ck").tensors}
    assert keys >= {
        "optim.state.nets.gen.inp.weight.exp_avg",
        "optim.state.disc.inp.weight.exp_avg",
        "optim.state.loose.1.0.exp_avg",
    }


# What trains and what does not


def _frozen(model: nn.Module) -> nn.Module:
    model.inp.requires_grad_(False)
    return model


def test_frozen_parameters_inside_and_outside_of_the_optimizer(tmp_path: Path) -> None:
    for inside in (True, False):

        def make(inside: bool = inside) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = _frozen(Net())
            return model, torch.optim.AdamW([p for p in model.parameters() if inside or p.requires_grad])

        model, optimizer = make()
        _step(model, optimizer)
        other, fresh = make()
        report = _round_trip(tmp_path / str(inside), {"m": model, "o": optimizer}, {"m": other, "o": fresh})
        assert not report.missing and not report.unexpected
        assert_same(_flat(other, fresh), _flat(model, optimizer))
        assert_same(other.state_dict(), model.state_dict())


def test_a_parameter_without_gradient_has_no_state_after_the_load_either(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        model.unused = nn.Linear(2, 2)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make()
    _step(model, optimizer)
    other, fresh = make()
    _round_trip(tmp_path / "ck", {"model": model, "optim": optimizer}, {"model": other, "optim": fresh})
    assert other.unused.weight not in fresh.state
    assert_same(_flat(other, fresh), _flat(model, optimizer))


def test_unfreezing_and_freezing_after_the_checkpoint_is_reported_and_not_fatal(tmp_path: Path) -> None:
    model = _frozen(Net())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    _step(model, optimizer)
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "frozen")
    thawed = Net()
    fresh = torch.optim.AdamW(thawed.parameters())
    with pytest.warns(UserWarning, match="fresh optimizer state"):
        report = dcp.load({"model": thawed, "optim": fresh}, tmp_path / "frozen")
    assert report.missing == ["optim.param_groups.inp.bias", "optim.param_groups.inp.weight"]
    assert thawed.inp.weight not in fresh.state and thawed.out.weight in fresh.state
    _step(thawed, fresh)
    dcp.save({"model": thawed, "optim": fresh}, tmp_path / "thawed")
    with pytest.warns(UserWarning, match="left out"):
        report = dcp.load({"model": model, "optim": optimizer}, tmp_path / "thawed")
    assert report.unexpected == ["optim.param_groups.inp.bias", "optim.param_groups.inp.weight"]


# Modules


class Odd(nn.Module):
    """Tied weights, buffers of both kinds, extra state, an empty parameter, a scalar one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.randn(3))
        self.register_buffer("scratch", torch.randn(3), persistent=False)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scale = nn.Parameter(torch.randn(()))
        self.extra: Any = {"calls": 0}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_ties_buffers_extra_state_and_odd_shapes(tmp_path: Path) -> None:
    model, other = Odd(), Odd()
    model.extra = {"calls": 7, "list": [1, 2]}
    scratch = other.scratch.clone()
    _round_trip(tmp_path / "ck", {"model": model}, {"model": other})
    assert other.head.weight is other.embed.weight, "still tied"
    assert_same(dict(other.named_parameters()), dict(model.named_parameters()))
    assert same_bytes(other.kept, model.kept)
    assert same_bytes(other.scratch, scratch), "not persistent: not stored"
    assert other.extra == {"calls": 7, "list": [1, 2]}
    assert "model.scratch" not in [tensor.key for tensor in dcp.inspect(tmp_path / "ck").tensors]


def _tensors_of(model: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in full_state(gather_module(model)).items() if isinstance(v, torch.Tensor)}


@on_ranks(3)
def test_odd_modules_sharded_over_more_ranks_than_rows(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (3,))

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(Odd(), nn.Linear(2, 1))
        del model[0].scale  # FSDP2 does not shard scalars
        return fully_shard(model, mesh=mesh)

    model, other = make(0), make(1)
    model[0].extra = {"calls": 3}
    dcp.save({"model": model}, tmp_path / "ck")
    dcp.load({"model": other}, tmp_path / "ck")
    assert_same(_tensors_of(other), _tensors_of(model))
    assert other[0].extra == {"calls": 3}
    assert other[0].head.weight is other[0].embed.weight


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.bool], ids=str
)
def test_modules_of_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    def make() -> nn.Module:
        model = nn.Module()
        model.w = nn.Parameter(torch.randn(5, 3).to(dtype), requires_grad=False)
        model.register_buffer("b", torch.randn(4).to(dtype))
        return model

    model, other = make(), make()
    report = _round_trip(tmp_path / "ck", {"model": model}, {"model": other})
    assert not report.cast
    assert_same(other.state_dict(), model.state_dict())


def test_a_meta_model_is_materialised_by_the_load(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer)
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "ck")
    with torch.device("meta"):
        other = Net()
    fresh = torch.optim.AdamW(other.parameters())
    dcp.load({"model": other, "optim": fresh}, tmp_path / "ck")
    assert_same(other.state_dict(), model.state_dict())
    assert_same(_flat(other, fresh), _flat(model, optimizer))
    _step(model, optimizer)
    _step(other, fresh)
    assert_same(other.state_dict(), model.state_dict())


def test_a_meta_buffer_that_no_checkpoint_holds_is_named(tmp_path: Path) -> None:
    dcp.save({"model": Odd()}, tmp_path / "ck")
    with torch.device("meta"):
        other = Odd()
    with pytest.warns(UserWarning, match="scratch"):
        dcp.load({"model": other}, tmp_path / "ck")
    assert other.head.weight is other.embed.weight


@on_ranks(2)
def test_a_load_without_meta_tensors_gathers_no_full_model_under_fsdp1(tmp_path: Path) -> None:
    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    if torch.distributed.get_rank() == 0:
        assert materialise(model) == []


@on_ranks(2)
def test_a_meta_model_under_fsdp2_is_materialised_by_the_load(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(Net(), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "ck")
    with torch.device("meta"):
        other = Net()
    fully_shard(other.block, mesh=mesh)
    fully_shard(other, mesh=mesh)
    fresh = torch.optim.AdamW(other.parameters())
    dcp.load({"model": other, "optim": fresh}, tmp_path / "ck")
    assert train(model, optimizer, 2) == train(other, fresh, 2)
    assert_same(whole_state(other, fresh), whole_state(model, optimizer))


# Whole states


def test_an_optimizer_that_is_not_there_is_one_line_with_those_that_are(tmp_path: Path) -> None:
    model, other = Net(), Net()
    optimizers = [torch.optim.AdamW(net.parameters(), lr=lr) for net, lr in ((model, 0.5), (model, 0.25), (other, 1))]
    dcp.save({"model": model, "a": optimizers[0], "b": optimizers[1]}, tmp_path / "two")
    dcp.save({"model": model, "n": 1}, tmp_path / "none")
    state = {"model": other, "optim": optimizers[2]}
    cases = {"two": "which has the optimizers 'a', 'b': choose one, for example with rename={'optim.': 'a.'}",
             "none": "no other optimizer is known in it"}  # fmt: skip
    for name, said in cases.items():
        with pytest.raises(dcp.CheckpointMismatch) as caught:
            dcp.load(state, tmp_path / name)
        assert said in str(caught.value)
        assert str(caught.value).count("'optim' is not in the checkpoint") == 1 and "did you" not in str(caught.value)
        assert "param_groups" not in str(caught.value)
    dcp.load(state, tmp_path / "two", dcp.PartialLoad(rename={"optim.": "b."}, unexpected="ignore"))
    assert optimizers[2].param_groups[0]["lr"] == 0.25
    report = dcp.load(state, tmp_path / "none", strict=False)
    assert "optim.param_groups.inp.bias" in report.missing
    with pytest.warns(UserWarning, match="nothing is loaded, .*'optim' is not in the checkpoint"):
        dcp.load(state, tmp_path / "none", dcp.PartialLoad("optim.*", missing="ignore"))


def test_other_names_find_the_only_module_and_optimizer_and_say_so(tmp_path: Path) -> None:
    model, other = Net(), Net()
    optimizer, fresh = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
    _step(model, optimizer)
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "ck")
    with pytest.warns(UserWarning, match=r"no '(net|adam)'; its only (module|optimizer)"):
        dcp.load({"net": other, "adam": fresh}, tmp_path / "ck")
    assert_same(other.state_dict(), model.state_dict())
    assert_same(_flat(other, fresh), _flat(model, optimizer))


def test_stateful_objects_and_nested_states(tmp_path: Path) -> None:
    def make(n: int) -> dict[str, Any]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=n)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {
            "train": {"net": model, "opt": optimizer, "sched": scheduler},
            "holder": Holder({"n": n, "history": {"values": [n] * 2, "tensor": torch.full((2,), n)}}),
            "t": torch.full((2,), n),
        }

    state, target = make(3), make(5)
    _round_trip(tmp_path / "ck", state, target)
    assert same_tree(target["holder"].state, state["holder"].state)
    assert_same(target["train"]["net"].state_dict(), state["train"]["net"].state_dict())
    assert target["train"]["opt"].param_groups[0]["lr"] == 3
    assert target["train"]["sched"].state_dict() == state["train"]["sched"].state_dict()
    assert same_bytes(target["t"], torch.full((2,), 3))


# Partial loads


def _partial_case(tmp_path: Path) -> tuple[Any, ...]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer)
    dcp.save({"model": model, "optim": optimizer, "extra": {"a": {"x": 1, "y": 2}}}, tmp_path / "ck")
    other = Net()
    fresh = torch.optim.AdamW(other.parameters(), lr=9.0)
    _step(other, fresh)
    return model, optimizer, other, fresh


def test_a_partial_load_fills_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    model, optimizer, other, fresh = _partial_case(tmp_path)
    before, slots = copy.deepcopy(other.state_dict()), copy.deepcopy(_flat(other, fresh))
    extra: dict[str, Any] = {"a": {"x": 0, "y": 0}}
    state = {"model": other, "optim": fresh, "extra": extra}
    partial = dcp.PartialLoad(include=("model.block.*", "optim.state.inp.*", "extra.a.x"), exclude=("*.bias", "*.step"))
    report = dcp.load(state, tmp_path / "ck", partial)
    assert sorted(report.loaded) == [
        "extra.a.x",
        "model.block.0.weight",
        "model.block.1.weight",
        "optim.state.inp.bias.exp_avg",
        "optim.state.inp.bias.exp_avg_sq",
        "optim.state.inp.weight.exp_avg",
        "optim.state.inp.weight.exp_avg_sq",
    ]
    assert extra == {"a": {"x": 1, "y": 0}}
    for mine, source, old in (
        (other.state_dict(), model.state_dict(), before),
        (_flat(other, fresh), _flat(model, optimizer), slots),
    ):
        for key, value in mine.items():
            loaded = f"model.{key}" in report.loaded or f"optim.{key}" in report.loaded
            assert same_bytes(value, source[key] if loaded else old[key]), key


def test_a_glob_that_matches_nothing_is_an_error_with_a_hint(tmp_path: Path) -> None:
    model, _, other, fresh = _partial_case(tmp_path)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(dcp.CheckpointMismatch, match=r"model\.blok\.\*.*did you mean 'model\.block\.\*'"):
        dcp.load({"model": other, "optim": fresh}, tmp_path / "ck", dcp.PartialLoad(include="model.blok.*"))
    assert_same(before, other.state_dict())
    assert not same_bytes(model.inp.weight, other.inp.weight)


# What is not the memory of a parameter or buffer


class Counting(nn.Module):
    """Extra state that is a tensor, and state that ``state_dict`` copies, as metrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.n = 0
        self.total = torch.zeros(())

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.n])

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.n = int(state.item())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "total"] = self.total.clone()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if prefix + "total" in state_dict:
            self.total = state_dict.pop(prefix + "total").clone()
        super()._load_from_state_dict(state_dict, prefix, *args)


WRAPPERS = {
    "plain": lambda m: m,
    "compiled": lambda m: torch.compile(m, backend="eager"),
    "checkpointed": checkpoint_wrapper,
}


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_state_that_is_only_a_copy_in_the_state_dict_is_restored_too(tmp_path: Path, wrap: str) -> None:
    model, other = Counting(), Counting()
    model.n, model.total = 7, torch.tensor(3.5)
    _round_trip(
        tmp_path / "ck",
        {"model": nn.Sequential(WRAPPERS[wrap](model))},
        {"model": nn.Sequential(WRAPPERS[wrap](other))},
    )
    assert other.n == 7
    assert same_bytes(other.total, model.total)
    assert same_bytes(other.lin.weight, model.lin.weight)


# What differs between ranks


@on_ranks(2)
def test_buffers_under_ddp_are_those_of_rank_0_and_parameters_are_shared_out(tmp_path: Path) -> None:
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(400, 400), nn.BatchNorm1d(400)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 400, generator=torch.Generator().manual_seed(rank))).sum().backward()
    optimizer.step()
    mine = torch.full((200_000,), float(rank))
    dcp.save({"model": model, "optim": optimizer, "mine": mine}, tmp_path / "ck")
    buffers = [full_state(dict(model.module.named_buffers()))]
    torch.distributed.broadcast_object_list(buffers)
    other = nn.Sequential(nn.Linear(400, 400), nn.BatchNorm1d(400))
    state = {"model": other, "mine": torch.ones(200_000)}
    dcp.load(state, tmp_path / "ck")
    assert_same(dict(other.named_buffers()), buffers[0])
    assert same_bytes(state["mine"], torch.zeros(200_000)), "rank 0's, and no mixture"
    sizes = [sum(f.stat().st_size for f in (tmp_path / "ck").glob(f"__{writer}_*.distcp")) for writer in (0, 1)]
    assert sizes[1] > 900_000, f"parameters and their optimizer state are equal: both write, {sizes}"


@on_ranks(2)
def test_a_trainable_part_that_lies_on_one_fsdp1_rank_hangs_nobody(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 1))
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    model, optimizer = make(0)
    model(torch.randn(4, 16, generator=torch.Generator().manual_seed(0))).sum().backward()
    optimizer.step()
    states = [len(optimizer.state)]
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "ck")
    assert states == [len(optimizer.state)], "a save changes nothing"
    other, fresh = make(1)
    dcp.load({"model": other, "optim": fresh}, tmp_path / "ck")
    assert_same(whole_state(other, fresh), whole_state(model, optimizer))


# Optimizers that are odd


class Slots(torch.optim.SGD):
    def put(self, **slots: Any) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].update({key: make(p) for key, make in slots.items()})


def test_slots_with_dots_in_their_names_and_nested_plain_slots(tmp_path: Path) -> None:
    model, other = Net(), Net()
    optimizer, fresh = Slots(model.parameters(), lr=0.1), Slots(other.parameters(), lr=0.1)
    optimizer.put(**{"m.v": torch.ones_like, "history": lambda p: [torch.ones(2), {"deep": 1}]})
    report = _round_trip(tmp_path / "ck", {"model": model, "optim": optimizer}, {"model": other, "optim": fresh})
    assert not report.unexpected
    state = fresh.state[other.inp.weight]
    assert set(state) == {"m.v", "history"}
    assert same_bytes(state["m.v"], torch.ones_like(other.inp.weight))
    assert same_bytes(state["history"][0], torch.ones(2)) and state["history"][1] == {"deep": 1}


@on_ranks(2)
def test_sharded_tensors_inside_of_a_slots_list_come_back_and_those_in_a_set_are_refused(tmp_path: Path) -> None:
    model = fully_shard(Net(), mesh=init_device_mesh("cpu", (2,)))
    optimizer = Slots(model.parameters(), lr=0.1)
    optimizer.put(history=lambda p: [p.detach() * 2, (p.detach() + 1,)])
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "ck")
    fresh = Slots(model.parameters(), lr=0.1)
    dcp.load({"model": model, "optim": fresh}, tmp_path / "ck")
    for parameter in model.parameters():
        first, (second,) = fresh.state[parameter]["history"]
        assert same_bytes(first.to_local(), parameter.to_local() * 2)
        assert same_bytes(second.to_local(), parameter.to_local() + 1)
    optimizer.put(history=lambda p: {torch.ones_like(p.detach())})
    with pytest.raises(dcp.CheckpointMismatch, match=r"history is a set with sharded tensors inside"):
        dcp.save({"model": model, "optim": optimizer}, tmp_path / "other")


def test_groups_that_do_not_fit_are_found_before_a_weight_is_overwritten(tmp_path: Path) -> None:
    model, other = Net(), Net()
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(dcp.CheckpointMismatch, match="had different"):
        _round_trip(
            tmp_path / "ck",
            {"model": model, "optim": _groups(model)},
            {"model": other, "optim": torch.optim.AdamW(other.parameters())},
        )
    assert_same(other.state_dict(), before)


# Plain state


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        ({"history": [{"loss": 1.0}], "metrics": {"a": 1}}, {"history": [], "metrics": {}}),
        ({"odd": {(0, 1): "x", None: 2}, "numbers": {2: "b", 0.5: "c", True: "d"}}, {}),
        ({"count": collections.Counter({3: 2})}, {}),
    ],
    ids=["empty containers", "odd keys", "counter"],
)
def test_plain_state_comes_back_as_it_was(tmp_path: Path, saved: dict[Any, Any], target: dict[Any, Any]) -> None:
    _round_trip(tmp_path / "ck", {"extra": saved}, {"extra": target})
    assert target == saved
    assert {key: type(value) for key, value in target.items()} == {key: type(value) for key, value in saved.items()}


def test_a_part_of_a_list_is_loaded_into_its_place(tmp_path: Path) -> None:
    target = {"items": [{"a": 10}, {"a": 20}, {"a": 30}]}
    dcp.save({"extra": {"items": [{"a": 1}, {"a": 2}, {"a": 3}]}}, tmp_path / "ck")
    dcp.load({"extra": target}, tmp_path / "ck", partial=dcp.PartialLoad(include="extra.items.1.*"))
    assert target == {"items": [{"a": 10}, {"a": 2}, {"a": 30}]}


def test_a_multi_step_schedule_works_after_the_load(tmp_path: Path) -> None:
    def make() -> Any:
        optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])

    one, other = make(), make()
    _round_trip(tmp_path / "ck", {"sched": one}, {"sched": other})
    assert other.state_dict() == one.state_dict()
    assert type(other.milestones) is type(one.milestones)


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": Net()}, "a.b": Net()},
        {"a": {"b.c": 1}, "a.b": {"c": 1}},
        {"model": nn.ModuleDict({"ema": Net()}), "model.ema": Net()},
    ],
    ids=["names", "values", "modules"],
)
def test_keys_that_are_the_same_are_refused(tmp_path: Path, state: dict[str, Any]) -> None:
    with pytest.raises(dcp.CheckpointMismatch, match=r"two (objects|values) of the state have the (name|key)"):
        dcp.save(state, tmp_path / "ck")


@pytest.mark.parametrize(
    "given",
    [
        collections.defaultdict(list, {"a": [1], 2: [torch.ones(2)]}),
        collections.defaultdict(None, {"a": 1}),
        collections.OrderedDict(b=1, a={"c": collections.OrderedDict(d=2)}),
        collections.Counter({3: 2, "x": 1, (0, 1): 1}),
        {(0, "a"): 1, ((1, 2), None): torch.ones(2), None: {(3,): "b"}},
        {b"bytes": 1, frozenset((1,)): {Path("x"): 2}},
        collections.Counter(),
    ],
    ids=["defaultdict", "no factory", "ordered", "counter", "tuples", "other keys", "nothing"],
)
def test_a_stateful_gets_the_class_and_the_keys_of_what_it_gave(tmp_path: Path, given: dict[Any, Any]) -> None:
    fresh = Holder({})
    _round_trip(tmp_path / "ck", {"it": Holder(given)}, {"it": fresh})
    assert repr(fresh.state) == repr(given)


def test_a_factory_that_no_file_can_name_is_that_of_the_object(tmp_path: Path) -> None:
    def make(**items: int) -> Holder:
        return Holder(collections.defaultdict(lambda: 7, items))

    other = make()
    _round_trip(tmp_path / "ck", {"it": make(a=1)}, {"it": other})
    assert dict(other.state) == {"a": 1} and other.state["b"] == 7


@pytest.mark.parametrize("by", ["ours", "stock"])
@pytest.mark.parametrize("kind", [dict, Holder], ids=["mappings", "stateful"])
@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ({"b.c": 1}, {"d": 2}),
        ({"b": {"c": 1}, "e": 3}, {"d": 2, "f": {"g": 4}}),
        ({"b": 1}, {"d": 2}),
        ({"b.c": 1}, {"d": {"e": 2}, "c": {"d": 3}}),
    ],
)
def test_names_that_overlap_are_told_apart(
    tmp_path: Path, outer: dict[str, Any], inner: dict[str, Any], kind: Any, by: str
) -> None:
    def times(tree: Any, factor: int) -> Any:
        if isinstance(tree, dict):
            return {key: times(value, factor) for key, value in tree.items()}
        return torch.full((2,), float(tree * factor))

    def state(factor: int) -> dict[str, Any]:
        return {"a": kind(times(outer, factor)), "a.b": kind(times(inner, factor))}

    saved, loaded = state(1), state(0)
    dcp.save(saved, tmp_path / "ck") if by == "ours" else stock.save(saved, checkpoint_id=tmp_path / "ck", no_dist=True)
    dcp.load(loaded, tmp_path / "ck")
    for name in saved:
        mine, theirs = (getattr(one[name], "state", one[name]) for one in (loaded, saved))
        assert same_tree(mine, theirs)


@pytest.mark.parametrize("names", [("model", "model.ema"), ("model.ema", "model")])
def test_modules_and_optimizers_whose_names_overlap_are_told_apart(tmp_path: Path, names: tuple[str, str]) -> None:
    def state(seed: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, name in enumerate(names):
            torch.manual_seed(seed + number)
            found[name] = Net()
            found[f"optim.{name}"] = torch.optim.Adam(found[name].parameters())
            train(found[name], found[f"optim.{name}"], 1)
        return found

    saved, loaded, other = state(0), state(5), state(9)
    _round_trip(tmp_path / "ck", saved, loaded)
    for name in names:
        pair = [whole_state(state[name], state[f"optim.{name}"]) for state in (loaded, saved)]
        assert_same(*pair)
    rename = {f"{name}.": f"{name}." for name in names}
    dcp.load({name: other[name] for name in names}, tmp_path / "ck", partial=dcp.PartialLoad(rename=rename))
    for name in names:
        assert_same(other[name].state_dict(), saved[name].state_dict())


def test_a_model_and_its_child_are_loaded_under_names_that_overlap(tmp_path: Path) -> None:
    saved, model = nn.ModuleDict({"ema": Net()}), nn.ModuleDict({"ema": Net()})
    dcp.save({"model": saved}, tmp_path / "ck")
    report = dcp.load({"model": model, "model.ema": model["ema"]}, tmp_path / "ck")
    assert not report.missing and not report.unexpected
    assert_same(model.state_dict(), saved.state_dict())


def test_a_partial_load_of_an_empty_state_loads_nothing(tmp_path: Path) -> None:
    dcp.save({"model": Net()}, tmp_path / "ck")
    assert dcp.load({}, tmp_path / "ck", partial=dcp.PartialLoad(unexpected="ignore")).loaded == []
    with pytest.raises(dcp.CheckpointMismatch, match="matches no key of the target"):
        dcp.load({}, tmp_path / "ck", partial=dcp.PartialLoad(include="model.*"))


def test_a_stateful_object_that_has_grown_is_resumed(tmp_path: Path) -> None:
    class Log:
        def __init__(self, n: int) -> None:
            self.t = torch.arange(n)

        def state_dict(self) -> dict[str, Any]:
            return {"t": self.t}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.t = state["t"]

    log = Log(0)
    dcp.save({"log": Log(5)}, tmp_path / "step-1")
    dcp.resume_or_init({"log": log}, tmp_path)
    assert same_bytes(log.t, torch.arange(5))


def test_a_dtype_that_cannot_hold_the_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointMismatch, match=r"torch\.int64 here, which cannot hold"):
        _round_trip(tmp_path / "ck", {"t": torch.tensor(0.7)}, {"t": torch.tensor(0)})


@on_ranks(2)
def test_fsdp2_with_cpu_offload(tmp_path: Path) -> None:
    """FSDP1 offloads to pinned memory only, which needs a GPU: that case is in test_cuda.py."""
    policy = CPUOffloadPolicy(pin_memory=False)

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = Net()
        for module in (model.block, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)), offload_policy=policy)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make(0)
    train(model, optimizer, 2)
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "ck")
    other, fresh = make(1)
    dcp.load({"model": other, "optim": fresh}, tmp_path / "ck")
    assert_same(whole_state(other, fresh), whole_state(model, optimizer))
    assert train(model, optimizer, 2) == train(other, fresh, 2)


@on_ranks(2)
def test_several_optimizers_under_fsdp1_one_unit_each(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")

    def fsdp1(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)

    def make(seed: int, units: bool) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = Net()
        if units:
            model.inp = fsdp1(model.inp)
        model = fsdp1(model)
        split: list[list[nn.Parameter]] = [[], []]
        for name, parameter in model.named_parameters():
            split["inp" in name].append(parameter)
        return model, torch.optim.AdamW(split[0]), torch.optim.SGD(split[1], lr=0.1, momentum=0.9)

    model, one, two = make(0, units=True)
    _step(model, one, two)
    dcp.save({"model": model, "one": one, "two": two}, tmp_path / "ck")
    other, fresh_one, fresh_two = make(1, units=True)
    dcp.load({"model": other, "one": fresh_one, "two": fresh_two}, tmp_path / "ck")
    assert_same(whole_state(other, fresh_one), whole_state(model, one))
    assert_same(whole_state(other, fresh_two), whole_state(model, two))

    model, one, two = make(0, units=False)
    _step(model, one, two)
    with pytest.raises(dcp.CheckpointMismatch, match="several optimizers"):
        dcp.save({"model": model, "one": one, "two": two}, tmp_path / "mixed")
