"""A state of thousands of small tensors: few calls for each, and the rare kinds among them are still told apart."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dcp_plugin as dcp
from dcp_plugin.core.format.keys import encode_state
from dcp_plugin.core.planning.local_inventory import LocalInventory, ties_of
from dcp_plugin.core.planning.save import PlanExchange, items_to_write
from dcp_plugin.core.ranks.collectives import Ranks
from dcp_plugin.core.state.named_objects import adapters_of, gather_state
from dcp_plugin.core.tensors.kinds import is_dense_memory
from tests.compare import assert_same
from tests.memory import calls_of

MOST_CALLS = 50
"""For one tensor. They are 41; when each stage looked at it anew, they were 115."""


def _before_the_first_write(state: dict[str, Any]) -> list[Any]:
    """Everything that a save does with each tensor before storage gets it."""
    leaves, paths = gather_state(adapters_of(state))
    flat = encode_state(leaves)
    inventory = LocalInventory.of_state(flat, paths)
    exchange, ranks = PlanExchange(), Ranks()
    claim = partial(exchange.claim, Path("step-1"), ranks, flat, inventory)
    return items_to_write(exchange.plan("plan", ranks, inventory, ranks.combine("plan", claim, exchange.answer)), flat)


def _calls(count: int) -> int:
    """Calls, of Python's functions and of C's, for so many tensors."""
    state = {f"tensor_{number}": torch.zeros(16) for number in range(count)}
    written: list[Any] = []
    calls = calls_of(lambda: written.extend(_before_the_first_write(state)), ("call", "c_call"))
    assert [item.data.data_ptr() for item in written] == [tensor.data_ptr() for tensor in state.values()]
    return calls


def test_one_more_small_tensor_costs_few_calls_before_it_is_written() -> None:
    _calls(10)  # what is made once
    per_tensor = (_calls(1100) - _calls(100)) / 1000
    assert per_tensor < MOST_CALLS


def test_tensors_that_begin_at_one_address_are_ties_only_if_they_are_the_same_view(tmp_path: Path) -> None:
    memory = torch.arange(24.0)
    state = {
        "all": memory,
        "again": memory.view(24),
        "rows": memory.view(4, 6),
        "turned": memory.view(6, 4).t(),
        "front": memory[:6],
        "bits": memory.view(torch.int32),
        "none": memory[:0],
        "none again": memory[:0],
        "behind": memory[6:],
    }
    assert ties_of(encode_state(state)) == {"again": "all"}
    dcp.save(state, tmp_path / "saved")
    found = {key: torch.full_like(tensor, 7) for key, tensor in state.items()}
    dcp.load(found, tmp_path / "saved")
    assert_same(found, state)


@pytest.mark.parametrize(
    "state",
    [
        {"a": torch.tensor(1.0), "b": torch.tensor(2)},
        {"a": torch.tensor(1.0), "b": torch.ones(2, 3, 1), "c": 5, "d": torch.ones(0, 4)},
        {"only": 5},
        {"a.b": torch.ones(2), "c.d": 3.5},
    ],
)
def test_scalars_mixed_shapes_and_dotted_names_come_back(tmp_path: Path, state: dict[str, Any]) -> None:
    dcp.save(state, tmp_path / "saved")
    found = {key: torch.zeros_like(one) if isinstance(one, torch.Tensor) else 0 for key, one in state.items()}
    dcp.load(found, tmp_path / "saved")
    assert_same(found, state)


class _Subclass(torch.Tensor):
    pass


def _freed() -> torch.Tensor:
    tensor = torch.ones(8)[2:]
    tensor.untyped_storage().resize_(0)
    return tensor


def _shrunk() -> torch.Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(16)
    return tensor


def test_what_is_taken_without_another_look_is_plain_memory_that_is_there() -> None:
    assert is_dense_memory(torch.ones(3)) and is_dense_memory(nn.Parameter(torch.ones(2, 2))[1:].detach())
    for tensor in (
        _freed(), _shrunk(), torch.ones(0), torch.ones(3, device="meta"), torch.ones(3, device="meta")[1:],
        torch.ones(2, 3).t(), torch.eye(2).to_sparse(), torch.ones(3).as_subclass(_Subclass),
        nn.parameter.UninitializedParameter(),
    ):  # fmt: skip
        assert not is_dense_memory(tensor), tensor.layout
