"""Lazy staging: a save returns at once, and its checkpoint still is the state at the call, byte for byte."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import dcp_plugin as dcp
from dcp_plugin.core.format.keys import encode_state
from dcp_plugin.core.paths import Where, as_path
from dcp_plugin.core.staging import guard
from dcp_plugin.core.staging.snapshot import HostPool, Snapshot
from dcp_plugin.core.tensors._torch import sharded_value
from dcp_plugin.core.types import ShardedValue
from tests.compare import assert_same, flat, only_tensors, weights_of
from tests.launch import on_ranks
from tests.layouts import build, train, whole_state
from tests.limits import HANG
from tests.object_server import Bucket
from tests.slowness import Gate, at_random, slow_copies, slow_writes


def _saved(path: Path) -> dict[str, Any]:
    """Everything in a checkpoint, by this process alone."""
    found: dict[str, Any] = {"model": {}, "optim": {}}
    dcp.Checkpointer(solo=True).load(found, path)
    return flat(found)


def _every_step(root: Where, layout: str, staging: str, steps: int) -> None:
    straight = build(layout)
    losses = [train(*straight, 1, seed=step)[0] for step in range(steps)]
    model, optimizer = build(layout)
    ours = dcp.Checkpointer(async_save=True, staging=staging)
    pause, expected = at_random(0.004, seed=dist.get_rank()), []
    with slow_copies(at_random(0.0005)), slow_writes(at_random(0.01, seed=1)):
        for step in range(steps):
            assert train(model, optimizer, 1, seed=step)[0] == losses[step]
            expected.append(whole_state(model, optimizer))
            ours.save({"model": model, "optim": optimizer}, root / str(step), step)
            pause()
        ours.close()
    assert_same(whole_state(model, optimizer), whole_state(*straight))
    for step in range(dist.get_rank(), steps, dist.get_world_size()):
        assert_same(only_tensors(_saved(root / str(step))), only_tensors(expected[step]))


@pytest.mark.parametrize("steps", [40, pytest.param(200, marks=pytest.mark.long)])
@on_ranks(2)
def test_saves_one_per_step_equal_the_state_at_their_call_and_change_no_loss(tmp_path: Path, steps: int) -> None:
    warnings.simplefilter("ignore")
    for layout, staging, part in (
        ("fsdp2", "lazy", 0.7), ("ddp", "lazy", 0.1), ("fsdp1", "lazy", 0.05), ("tp", "lazy", 0.05),
        ("fsdp2", "blocking", 0.1),
    ):  # fmt: skip
        _every_step(tmp_path / f"{layout}-{staging}", layout, staging, int(part * steps))


@on_ranks(2)
def test_lazy_saves_to_a_bucket_equal_the_state_at_their_call_too(bucket: Bucket) -> None:
    _every_step(as_path(bucket.url) / "run", "fsdp2", "lazy", 5)


class _Everything(nn.Module):
    """Every kind of state that a module can have."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6))
        self.tied = nn.Linear(6, 6)
        self.tied.weight = nn.Parameter(torch.randn(6, 6))
        self.again = self.tied.weight
        self.frozen = nn.Parameter(torch.randn(500), requires_grad=False)
        self.register_buffer("shared", self.body[0].bias.detach())  # the memory of a parameter, called a buffer
        self.count = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.body(x))  # type: ignore[no-any-return]

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_every_kind_of_state_may_change_at_the_earliest_moment_it_legally_can(tmp_path: Path) -> None:
    model = _Everything()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    averaged = AveragedModel(model, use_buffers=True)
    loose, numbers, nested = torch.arange(5.0), [1, 2, 3], {"a": {"b": torch.ones(2), "c": "text"}}
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    state = {"model": model, "optim": optimizer, "ema": averaged, "loose": loose, "n": numbers, "nested": nested}
    dcp.save(state, tmp_path / "expected")
    held = Gate(is_open=False)
    ours = dcp.Checkpointer(async_save=True, staging="lazy")
    with slow_copies(held):
        handle = ours.save(state, tmp_path / "lazy")
        assert not handle.staged()
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()  # changes the running statistics
        with torch.no_grad():
            model.frozen.zero_()
        averaged.update_parameters(model)
        model.count = 0
        optimizer.param_groups[0]["lr"].zero_()
        optimizer.param_groups[0]["betas"] = (0.0, 0.0)
        loose.zero_()
        numbers.clear()
        nested["a"]["b"].zero_()
        nested["a"]["c"] = "changed"
        assert not handle.staged()
        held.open_soon()
        optimizer.step()
        assert handle.staged()
        model.body[0].weight.data.zero_()
    ours.close()
    _assert_equal_checkpoints(tmp_path / "lazy", tmp_path / "expected", list(state))


