"""Who writes what: every byte once, evenly, split by rows where that is needed."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_plugin._torch import sharded_value
from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.planning.flatten import flatten, unflatten
from dcp_plugin.planning.partition import MIN_SPLIT, Box, partition
from dcp_plugin.planning.save import ShardedSavePlanner

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@settings(deadline=None)
@given(st.lists(shapes, min_size=1, max_size=8), st.integers(1, 5), st.integers(1, 1 << 16))
def test_parts_cover_every_element_once(sizes: list[tuple[int, ...]], ranks: int, max_bytes: int) -> None:
    boxes = {Box(str(n), (0,) * len(s), s, 1 << 12): tuple(range(ranks)) for n, s in enumerate(sizes)}
    covered = {box.key: np.zeros(box.sizes, int) for box in boxes}
    for part, rank in partition(boxes, max_bytes << 12):
        assert 0 <= rank < ranks
        covered[part.key][tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))] += 1
    assert all((count == 1).all() for count in covered.values())


@pytest.mark.parametrize(("shards", "replicas"), [(1, 8), (8, 2), (8, 8), (8, 64), (8, 128)])
def test_replicas_share_the_writing_evenly(shards: int, replicas: int) -> None:
    """The weights of a 1B-parameter LLM, HSDP: no rank writes more than its share plus 256 KiB."""
    hidden, vocabulary, layers = 2048, 32000, 16
    matrices = [
        (vocabulary, hidden),
        *[(hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden), (hidden,)] * layers,
    ]
    boxes = {}
    for n, shape in enumerate(matrices):
        rows = shape[0] // shards
        for shard in range(shards):
            holders = tuple(shard + shards * replica for replica in range(replicas))
            box = Box(str(n), (shard * rows, *[0] * (len(shape) - 1)), (rows, *shape[1:]), 4)
            boxes[box] = holders
    loads: dict[int, int] = defaultdict(int)
    for part, rank in partition(boxes, 1 << 30):
        loads[rank] += part.nbytes
    share = sum(box.nbytes for box in boxes) / (shards * replicas)
    assert max(loads.values()) <= share + MIN_SPLIT


def _plan(*states: dict[str, object]) -> tuple[list[list[tuple[str, tuple[int, ...]]]], object]:
    planners = []
    for rank, state in enumerate(states):
        planner = ShardedSavePlanner()
        planner.set_up_planner(state, None, rank == 0)
        planners.append(planner)
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    return [[(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items] for plan in plans], metadata


def test_a_large_replicated_tensor_is_split_by_rows_over_the_ranks_that_hold_it() -> None:
    big = sharded_value(torch.zeros(1024, 1024), any_rank=True)
    plans, metadata = _plan({"w": big}, {"w": big}, {"w": big})
    offsets = [plan[0][1][0] for plan in plans]
    assert offsets == [0, 341, 683]
    chunks = metadata.state_dict_metadata["w"].chunks  # type: ignore[attr-defined]
    assert sum(chunk.sizes[0] for chunk in chunks) == 1024


def test_tied_tensors_are_cut_at_the_same_places() -> None:
    big = sharded_value(torch.zeros(1024, 1024), any_rank=True)
    plans, _ = _plan({"a": big, "b": big}, {"a": big, "b": big})
    for plan in plans:
        assert {key for key, _ in plan} == {"a", "b"}
        assert len({offset for _, offset in plan}) == 1


def test_ranks_that_disagree_are_named() -> None:
    with pytest.raises(CheckpointMismatch, match=r"rank 1 holds w as \(3,\)"):
        _plan({"w": torch.zeros(2)}, {"w": torch.zeros(3)})
    with pytest.raises(CheckpointMismatch, match="float16"):
        _plan({"w": torch.zeros(2)}, {"w": torch.zeros(2).half()})
    with pytest.raises(CheckpointMismatch, match="w is a tensor on some ranks"):
        _plan({"w": torch.zeros(2)}, {"w": 1})


def test_values_are_written_by_the_first_rank_that_has_them() -> None:
    plans, _ = _plan({"n": 1}, {"n": 1, "mine": 2})
    assert plans == [[("n", ())], [("mine", ())]]


leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
keys = st.text("abc", min_size=1, max_size=2) | st.integers(0, 3)
trees = st.recursive(leaves, lambda t: st.lists(t, max_size=3) | st.dictionaries(keys, t, max_size=3), max_leaves=12)


@settings(deadline=None)
@given(st.dictionaries(st.text("xyz", min_size=1, max_size=2), trees, max_size=4))
def test_flatten_is_undone_by_unflatten(tree: dict[str, object]) -> None:
    try:
        flat, paths = flatten(tree)
    except CheckpointMismatch:
        return  # {"a": {1: …, "1": …}}: two leaves of one name cannot both be stored
    if tree:
        assert unflatten(flat, paths) == tree


def test_two_leaves_of_one_key_are_refused() -> None:
    with pytest.raises(CheckpointMismatch, match=r"'a\.b'"):
        flatten({"a.b": 1, "a": {"b": 2}})


def test_a_plain_tensor_may_differ_between_ranks_and_is_written_by_the_first() -> None:
    plans, _ = _plan({"w": torch.zeros(1024, 1024)}, {"w": torch.ones(1024, 1024)})
    assert [len(plan) for plan in plans] == [1, 0]


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(CheckpointMismatch, match=r"empty key at a"):
        flatten({"a": {"": 1}})


def test_every_rank_gets_a_plan_even_with_nothing_to_write() -> None:
    plans, _ = _plan(*itertools.repeat({"n": 1}, 3))
    assert [len(plan) for plan in plans] == [1, 0, 0]
