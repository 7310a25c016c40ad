"""Reading only what is needed, checking what was read, and naming what is wrong."""

from __future__ import annotations

import errno
import itertools
import os
import random
import uuid
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint._extension import ZStandard
from torch.utils.serialization import config as serialization

import dcp_plugin as dcp
from dcp_plugin.core.media.disk.local_files import LocalFile
from dcp_plugin.core.media.medium import stretches
from dcp_plugin.core.storage.fetch import MOST_WASTE, covering, of_box, runs_of
from dcp_plugin.core.storage.reading import _taken, batches_of
from dcp_plugin.core.tensors.host_memory import READ_PIECE
from tests.boxes import Boxes, read_boxes
from tests.compare import assert_same, same_bytes
from tests.damage import flip
from tests.memory import extra_peak

MIB = 1 << 20


def _box(tensor: torch.Tensor, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]


def test_the_ranges_of_any_box_hold_its_bytes_and_little_more() -> None:
    chance = random.Random(0)
    for _ in range(400):
        sizes = tuple(chance.choice([1, 2, 5, 16, 40]) for _ in range(chance.randrange(5)))
        lengths = tuple(chance.randint(1, size) for size in sizes)
        offsets = tuple(chance.randint(0, size - length) for size, length in zip(sizes, lengths, strict=True))
        numbers = torch.arange(int(np.prod(sizes, dtype=int))).reshape(sizes)
        starts, run = runs_of(sizes, offsets, lengths, 1)
        held = np.concatenate([np.arange(start, start + run) for start in starts])
        assert held.tolist() == _box(numbers, offsets, lengths).reshape(-1).tolist()
        for block in (None, 8):
            begins, ends = covering(starts, run, block, numbers.numel())
            read = np.concatenate([np.arange(*one) for one in zip(begins, ends, strict=True)])
            assert len(np.unique(read)) == len(read) and set(held) <= set(read.tolist())
            at_the_ends = 2 * (block or 0) if len(starts) == 1 else 0
            assert len(read) <= (1 + MOST_WASTE) * len(held) + at_the_ends