def _assert_equal_checkpoints(one: Path, other: Path, names: list[str]) -> None:
    found = []
    for path in (one, other):
        loaded: dict[str, Any] = {name: {} if name in ("model", "optim", "ema", "nested") else None for name in names}
        if "loose" in names:
            loaded["loose"] = torch.empty(5)
        dcp.load(loaded, path)
        found.append(flat(loaded))
    assert_same(*found)


Change = Callable[[Any, torch.optim.Optimizer], Any]


def _lbfgs(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    other = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        other.zero_grad()
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        return loss

    return other.step(closure)


class _Perturbing(torch.optim.SGD):
    """Changes parameters before it calls its closure, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(1.0)
        return closure()


CHANGES: dict[str, Change] = {
    "outsider": lambda model, optimizer: torch.optim.SGD(model.parameters(), lr=1.0).step(),
    "load_module": lambda model, optimizer: model.load_state_dict(
        {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
    ),
    "load_child": lambda model, optimizer: model.block[0].load_state_dict(
        {"weight": torch.zeros(5, 10), "bias": torch.zeros(5)}
    ),
    "load_optimizer": lambda model, optimizer: optimizer.load_state_dict(
        torch.optim.AdamW(model.parameters()).state_dict()
    ),
    "with_closure": lambda model, optimizer: optimizer.step(lambda: torch.zeros(())),
    "lbfgs": _lbfgs,
    "perturbing": lambda model, optimizer: _Perturbing(model.parameters(), lr=0.1).step(lambda: torch.zeros(())),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_state_waits_for_the_copy(change: str, tmp_path: Path) -> None:
    model, optimizer = build("plain")
    train(model, optimizer, 2)
    model(torch.randn(4, 6)).square().mean().backward()
    expected = only_tensors(whole_state(model, optimizer))
    held = Gate(is_open=False)
    ours = dcp.Checkpointer(async_save=True, staging="lazy")
    with slow_copies(held):
        handle = ours.save({"model": model, "optim": optimizer}, tmp_path / "ck")
        assert not handle.staged()
        held.open_soon()
        CHANGES[change](model, optimizer)
    handle.wait()
    assert_same(only_tensors(_saved(tmp_path / "ck")), expected)
    CHANGES[change](model, optimizer)
    ours.close()
    assert not guard._under_way
    assert not any(child._load_state_dict_pre_hooks for child in model.modules())


def test_a_load_through_another_checkpointer_waits_for_the_copy(tmp_path: Path) -> None:
    model, optimizer = build("plain")
    dcp.save({"model": model}, tmp_path / "old")
    train(model, optimizer, 1)
    expected = only_tensors(whole_state(model, optimizer))
    held = Gate(is_open=False)
    ours = dcp.Checkpointer(async_save=True, staging="lazy")
    with slow_copies(held):
        ours.save({"model": model, "optim": optimizer}, tmp_path / "ck")
        held.open_soon()
        dcp.load({"model": model}, tmp_path / "old")
    ours.close()
    assert_same(only_tensors(_saved(tmp_path / "ck")), expected)


def test_state_dicts_are_copied_later_if_their_owners_are_named(tmp_path: Path) -> None:
    model, _ = build("plain")
    ours = dcp.Checkpointer(async_save=True, staging="lazy")
    with slow_copies(held := Gate(is_open=False)):
        assert ours.save({"model": model.state_dict()}, tmp_path / "at once").staged()
        handle = ours.save({"model": model.state_dict()}, tmp_path / "later", owners=[model])
        assert not handle.staged()
        with pytest.raises(TimeoutError):
            handle.wait_staged(0.01)
        held.open()
        handle.wait_staged()
    ours.close()


@on_ranks(2)
def test_under_ddp_too_parameters_and_the_optimizers_state_are_copied_later(tmp_path: Path) -> None:
    model, optimizer = build("ddp")
    train(model, optimizer, 1)
    later: list[None] = []
    ours = dcp.Checkpointer(async_save=True, staging="lazy")
    with slow_copies(lambda: later.append(None)):
        ours.save({"model": model, "optim": optimizer}, tmp_path / "ck")
        ours.close()
    assert len(later) == len(list(model.parameters())) + sum(map(len, optimizer.state.values()))


def test_what_shares_memory_with_what_may_change_may_change_too(tmp_path: Path) -> None:
    norm = nn.BatchNorm1d(6)
    whole = torch.arange(10.0)
    norm.trained, norm.frozen = nn.Parameter(whole[:5]), nn.Parameter(whole[5:], requires_grad=False)
    optimizer = torch.optim.SGD(norm.parameters())
    optimizer.state[norm.weight]["mean"] = norm.running_mean
    optimizer.state[norm.bias]["frozen"] = norm.frozen.detach()
    state = {"model": norm, "optim": optimizer}
    dcp.save(state, tmp_path / "expected")
    ours = dcp.Checkpointer(async_save=True, staging="lazy")
    with slow_copies(held := Gate(is_open=False)):
        ours.save(state, tmp_path / "lazy")
        norm(torch.randn(4, 6))
        with torch.no_grad():
            norm.frozen.zero_()
        held.open()
        ours.close()
    _assert_equal_checkpoints(tmp_path / "lazy", tmp_path / "expected", list(state))


def test_a_model_can_be_copied_and_pickled_while_it_is_being_saved(tmp_path: Path) -> None:
    model, optimizer = build("plain")
    ours = dcp.Checkpointer(async_save=True, staging="lazy")
    with slow_copies(held := Gate(is_open=False)):
        ours.save({"model": model, "optim": optimizer}, tmp_path / "ck")
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        held.open()
    ours.close()
    for one in copies:
        one.load_state_dict(model.state_dict())


@on_ranks(2)
def test_a_change_while_copying_fails_that_save_on_every_rank_naming_the_key_and_nothing_else(tmp_path: Path) -> None:
    model, optimizer = build("fsdp2")
    train(model, optimizer, 1)
    state = {"model": model, "optim": optimizer}
    ours = dcp.Checkpointer(async_save=True, staging="lazy")
    ours.save(state, tmp_path / "ck", 1)
    ours.wait()
    before = whole_state(model, optimizer)
    with slow_copies(held := Gate(is_open=False)):
        handle = ours.save(state, tmp_path / "ck", 2)
        if dist.get_rank() == 1:
            with torch.no_grad():
                for parameter in model.block.parameters():
                    parameter.mul_(2)
        held.open()
        with pytest.raises(dcp.SaveFailed, match=r"rank 1: model\.block\.0\.weight, .*wait_staged"):
            handle.wait()
    train(model, optimizer, 1)  # nothing waits for a copy that has failed
    other, fresh = build("fsdp2", seed=1)
    dcp.load({"model": other, "optim": fresh}, tmp_path / "ck")
    assert_same(whole_state(other, fresh), before)
    ours.save(state, tmp_path / "ck", 4).wait_staged(30)
    ours.close()
    assert dcp.inspect(tmp_path / "ck").step == 4


def test_a_change_that_no_version_counts_fails_that_save_and_the_next_ones_copy_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    ours = dcp.Checkpointer(async_save=True, staging="lazy")
    with slow_copies(held := Gate(is_open=False)):
        handle = ours.save({"model": model, "optim": optimizer}, tmp_path / "ck")
        model[1].weight.data.mul_(0.5)
        held.open()
        with pytest.raises(dcp.SaveFailed, match=r"^model\.1\.weight changed while the save copied it"):
            handle.wait()
    assert "rank 0: code other than an optimizer step wrote to the state" in caplog.text
    assert "From now on, saves copy the state before they return" in caplog.text
    assert ours.save({"model": model, "optim": optimizer}, tmp_path / "ck").staged()
    ours.close()


@pytest.mark.parametrize("shape", [(1,), (3,), (8, 5), (4, 3, 5, 5)])
def test_a_write_to_all_of_a_tensor_is_noticed_whatever_its_shape_and_strides(shape: tuple[int, ...]) -> None:
    from dcp_plugin.core.staging.snapshot import _Sample, _Streams

    for tensor in (torch.zeros(shape), torch.zeros(shape).to(torch.bfloat16), torch.zeros(shape).transpose(0, -1)):
        if tensor.dim() == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        sample = _Sample([("one", tensor), ("nan", torch.full((2,), torch.nan))])
        assert sample.differs(_Streams([])) == set()
        tensor.data.add_(1)
        assert sample.differs(_Streams([])) == {"one"}


def test_a_save_that_cannot_begin_holds_nobody_back(tmp_path: Path) -> None:
    model, optimizer = build("plain")
    train(model, optimizer, 1)
    ours = dcp.Checkpointer(async_save=True, staging="lazy")
    handle = ours.save({"model": model, "optim": optimizer, "bad": {"x": Path}}, tmp_path / "ck")
    train(model, optimizer, 1)
    with pytest.raises(dcp.UnsafeCheckpoint, match=r"bad\.x"):
        handle.wait()
    ours.close()


class _RefusesHooks(nn.Linear):
    """A module that lets a lazy copy begin, and fails where the save would delay loads into it."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self._load_state_dict_pre_hooks = {}  # without weak references, which the handle of a hook needs


FAILING: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "values": (lambda: {"bad": {"x": Path}}, dcp.UnsafeCheckpoint, r"bad\.x"),
    "hooks": (lambda: {"refuses": _RefusesHooks()}, dcp.SaveFailed, "weak reference"),
}


