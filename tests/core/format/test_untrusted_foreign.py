"""Files of other tools are untrusted as our own are: no code is executed, nothing outside is read, lies are named."""

from __future__ import annotations

import argparse
import codecs
import collections
import json
import os
import pickle
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file
from torch import nn

import dcp_plugin as dcp
from dcp_plugin.tools.contents import statistics
from tests.objects import PickledAs, attack

STATE = {"a": torch.arange(300.0), "b": torch.ones(7, dtype=torch.int16)}


def _refused(path: Path, error: type[dcp.CheckpointError], match: str) -> None:
    """Nothing of the target has changed."""
    target = {key: torch.full_like(value, 9) for key, value in STATE.items()}
    with pytest.raises(error, match=match):
        dcp.load({"model": target}, path)
    assert all((value == 9).all() for value in target.values())


def test_code_in_a_torch_file_is_not_executed_and_the_way_out_is_said(tmp_path: Path) -> None:
    torch.save({"state_dict": STATE, "note": attack(tmp_path / "owned")}, tmp_path / "file")
    _refused(tmp_path / "file", dcp.UnsafeCheckpoint, "mkdir.*weights_only=False")
    assert not (tmp_path / "owned").exists()


class Settings:
    """A class of the authors of a file, which nobody else has."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.loop = tensor, [self]

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("executed")


LIGHTNING = {"pytorch-lightning_version": "2.6.6", "epoch": 3}


@pytest.mark.parametrize("beside", [{}, LIGHTNING], ids=["torch.save", "lightning"])
def test_weights_are_loaded_from_beside_objects_of_which_nothing_is_executed(
    tmp_path: Path, beside: dict[str, Any]
) -> None:
    proof = tmp_path / "owned"
    command = PickledAs(subprocess.call, (["mkdir", str(proof)],))  # torch does not block this name, nor know it
    evaluated = PickledAs(eval, (f"__import__('os').mkdir({str(proof)!r})",))
    objects = {"hparams": argparse.Namespace(lr=1), "own": Settings(torch.ones(3)), "command": command}
    torch.save(
        {**beside, "state_dict": STATE, "step": 7, "hyper_parameters": objects, "code": evaluated},
        tmp_path / "file",
    )
    target: dict[str, Any] = {"model": {key: torch.zeros_like(value) for key, value in STATE.items()}, "step": 0}
    dcp.load(target, tmp_path / "file")
    assert target["step"] == 7 and all(torch.equal(target["model"][key], value) for key, value in STATE.items())
    asked: dict[str, Any]
    for asked, match in (
        ({"hyper_parameters": {"hparams": None}}, r"hyper_parameters\.hparams is.* argparse\.Namespace"),
        ({"hyper_parameters": {}}, "can only be restored by executing code"),
        ({"code": None}, r"code is.* builtins\.eval"),
    ):
        before = {key: torch.zeros_like(value) for key, value in STATE.items()}
        with pytest.raises(dcp.UnsafeCheckpoint, match=match):
            dcp.load({**asked, "model": before}, tmp_path / "file")
        assert all((value == 0).all() for value in before.values())
    assert not proof.exists()
    with pytest.raises(pickle.UnpicklingError):  # torch itself refuses as before
        torch.load(tmp_path / "file", weights_only=True)


def test_an_extra_state_with_an_object_in_it_is_refused_when_a_module_asks_for_it(tmp_path: Path) -> None:
    class Head(nn.Linear):
        def get_extra_state(self) -> Any:
            return [torch.ones(1), {"x": argparse.Namespace(a=1)}]

        def set_extra_state(self, state: Any) -> None:
            assert state == self.get_extra_state(), "its own"

    torch.save({"state_dict": Head(2, 2).state_dict()}, tmp_path / "file")
    with pytest.raises(dcp.UnsafeCheckpoint, match=r"_extra_state.*argparse\.Namespace"):
        dcp.load({"model": Head(2, 2)}, tmp_path / "file")
    partial = dcp.PartialLoad(exclude="*_extra_state")
    dcp.load({"model": Head(2, 2)}, tmp_path / "file", partial)


@pytest.mark.parametrize(
    "content",
    [
        {"model": Settings(torch.ones(1)), "ema": STATE},
        {"model": {**STATE, "c": Settings(torch.ones(1))}, "ema": {"state_dict": STATE}},
        {"only": STATE, "args": argparse.Namespace()},
        {**STATE, "args": argparse.Namespace()},
        Settings(torch.ones(1)),
        {"state_dict": STATE, "args": collections.defaultdict(list, a=argparse.Namespace())},
    ],
    ids=["module and average", "damaged and average", "no usual name", "among tensors", "object", "filled like a dict"],
)
def test_where_objects_leave_a_doubt_which_tensors_are_the_model_nothing_is_loaded(
    tmp_path: Path, content: Any
) -> None:
    torch.save(content, tmp_path / "file")
    _refused(tmp_path / "file", dcp.UnsafeCheckpoint, "weights_only=False")


def test_containers_that_contain_themselves_are_no_trap(tmp_path: Path) -> None:
    loop: list[Any] = [argparse.Namespace()]
    loop.append(loop)
    deep: Any = ()
    for _ in range(900):
        deep = (deep,)
    state = {"a": torch.ones(2), "x._extra_state": loop, "y._extra_state": deep}
    torch.save({"state_dict": state}, tmp_path / "file")
    target = {"a": torch.zeros(2)}
    dcp.load({"model": target}, tmp_path / "file", dcp.PartialLoad(include="model.a"))
    assert (target["a"] == 1).all()


@pytest.mark.parametrize("save", [save_file, torch.save], ids=["safetensors", "torch.save"])
@pytest.mark.parametrize("left", [0.99, 0.5, 0.02])
def test_a_truncated_file_is_named(tmp_path: Path, save: Callable[..., Any], left: float) -> None:
    path = tmp_path / "cut"
    save(STATE, path)
    os.truncate(path, int(path.stat().st_size * left))
    _refused(path, dcp.CheckpointError, "cut")  # of very little it cannot be said what it was


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def forge(path: Path) -> None:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return forge


LIES: dict[str, Callable[[Path], None]] = {
    "outside": _header(lambda header: header["a"].update(data_offsets=[0, 1 << 40])),
    "overlap": _header(lambda header: header["b"].update(data_offsets=[0, 14])),
    "hole": _header(lambda header: header.pop("a")),
    "shape": _header(lambda header: header["a"].update(shape=[301])),
    "huge shape": _header(lambda header: header["a"].update(shape=[1 << 62, 4])),
    "negative": _header(lambda header: header["a"].update(shape=[-300])),
    "more bytes": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "no json": lambda path: path.write_bytes(path.read_bytes()[:9] + b"\xff" + path.read_bytes()[10:]),
    "length": lambda path: path.write_bytes(struct.pack("<Q", 90_000_000) + path.read_bytes()[8:]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_of_safetensors_that_lies_is_refused(tmp_path: Path, lie: str) -> None:
    save_file(STATE, tmp_path / "file")
    LIES[lie](tmp_path / "file")
    _refused(tmp_path / "file", dcp.CheckpointCorrupt, "file")


def test_a_dtype_that_torch_has_not_is_named(tmp_path: Path) -> None:
    save_file({"f4": torch.zeros(8, dtype=torch.uint8)}, tmp_path / "file")
    _header(lambda header: header["f4"].update(dtype="F4", shape=[16]))(tmp_path / "file")
    with pytest.raises(dcp.CheckpointMismatch, match="f4 has the dtype F4"):
        dcp.inspect(tmp_path / "file")


def _rewritten(
    path: Path,
    change: Callable[[str, bytes], bytes],
    compression: int = zipfile.ZIP_STORED,
    without: tuple[str, ...] = (".format_version", ".storage_alignment"),  # then torch asks where the records are
) -> None:
    """The zip again with other records, made by another tool."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            if not name.endswith(without):
                archive.writestr(name, change(name, data))


