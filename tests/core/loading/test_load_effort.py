"""What a load does for each tensor and for each run of columns, counted: a clock would not see it grow in time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import dcp_plugin as dcp
from tests.boxes import Boxes, read_boxes
from tests.compare import assert_same, same_bytes
from tests.memory import calls_of

KIB = 1 << 10


def _flat(count: int, filled: bool = True) -> dict[str, Any]:
    return {f"layers.{number}.weight": torch.full((1000,), float(number * filled)) for number in range(count)}


def _mapping(count: int, filled: bool = True) -> dict[str, Any]:
    return {"m": _flat(count, filled)}


def _module(count: int, filled: bool = True) -> dict[str, Any]:
    return {"model": nn.ParameterList(_flat(count, filled).values())}


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    if "model" in state:
        return dict(state["model"].state_dict())
    return state.get("m", state)


@pytest.mark.parametrize(("state", "most"), [(_flat, 52), (_mapping, 58), (_module, 65)])
def test_a_small_tensor_takes_few_python_calls(tmp_path: Path, state: Callable[..., dict[str, Any]], most: int) -> None:
    calls = []
    for count in (100, 300):
        path, target, saved = tmp_path / str(count), state(count, filled=False), state(count)
        dcp.save(state(count), path)
        checkpointer = dcp.Checkpointer(io={"threads": 1})  # all in the thread that is looked at
        checkpointer.load(state(count), path)  # imports
        calls.append(calls_of(lambda load=checkpointer.load, target=target, path=path: load(target, path)))
        assert_same(_tensors(target), _tensors(saved))
    assert (calls[1] - calls[0]) / 200 <= most


def test_a_number_of_a_mapping_takes_few_python_calls(tmp_path: Path) -> None:
    calls = []
    for count in (1, 100, 300):  # the first load imports
        path, target = tmp_path / str(count), {"m": dict.fromkeys(map(str, range(count)), 0.0)}
        saved = {"m": {str(number): number + 1 / count for number in range(count)}}  # no load has decoded these
        dcp.save(saved, path)
        checkpointer = dcp.Checkpointer(io={"threads": 1})  # all in the thread that is looked at
        calls.append(calls_of(lambda load=checkpointer.load, target=target, path=path: load(target, path)))
        assert target == saved
    assert (calls[2] - calls[1]) / 200 <= 70


def test_equal_values_are_read_once(tmp_path: Path) -> None:
    text = "x" * 100_000
    dcp.save({"m": {f"n{number}": text for number in range(50)}}, tmp_path / "ck")
    target = {"m": dict.fromkeys((f"n{number}" for number in range(50)), "")}
    assert dcp.load(target, tmp_path / "ck").bytes_read < 2 * len(text)
    assert set(target["m"].values()) == {text}


def test_inspect_goes_over_the_keys_of_a_safetensors_file_by_columns(tmp_path: Path) -> None:
    """Such a file may have a million keys. For each of them an object of the answer is made, and its size is added."""

    def calls(count: int) -> int:
        save_file(_flat(count), tmp_path / f"{count}.safetensors")
        return calls_of(lambda: dcp.inspect(tmp_path / f"{count}.safetensors"))

    calls(10)  # imports
    assert (calls(1500) - calls(500)) // 1000 <= 2


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each call of ``preadv``."""
    found: list[int] = []
    real = os.preadv

    def counted(*arguments: Any) -> int:
        found.append(real(*arguments))
        return found[-1]

    monkeypatch.setattr(os, "preadv", counted)
    return found


def _saved(path: Path, rows: int, columns: int) -> torch.Tensor:
    tensor = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)
    dcp.save({"t": tensor}, path)
    return tensor


def test_columns_apart_take_a_call_each_and_nothing_else_is_read(tmp_path: Path, calls: list[int]) -> None:
    tensor = _saved(tmp_path / "ck", 1024, 8192)
    target = torch.zeros(1024, 1024, dtype=torch.int32)
    reader = dcp.ShardedReader(tmp_path / "ck")
    assert len(reader.index) == 1
    calls.clear()
    reader = read_boxes(tmp_path / "ck", ("t", (0, 1024), target), io_threads=1)
    assert same_bytes(target, tensor[:, 1024:2048].contiguous())
    assert calls.count(4 * KIB) == 1024 and reader.bytes_read == target.nbytes
    assert len(calls) < 1024 + 8  # the index


@pytest.mark.parametrize(("rows", "columns", "taken"), [(4096, 1024, 512), (1024, 4096, 1024), (5000, 700, 50)])
def test_columns_near_each_other_are_read_with_what_is_between_and_checked(
    tmp_path: Path, calls: list[int], rows: int, columns: int, taken: int
) -> None:
    tensor = _saved(tmp_path / "ck", rows, columns)
    target = torch.zeros(rows, taken, dtype=torch.int32)
    reader = read_boxes(tmp_path / "ck", ("t", (0, columns - taken), target), io_threads=1)
    assert same_bytes(target, tensor[:, columns - taken :].contiguous())
    assert len(calls) < 48 and reader.unchecked_bytes == 0
    assert reader.bytes_read <= 1.1 * tensor.nbytes


@pytest.mark.parametrize(("columns", "first"), [(1024, 512), (8192, 7168)], ids=["near", "apart"])
def test_a_file_that_ends_in_the_middle_of_columns_is_named(tmp_path: Path, columns: int, first: int) -> None:
    _saved(tmp_path / "ck", 1024, columns)
    reader = dcp.ShardedReader(tmp_path / "ck", check_files=False)
    (name,) = reader.index.files
    os.truncate(tmp_path / "ck" / name, 1 << 20)
    planner = Boxes(("t", (0, first), torch.zeros(1024, columns - first, dtype=torch.int32)))
    with pytest.raises(dcp.CheckpointCorrupt, match=rf"{name} ends within t"):
        reader.read_data(planner.plan(), planner)


@pytest.mark.parametrize("verify", [True, False])
def test_a_changed_byte_of_any_small_tensor_is_found(tmp_path: Path, verify: bool) -> None:
    """Of one block, and of several."""
    state = {"one": torch.zeros(1000), "more": torch.zeros(50_000), "other": torch.zeros(1000)}
    dcp.save(state, tmp_path / "ck")
    index = dcp.ShardedReader(tmp_path / "ck").index
    for key in ("one", "more"):
        (chunk,) = index[key].chunks
        where, path = chunk.location, tmp_path / "ck" / chunk.location.file
        good = path.read_bytes()
        at = where.offset + where.payload_offset + where.payload_length - 3
        path.write_bytes(good[:at] + b"\1" + good[at + 1 :])
        target = {name: torch.ones_like(one) for name, one in state.items()}
        checkpointer = dcp.Checkpointer(dcp.CheckpointConfig(io=dcp.IO(verify=verify)))
        if verify:
            with pytest.raises(dcp.CheckpointCorrupt, match=rf"the bytes of {key} in .* at byte \d+ of the file"):
                checkpointer.load(target, tmp_path / "ck")
        else:
            checkpointer.load(target, tmp_path / "ck")
            assert target[key].count_nonzero() == 1
        path.write_bytes(good)