@pytest.mark.parametrize(("staging", "failing"), [("blocking", "values"), ("lazy", "values"), ("lazy", "hooks")])
def test_a_copy_that_cannot_begin_is_not_staged_and_delays_no_training(
    tmp_path: Path, staging: str, failing: str
) -> None:
    bad, error, message = FAILING[failing]
    model, optimizer = build("plain")
    train(model, optimizer, 1)
    ours = dcp.Checkpointer(async_save=True, staging=staging)
    with slow_copies(held := Gate(is_open=False)):
        handle = ours.save({"model": model, "optim": optimizer, **bad()}, tmp_path / "ck")
        handle.wait_staged(0)  # raises TimeoutError while the state is being copied
        assert not handle.staged()
        train(model, optimizer, 1)
        model.load_state_dict(model.state_dict())
        held.open()
    with pytest.raises(error, match=message):
        handle.wait()
    assert not handle.staged()
    ours.close()
    assert not guard._under_way
    assert not any(child._load_state_dict_pre_hooks for child in model.modules())


def test_a_copy_that_fails_later_is_not_staged_and_delays_no_training(tmp_path: Path) -> None:
    model, optimizer = build("plain")
    train(model, optimizer, 1)
    ours = dcp.Checkpointer(async_save=True, staging="lazy")
    with slow_copies(held := Gate(is_open=False)):
        handle = ours.save({"model": model, "optim": optimizer}, tmp_path / "ck")
        with torch.no_grad():
            model.block[0].weight.zero_()
        assert not handle.staged()
        held.open_soon()
        handle.wait_staged()
    assert not handle.staged()
    train(model, optimizer, 1)
    with pytest.raises(dcp.SaveFailed, match="changed while the save copied it"):
        handle.wait()
    ours.close()
    assert not guard._under_way


