"""A load runs what a module's own code does in ``load_state_dict``, and fills the rest in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dcp_plugin as dcp
from dcp_plugin.core.state.module_load import ModuleLoad
from tests.compare import assert_same, full_state, same_bytes
from tests.launch import on_ranks
from tests.objects import WithExtra


class Migrating(nn.Module):
    """Was called otherwise once: its pre-hook gives old keys their new names."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 2))
        self.seen: list[str] = []
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: Migrating, state: dict[str, Any], prefix: str, *args: Any) -> None:
        module.seen += sorted(state)
        if f"{prefix}weight" in state:
            state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")


class Cached(nn.Module):
    """What it computes from its weights when they are loaded is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.total = torch.zeros(())
        self.calls = 0
        self.register_load_state_dict_post_hook(self._sum_up)

    @staticmethod
    def _sum_up(module: Cached, keys: Any) -> None:
        module.total = module.inner.weight.detach().sum()
        module.calls += 1


class Growing(nn.Module):
    """Takes a buffer of any length."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("history", torch.arange(length, dtype=torch.float64))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        self.history = torch.empty_like(state[f"{prefix}history"])
        super()._load_from_state_dict(state, prefix, *args)


class Overriding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.head = nn.Linear(2, 1)
        self.given: list[Any] = []

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        self.given.append((list(state), args, kwargs))
        return super().load_state_dict({**state, "head.bias": torch.full((1,), 7.0)}, *args, **kwargs)


def _saved_and_loaded(path: Path, saved: nn.Module, target: nn.Module, **options: Any) -> dcp.LoadReport:
    dcp.save({"model": saved}, path)
    return dcp.load({"model": target}, path, **options)


def test_a_pre_hook_sees_all_stored_keys_and_may_rename_them(tmp_path: Path) -> None:
    saved, target = nn.Sequential(nn.Linear(2, 3, bias=False)), nn.Sequential(Migrating())
    report = _saved_and_loaded(tmp_path / "c", saved, target)
    assert same_bytes(target[0].kernel.detach(), saved[0].weight.detach())
    assert target[0].seen == ["0.weight"]
    assert not report.missing
    assert not report.unexpected


def test_what_the_hooks_leave_missing_is_an_error_that_names_it(tmp_path: Path) -> None:
    class Wants(Migrating):
        def __init__(self) -> None:
            super().__init__()
            self.added = nn.Parameter(torch.zeros(1))

    saved, path = nn.Sequential(nn.Linear(2, 3, bias=False)), tmp_path / "c"
    dcp.save({"model": saved}, path)
    with pytest.raises(dcp.CheckpointMismatch, match=r"model\.0\.added: missing after the load hooks of 'model'"):
        dcp.load({"model": nn.Sequential(Wants())}, path)
    report = dcp.load({"model": nn.Sequential(Wants())}, path, strict=False)
    assert report.missing == ["model.0.added"]


def test_a_post_hook_runs_once_when_everything_below_is_loaded(tmp_path: Path) -> None:
    saved, target = nn.Sequential(Cached(), nn.Linear(2, 2)), nn.Sequential(Cached(), nn.Linear(2, 2))
    _saved_and_loaded(tmp_path / "c", saved, target)
    assert target[0].calls == 1
    assert same_bytes(target[0].total, saved[0].inner.weight.detach().sum())


def test_a_module_that_resizes_itself_gets_what_is_stored(tmp_path: Path) -> None:
    target = nn.Sequential(Growing(2), nn.Linear(2, 2))
    _saved_and_loaded(tmp_path / "c", nn.Sequential(Growing(5), nn.Linear(2, 2)), target)
    assert same_bytes(target[0].history, torch.arange(5, dtype=torch.float64))


def test_an_overridden_load_state_dict_is_called_as_stock_calls_it(tmp_path: Path) -> None:
    saved = Overriding()
    dcp.save({"model": saved}, tmp_path / "c")
    ours, others = Overriding(), Overriding()
    dcp.load({"model": ours}, tmp_path / "c")
    stock.load({"model": others}, checkpoint_id=tmp_path / "c")
    assert ours.given == others.given
    assert_same(ours.state_dict(), others.state_dict())
    assert ours.head.bias.item() == 7.0


class Partial(nn.Linear):
    """Saves its weight alone, and returns what torch misses."""

    names = ("weight",)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if name in self.names}

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        return super().load_state_dict(state, strict=False)


