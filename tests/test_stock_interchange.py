"""Stock code reads what we wrote and we read what stock code wrote, for every layout, flattened or not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

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


@on_ranks(*sorted(set(WORLD_SIZE.values())))
def test_stock_and_we_read_each_other(tmp_path: Path, world_size: int) -> None:
    layouts = [name for name, size in WORLD_SIZE.items() if size == world_size]
    warnings.simplefilter("ignore")
    for layout in layouts:
        model, optimizer = build(layout)
        train(model, optimizer, 2)
        expected = _normal(whole_state(model, optimizer))
        dcp.save({"model": model, "optim": optimizer}, tmp_path / layout / "ours")
        for flatten in (True, False):
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