def test_a_save_that_fails_after_its_copy_stays_staged(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ours = dcp.Checkpointer(async_save=True)
    handle = ours.save({"weights": torch.ones(3)}, tmp_path / "file" / "ck")
    with pytest.raises(dcp.SaveFailed):
        handle.wait()
    assert handle.staged()
    ours.close()


def test_a_forked_child_waits_for_no_copy(tmp_path: Path) -> None:
    model, optimizer = build("plain")
    train(model, optimizer, 1)
    ours = dcp.Checkpointer(async_save=True, staging="lazy")
    with slow_copies(held := Gate(is_open=False)):
        ours.save({"model": model, "optim": optimizer}, tmp_path / "ck")
        child = multiprocessing.get_context("fork").Process(target=optimizer.step)
        child.start()
        child.join(HANG)
        assert child.exitcode == 0
        held.open()
    ours.close()


def _replace_a_parameter(model: Any, optimizer: torch.optim.Optimizer) -> None:
    old, new = model.block[0].weight, nn.Parameter(torch.ones_like(model.block[0].weight))
    model.block[0]._parameters["weight"] = new
    optimizer.state[new] = optimizer.state.pop(old)
    optimizer.param_groups[0]["params"] = [new if one is old else one for one in optimizer.param_groups[0]["params"]]


def _add_a_group(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.more = nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(model.more.parameters()), "lr": 0.5})


