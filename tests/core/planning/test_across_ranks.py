"""The plan of ranks that hold different things: what is filled counts, and names come from all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dcp_plugin.core.format.keys import encode_state, flatten
from dcp_plugin.core.planning.global_plan import GlobalPlan, make_global_plan
from dcp_plugin.core.planning.local_inventory import Holdings, LocalInventory
from dcp_plugin.core.types import Standing
from dcp_plugin.errors import CheckpointMismatch


def _plan(*states: dict[str, Any], holds: tuple[Holdings, ...] = ()) -> GlobalPlan:
    inventories = []
    for rank, state in enumerate(states):
        leaves, paths = flatten(state)
        inventories.append(LocalInventory.of_state(encode_state(leaves), paths, holds[rank] if holds else None))
    return make_global_plan(inventories)


@pytest.mark.parametrize("empty", [{}, None, [], ()], ids=repr)
@pytest.mark.parametrize("filled", [{"w": torch.ones(2), "n": 3}, torch.ones(2), 5, "text", [1, 2]], ids=repr)
@pytest.mark.parametrize("holder", [0, 1])
def test_what_is_filled_counts_where_another_rank_is_empty(empty: Any, filled: Any, holder: int) -> None:
    states = [{"x": empty}, {"x": filled}]
    plan = _plan(*(states if holder else reversed(states)))
    assert set(plan.table.keys) == set(flatten({"x": filled})[0])
    assert set(plan.rank.tolist()) == {holder}


def test_what_is_empty_on_all_ranks_stays_empty() -> None:
    plan = _plan({"x": {}, "y": None}, {"x": {}, "y": None})
    assert (plan.table.keys, plan.empty) == (["x", "y"], ["x"])


def test_the_entries_of_a_per_rank_value_are_not_below_an_empty_one() -> None:
    holds = (Holdings(per_rank=["loader"]), Holdings())
    plan = _plan({"loader": {"0": 7}}, {"loader": {}}, holds=holds)
    assert plan.table.keys == ["loader.0", "loader"]


def test_a_key_with_the_beginning_of_another_is_not_above_it() -> None:
    assert _plan({"x": {}}, {"x1": 5, "x-y": 6}).table.keys == ["x", "x1", "x-y"]


def test_a_value_that_a_load_has_given_to_a_rank_does_not_count_beside_its_holder() -> None:
    received = Holdings(standing={"x": Standing.RECEIVED})
    plan = _plan({"x": torch.zeros(3)}, {"x": torch.ones(2)}, holds=(received, Holdings()))
    assert plan.rank.tolist() == [1] and plan.table.shape_of(0) == (2,)


def test_of_two_copies_the_one_that_was_changed_counts() -> None:
    holds = (Holdings(standing={"x": Standing.RECEIVED}), Holdings(standing={"x": Standing.CHANGED}))
    assert _plan({"x": 7}, {"x": 8}, holds=holds).rank.tolist() == [1]


def test_a_copy_that_every_rank_has_received_counts() -> None:
    holds = Holdings(standing={"x": Standing.RECEIVED})
    assert _plan({"x": 7}, {"x": 7}, holds=(holds, holds)).rank.tolist() == [0]


def test_a_tensor_beside_a_number_is_refused() -> None:
    with pytest.raises(CheckpointMismatch, match="x is a tensor on some ranks and another value on others"):
        _plan({"x": torch.ones(2)}, {"x": 5})


def test_kinds_and_classes_are_those_of_all_ranks() -> None:
    first = Holdings({"stage0": ("module", ""), "optim": ("optimizer", "torch.optim.adamw.AdamW")})
    second = Holdings({"stage1": ("module", ""), "optim": ("optimizer", "torch.optim.Muon")})
    assert _plan({"a": 1}, {"b": 1}, holds=(first, second)).objects == {
        "stage0": ("module", ""),
        "optim": ("optimizer", "torch.optim.adamw.AdamW, torch.optim.Muon"),
        "stage1": ("module", ""),
    }
