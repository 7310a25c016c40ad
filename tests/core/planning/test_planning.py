"""Who writes what: every byte once, evenly, split by rows where that is needed."""

from __future__ import annotations

import itertools
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_plugin.core.format.columns import filled_rows, partitioned
from dcp_plugin.core.format.keys import flatten, unflatten
from dcp_plugin.core.planning.global_plan import Share, make_global_plan
from dcp_plugin.core.planning.load_balance import BoxParts, HeldBoxes, balance_load
from dcp_plugin.core.planning.local_inventory import LocalInventory
from dcp_plugin.core.storage.stock.stock_save import ShardedSavePlanner
from dcp_plugin.core.tensors._torch import sharded_value
from dcp_plugin.core.types import EncodedValue, LocalChunk, ShardedValue
from dcp_plugin.errors import CheckpointMismatch

MIB = 1 << 20


def _held(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], itemsize: int) -> HeldBoxes:
    """Boxes as (sizes, ranks that hold them)."""
    width = max(len(sizes) for sizes, _ in boxes)
    count = np.array([len(ranks) for _, ranks in boxes])
    return HeldBoxes(
        filled_rows([sizes for sizes, _ in boxes], width, 1),
        np.full(len(boxes), itemsize),
        np.cumsum(count) - count,
        count,
        np.array([rank for _, ranks in boxes for rank in ranks]),
    )


def _writers(held: HeldBoxes, parts: BoxParts) -> np.ndarray[Any, Any]:
    assert (parts.holder < held.count[parts.box]).all() and (parts.holder >= 0).all()
    return held.ranks[held.first[parts.box] + parts.holder]


def _loads(held: HeldBoxes, parts: BoxParts, world_size: int) -> np.ndarray[Any, Any]:
    """Bytes that each rank writes."""
    loads = np.zeros(world_size, np.int64)
    np.add.at(loads, _writers(held, parts), parts.sizes.prod(axis=1) * held.itemsize[parts.box])
    return loads


shapes = st.one_of(  # at most some thousand elements, since the test looks at each
    st.lists(st.integers(0, 40), min_size=1, max_size=2).map(tuple),
    st.lists(st.integers(0, 12), min_size=3, max_size=3).map(tuple),
)
some_ranks = st.sets(st.integers(0, 4), min_size=1).map(lambda ranks: tuple(sorted(ranks)))


@settings(deadline=None)
@given(st.lists(st.tuples(shapes, some_ranks), min_size=1, max_size=8), st.integers(1, 1 << 16))
def test_parts_cover_every_element_once(boxes: list[Any], max_bytes: int) -> None:
    held = _held(boxes, 1 << 12)
    parts = balance_load(held, np.zeros(5, np.int64), max_bytes << 12)
    covered = [np.zeros(sizes, int) for sizes in held.sizes]
    for box, offsets, sizes in zip(parts.box, parts.offsets, parts.sizes, strict=True):
        covered[box][tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
        assert sizes.prod() <= max_bytes or sizes.max() == 1
    assert all((count == 1).all() for count in covered)
    _writers(held, parts)


tensors = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 3 * MIB)),
        st.tuples(st.integers(1, 5), st.integers(1, 1 * MIB)),
        st.tuples(st.integers(1, 300), st.integers(1, 4096)),
    ),
    min_size=1,
    max_size=30,
)


@settings(deadline=None)
@given(tensors, st.integers(1, 9))
def test_no_rank_writes_more_than_its_share_and_256_kib(sizes: list[tuple[int, ...]], ranks: int) -> None:
    held = _held([(size, tuple(range(ranks))) for size in sizes], 4)
    loads = _loads(held, balance_load(held, np.zeros(ranks, np.int64), 1 << 30), ranks)
    assert loads.max() <= held.nbytes.sum() / ranks + 256 * 1024