def _swap_a_module(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.block[1] = nn.BatchNorm1d(5)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    for parameter in set(optimizer.state).difference(model.parameters()):
        del optimizer.state[parameter]


def _untie(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.block.again = model.block[0].weight
    model.block.again = nn.Parameter(torch.zeros(3))


def _move_the_data(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone().double()


def _swap_layers(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.inp, model.out = model.out, model.inp


class _LoRA(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 2))


def _add_lora(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.block[0] = _LoRA(model.block[0])


def _merge_lora(model: Any, optimizer: torch.optim.Optimizer) -> None:
    adapted = _LoRA(model.block[0])
    with torch.no_grad():
        adapted.base.weight += adapted.up @ adapted.down  # in place, in the base that takes the place of the adapted
    model.block[0] = adapted.base


def _override_the_state_dict(model: Any, optimizer: torch.optim.Optimizer) -> None:
    own = type(model.block[0]).state_dict

    def renamed(*args: Any, prefix: str = "", **kwargs: Any) -> Any:
        state = own(model.block[0], *args, prefix=prefix, **kwargs)
        state[f"{prefix}renamed"] = state.pop(f"{prefix}weight") * 2
        return state

    model.block[0].state_dict = renamed


BETWEEN_SAVES: dict[str, Change] = {
    "swap_layers": _swap_layers,
    "add_lora": _add_lora,
    "override_the_state_dict": _override_the_state_dict,
    "hook_before_the_state_dict": lambda model, optimizer: model.register_state_dict_pre_hook(
        lambda module, prefix, keep_vars: module.register_buffer("calls", torch.ones(3))
    ),
    "hook_loads": lambda model, optimizer: model.block.register_load_state_dict_pre_hook(
        lambda module, state, prefix, *rest: state.update({f"{prefix}0.bias": torch.zeros(5)})
    ),
    "hook_after_loads": lambda model, optimizer: model.block.register_load_state_dict_post_hook(
        lambda module, incompatible: module[0].weight.data.zero_()
    ),
    "replace_a_parameter": _replace_a_parameter,
    "add_a_group": _add_a_group,
    "freeze": lambda model, optimizer: model.block[0].weight.requires_grad_(False),
    "register_a_buffer": lambda model, optimizer: model.block.register_buffer("late", torch.arange(5.0)),
    "swap_a_module": _swap_a_module,
    "tie": lambda model, optimizer: setattr(model.block, "again", model.block[0].weight),
    "untie": _untie,
    "prune": lambda model, optimizer: prune.l1_unstructured(model.block[0], "weight", 0.5),
    "hook_the_state_dict": lambda model, optimizer: model.register_state_dict_post_hook(
        lambda module, state, *rest: state.update(extra=torch.full((2,), 7.0))
    ),
    "move_the_data": _move_the_data,
}


@pytest.mark.parametrize("change", BETWEEN_SAVES)
def test_what_changes_between_two_saves_is_in_the_second(change: str, tmp_path: Path) -> None:
    model, optimizer = build("plain")
    train(model, optimizer, 1)
    ours = dcp.Checkpointer(async_save=True, staging="lazy")
    ours.save({"model": model, "optim": optimizer}, tmp_path / "first")
    BETWEEN_SAVES[change](model, optimizer)
    ours.wait()
    ours.save({"model": model, "optim": optimizer}, tmp_path / "second")
    ours.close()
    fresh = dcp.Checkpointer()
    fresh.save({"model": model, "optim": optimizer}, tmp_path / "expected")
    assert_same(_saved(tmp_path / "second"), _saved(tmp_path / "expected"))


BETWEEN_COPIES: dict[str, Change] = {**BETWEEN_SAVES, "merge_lora": _merge_lora}
"""Changes after the copy of the first save. A merge writes in place, which fails a save whose copy is under way."""


@pytest.mark.parametrize("change", BETWEEN_COPIES)
def test_each_of_two_saves_has_the_state_dict_that_stock_returns_at_its_call(change: str, tmp_path: Path) -> None:
    model, optimizer = build("plain")
    train(model, optimizer, 1)
    ours = dcp.Checkpointer(async_save=True, staging="lazy")
    expected = {"first": copy.deepcopy(model.state_dict())}
    ours.save({"model": model, "optim": optimizer}, tmp_path / "first").wait_staged()
    BETWEEN_COPIES[change](model, optimizer)
    expected["second"] = copy.deepcopy(model.state_dict())
    ours.save({"model": model, "optim": optimizer}, tmp_path / "second")
    ours.close()
    for name, state in expected.items():
        assert_same(weights_of(_saved(tmp_path / name)), state)


_TASKS = """
import os, sys, threading, torch, dcp_plugin as dcp
from dcp_plugin import events

def tasks(event=None):
    if event is None or isinstance(event, events.SaveStarted):
        names = [thread.name for thread in threading.enumerate()]
        counted.append(len(os.listdir("/proc/self/task")) - names.count("dcp-heartbeat"))  # which sleeps

torch.set_num_threads(4)
model = torch.nn.Linear(2048, 2048)
model(torch.ones(64, 2048)).sum().backward()  # the training has its threads
counted = []
events.subscribe(tasks)  # called in the thread that has copied
tasks()
ours = dcp.Checkpointer(async_save=True, staging="lazy", io={"threads": 1})
ours.save({"model": model}, sys.argv[1])
ours.close()
print(counted[1] - counted[0])
"""


def test_the_later_copy_starts_no_threads_that_compete_with_those_of_the_training(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    ended = subprocess.run(
        [sys.executable, "-c", _TASKS, str(tmp_path / "ck")],
        capture_output=True,
        text=True,
        timeout=HANG,
        env={**environment, "PYTHONPATH": os.getcwd()},
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) == 1, "the one that saves"


def test_the_copy_is_of_the_memory_at_the_call_whatever_the_parameters_point_to_later(tmp_path: Path) -> None:
    model, optimizer = build("plain")
    train(model, optimizer, 1)
    expected = only_tensors(whole_state(model, optimizer))
    ours = dcp.Checkpointer(async_save=True, staging="lazy")
    with slow_copies(held := Gate(is_open=False)):
        ours.save({"model": model, "optim": optimizer}, tmp_path / "ck")
        model.double()
        for slots in optimizer.state.values():
            slots["exp_avg"].data = torch.zeros_like(slots["exp_avg"])
        held.open()
        ours.close()
    assert_same(only_tensors(_saved(tmp_path / "ck")), expected)


def test_lazy_staging_without_async_save_is_refused_where_it_is_asked_for(tmp_path: Path) -> None:
    for ask in (dcp.CheckpointConfig, dcp.Checkpointer):
        with pytest.raises(ValueError, match="staging='lazy' needs async_save=True"):
            ask(staging="lazy")
    lazy = dcp.CheckpointConfig(async_save=True, staging="lazy")
    dcp.save({"n": 1}, tmp_path / "ck", config=lazy, async_save=False)
    with pytest.raises(ValueError, match="needs async_save=True"):
        dcp.Checkpointer(lazy, async_save=False, staging="lazy")


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "described at the call"])
def test_what_was_copied_at_the_call_may_be_freed(wrapped: bool) -> None:
    """FSDP gives the memory of a gathered parameter back and leaves the tensor, as at the end of its
    ``summon_full_params``."""
    tensors = {"small": torch.randn(100), "large": torch.randn(100_000), "again": torch.empty(0)}
    tensors["again"] = tensors["small"]
    expected = {key: tensor.clone() for key, tensor in tensors.items()}
    leaves = {key: sharded_value(tensor) if wrapped else tensor for key, tensor in tensors.items()}
    copy_of_all = Snapshot(leaves, HostPool(), encode_state)
    assert copy_of_all.complete
    for tensor in tensors.values():
        tensor.untyped_storage().resize_(0)
    state = copy_of_all.finish()
    found = {key: value.chunks[0].tensor for key, value in state.items() if isinstance(value, ShardedValue)}
    assert_same(found, expected)
    assert found["small"].data_ptr() == found["again"].data_ptr()
