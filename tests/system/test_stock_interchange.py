"""Stock code reads what we wrote and we read what stock code wrote, for every layout, flattened or not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import dcp_plugin as dcp
from tests.compare import assert_same
from tests.launch import on_ranks
from tests.layouts import WORLD_SIZE, build, train, whole_state


def _normal(state: dict[str, Any]) -> dict[str, Any]:
    """Stock's flattening makes lists of tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in state.items()}


@pytest.mark.one_of("world_size")
@pytest.mark.parametrize("both_ways", [False, pytest.param(True, marks=pytest.mark.long)])
@on_ranks(*sorted(set(WORLD_SIZE.values())))
def test_stock_and_we_read_each_other(tmp_path: Path, world_size: int, both_ways: bool) -> None:
    """Of a layout flattened in one direction and not in the other; or each in both."""
    warnings.simplefilter("ignore")
    for number, layout in enumerate(WORLD_SIZE):
        if WORLD_SIZE[layout] != world_size:
            continue
        model, optimizer = build(layout)
        train(model, optimizer, 2)
        expected = _normal(whole_state(model, optimizer))
        dcp.save({"model": model, "optim": optimizer}, tmp_path / layout / "ours")
        for flatten in (True, False) if both_ways else (number % 2 == 0,):
            options = StateDictOptions(flatten_optimizer_state_dict=flatten)
            other, fresh = build(layout, seed=1)
            theirs = dict(zip(("model", "optim"), get_state_dict(other, fresh, options=options), strict=True))
            # Stock's own flattening of ShardedTensors loses the keys of which a rank has no shard.
            planner = stock.DefaultLoadPlanner(flatten_sharded_tensors=False)
            stock.load(theirs, checkpoint_id=tmp_path / layout / "ours", planner=planner)
            set_state_dict(
                other, fresh, model_state_dict=theirs["model"], optim_state_dict=theirs["optim"], options=options
            )
            assert_same(expected, _normal(whole_state(other, fresh)))

        for flatten in (True, False) if both_ways else (number % 2 != 0,):
            options = StateDictOptions(flatten_optimizer_state_dict=flatten)
            path = tmp_path / layout / f"stock-{flatten}"
            state = dict(zip(("model", "optim"), get_state_dict(model, optimizer, options=options), strict=True))
            stock.save(state, checkpoint_id=path)
            ours, newest = build(layout, seed=2)
            report = dcp.load({"model": ours, "optim": newest}, path)
            assert not report.missing and not report.unexpected
            assert_same(expected, _normal(whole_state(ours, newest)))


def test_without_aliases_the_group_list_is_left_out(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "with")
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "without", stock_aliases=False)
    assert "optim.param_groups.0.lr" in dcp.inspect(tmp_path / "with").values
    assert "optim.param_groups.0.lr" not in dcp.inspect(tmp_path / "without").values
    dcp.load({"model": model, "optim": optimizer}, tmp_path / "without")