@settings(deadline=None)
@given(tensors, tensors, tensors, st.integers(2, 4))
def test_what_few_ranks_hold_is_evened_out_by_what_all_hold(
    mine: list[tuple[int, ...]], ours: list[tuple[int, ...]], all_have: list[tuple[int, ...]], half: int
) -> None:
    """Rank 0 has tensors of its own, the first half of the ranks has others, all ranks have the rest: no way to
    distribute them could give the busiest rank less than the largest of these three means."""
    world_size = 2 * half
    sets = [(0,), tuple(range(half)), tuple(range(world_size))]
    groups = list(zip((mine, ours, all_have), sets, strict=True))
    held = _held([(size, ranks) for sizes, ranks in groups for size in sizes], 4)
    total = np.cumsum([sum(prod(size) * 4 for size in sizes) for sizes, _ in groups])
    least = max(total / [len(ranks) for ranks in sets])
    assert (
        _loads(held, balance_load(held, np.zeros(world_size, np.int64), 1 << 30), world_size).max()
        <= least + 2 * 256 * 1024
    )


@pytest.mark.parametrize("replicas", [2, 8, 64, 128])
def test_hsdp_replicas_share_the_writing_evenly(replicas: int) -> None:
    """Weights and Adam state of a 1B-parameter LLM over 8 shards."""
    hidden, vocabulary, layers = 2048, 32000, 16
    layer = [*[(hidden, hidden)] * 4, (4 * hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden), (hidden, 1)]
    matrices = [(vocabulary, hidden), *layer * layers, (vocabulary, hidden)] * 3
    boxes = [
        ((rows // 8, columns), tuple(range(shard, 8 * replicas, 8))) for rows, columns in matrices for shard in range(8)
    ]
    held = _held(boxes, 4)
    loads = _loads(held, balance_load(held, np.zeros(8 * replicas, np.int64), 1 << 30), 8 * replicas)
    assert loads.max() / loads.mean() < 1.01


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


cuts = st.lists(st.integers(1, 30), max_size=4).map(lambda cuts: sorted({0, *cuts, 31}))
layouts = st.lists(st.tuples(cuts, cuts, st.integers(0, 3), st.booleans()), min_size=1, max_size=5)


@settings(deadline=None)
@given(layouts, st.integers(1, 5), st.integers(0, 2))
def test_any_layout_is_written_once_by_ranks_that_hold_it(
    tensors: list[Any], world_size: int, without_values: int
) -> None:
    """Tensors cut into a grid at any rows and columns, the cells dealt to ranks, some to several of them."""
    states: list[dict[str, Any]] = [{} for _ in range(world_size)]
    for number, (rows, columns, more, tall) in enumerate(tensors):
        cells = [((a, c), (b - a, d - c)) for a, b in pairwise(rows) for c, d in pairwise(columns)]
        itemsize_up = torch.float64 if tall else torch.float32
        for rank, state in enumerate(states):
            mine = tuple(
                LocalChunk(offsets, sizes, torch.zeros(1).expand(sizes))
                for at, (offsets, sizes) in enumerate(cells)
                if (rank - at) % world_size <= more
            )
            state[f"t{number}"] = ShardedValue((31, 31), itemsize_up, mine, any_rank=True)
    for state in states[without_values:]:
        state["value"] = EncodedValue(b"1")
    inventories = [LocalInventory.of_state(state, {}) for state in states]
    again = [LocalInventory.unpack(inventory.description, inventory.pack_offsets()) for inventory in inventories]
    assert [one.digest for one in again] == [one.digest for one in inventories]
    global_plan = make_global_plan(again)
    covered = {key: np.zeros((31, 31), int) for key in states[0] if key != "value"}
    written = 0
    for inventory, share in zip(inventories, global_plan.shares(world_size), strict=True):
        share = Share.decode(share.encode())
        offsets, sizes = share.boxes(inventory)
        names = [inventory.description.keys[number] for number in inventory.description.key[share.chunk]]
        for key, at, size, chunk in zip(names, offsets, sizes, share.chunk, strict=True):
            written += key == "value"
            if key in covered:
                covered[key][tuple(slice(o, o + n) for o, n in zip(at, size, strict=True))] += 1
                inside = inventory.offsets[chunk]
                assert (inside <= at).all() and (at + size <= inside + inventory.description.sizes[chunk]).all()
    assert all((count == 1).all() for count in covered.values())
    assert written == (without_values < world_size)


@settings(deadline=None)
@given(st.data(), st.integers(1, 4), st.sampled_from([1, 1 << 14]))
def test_keys_with_the_same_boxes_have_a_plan_of_their_own(data: st.DataObject, world_size: int, wide: int) -> None:
    """Keys of few layouts, in another order on each rank; some tied, and some boxes on several ranks or to be cut."""
    of_key = data.draw(st.lists(st.sampled_from([(1, 0), (2, 0), (2, 1), (4, 0)]), min_size=1, max_size=8))
    memory, states = torch.zeros(1), list[dict[str, Any]]()
    for rank in range(world_size):
        state: dict[str, Any] = {"value": EncodedValue(b"1")} if rank else {}
        for number in data.draw(st.permutations(range(len(of_key)))):
            rows, shift = of_key[number]
            cells = min(world_size, 4 // rows)  # a rank has one cell if there are enough ranks
            boxes = [((rows * at, 0), (rows, 4 * wide)) for at in range(4 // rows) if (at + shift - rank) % cells == 0]
            tensor = memory if data.draw(st.booleans()) else torch.zeros(1)
            chunks = tuple(LocalChunk(*box, tensor.expand(box[1])) for box in boxes)
            if chunks or data.draw(st.booleans()):
                state[f"t{number}"] = ShardedValue((4, 4 * wide), torch.float32, chunks, any_rank=number % 3 > 0)
        states.append(state)
    inventories = [LocalInventory.of_state(state, {}) for state in states]
    plan = make_global_plan(inventories)
    assert sorted(plan.table.keys) == sorted({key for state in states for key in state})
    for slot, key in enumerate(plan.table.keys):
        offsets, sizes = plan.table.boxes_of(slot)
        assert partitioned(offsets, sizes, np.array([plan.table.shape_of(slot)]), np.zeros(len(sizes), int), 1).all()
        for row, offset, size in zip(itertools.count(plan.table.chunk_starts[slot]), offsets, sizes, strict=False):
            described, at = inventories[plan.rank[row]].description, plan.chunk[row]
            begin, ndim = inventories[plan.rank[row]].offsets[at], len(offset)
            assert described.keys[described.key[at]] == key
            assert (begin[:ndim] <= offset).all() and (offset + size <= (begin + described.sizes[at])[:ndim]).all()
            assert row in plan.cut or size.tolist() == described.sizes[at][:ndim].tolist()
    shares = plan.shares(world_size)
    assert [len(share.chunk) for share in shares] == np.bincount(plan.rank, minlength=world_size).tolist()


def test_a_hole_is_found_in_a_key_whose_offsets_are_those_of_a_complete_key() -> None:
    def state(rank: int) -> dict[str, Any]:
        chunks = {
            key: LocalChunk((2 * rank, 0), (2, width), torch.zeros(2, width)) for key, width in (("a", 4), ("b", 3))
        }
        return {key: ShardedValue((4, 4), torch.float32, (chunk,)) for key, chunk in chunks.items()}

    with pytest.raises(CheckpointMismatch, match="48 bytes of b"):
        make_global_plan([LocalInventory.of_state(state(rank), {}) for rank in range(2)])


@settings(deadline=None)
@given(cuts, cuts, st.data())
def test_boxes_that_overlap_or_leave_holes_are_found_whatever_they_add_up_to(
    rows: list[int], columns: list[int], data: st.DataObject
) -> None:
    boxes = np.array([[(a, c), (b - a, d - c)] for a, b in pairwise(rows) for c, d in pairwise(columns)])
    shape, of = np.array([[31, 31]]), np.zeros(len(boxes), int)
    assert partitioned(boxes[:, 0], boxes[:, 1], shape, of, 1).all()
    at = data.draw(st.integers(0, len(boxes) - 1))
    room = 31 - boxes[at, 1]
    boxes[at, 0] = [data.draw(st.integers(0, int(limit))) for limit in room]
    covered = np.zeros((31, 31), int)
    for (row, column), (height, width) in boxes:
        covered[row : row + height, column : column + width] += 1
    assert partitioned(boxes[:, 0], boxes[:, 1], shape, of, 1).all() == (covered == 1).all()