@pytest.mark.parametrize("without", [(), (".format_version", ".storage_alignment")], ids=["all records", "some"])
def test_a_zip_that_another_tool_has_stored_again_is_read(tmp_path: Path, without: tuple[str, ...]) -> None:
    torch.save(STATE, tmp_path / "file")
    _rewritten(tmp_path / "file", lambda name, data: data, without=without)
    target = {key: torch.zeros_like(value) for key, value in STATE.items()}
    dcp.load({"model": target}, tmp_path / "file")
    assert all(torch.equal(target[key], STATE[key]) for key in STATE)


def test_records_that_lie_are_refused(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "file")
    shutil.copy(tmp_path / "file", tmp_path / "packed")
    shutil.copy(tmp_path / "file", tmp_path / "short")
    shutil.copy(tmp_path / "file", tmp_path / "big")
    _rewritten(tmp_path / "packed", lambda name, data: data, zipfile.ZIP_DEFLATED)
    _refused(tmp_path / "packed", dcp.CheckpointCorrupt, "compressed, encrypted or damaged")
    _rewritten(tmp_path / "short", lambda name, data: data[:-1] if name.endswith("data/0") else data)
    _refused(tmp_path / "short", dcp.CheckpointCorrupt, "outside of its record")
    _rewritten(tmp_path / "big", lambda name, data: b"big" if name.endswith("byteorder") else data)
    _refused(tmp_path / "big", dcp.CheckpointMismatch, "byte order")


