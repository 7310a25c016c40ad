"""What is on disk: items that torch itself could have written, and files that say what they are."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.serialization import config as torch_config

import dcp_plugin as dcp
from dcp_plugin.core.errors import damage_in
from dcp_plugin.core.format import INDEX, SUMMARY, index_file, read, stock_metadata, uncommitted_reason
from dcp_plugin.core.format.columns import itemsize_named
from dcp_plugin.core.format.foreign import detect
from dcp_plugin.core.format.index import StoredTensor
from dcp_plugin.core.format.payload import ALIGNMENT, frame
from dcp_plugin.core.format.summary import Summary
from tests.compare import assert_same, same_bytes
from tests.foreign import without_crcs

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.bool,
    torch.complex64, torch.complex128,
]  # fmt: skip
SHAPES = [(), (1,), (7,), (3, 5), (2, 0, 4), (1, 1, 9)]


def _tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return (torch.randn(shape) * 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_item_is_the_file_that_torch_would_write_without_crcs(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor, buffer = _tensor(dtype, shape), io.BytesIO()
    around = frame(dtype, shape)
    item = around.head + tensor.reshape(-1).view(torch.uint8).numpy().tobytes() + around.tail
    with without_crcs():
        torch.save(tensor, buffer)
    theirs = buffer.getvalue()
    own_id = re.findall(rb"[0-9]{40}", theirs)[-1]
    assert item == theirs.replace(own_id, b"0" * 40)
    assert len(item) == around.length
    assert around.payload_offset % ALIGNMENT == 0
    assert same_bytes(torch.load(io.BytesIO(item), weights_only=True), tensor)


def _other_alignment() -> AbstractContextManager[Any]:
    return torch_config.patch("save.storage_alignment", 4096)


SETTINGS = {
    "without CRCs": without_crcs,
    "another alignment": _other_alignment,
    "meta": partial(torch.device, "meta"),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=list(SETTINGS))
def test_a_frame_is_the_same_whatever_the_caller_has_set(
    tmp_path: Path, setting: Callable[[], AbstractContextManager[Any]]
) -> None:
    state = {"w": torch.arange(12.0).reshape(3, 4), "n": torch.ones(70_000, dtype=torch.int16), "e": torch.empty(0, 2)}
    dcp.save(state, tmp_path / "plain")
    frame.cache_clear()
    with setting():
        dcp.save(state, tmp_path / "ck")
    data = [b"".join(file.read_bytes() for file in (tmp_path / name).glob("*.distcp")) for name in ("plain", "ck")]
    assert data[0] == data[1]
    with setting():
        assert dcp.verify(tmp_path / "ck").ok
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    stock.load(target, checkpoint_id=tmp_path / "ck", no_dist=True)
    assert_same(target, state)


def test_every_kind_of_tensor_comes_back_byte_for_byte_through_us_and_through_stock(tmp_path: Path) -> None:
    base = torch.randn(40, 30)
    state = {
        "transposed": base.t(),
        "slice of a larger storage": base[3:7, 5:9],
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.arange(3).expand(4, 3),
        "conjugated": torch.randn(5, dtype=torch.complex64).conj(),
        "special values": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
        "several blocks": torch.randn((5 << 20) // 4 + 11),
        **{f"{dtype} {shape}": _tensor(dtype, shape) for dtype in DTYPES for shape in SHAPES},
    }
    dcp.save({"t": state}, tmp_path / "ck")
    ours = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in state.items()}
    dcp.load({"t": ours}, tmp_path / "ck")
    assert_same(state, ours)
    theirs = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in state.items()}
    stock.load({"t": theirs}, checkpoint_id=tmp_path / "ck")
    assert_same(state, theirs)
    assert dcp.inspect(tmp_path / "ck").nbytes < sum(t.numel() * t.element_size() for t in state.values()) + 1


def test_targets_that_are_not_contiguous_or_of_another_dtype_are_filled(tmp_path: Path) -> None:
    saved = torch.randn(6, 8)
    dcp.save({"a": saved, "b": saved}, tmp_path / "ck")
    strided, half = torch.zeros(8, 6).t(), torch.zeros(6, 8, dtype=torch.float16)
    report = dcp.load({"a": strided, "b": half}, tmp_path / "ck")
    assert same_bytes(strided.contiguous(), saved)
    assert same_bytes(half, saved.half())
    assert report.cast == ["b"]


def test_nested_values_of_every_plain_type_come_back(tmp_path: Path) -> None:
    state = {
        "nested": {
            "list": [1, [2, 3]],
            "mixed": [{"a": 1}, {"b": torch.ones(2)}],
            "tuple": (1, torch.ones(2)),
            3: "int key",
        },
        "empty": {},
        "none": None,
        "numbers": [True, 1, 1.0, -0.0],
        "path": Path("/some/where"),
        "numpy": np.float32(1.5),
        "bytes": b"\x00\x01",
    }
    dcp.save({"extra": state}, tmp_path / "ck")
    loaded: dict[str, object] = {}
    dcp.load({"extra": loaded}, tmp_path / "ck")
    assert torch.equal(loaded["nested"]["mixed"][1].pop("b"), torch.ones(2))  # type: ignore[index]
    assert loaded["nested"]["mixed"] == [{"a": 1}, {}]  # type: ignore[index]
    assert loaded["nested"]["tuple"][0] == 1 and isinstance(loaded["nested"]["tuple"], tuple)  # type: ignore[index]
    assert loaded["nested"][3] == "int key"  # type: ignore[index]
    assert repr(loaded["numbers"]) == "[True, 1, 1.0, -0.0]"
    assert {key: loaded[key] for key in ("empty", "none", "path", "numpy", "bytes")} == {
        "empty": {}, "none": None, "path": Path("/some/where"), "numpy": np.float32(1.5), "bytes": b"\x00\x01",
    }  # fmt: skip
    assert type(loaded["numpy"]) is np.float32


def test_equal_values_and_tied_tensors_are_written_once(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Linear(64, 64, bias=False), "head": torch.nn.Linear(64, 64, bias=False)}
    )
    model["head"].weight = model["embed"].weight
    dcp.save({"model": model, "lr": {str(i): 0.1 for i in range(50)}}, tmp_path / "ck")
    index = dcp.ShardedReader(tmp_path / "ck").index
    one, other = index["model.embed.weight"], index["model.head.weight"]
    assert isinstance(one, StoredTensor) and isinstance(other, StoredTensor)
    assert one.chunks[0].location.offset == other.chunks[0].location.offset
    assert len({index[key].chunks[0].location.offset for key in index if key.startswith("lr.")}) == 1
    assert dcp.inspect(tmp_path / "ck").nbytes < 64 * 64 * 4 + 4096
    target = {"model": {key: torch.zeros(64, 64) for key in ("embed.weight", "head.weight")}}
    stock.load(target, checkpoint_id=tmp_path / "ck")
    dcp_to_torch_save(tmp_path / "ck", tmp_path / "whole.pt")
    assert_same(target["model"], model.state_dict())
    assert_same(torch.load(tmp_path / "whole.pt")["model"], model.state_dict())


def test_the_summary_is_for_people(tmp_path: Path) -> None:
    dcp.save({"model": torch.nn.Linear(3, 2), "n": 1}, tmp_path / "ck", step=7)
    said = json.loads((tmp_path / "ck" / "dcp_plugin.json").read_text())
    assert said["step"] == 7 and said["world_size"] == 1
    assert said["tensors"] == 2 and said["values"] == 1
    assert said["kinds"] == {"model": "module"}
    assert said["versions"]["torch"] == torch.__version__
    info = dcp.inspect(tmp_path / "ck")
    assert [tensor.key for tensor in info.tensors] == ["model.weight", "model.bias"]
    assert "step 7" in str(info)


@pytest.mark.parametrize("driver", ["our writer and planner", "our writer", "our planner"])
def test_stock_save_and_load_take_our_classes(tmp_path: Path, driver: str) -> None:
    state = {"model": torch.nn.Linear(5, 3).state_dict(), "n": [1, 2]}
    if driver == "our planner":
        stock.save(state, checkpoint_id=tmp_path / "ck", planner=dcp.ShardedSavePlanner())
    else:
        planner = dcp.ShardedSavePlanner() if "planner" in driver else None
        stock.save(state, storage_writer=dcp.ShardedWriter(tmp_path / "ck"), planner=planner)
    for reader, load_planner in (
        (dcp.ShardedReader(tmp_path / "ck"), dcp.ShardedLoadPlanner()),
        (dcp.ShardedReader(tmp_path / "ck"), None),
        (stock.FileSystemReader(tmp_path / "ck"), dcp.ShardedLoadPlanner()),
    ):
        target = {"model": {"weight": torch.zeros(3, 5), "bias": torch.zeros(3)}, "n": None}
        stock.load(target, storage_reader=reader, planner=load_planner)
        assert_same(target["model"], state["model"])
        assert target["n"] == [1, 2]
    assert dcp.verify(tmp_path / "ck").ok


def test_a_checkpoint_by_stock_torch_loads_through_us(tmp_path: Path) -> None:
    model = torch.nn.Linear(5, 3)
    stock.save({"model": model.state_dict(), "n": {"deep": [1, 2]}}, checkpoint_id=tmp_path / "ck")
    other, state = torch.nn.Linear(5, 3), {"n": {}}
    report = dcp.load({"model": other, **state}, tmp_path / "ck")
    assert_same(other.state_dict(), model.state_dict())
    assert state["n"] == {"deep": [1, 2]}
    assert not report.missing
    assert dcp.inspect(tmp_path / "ck").format == "stock"
    verified = dcp.verify(tmp_path / "ck")
    assert verified.ok and sorted(verified.unverified) == ["model.bias", "model.weight", "n.deep"]
    assert dcp.latest(tmp_path) == tmp_path / "ck"


class _Remote:
    """Files as an object store has them: no paths, names with ``/``, and every read is of a range."""

    where = "store://bucket/run"

    def __init__(self, root: Path) -> None:
        self._objects = {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}

    def names(self) -> list[str]:
        return sorted({name[: name.find("/") + 1] or name for name in self._objects})

    def size(self, name: str) -> int:
        return len(self._objects[name])

    def modified(self, name: str) -> float:
        return 0.0

    def open(self, name: str) -> io.BytesIO:
        if name not in self._objects:
            raise FileNotFoundError(2, "No such object", name)
        return io.BytesIO(self._objects[name])


def test_the_format_needs_no_file_system(tmp_path: Path) -> None:
    state = {"w": torch.arange(12.0).reshape(3, 4), "n": torch.ones(2, dtype=torch.int16)}
    dcp.save(state, tmp_path / "ours", step=3)
    stock.save(state, checkpoint_id=tmp_path / "stock")
    (tmp_path / "files").mkdir()
    save_file(state, tmp_path / "files" / "one.safetensors")
    torch.save({"model": state}, tmp_path / "files" / "two.pt")

    ours = _Remote(tmp_path / "ours")
    summary = Summary.decode(read(ours, SUMMARY), "the summary")
    assert (summary.step, uncommitted_reason(ours.names())) == (3, "")
    index = index_file.decode(read(ours, INDEX), summary.index_sha256, "the index")
    assert list(index) == list(state) == list(stock_metadata.read_index(_Remote(tmp_path / "stock")))
    files = _Remote(tmp_path / "files")
    for name in ("one.safetensors", "two.pt"):
        contents = detect.read_file(files, name)
        assert {key: (view.shape, view.dtype) for key, view in contents.views.items()} == {
            f"model.{key}": (tuple(tensor.shape), tensor.dtype) for key, tensor in state.items()
        }
        for key, view in contents.views.items():
            files_bytes = files.open(name).getvalue()[view.start : view.start + view.span]
            assert files_bytes == state[key.removeprefix("model.")].numpy().tobytes()
    with pytest.raises(dcp.CheckpointCorrupt, match=r"store://bucket/run/lost cannot be read: No such object"):
        read(files, "lost")


def test_an_error_of_code_while_bytes_are_read_is_no_damage() -> None:
    """As when Ctrl-C interrupts an import, which some libraries raise as an ImportError."""
    for error in (ImportError("interrupted"), NameError("name"), SyntaxError("code")):
        with pytest.raises(type(error)), damage_in("ck/dcp_plugin.index"):
            raise error
    with pytest.raises(dcp.CheckpointCorrupt, match="index is damaged"), damage_in("ck/dcp_plugin.index"):
        raise ValueError("bytes")


def test_the_size_of_an_element_follows_from_the_name_of_each_dtype() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert all(itemsize_named(str(dtype).removeprefix("torch.")) == dtype.itemsize for dtype in dtypes)
    with pytest.raises(ValueError, match="unknown dtype 'load'"):
        itemsize_named("load")
