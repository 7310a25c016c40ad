"""safetensors files in which stock DCP has put what each rank had of the tensors, and weights that are quantized."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_plugin as dcp
from tests import launch
from tests.compare import assert_same, full_state

FILE_OF = {"rows": 1, "columns": 2, "one": 1, "whole": 2, "number": 2}


def _state(at: int) -> dict[str, torch.Tensor]:
    state = {
        "rows": torch.arange(14.0).reshape(7, 2) + at,
        "columns": torch.arange(6).reshape(2, 3) + at,
        "one": torch.full((1, 2), at),
        "whole": torch.full((3,), at, dtype=torch.bfloat16),
        "number": torch.tensor(float(at)),
    }
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for name, dim in (("rows", 0), ("columns", 1), ("one", 0)):
            state[name] = distribute_tensor(state[name], mesh, [Shard(dim)])
    return state


def _save_and_load(root: Path) -> None:
    warnings.simplefilter("ignore")
    for name, files in (("one file", None), ("several", FILE_OF)):
        writer = stock.HuggingFaceStorageWriter(
            str(root / name), save_distributed=True, fqn_to_index_mapping=files, enable_consolidation=False
        )
        stock.save(_state(1), storage_writer=writer)
        found = _state(0)
        dcp.load({"model": found}, root / name)
        assert_same(full_state(found), full_state(_state(1)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By two ranks; loaded by two."""
    root = tmp_path_factory.mktemp("saved")
    launch.run(_save_and_load, 2, root)
    return root


@pytest.mark.parametrize("name", ["one file", "several"])
def test_parts_that_were_not_consolidated_are_read(saved: Path, name: str) -> None:
    found = _state(0)
    dcp.load({"model": found}, saved / name)
    assert_same(found, _state(1))
    about = dcp.inspect(saved / name)
    assert about.format == "safetensors"
    assert {tensor.key for tensor in about.tensors} == {f"model.{key}" for key in FILE_OF}
    assert dcp.verify(saved / name).ok


def test_one_of_the_files_is_not_taken_for_the_checkpoint(saved: Path) -> None:
    file = next((saved / "one file").glob("shard-00002-*"))
    with pytest.raises(dcp.CheckpointNotFound, match=r"what rank 1 had of each tensor\. Name the directory"):
        dcp.inspect(file)


def _changed(saved: Path, path: Path, **noted: Any) -> Path:
    """A copy in which the second file notes something else."""
    shutil.copytree(saved / "one file", path)
    file = next(path.glob("shard-00002-*"))
    save_file(load_file(file), file, {"format": "pt", **{key: json.dumps(value) for key, value in noted.items()}})
    return path


def test_what_is_wrong_with_parts_is_said(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "one file", tmp_path / "lost")
    next((tmp_path / "lost").glob("shard-00001-*")).unlink()
    with pytest.raises(dcp.CheckpointCorrupt, match=r"do not add up to its shape .*Is a file missing\?"):
        dcp.inspect(tmp_path / "lost")
    keys = ("rows", "columns", "whole", "number", "one")
    for number, wrong in enumerate(([-1, 0], [0], "ab", [0, 1 << 70], [True, 0], None)):
        noted = {key: {"saved_offsets": wrong} for key in keys}
        with pytest.raises(dcp.CheckpointCorrupt):
            dcp.inspect(_changed(saved, tmp_path / str(number), DCP_SHARDING_INFO=noted))
    with pytest.raises(dcp.CheckpointCorrupt, match="does not give the positions of its tensors"):
        dcp.inspect(_changed(saved, tmp_path / "a list", DCP_SHARDING_INFO=[1]))
    with pytest.raises(dcp.CheckpointNotFound, match="2 files that could be meant"):
        dcp.inspect(_changed(saved, tmp_path / "nothing noted"))


def test_weights_that_have_scales_are_not_cast_without_them(tmp_path: Path) -> None:
    """As DeepSeek's are stored. Stock has a reader of its own for them; its others cast."""
    quantized = {
        "one.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "one.weight_scale_inv": torch.full((1, 1), 2.0),
    }
    save_file(quantized, tmp_path / "model-1.safetensors")
    index = {"weight_map": dict.fromkeys(quantized, "model-1.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = {"one.weight": torch.zeros(4, 4)}
    for load in (
        lambda: dcp.load({"model": found}, tmp_path),
        lambda: dcp.load({"model": found}, tmp_path, strict=False),
    ):
        with pytest.raises(dcp.CheckpointMismatch, match=r"one\.weight is torch\.float32 here and quanti.*says how"):
            load()
    stock.load(found, storage_reader=stock.QuantizedHuggingFaceStorageReader(str(tmp_path)))
    assert found["one.weight"].eq(2).all()
    as_stored = {key: torch.zeros_like(value) for key, value in quantized.items()}
    dcp.load({"model": as_stored}, tmp_path)
    assert_same(as_stored, quantized)