def test_a_directory_of_the_zip_that_lies_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(64), "b": torch.ones(64)}, tmp_path / "file")
    data = bytearray((tmp_path / "file").read_bytes())
    entries = [at for at in range(len(data)) if data[at : at + 4] == b"PK\1\2"]
    of = {bytes(data[at + 46 : at + 46 + data[at + 28]]).rpartition(b"/")[2]: at for at in entries}
    for record, other in ((b"1", b"0"), (b"0", b"1")):  # both point to one, and then the size reaches over the other
        forged = bytearray(data)
        forged[of[record] + 42 : of[record] + 46] = data[of[other] + 42 : of[other] + 46]
        (tmp_path / "file").write_bytes(forged)
        with pytest.raises(dcp.CheckpointCorrupt):
            dcp.inspect(tmp_path / "file")
    for record, fields, packing, value, match in (
        (b"0", (20, 24), "<I", 400, "overlaps another record"),
        (b"1", (20, 24), "<I", 1 << 20, "lies outside the file"),
        (b"1", (10,), "<H", zipfile.ZIP_DEFLATED, "compressed, encrypted or damaged"),
        (b"1", (8,), "<H", 1, "compressed, encrypted or damaged"),  # encrypted
    ):
        forged = bytearray(data)
        for at in fields:
            struct.pack_into(packing, forged, of[record] + at, value)
        (tmp_path / "file").write_bytes(forged)
        with pytest.raises(dcp.CheckpointCorrupt, match=match):
            dcp.inspect(tmp_path / "file")


def test_a_tensor_that_leaves_its_record_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(8.0)[2:5]}, tmp_path / "file")
    seen = []

    def change(name: str, data: bytes) -> bytes:
        if name.endswith("data.pkl"):
            seen.append(data.replace(b"K\x02K\x03\x85", b"K\x06K\x03\x85"))  # storage offset 2, size (3,)
            assert seen[0] != data
            return seen[0]
        return data

    _rewritten(tmp_path / "file", change)
    with pytest.raises(dcp.CheckpointCorrupt):
        dcp.inspect(tmp_path / "file")


@pytest.mark.parametrize("codec", ["latin1", "latin-1", "UTF-8", "utf_8", "ascii"])
def test_bytes_that_a_pickle_spells_as_text_come_back(tmp_path: Path, codec: str) -> None:
    torch.save({"model": STATE, "spelled": PickledAs(codecs.encode, ("text", codec))}, tmp_path / "file")
    target = {"spelled": b""}
    dcp.load(target, tmp_path / "file")
    assert target == {"spelled": b"text"}


