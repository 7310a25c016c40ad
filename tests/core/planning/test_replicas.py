"""Replicas are compared by one number of each rank, and named where they differ."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from dcp_plugin.core.format.keys import encode_state
from dcp_plugin.core.planning.global_plan import Share, make_global_plan
from dcp_plugin.core.planning.local_inventory import Holdings, LocalInventory
from dcp_plugin.core.planning.replicas import Drift, LocalReplicas
from dcp_plugin.core.planning.save import replicas_differ
from dcp_plugin.core.types import Flat

State = dict[str, torch.Tensor]


def _replicas(states: list[State]) -> list[tuple[LocalReplicas, Flat]]:
    flats = [encode_state(state) for state in states]
    inventories = [LocalInventory.of_state(flat, {}, Holdings(replicas=frozenset(flat))) for flat in flats]
    shares = [Share.decode(share.encode()) for share in make_global_plan(inventories).shares(len(states))]
    held = zip(inventories, shares, strict=True)
    return [
        (LocalReplicas(inventory, share.replica, share.weight), flat)
        for (inventory, share), flat in zip(held, flats, strict=True)
    ]


def _differ(states: list[State], path: str = "run/step-1") -> bool:
    return replicas_differ([replicas.sum(flat, path) for replicas, flat in _replicas(states)])


def _state(*names: str) -> State:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(5, 7, generator=generator) for name in sorted(names)}


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_equal_replicas_add_up_to_zero_and_a_changed_one_does_not(ranks: int) -> None:
    states = [_state("a", "b") for _ in range(ranks)]
    assert not _differ(states)
    states[-1]["b"] += 1
    assert _differ(states)


def test_ranks_that_hold_different_keys_are_compared_in_what_they_share() -> None:
    all_of_them = _state("everywhere", "first two", "last two", "only first")
    of_ranks = [("everywhere", "first two", "only first"), ("everywhere", "first two", "last two")]
    of_ranks += [("everywhere", "last two")]
    states = [{name: all_of_them[name].clone() for name in names} for names in of_ranks]
    assert not _differ(states)
    states[1]["last two"] *= 2
    assert _differ(states)


def test_two_tensors_that_changed_places_differ() -> None:
    here, there = _state("a", "b"), _state("a", "b")
    there["a"], there["b"] = there["b"], there["a"]
    assert _differ([here, there])


def test_equal_nans_and_zeros_of_either_sign_are_equal() -> None:
    here = torch.tensor([math.nan, 0.0, 1.0, math.inf])
    there = torch.tensor([-math.nan, -0.0, 1.0, math.inf])
    assert not _differ([{"a": here}, {"a": there}])
    assert _differ([{"a": here}, {"a": torch.tensor([1.0, 1.0, 2.0, math.nan])}])


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool, torch.complex64],
    ids=str,
)
def test_every_dtype_is_compared(dtype: torch.dtype) -> None:
    ones, zeros = torch.ones(9).to(dtype), torch.zeros(9).to(dtype)
    assert not _differ([{"a": ones}, {"a": ones.clone()}])
    assert _differ([{"a": ones}, {"a": zeros}])


def test_a_transposed_view_equals_the_same_tensor_in_row_major_order() -> None:
    tensor = _state("a")["a"]
    assert not _differ([{"a": tensor}, {"a": tensor.t().contiguous().t()}])


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(1.0, 841.0).view(6, 4, 5, 7).to(memory_format=torch.channels_last),
        torch.arange(1.0, 101.0)[3:90:3],
        torch.arange(1.0, 6.0)[:, None].expand(5, 40),
    ],
    ids=["channels last", "every third element", "expanded"],
)
def test_a_view_equals_its_copy_and_differs_from_a_changed_copy(view: torch.Tensor) -> None:
    assert not _differ([{"a": view}, {"a": view.contiguous()}])
    assert _differ([{"a": view}, {"a": view.contiguous() + 1}])


def test_the_compared_elements_move_from_save_to_save() -> None:
    here, there = {"a": torch.zeros(1000)}, {"a": torch.zeros(1000)}
    there["a"][torch.randperm(1000, generator=torch.Generator().manual_seed(1))[:100]] = 1
    found = [_differ([here, there], f"run/step-{step}") for step in range(100)]
    assert any(found) and not all(found)


def test_no_combination_of_two_changes_hides_both() -> None:
    for first, second in itertools.product(range(3), repeat=2):
        states = [_state("a", "b") for _ in range(3)]
        states[first]["a"] += 1
        states[second]["b"] += 1
        assert _differ(states), (first, second)


def test_with_three_replicas_the_minority_is_named() -> None:
    states = [_state("a", "b") for _ in range(3)]
    states[2]["a"] *= 3
    drift = Drift.between([replicas.samples(flat, "run/step-1") for replicas, flat in _replicas(states)])
    assert drift.ranks == {"a": [2]}
    assert drift.difference == pytest.approx(2 / 3, rel=1e-5)


def test_with_two_replicas_both_are_named() -> None:
    states = [_state("a"), _state("a")]
    states[1]["a"] += 1
    drift = Drift.between([replicas.samples(flat, "run/step-1") for replicas, flat in _replicas(states)])
    assert drift.ranks == {"a": [0, 1]}
    assert "a (ranks 0-1)" in str(drift)
