"""Which damage the hashes of a checkpoint find, and that they are those of the bytes that were written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_plugin as dcp
from dcp_plugin.core.format import payload
from dcp_plugin.core.format.columns import Location
from dcp_plugin.core.format.payload import SMALLEST_BLOCK
from dcp_plugin.core.storage import reuse
from dcp_plugin.core.storage.reuse import Reuse
from dcp_plugin.core.storage.stream_copy import check_of
from tests.compare import assert_same
from tests.damage import flip_byte

NUMBERS = 3 * SMALLEST_BLOCK // 4 + 5


def _state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(NUMBERS, generator=generator) for key in "ab"}


def _place(path: Path, key: str) -> tuple[Path, Location]:
    location = dcp.ShardedReader(path).index[key].chunks[0].location  # type: ignore[union-attr]
    return path / location.file, location


def test_a_flipped_bit_of_any_byte_of_a_data_file_is_found(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(70), "n": {"x": 1}, "empty": torch.empty(0, 3)}, tmp_path / "ck")
    (file,) = (tmp_path / "ck").glob("*.distcp")
    index, data = dcp.ShardedReader(tmp_path / "ck").index, bytearray(file.read_bytes())
    for position in range(-1, len(data)):
        flipped = bytearray(data)
        if position >= 0:
            flipped[position] ^= 1 << position % 8
        check = check_of(index, file.name, "it")
        assert check is not None
        check.add(memoryview(flipped))
        check.finish()
        assert len(check.faults) == (position >= 0), f"byte {position}"


def test_a_flipped_bit_of_the_tables_is_found(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(7), "n": 1}, tmp_path / "ck")
    for name in ("dcp_plugin.index", "dcp_plugin.json", ".metadata"):
        good = (tmp_path / "ck" / name).read_bytes()
        for position in range(0, len(good), 23):
            flipped = bytearray(good)
            flipped[position] ^= 1 << position % 8
            (tmp_path / "ck" / name).write_bytes(flipped)
            with pytest.raises(dcp.CheckpointCorrupt):
                dcp.verify(tmp_path / "ck")
        (tmp_path / "ck" / name).write_bytes(good)


def test_a_load_finds_a_flipped_bit_of_any_byte_that_it_reads(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(20)}, tmp_path / "ck")
    file, location = _place(tmp_path / "ck", "a")
    assert location.payload_offset is not None
    good, begin = file.read_bytes(), location.offset + location.payload_offset
    for position in range(begin, begin + location.payload_length):
        file.write_bytes(good[:position] + bytes([good[position] ^ 1 << position % 8]) + good[position + 1 :])
        with pytest.raises(dcp.CheckpointCorrupt, match="checksum differs in block 0"):
            dcp.load({"a": torch.zeros(20, dtype=torch.int64)}, tmp_path / "ck")


def _exchange(data: bytearray, places: list[Location], other: bytes) -> None:
    """Two complete items of one shape in each other's place."""
    a, b = (slice(place.offset, place.offset + place.length) for place in places)
    data[a], data[b] = data[b], data[a]


def _of_another_save(data: bytearray, places: list[Location], other: bytes) -> None:
    """A complete item as another save wrote it at the same place."""
    a = slice(places[0].offset, places[0].offset + places[0].length)
    data[a] = other[a]


def _swap_blocks(data: bytearray, places: list[Location], other: bytes) -> None:
    begin = places[0].offset + (places[0].payload_offset or 0)
    first, second = (slice(begin + at, begin + at + SMALLEST_BLOCK) for at in (0, SMALLEST_BLOCK))
    data[first], data[second] = data[second], data[first]


def _move_blocks(data: bytearray, places: list[Location], other: bytes) -> None:
    """The second block is cut out, and those behind it move up."""
    begin = places[0].offset + (places[0].payload_offset or 0) + SMALLEST_BLOCK
    end = places[0].offset + (places[0].payload_offset or 0) + places[0].payload_length
    data[begin:end] = data[begin + SMALLEST_BLOCK : end] + bytes(SMALLEST_BLOCK)


