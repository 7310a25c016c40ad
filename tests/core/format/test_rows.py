"""Rows that stand for many chunks: what they describe is what there was, and a mesh takes few of them."""

from __future__ import annotations

import gc
import itertools
import pickle
import random
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_plugin.core.format import index_file, metadata
from dcp_plugin.core.format.columns import Location, Places, grid_begins, in_grid
from dcp_plugin.core.format.index import CheckpointIndex, StoredTensor
from dcp_plugin.core.format.stock_objects import metadata_of
from dcp_plugin.core.format.summary import fingerprint
from dcp_plugin.core.planning.global_plan import make_global_plan
from dcp_plugin.core.planning.local_inventory import LocalInventory
from dcp_plugin.core.planning.save import in_table_order
from dcp_plugin.core.types import EncodedValue, LocalChunk, ShardedValue
from dcp_plugin.errors import CheckpointCorrupt

sizes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=2, max_size=2)


@settings(deadline=None)
@given(st.lists(sizes, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_boxes_are_the_same_after_rows_have_described_them(tensors: list[Any], random: Any) -> None:
    """Of grids whose last cells may be smaller, and in which boxes may be missing."""
    boxes = [
        (key, corner, [min(size, end - at) for at, (end, size) in zip(corner, tensor, strict=True)])
        for key, tensor in enumerate(tensors)
        for corner in itertools.product(*(range(0, end, size) for end, size in tensor))
        if random.random() < 0.9
    ]
    key = np.array([key for key, _, _ in boxes], np.int64)
    both = np.array([box for _, *box in boxes], np.int64).reshape(-1, 2, 2)
    shapes = np.array([[end for end, _ in tensor] for tensor in tensors], np.int64)
    begins = grid_begins(key, both[:, 0], both[:, 1], shapes)
    counts = np.diff(begins, append=len(key))
    assert np.array_equal(in_grid(both[begins], counts, shapes[key[begins]]), both)


def _part(rank: int, lengths: list[int], random: Any) -> Places:
    locations, end = [], 0
    for number, length in enumerate(lengths):
        hashes = np.array([random.getrandbits(64) for _ in range(-(-length // (1 << 16)))], np.uint64)
        locations.append(Location(f"__{rank}_{number % 2}", end, length + 9, 5, length, length % 3, hashes))
        end += length + 64
    return Places.of(locations)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([[], [7], [1, 70_000, 3], [5] * 6, [1, 2, 3, 4]]), min_size=1, max_size=9),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_places_are_the_same_after_ranks_have_sent_them(kinds: list[list[int]], by_key: bool, random: Any) -> None:
    parts = [_part(rank, lengths, random) for rank, lengths in enumerate(kinds)]
    wanted = [part.location(number) for part in parts for number in range(len(part.file))]
    order = list(range(len(wanted)))
    random.shuffle(order)
    if by_key:  # as the keys of a mesh: each on all ranks
        numbers = [number for part in parts for number in range(len(part.file))]
        order.sort(key=lambda at: (numbers[at], at))
    found = Places.merged([pickle.loads(pickle.dumps(part)) for part in parts], np.array(order, np.int64))
    assert [str(found.location(at)) for at in range(len(order))] == [str(wanted[at]) for at in order]
    for file, name in enumerate(found.files):
        assert found.items_in(file)[0].tolist() == [at for at in range(len(order)) if wanted[order[at]].file == name]


def _index(rows: int, columns: int, tensors: int) -> CheckpointIndex:
    """A mesh of ``rows`` x ``columns`` ranks, each with one box of every tensor; rank 0 has a value, too."""
    states: list[dict[str, Any]] = [{"n": EncodedValue(b"1" * 9)}] + [{} for _ in range(rows * columns - 1)]
    for rank, state in enumerate(states):
        for number in range(tensors):
            corner = (rank // columns * 4, rank % columns * 2)
            chunk = LocalChunk(corner, (4, 2), torch.zeros(1).expand(4, 2))
            state[f"t{number}"] = ShardedValue((4 * rows, 2 * columns), torch.float32, (chunk,))
    inventories = [LocalInventory.of_state(state, {}) for state in states]
    plan = make_global_plan(inventories)
    parts = []
    for rank, state in enumerate(states):
        lengths = [9 if key == "n" else 32 for key in state]
        offsets = np.cumsum([0, *lengths[:-1]])
        parts.append(
            Places.of(
                [
                    Location(f"__{rank}_0", at, length, 0, length, 1, np.array([rank * 100 + at], np.uint64))
                    for at, length in zip(offsets.tolist(), lengths, strict=True)
                ]
            )
        )
    places = Places.merged(parts, in_table_order(plan))
    files = {f"__{rank}_0": 9 + 32 * tensors for rank in reversed(range(len(states)))}
    return CheckpointIndex.of(plan.table, places, files)


def test_a_tensor_of_a_mesh_takes_a_row_and_reads_as_if_each_chunk_had_one() -> None:
    data = index_file.encode(_index(4, 3, 5))
    index = index_file.decode(data, fingerprint(data), "the index")
    assert len(index.columns["box_count"]) == 1 + 5  # the value, and a grid for each tensor
    assert len(index.columns["file"]) == 1 + 2 * 5  # of rank 0, which has a value before them, and of all others
    tensor = index["t3"]
    assert isinstance(tensor, StoredTensor)
    for rank, chunk in enumerate(tensor.chunks):
        begin = 3 * 32 + 9 * (rank == 0)
        assert (chunk.offsets, chunk.sizes) == ((rank // 3 * 4, rank % 3 * 2), (4, 2))
        assert (chunk.location.file, chunk.location.offset) == (f"__{rank}_0", begin)
        assert chunk.location.hashes is not None and chunk.location.hashes.tolist() == [rank * 100 + begin]
    assert index.payload_bytes == 9 + 5 * 12 * 32


def test_a_row_with_several_items_in_one_file_is_refused() -> None:
    index = _index(4, 3, 5)
    index.columns["file_step"][-1] = 0
    index.files = dict.fromkeys(index.files, 1 << 10)
    data = index_file.encode(index)
    with pytest.raises(CheckpointCorrupt, match="several items in one file"):
        index_file.decode(data, fingerprint(data), "the index")


def test_metadata_has_every_chunk_that_a_row_stands_for(tmp_path: Path) -> None:
    index = _index(3, 2, 4)
    found, wanted = pickle.loads(metadata.encode(index, None)), metadata_of(index)
    assert found.state_dict_metadata == wanted.state_dict_metadata
    assert found.storage_data == wanted.storage_data and len(found.storage_data) == 1 + 4 * 6
    assert b"".join(metadata.pieces(index, None)) == metadata.encode(index, None)


def test_an_index_with_empty_shards_on_several_ranks_is_read() -> None:
    chunks = [LocalChunk((2 * rank, 0), (2, 0), torch.zeros(2, 0)) for rank in range(3)]
    states = [{"t": ShardedValue((6, 0), torch.float32, (chunk,))} for chunk in chunks]
    plan = make_global_plan([LocalInventory.of_state(state, {}) for state in states])
    parts = [Places.of([Location(f"__{rank}_0", 0, 9, 5, 0, 1)]) for rank in range(3)]
    places = Places.merged(parts, in_table_order(plan))
    data = index_file.encode(CheckpointIndex.of(plan.table, places, {f"__{rank}_0": 9 for rank in range(3)}))
    index = index_file.decode(data, fingerprint(data), "the index")
    tensor = index["t"]
    assert isinstance(tensor, StoredTensor)
    assert [chunk.location.file for chunk in tensor.chunks] == [f"__{rank}_0" for rank in range(3)]


def test_the_rows_that_ranks_have_sent_are_freed_after_the_merge() -> None:
    parts = [pickle.loads(pickle.dumps(_part(rank, [7, 70_000], random.Random(0)))) for rank in range(2)]
    rows = weakref.ref(parts[0].place)
    merged = Places.merged(parts, np.arange(4))
    del parts
    gc.collect()
    assert rows() is None and len(merged.files) == 4