@pytest.fixture
def bomb(tmp_path: Path) -> Path:
    """A file of less than 2 kB with a tensor of 1 TiB."""
    path = tmp_path / "bomb"
    torch.save({"a": torch.ones(1).expand(1 << 38), "b": torch.ones(2)}, path)
    assert path.stat().st_size < 2000
    return path


@pytest.mark.parametrize(
    "use",
    [
        lambda path: dcp.load({"model": {}}, path),
        dcp.read,
        lambda path: dcp.export(path, path.with_name("out"), format="torch"),
        lambda path: dcp.export(path, path.with_name("out"), format="hf", max_shard_size="1MB"),
        lambda path: dcp.export(path, path.with_name("out"), format="dcp"),
        lambda path: dcp.diff(path, path, checksums=False),
        statistics,
    ],
    ids=["load", "read", "export torch", "export hf", "import", "diff", "statistics"],
)
def test_a_small_file_does_not_expand_to_a_tensor_of_any_size(bomb: Path, use: Callable[[Path], Any]) -> None:
    with pytest.raises(dcp.UnsafeCheckpoint, match=r"1024\.0 GiB.*bomb.*model\.a"):
        use(bomb)
    assert list(bomb.parent.iterdir()) == [bomb]


def test_many_names_of_one_tensor_do_not_expand_to_any_size(tmp_path: Path) -> None:
    tensor = torch.zeros(1 << 20)
    torch.save({f"{number}": tensor for number in range(400)}, tmp_path / "file")
    with pytest.raises(dcp.UnsafeCheckpoint, match=r"1\.6 GiB"):
        dcp.read(tmp_path / "file")
    few = dcp.read(tmp_path / "file", include=["model.0", "model.1?"])
    assert len(few) == 11 and all(torch.equal(one, tensor) for one in few.values())


def test_a_stock_checkpoint_does_not_expand_to_a_tensor_of_any_size(tmp_path: Path) -> None:
    stock.save({"model": {"a": torch.ones(1)}}, checkpoint_id=tmp_path, no_dist=True)
    metadata = stock.FileSystemReader(tmp_path).read_metadata()
    described = metadata.state_dict_metadata["model.a"]
    described.size = described.chunks[0].sizes = torch.Size([1 << 38])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    for target in ({}, {"a": None}):
        with pytest.raises(dcp.UnsafeCheckpoint, match=r"1024\.0 GiB"):
            dcp.load({"model": target}, tmp_path)


def test_a_tensor_of_the_caller_allows_a_small_file_to_expand(tmp_path: Path) -> None:
    torch.save({"a": torch.full((1,), 3.0).expand(17, 1 << 20), "b": torch.ones(2)}, tmp_path / "file")
    target = {"a": torch.zeros(17, 1 << 20), "b": torch.zeros(2)}
    dcp.load({"model": target}, tmp_path / "file")
    assert (target["a"] == 3).all() and (target["b"] == 1).all()
    assert torch.equal(dcp.read(tmp_path / "file", exclude="model.a")["model.b"], torch.ones(2))


@pytest.mark.parametrize("named", ["../outside.safetensors", "/etc/passwd", "sub/inside.safetensors", "..", ""])
def test_an_index_that_names_files_elsewhere_is_refused(tmp_path: Path, named: str) -> None:
    (tmp_path / "ck" / "sub").mkdir(parents=True)
    save_file(STATE, tmp_path / "outside.safetensors")
    save_file(STATE, tmp_path / "ck" / "sub" / "inside.safetensors")
    index = {"weight_map": dict.fromkeys(STATE, named)}
    (tmp_path / "ck" / "model.safetensors.index.json").write_text(json.dumps(index))
    _refused(tmp_path / "ck", dcp.CheckpointCorrupt, "not a file in the same directory")


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ("{", "damaged"), ('{"weight_map": {}}', "damaged"), ('{"weight_map": {"a": 1}}', "damaged"), ("[]", "damaged"),
        ('{"weight_map": {"a": "lost"}}', "lost is missing"),
        ('{"weight_map": {"c": "shard"}}', "shard does not contain c"),
        ('{"weight_map": {"a": "text"}}', "not a safetensors or torch.save file"),
    ],
)  # fmt: skip
def test_an_index_that_lies_is_refused(tmp_path: Path, index: str, match: str) -> None:
    save_file(STATE, tmp_path / "shard")
    (tmp_path / "text").write_text("nothing")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    _refused(tmp_path, dcp.CheckpointCorrupt, match)