@pytest.mark.parametrize("damage", [_exchange, _of_another_save, _swap_blocks, _move_blocks])
def test_bytes_in_the_wrong_place_are_found_by_verify_and_by_loads(
    tmp_path: Path, damage: Callable[[bytearray, list[Location], bytes], None]
) -> None:
    for seed, name in enumerate(("ck", "other")):
        dcp.save(_state(seed), tmp_path / name, io={"threads": 1})
    files, places = zip(*(_place(tmp_path / "ck", key) for key in "ab"), strict=True)
    data, other = bytearray(files[0].read_bytes()), _place(tmp_path / "other", "a")[0].read_bytes()
    damage(data, list(places), other)
    files[0].write_bytes(data)
    assert any("a in" in fault for fault in dcp.verify(tmp_path / "ck").errors)
    for target in (_state(2)["a"], torch.zeros(NUMBERS, dtype=torch.float64), torch.zeros(2 * NUMBERS)[::2]):
        with pytest.raises(dcp.CheckpointCorrupt, match="checksum differs in block"):
            dcp.load({"a": target}, tmp_path / "ck", strict=False)


def test_torch_loads_an_item_by_itself(tmp_path: Path) -> None:
    state = _state(0)
    dcp.save(state, tmp_path / "ck")
    file, location = _place(tmp_path / "ck", "b")
    (tmp_path / "item.pt").write_bytes(file.read_bytes()[location.offset :][: location.length])
    for mmap in (False, True):
        assert_same({"b": torch.load(tmp_path / "item.pt", mmap=mmap, weights_only=True)}, {"b": state["b"]})


@pytest.mark.parametrize("async_save", [False, True])
def test_hashes_are_those_of_the_written_bytes_if_tensors_change_after_they_were_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_save: bool
) -> None:
    """As by a thread that trains on during a save: an earlier hash only decides what is written."""
    state, examine = _state(0), Reuse.examine
    with dcp.Checkpointer(async_save=async_save) as ours:
        for step in range(2):
            ours.save(state, tmp_path / str(step)).wait()
        assert dcp.ShardedReader(tmp_path / "1").index.linkable
        shutil.rmtree(tmp_path / "0")
        shutil.rmtree(tmp_path / "1")  # what is stable cannot be linked, and is written

        def examine_and_change(self: Reuse, *args: Any) -> Any:
            findings = examine(self, *args)
            assert len(findings.stable) == 2
            for tensor in state.values():
                tensor += 1
            return findings

        monkeypatch.setattr(Reuse, "examine", examine_and_change)
        ours.save(state, tmp_path / "2").wait()
    assert dcp.verify(tmp_path / "2").ok


def test_the_first_save_after_a_resume_hashes_each_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, hashed, digest = _state(0), list[int](), payload.xxh3_64_intdigest
    with dcp.Checkpointer() as ours:
        for step in range(2):
            ours.save(state, tmp_path / str(step))
    with dcp.Checkpointer() as resumed:
        resumed.load(state, tmp_path / "1")
        monkeypatch.setattr(payload, "xxh3_64_intdigest", lambda data: hashed.append(len(data)) or digest(data))
        resumed.save(state, tmp_path / "2")
    assert hashed == [SMALLEST_BLOCK] * 3 * len(state)
    assert dcp.inspect(tmp_path / "2").bytes_reused > 2 * 4 * NUMBERS


def test_the_first_save_after_a_resume_links_no_file_with_a_flipped_bit_anywhere_in_an_item(tmp_path: Path) -> None:
    state = _state(0)
    with dcp.Checkpointer(io={"threads": 1}) as ours:
        for step in range(2):
            ours.save(state, tmp_path / str(step))
    file, place = _place(tmp_path / "1", "a")
    begin = place.offset + (place.payload_offset or 0)
    end = begin + place.payload_length
    for at in (place.offset, begin - 1, begin, begin + SMALLEST_BLOCK, end - 1, end, place.offset + place.length - 1):
        flip_byte(file, at)
        with dcp.Checkpointer(io={"verify": False}) as resumed:
            resumed.load({"n": 0}, tmp_path / "1", strict=False)
            resumed.save(state, tmp_path / "2")
        assert dcp.inspect(tmp_path / "2").bytes_reused == 0 and dcp.verify(tmp_path / "2").ok
        flip_byte(file, at)


def test_after_a_resume_only_what_was_stable_is_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {**_state(0), "changing": torch.zeros(NUMBERS)}
    with dcp.Checkpointer() as ours:
        for step in range(2):
            state["changing"] += 1
            ours.save(state, tmp_path / str(step))
    examined: list[int] = []
    equal_item = reuse.equal_item
    monkeypatch.setattr(reuse, "equal_item", lambda *item: examined.append(1) or equal_item(*item))
    with dcp.Checkpointer() as resumed:
        resumed.load(state, tmp_path / "1")
        resumed.save(state, tmp_path / "2")
    assert examined == [1, 1]
    assert dcp.inspect(tmp_path / "2").bytes_reused > 2 * 4 * NUMBERS