def _target(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    if kind == "strided":
        return torch.zeros(*shape[:-1], shape[-1] + 3)[..., 1 : shape[-1] + 1]
    return torch.zeros(shape, dtype=torch.float64 if kind == "cast" else torch.float32)


@pytest.mark.one_of
@pytest.mark.parametrize("threads", [1, 3])
def test_any_box_comes_back_into_any_kind_of_target(tmp_path: Path, threads: int) -> None:
    chance = random.Random(1)
    state = {"big": torch.randn(700, 2500), "cube": torch.randn(40, 50, 60), "line": torch.randn(3 * MIB)}
    dcp.save(state, tmp_path / "ours", io={"threads": threads})
    stock.save(dict(state), checkpoint_id=tmp_path / "stock")
    boxes = []
    for key, tensor in state.items():
        for number in range(12):
            lengths = tuple(chance.choice([1, chance.randint(1, size), size]) for size in tensor.shape)
            offsets = tuple(chance.randint(0, s - n) for s, n in zip(tensor.shape, lengths, strict=True))
            boxes.append((key, offsets, _target(("plain", "strided", "cast")[number % 3], lengths)))
    for name in ("ours", "stock"):
        for verify in (True, False):
            for _, _, target in boxes:
                target.zero_()
            read_boxes(tmp_path / name, *boxes, io_threads=threads, verify=verify)
            for key, offsets, target in boxes:
                expected = _box(state[key], offsets, tuple(target.shape)).to(target.dtype)
                assert same_bytes(target.contiguous(), expected.contiguous())


def test_rows_are_read_with_at_most_a_block_at_either_end(tmp_path: Path) -> None:
    tensor = torch.randn(4000, 1001)
    dcp.save({"t": tensor}, tmp_path / "ck")
    target = torch.zeros(1333, 1001)
    reader = read_boxes(tmp_path / "ck", ("t", (1234, 0), target))
    assert same_bytes(target, tensor[1234:2567].contiguous())
    block = 64 << 10  # of an item of 16 MiB
    assert target.nbytes < reader.bytes_read <= target.nbytes + 2 * block
    assert reader.unchecked_bytes == 0


def test_wide_columns_are_checked_and_narrow_ones_are_read_without_their_neighbours(tmp_path: Path) -> None:
    wide, narrow = torch.randn(64, 65536), torch.randn(256, 8192)  # a row of the first has four blocks of 64 KiB
    dcp.save({"wide": wide, "narrow": narrow}, tmp_path / "ck")
    target = torch.zeros(64, 32768)
    reader = read_boxes(tmp_path / "ck", ("wide", (0, 16384), target))
    assert same_bytes(target, wide[:, 16384:49152].contiguous())
    assert reader.bytes_read == target.nbytes and reader.unchecked_bytes == 0
    target = torch.zeros(256, 128)
    for first in (256, 8192 - 128):  # also to the last byte of the last block
        reader = read_boxes(tmp_path / "ck", ("narrow", (0, first), target))
        assert same_bytes(target, narrow[:, first : first + 128].contiguous())
        assert reader.bytes_read == target.nbytes == reader.unchecked_bytes


def test_a_part_of_a_stock_tensor_is_all_that_is_read_of_it(tmp_path: Path) -> None:
    tensor = torch.randn(1000, 1000)
    stock.save({"t": tensor}, checkpoint_id=tmp_path / "ck")
    target = torch.zeros(10, 1000)
    reader = read_boxes(tmp_path / "ck", ("t", (500, 0), target))
    assert same_bytes(target, tensor[500:510].contiguous())
    assert reader.bytes_read < target.nbytes + 4096


def test_stock_items_of_another_layout_are_read_through_torch(tmp_path: Path) -> None:
    state = {"t": torch.randn(300, 7), "n": {"x": 1}}
    aligned = serialization.save.storage_alignment
    serialization.save.storage_alignment = 4096
    try:
        stock.save(dict(state), checkpoint_id=tmp_path / "other")
    finally:
        serialization.save.storage_alignment = aligned
    writer = stock.FileSystemWriter(tmp_path / "zstd", _extensions=[ZStandard()])
    stock.save(dict(state), storage_writer=writer)
    for name in ("other", "zstd"):
        target: dict[str, Any] = {"t": torch.zeros(300, 7), "n": {"x": 0}}
        dcp.load(target, tmp_path / name)
        assert same_bytes(target["t"], state["t"]) and target["n"] == {"x": 1}
        rows = torch.zeros(5, 7)
        read_boxes(tmp_path / name, ("t", (100, 0), rows))
        assert same_bytes(rows, state["t"][100:105].contiguous())
        assert dcp.verify(tmp_path / name).ok


def test_a_stock_item_that_unpacks_to_more_than_it_says_is_refused(tmp_path: Path) -> None:
    for name, tensor in (("ck", torch.zeros(64)), ("bomb", torch.zeros(64 * MIB))):
        writer = stock.FileSystemWriter(tmp_path / name, _extensions=[ZStandard()])
        stock.save({"t": tensor}, storage_writer=writer)
    bomb = (tmp_path / "bomb" / "__0_0.distcp").read_bytes()
    length = (tmp_path / "ck" / "__0_0.distcp").stat().st_size
    reader = dcp.ShardedReader(tmp_path / "ck")
    reader.index.columns["place"][0, 1] = len(bomb)
    (tmp_path / "ck" / "__0_0.distcp").write_bytes(bomb)
    assert length < len(bomb) < MIB
    planner = Boxes(("t", (0,), torch.zeros(64)))
    with pytest.raises(dcp.CheckpointCorrupt, match=r"t in __0_0\.distcp is damaged"):
        assert extra_peak(lambda: reader.read_data(planner.plan(), planner)) < 64 * MIB


def test_many_small_tensors_take_few_system_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"layer.{number}": torch.full((1000,), float(number)) for number in range(1000)}
    dcp.save({"m": state}, tmp_path / "ck")
    calls = 0
    real = os.preadv

    def counted(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", counted)
    target = {key: torch.zeros(1000) for key in state}
    report = dcp.load({"m": target}, tmp_path / "ck")
    assert_same(target, state)
    assert calls < 20
    assert report.bytes_read < 1.5 * 4_000_000


def test_several_threads_share_one_file(tmp_path: Path) -> None:
    tensor = torch.randn(12 * MIB)
    dcp.save({"t": tensor}, tmp_path / "ck", io={"threads": 1})
    target = torch.zeros(12 * MIB)
    dcp.load({"t": target}, tmp_path / "ck", io={"threads": 4})
    assert same_bytes(target, tensor)


def test_values_and_the_tensors_around_them_are_read_together_from_a_store() -> None:
    path = f"memory://{uuid.uuid4().hex}/step"
    state = {f"{at}.{name}": torch.rand(2000) if name == "a" else f"value {at}" for at in range(100) for name in "ab"}
    dcp.save(state, path)
    loaded = {key: torch.zeros(2000) if torch.is_tensor(value) else "" for key, value in state.items()}
    reader = dcp.ShardedReader(path)
    stock.load(loaded, storage_reader=reader, no_dist=True)
    assert_same(loaded, state)
    assert reader.bytes_read < 1.5 * 100 * 8000


def test_equal_values_are_read_once(tmp_path: Path) -> None:
    state = {str(number): {"lr": 0.125} for number in range(500)}
    dcp.save({"groups": state}, tmp_path / "ck")
    target = {str(number): {"lr": 0.0} for number in range(500)}
    report = dcp.load({"groups": target}, tmp_path / "ck")
    assert target == state
    assert report.bytes_read < 4096


@pytest.mark.one_of
@pytest.mark.parametrize("how", ["contiguous", "cast", "turned"])
def test_a_load_needs_memory_for_blocks_only(tmp_path: Path, how: str) -> None:
    dcp.save({"t": torch.randn(6000, 6000)}, tmp_path / "ck")
    target = torch.ones(6000, 6000, dtype=torch.float64 if how == "cast" else torch.float32)
    target = target.t() if how == "turned" else target
    dcp.load({"t": torch.zeros(6000, 6000)}, tmp_path / "ck")
    assert extra_peak(lambda: dcp.load({"t": target}, tmp_path / "ck")) < 32 * MIB


def test_damage_is_found_where_it_is_read_and_names_file_and_key(tmp_path: Path) -> None:
    tensor = torch.randn(1024, 1024)
    dcp.save({"fine": torch.randn(500), "t": tensor}, tmp_path / "ck")
    flip(tmp_path / "ck", "t", byte=600 * 4096 + 7)  # a block of 64 KiB has 16 rows
    for offsets, lengths in (
        ((0, 0), (1024, 1024)),
        ((590, 0), (20, 1024)),
        ((600, 0), (1, 1024)),
        ((0, 0), (1024, 1023)),
    ):
        with pytest.raises(dcp.CheckpointCorrupt, match=r"bytes of t in __0_\d-\w+\.distcp .*block 37,") as caught:
            read_boxes(tmp_path / "ck", ("t", offsets, torch.zeros(lengths)))
        assert caught.value.key == "t"
        read_boxes(tmp_path / "ck", ("t", offsets, torch.zeros(lengths)), verify=False)
    target = torch.zeros(500, 1024)
    read_boxes(tmp_path / "ck", ("t", (0, 0), target))
    assert same_bytes(target, tensor[:500].contiguous())
    assert len(dcp.verify(tmp_path / "ck").errors) == 1


@pytest.mark.parametrize("first", [slice(0, 6), slice(2, 8)])
def test_targets_that_share_memory_are_a_mismatch_and_no_damage(tmp_path: Path, first: slice) -> None:
    dcp.save({"a": torch.ones(6), "b": torch.zeros(6)}, tmp_path / "run/step-1", step=1)
    memory = torch.full((8,), 7.0)
    state = {"a": memory[first], "b": memory[2:8]}
    with pytest.raises(dcp.CheckpointMismatch, match=r"(a and b|b and a) share memory here"):
        dcp.resume_or_init(state, tmp_path / "run")
    assert dcp.latest(tmp_path / "run") is not None  # not in quarantine


@pytest.mark.parametrize("damaged", ["b", "c"])
def test_damage_of_tensors_that_share_memory_and_of_others_is_damage(tmp_path: Path, damaged: str) -> None:
    memory = torch.ones(2000)
    state = {"a": memory, "b": memory.clone(), "c": torch.ones(500)}
    dcp.save(state, tmp_path / "ck")
    state["b"] = memory[:2000]
    dcp.load(state, tmp_path / "ck")
    flip(tmp_path / "ck", damaged, byte=77)
    with pytest.raises(dcp.CheckpointCorrupt):
        dcp.load(state, tmp_path / "ck")


@pytest.mark.parametrize("kind", ["plain", "strided", "cast"])
def test_what_is_copied_is_checked_before_the_target_is_touched(tmp_path: Path, kind: str) -> None:
    dcp.save({"t": torch.randn(50, 40)}, tmp_path / "ck")
    flip(tmp_path / "ck", "t", byte=77)
    target = _target(kind, (50, 40)).fill_(3)
    with pytest.raises(dcp.CheckpointCorrupt):
        dcp.load({"t": target}, tmp_path / "ck")
    assert bool((target == 3).all()) == (kind != "plain")


@pytest.mark.parametrize("damage", ["truncated", "missing", "a directory"])
@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_a_file_that_is_lost_after_the_index_was_read_is_named_with_a_key(
    tmp_path: Path, damage: str, writer: str
) -> None:
    state = {"first": torch.randn(100), "last": torch.randn(5000)}
    if writer == "ours":
        dcp.save(dict(state), tmp_path / "ck")
    else:
        stock.save(dict(state), checkpoint_id=tmp_path / "ck")
    reader = dcp.ShardedReader(tmp_path / "ck")
    assert len(reader.index) == 2
    file = next((tmp_path / "ck").glob("__0_0*.distcp"))
    if damage == "truncated":
        os.truncate(file, file.stat().st_size - 3000)
    else:
        file.unlink()
        if damage == "a directory":
            file.mkdir()
    planner = Boxes(("first", (0,), torch.zeros(100)), ("last", (0,), torch.zeros(5000)))
    key = "last" if damage == "truncated" else "first"
    with pytest.raises(dcp.CheckpointCorrupt, match=rf"({key}.*{file.name}|{file.name}.*{key})"):
        reader.read_data(planner.plan(), planner)


def test_verify_names_the_key_from_which_on_a_file_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elements = READ_PIECE // 4
    state = {"a": torch.ones(elements), "b": torch.ones(2 * elements), "c": torch.ones(1)}
    dcp.Checkpointer(io={"threads": 1}).save(state, tmp_path / "ck")
    read_into = LocalFile.read_into

    def fail(file: LocalFile, memory: Any, offset: int) -> int:
        if offset >= 2 * READ_PIECE:
            raise OSError(errno.EIO, "Input/output error")
        return read_into(file, memory, offset)

    monkeypatch.setattr(LocalFile, "read_into", fail)
    (error,) = dcp.verify(tmp_path / "ck").errors
    assert error.endswith(f".distcp cannot be read behind byte {2 * READ_PIECE}, in b: Input/output error")


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_lost_file_leaves_the_target_as_it_was(tmp_path: Path, damage: str) -> None:
    state = {"a": torch.randn(MIB), "b": torch.randn(MIB)}
    dcp.save(state, tmp_path / "ck")
    file = next((tmp_path / "ck").glob("__0_1-*.distcp"))
    if damage == "truncated":
        os.truncate(file, 4096)
    else:
        file.unlink()
    target = {key: torch.full((MIB,), 7.0) for key in state}
    with pytest.raises(dcp.CheckpointCorrupt, match=rf"{file.name} is (truncated|missing)"):
        dcp.load(target, tmp_path / "ck")
    assert all(bool((value == 7).all()) for value in target.values())


def test_each_thread_reads_neighbours_and_everything_is_read_once(tmp_path: Path) -> None:
    state = {f"t{number}": torch.full((1 + 37 * number % 11, 300_000), float(number)) for number in range(20)}
    dcp.save(state, tmp_path / "ck", io={"threads": 3})
    with dcp.ShardedReader(tmp_path / "ck") as reader:
        chunks = [(key, reader.index[key].chunks[0]) for key in state]
        fetches = [
            one
            for key, chunk in chunks
            for one in of_box(key, chunk, torch.float32, ((0, 0), chunk.sizes), torch.empty(chunk.sizes), None)
        ]
        batches = sorted(batches_of(fetches, reader.open().files.cost), key=lambda one: (one.file, one.begin))
    work = [deque(batches[at] for at in one) for one in stretches([one.nbytes for one in batches], 3)]
    assert [one for stretch in work for one in stretch] == batches
    sizes = [sum(one.nbytes for one in stretch) for stretch in work]
    assert max(sizes) - min(sizes) <= 2 * max(one.nbytes for one in batches)
    taken = [_taken(work, number) for number in range(3)]
    done = [one for round_of in itertools.zip_longest(taken[0], taken[1]) for one in round_of if one is not None]
    assert list(taken[2]) == []  # who was done has taken what it had, from its end
    assert sorted(map(id, done)) == sorted(map(id, batches))