def test_what_is_nothing_known_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "text.safetensors").write_text("no tensors at all")
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "lfs.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    torch.save(STATE, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name, match in (
        ("text.safetensors", "Looked for"), ("empty.pt", "Looked for"), ("lfs.bin", "git lfs pull"),
        ("old.pt", "before torch 1.6"), (".", "Looked for"), ("nowhere", "nothing is there"),
    ):  # fmt: skip
        _refused(tmp_path / name, dcp.CheckpointNotFound, match)


def test_what_is_known_does_not_say_what_was_looked_for(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    dcp.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "ck")
    inside = list((tmp_path / "ck").iterdir())
    assert {".metadata", ".distcp"} < {file.suffix or file.name for file in inside}
    (tmp_path / "two").mkdir()
    for name in ("one", "other"):
        save_file(STATE, tmp_path / "two" / name)
    cases = {tmp_path / "old.pt": "before torch 1.6", tmp_path / "two": "name one: one, other"}
    for path, said in {**cases, **dict.fromkeys(inside, f"files of {tmp_path / 'ck'}. Name that directory")}.items():
        with pytest.raises(dcp.CheckpointNotFound) as caught:
            dcp.inspect(path)
        assert said in str(caught.value) and "Looked for" not in str(caught.value)


def test_the_directory_of_a_run_names_the_checkpoints_in_it(tmp_path: Path) -> None:
    dcp.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "step-1")
    _refused(tmp_path, dcp.CheckpointNotFound, "but a directory with checkpoints, such as .*step-1.*latest")


def test_zips_and_pickles_of_other_things_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("hello", "world")
    _refused(tmp_path / "zip", dcp.CheckpointMismatch, "not a torch.save file")
    torch.save([1, 2], tmp_path / "list")
    _refused(tmp_path / "list", dcp.CheckpointMismatch, "holds a list")
    torch.save(torch.optim.SGD([torch.ones(1)]).state_dict(), tmp_path / "optimizer")
    _refused(tmp_path / "optimizer", dcp.CheckpointMismatch, "has no state dict")
    os.mkfifo(tmp_path / "fifo")
    _refused(tmp_path / "fifo", dcp.CheckpointNotFound, "no regular file")


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # torch's, of tensors in beta state
def test_a_tensor_that_is_not_plain_is_named(tmp_path: Path) -> None:
    """Whichever version of torch can or cannot have it on the meta device."""
    odd = {
        "sparse_coo": torch.eye(2).to_sparse(),
        "sparse_csr": torch.eye(2).to_sparse_csr(),
        "resolve_conj": torch.ones(2, dtype=torch.complex64).conj(),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 3, torch.qint8),
    }
    for said, tensor in odd.items():
        torch.save({"model": {"a": torch.ones(2), "s": tensor}}, tmp_path / said)
        _refused(tmp_path / said, dcp.CheckpointMismatch, rf"model\.s is not a plain tensor .*{said}")
    torch.save({"a": torch.nested.nested_tensor([torch.ones(2), torch.ones(1)])}, tmp_path / "nested")
    with pytest.raises(
        (dcp.CheckpointMismatch, dcp.UnsafeCheckpoint), match=r"a is not a plain|_rebuild_nested_tensor"
    ):
        dcp.inspect(tmp_path / "nested")


def test_a_directory_with_two_candidates_asks_for_one(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file(STATE, tmp_path / name)
    _refused(tmp_path, dcp.CheckpointNotFound, "2 files that could be meant, name one: one, two")