def test_an_override_answers_for_the_keys_of_its_own_state_dict(tmp_path: Path) -> None:
    saved, target = Partial(2, 2), Partial(2, 2)
    dcp.save({"model": saved}, tmp_path / "c")
    for options in ({}, {"strict": False}, {"partial": dcp.PartialLoad(unexpected="ignore")}):
        nn.init.zeros_(target.weight)
        report = dcp.load({"model": target}, tmp_path / "c", **options)
        assert same_bytes(target.weight, saved.weight)
        assert (report.missing, report.unexpected) == ([], [])
    target.names = ("weight", "bias")
    with pytest.raises(dcp.CheckpointMismatch, match=r"model\.bias: missing after the load hooks"):
        dcp.load({"model": target}, tmp_path / "c")


def test_only_what_has_hooks_is_read_into_memory_of_its_own(tmp_path: Path) -> None:
    """BatchNorm and the wrappers of torch have hooks that need nothing; they do not cost a model its fast path."""
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.BatchNorm1d(2), Migrating(), Cached())
    dcp.save({"model": model}, tmp_path / "c")
    stored = {key.removeprefix("model."): entry for key, entry in dcp.ShardedReader(tmp_path / "c").index.items()}
    wanted = ModuleLoad(model).want(stored, {})
    targets, missing = wanted.targets, wanted.missing
    assert [key for key, target in targets.items() if not isinstance(target, torch.Tensor)] == ["2.kernel"]
    assert not missing


@pytest.mark.parametrize("extra", [3, [1, 2], {"a": 1}, {"a": {"b": torch.ones(2), "c": ()}}, {}, None, torch.ones(3)])
def test_extra_state_of_any_kind_comes_back_into_a_module_that_has_another(tmp_path: Path, extra: Any) -> None:
    for other in (None, {}, 5, torch.zeros(1)):
        target = WithExtra(other)
        _saved_and_loaded(tmp_path / "c", WithExtra(extra), target)
        assert repr(target.extra) == repr(extra)
        assert type(target.extra) is type(extra)


def test_extra_state_that_stock_has_saved_comes_back(tmp_path: Path) -> None:
    extra = {"a": {"b": torch.ones(2)}, "c": [1, 2]}
    stock.save({"model": WithExtra(extra)}, checkpoint_id=tmp_path / "c")
    target = WithExtra(None)
    dcp.load({"model": target}, tmp_path / "c")
    assert repr(target.extra) == repr(extra)


def test_a_partial_load_runs_the_hooks_of_what_it_loads(tmp_path: Path) -> None:
    make: Callable[[], nn.Module] = lambda: nn.Sequential(Cached(), Cached())  # noqa: E731
    target = make()
    _saved_and_loaded(tmp_path / "c", make(), target, partial=dcp.PartialLoad(include="model.1.*"))
    assert [child.calls for child in target] == [0, 1]


def test_tied_weights_below_a_hook_are_found_under_their_other_name(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
            self.head.weight = self.embed.weight
            self.register_load_state_dict_pre_hook(lambda *args: None)

    saved, target = Tied(), Tied()
    dcp.save({"model": saved}, tmp_path / "c", exclude=("model.head.*",))
    dcp.load({"model": target}, tmp_path / "c")
    assert same_bytes(target.embed.weight.detach(), saved.embed.weight.detach())


@on_ranks(2)
def test_hooks_get_sharded_tensors_under_fsdp2(tmp_path: Path) -> None:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(Cached(), Migrating(), nn.Linear(2, 2))
        model[1].register_load_state_dict_pre_hook(lambda m, state, *args: kinds.extend(map(type, state.values())))
        fully_shard(model)
        return model

    kinds: list[type] = []
    saved, target = build(0), build(1)
    dcp.save({"model": saved}, tmp_path / "c")
    dcp.load({"model": target}, tmp_path / "c")
    assert kinds == [DTensor]
    assert_same(full_state(target.state_dict()), full_state(saved.state_dict()))
    assert target[0].calls == 1
    assert same_bytes(target[0].total.full_tensor(), saved[0].inner.weight.detach().sum().full_tensor())


@on_ranks(2)
def test_a_save_and_a_load_after_an_evaluation_under_fsdp2(tmp_path: Path) -> None:
    """The root of FSDP2 stays unsharded after a forward without gradients."""

    def evaluate(model: Any, how: str) -> None:
        if how == "unshard":
            model.unshard()
        else:
            with torch.no_grad() if how == "no_grad" else torch.inference_mode():
                model(torch.ones(2, 4))

    for again in (True, False, None):
        for moment in ("no_grad", "inference", "unshard"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
            options: dict[str, Any] = {} if again is None else {"reshard_after_forward": again}
            fully_shard(model[0], **options)
            fully_shard(model, **options)
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            before = full_state(model.state_dict())
            evaluate(model, moment)
            state = {"model": model, "optim": optimizer}
            path = tmp_path / f"{again}-{moment}"
            dcp.save(state, path)
            evaluate(model, moment)
            dcp.load(state, path)
            assert_same(full_state(model.state_dict()), before)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
