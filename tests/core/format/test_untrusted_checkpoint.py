"""A checkpoint is untrusted input: nothing in it is executed, nothing outside its directory is read, damage is named.

Every test here plants an attack or a defect in a real checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors import safe_open
from safetensors.numpy import save as save_columns

import dcp_plugin as dcp
from dcp_plugin.core.format import stock_metadata
from tests.compare import same_bytes
from tests.forge import change_summary
from tests.objects import attack


def test_code_in_stock_metadata_is_not_executed(tmp_path: Path) -> None:
    stock.save({"t": torch.ones(3)}, checkpoint_id=tmp_path / "ck")
    metadata = pickle.loads((tmp_path / "ck" / ".metadata").read_bytes())
    metadata.planner_data = attack(tmp_path / "owned")
    (tmp_path / "ck" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(dcp.UnsafeCheckpoint, match="mkdir"):
        dcp.load({"t": torch.zeros(3)}, tmp_path / "ck")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", [".metadata", "dcp_plugin.index", "dcp_plugin.json"])
def test_a_named_pipe_in_a_checkpoint_is_not_waited_for(tmp_path: Path, name: str) -> None:
    if name == ".metadata":
        stock.save({"t": torch.ones(3)}, checkpoint_id=tmp_path / "ck")
    else:
        dcp.save({"t": torch.ones(3)}, tmp_path / "ck")
    (tmp_path / "ck" / name).unlink()
    os.mkfifo(tmp_path / "ck" / name)
    with pytest.raises(dcp.CheckpointCorrupt, match="no regular file"):
        dcp.load({"t": torch.zeros(3)}, tmp_path / "ck")
    assert dcp.latest(tmp_path) is None


def test_a_summary_nested_too_deep_is_damage(tmp_path: Path) -> None:
    dcp.save({"t": torch.ones(3)}, tmp_path / "ck")
    (tmp_path / "ck" / "dcp_plugin.json").write_text("[" * 99_999)
    with pytest.raises(dcp.CheckpointCorrupt, match="damaged"):
        dcp.load({"t": torch.zeros(3)}, tmp_path / "ck")
    assert dcp.latest(tmp_path) is None


def test_code_in_a_stock_value_is_not_executed_unless_allowed(tmp_path: Path) -> None:
    stock.save({"n": attack(tmp_path / "owned")}, checkpoint_id=tmp_path / "ck")
    with pytest.raises(dcp.UnsafeCheckpoint, match="allow_pickle"):
        dcp.load({"n": 0}, tmp_path / "ck")
    assert not (tmp_path / "owned").exists()
    dcp.load({"n": 0}, tmp_path / "ck", allow_pickle=("n",))
    assert (tmp_path / "owned").exists()


def test_a_pickle_in_place_of_our_metadata_is_damage_and_is_not_executed(tmp_path: Path) -> None:
    dcp.save({"t": torch.arange(3)}, tmp_path / "ck")
    (tmp_path / "ck" / ".metadata").write_bytes(pickle.dumps(attack(tmp_path / "owned")))
    with pytest.raises(dcp.CheckpointCorrupt, match=r"\.metadata is not the one .* not executed"):
        dcp.load({"t": torch.zeros(3, dtype=torch.int64)}, tmp_path / "ck")
    assert dcp.latest(tmp_path) is None
    assert not (tmp_path / "owned").exists()


def test_metadata_of_every_kind_of_stock_checkpoint_is_readable_without_pickle_tricks(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {
        "m": model.state_dict(),
        "o": optimizer.state_dict(),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "s": "x",
    }
    stock.save(state, checkpoint_id=tmp_path / "ck")
    assert set(stock_metadata.decode((tmp_path / "ck" / ".metadata").read_bytes(), "it").table.keys) >= {
        "m.weight",
        "half",
        "s",
    }


Columns = dict[str, np.ndarray[Any, Any]]


def _forge(path: Path, change: Callable[[Columns, dict[str, str]], None]) -> None:
    """Rewrite the index with a change, and the summary so that its fingerprint fits: an attacker can do both."""
    with safe_open(str(path / "dcp_plugin.index"), framework="numpy") as file:
        about = dict(file.metadata())
        columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(columns, about)
    data = save_columns(columns, metadata=about)
    (path / "dcp_plugin.index").write_bytes(data)
    change_summary(path, index_sha256=hashlib.sha256(data).hexdigest())


def _set(column: str, position: Any, value: int) -> Callable[[Columns, dict[str, str]], None]:
    def change(columns: Columns, about: dict[str, str]) -> None:
        columns[column][position] = value

    return change


def _about(name: str, replace: str, by: str) -> Callable[[Columns, dict[str, str]], None]:
    def change(columns: Columns, about: dict[str, str]) -> None:
        assert replace in about[name]
        about[name] = about[name].replace(replace, by)

    return change


def _drop(column: str) -> Callable[[Columns, dict[str, str]], None]:
    return lambda columns, about: columns.update({column: columns[column][:-1]})


def _overlap(columns: Columns, about: dict[str, str]) -> None:
    """The tensor in two chunks, the second of which covers the first once more."""
    for name in ("file_step", "item_count", "box_count", "file", "frame"):
        columns[name] = np.concatenate((columns[name][:1], columns[name]))
    columns["place"] = np.array([*[[0, 16, 0, 16]] * 2, *columns["place"][1:].tolist()])
    columns["box"] = np.array([0, 2, 0, 2, *columns["box"][2:].tolist()])
    columns["box_ends"] = columns["box_ends"] + 1


def _repeat(row: int, count: int, file_step: int = 0) -> Callable[[Columns, dict[str, str]], None]:
    """A row that stands for ``count`` chunks."""

    def change(columns: Columns, about: dict[str, str]) -> None:
        columns["box_count"][row] = columns["item_count"][row] = count
        columns["file_step"][row] = file_step

    return change


def _absurd(columns: Columns, about: dict[str, str]) -> None:
    """A tensor of 2^64 elements, whose product is 0 in 64 bits, in an item without bytes."""
    columns["ndim"][0], columns["place"][0, 3], columns["hash"] = 2, 0, columns["hash"][1:]
    columns["shape"] = np.array([*[1 << 32] * 2, *columns["shape"][1:].tolist()])
    columns["box"] = np.array([0, 0, *[1 << 32] * 2, *columns["box"][2:].tolist()])


def _without_items(columns: Columns, about: dict[str, str]) -> None:
    for name in ("box", "box_count", "file", "file_step", "item_count", "place", "frame", "hash"):
        columns[name] = columns[name][:0]
    columns["box_ends"][:] = 0


def _large_boxes(columns: Columns, about: dict[str, str]) -> None:
    """A row of a thousand boxes with 255 dimensions each."""
    _repeat(0, 1000, file_step=1)(columns, about)
    columns["ndim"][0], columns["hash"] = 255, np.zeros(1001, np.uint64)
    columns["shape"] = np.array([1000, *[1] * 254, *columns["shape"][1:].tolist()])
    columns["box"] = np.array([*[0] * 255, *[1] * 255, *columns["box"][2:].tolist()])


FORGERIES = {
    "leaves the directory": (_about("files", "__0_0", "../__0_0"), "is outside the checkpoint"),
    "absolute path": (_about("files", "__0_0", "/etc/__0_0"), "is outside the checkpoint"),
    "missing data file": (_about("files", "__0_0", "__9_9"), "is missing"),
    "beyond the end of the file": (_set("place", (0, 0), 1 << 40), "outside its file"),
    "negative offset": (_set("place", (0, 0), -64), "outside its file"),
    "offset that overflows": (_set("place", (0, 1), (1 << 63) - 1), "outside its file"),
    "payload beyond its item": (_set("place", (0, 3), 1 << 20), "outside its file or item"),
    "overlapping items": (_set("place", (1, 0), 8), "overlaps"),
    "chunk outside its tensor": (_set("box", 0, 3), "outside its shape"),
    "negative chunk": (_set("box", 1, -4), "outside its shape"),
    "holes that an overlap makes up for": (_overlap, "some are missing, or chunks overlap"),
    "another shape": (_set("shape", 0, 9), "do not add up"),
    "another dtype": (_about("dtypes", "int64", "int8"), "wrong size"),
    "no such dtype": (_about("dtypes", "int64", "load"), "unknown dtype"),
    "file number out of range": (_set("file", 0, 7), "does not list"),
    "huge key table": (_set("key_ends", 0, 1 << 40), "does not count up"),
    "columns of different length": (_drop("ndim"), "differ in length"),
    "more boxes than cells": (_repeat(0, 2), "outside its shape"),
    "more boxes than items": (_set("box_count", 0, 2), "another number of boxes than of items"),
    "a row without boxes": (_repeat(0, 0), "another number of boxes than of items"),
    "a billion chunks": (_repeat(0, 1 << 30), "more items than hashes"),
    "items in files beyond the last": (_repeat(0, 2, file_step=1), "does not list"),
    "items in files before the first": (_repeat(0, 2, file_step=-1), "does not list"),
    "a product that overflows": (_absurd, "outside its shape"),
    "tensors without items": (_without_items, "do not add up"),
    "boxes larger than the index": (_large_boxes, "too many boxes"),
    "no hashes": (lambda columns, about: columns.update(hash=columns["hash"][:0]), "another number of blocks"),
    "fewer hashes than blocks": (_drop("hash"), "another number of blocks"),
    "a future format": (_about("format_version", "4", "9"), "Upgrade"),
    "a former format": (_about("format_version", "4", "3"), "Stock's torch.distributed.checkpoint.load"),
    "path that is no path": (lambda columns, about: about.update(paths='{"a": [{"x": 1}]}'), "key path"),
    "no metadata": (lambda columns, about: about.clear(), "format"),
    "missing column": (lambda columns, about: columns.pop("box"), "damaged"),
    "wrong column shape": (lambda columns, about: columns.update(hash=columns["hash"][:, None]), "2-dim"),
    "wrong column type": (lambda columns, about: columns.update(file=columns["file"].astype(np.int64)), "column file"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_index_is_refused_before_anything_is_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes(b"\0" * 4096)
    dcp.save({"a": torch.arange(4), "b": torch.arange(5)}, tmp_path / "ck")
    change, words = FORGERIES[name]
    _forge(tmp_path / "ck", change)
    target = torch.full((4,), 7)
    with pytest.raises(dcp.CheckpointCorrupt, match=words):
        dcp.load({"a": target}, tmp_path / "ck")
    assert same_bytes(target, torch.full((4,), 7))


def test_tensors_without_elements_need_no_items(tmp_path: Path) -> None:
    dcp.save({"a": torch.zeros(0, 3)}, tmp_path / "ck")
    _forge(tmp_path / "ck", _without_items)
    assert dcp.load({"a": torch.zeros(0, 3)}, tmp_path / "ck").loaded == ["a"]
    assert dcp.read(tmp_path / "ck")["a"].shape == (0, 3)


def test_a_file_name_longer_than_names_can_be_is_damage_and_not_a_failing_disk(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(4)}, tmp_path / "ck")
    _forge(tmp_path / "ck", _about("files", "__0_0", f"__{'9' * 300}_0"))
    with pytest.raises(dcp.CheckpointCorrupt, match="is missing") as caught:
        dcp.load({"a": torch.arange(4)}, tmp_path / "ck")
    assert type(caught.value) is dcp.CheckpointCorrupt
    assert dcp.latest(tmp_path) is None


def test_an_index_that_is_not_the_saved_one_is_refused(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(4)}, tmp_path / "one")
    dcp.save({"a": torch.arange(5)}, tmp_path / "other")
    (tmp_path / "one" / "dcp_plugin.index").write_bytes((tmp_path / "other" / "dcp_plugin.index").read_bytes())
    with pytest.raises(dcp.CheckpointCorrupt, match="SHA-256"):
        dcp.load({"a": torch.zeros(4)}, tmp_path / "one")


@pytest.mark.parametrize(
    "junk", [b"", b"\xff" * 100, b"\xff" * 7 + b"\x7f" + b"{}", b"{}" * 50], ids=["empty", "ff", "huge header", "text"]
)
def test_junk_in_place_of_any_file_of_ours_is_corrupt_and_nothing_else(tmp_path: Path, junk: bytes) -> None:
    for pattern in ("dcp_plugin.index", "dcp_plugin.json", ".metadata", "*.distcp"):
        path = tmp_path / pattern.strip("*.")
        dcp.save({"a": torch.arange(4)}, path)
        next(path.glob(pattern)).write_bytes(junk)
        if pattern == "dcp_plugin.index":
            change_summary(path, index_sha256=hashlib.sha256(junk).hexdigest())
        with pytest.raises(dcp.CheckpointCorrupt):
            dcp.load({"a": torch.zeros(4)}, path)


def test_every_single_flipped_byte_of_an_item_is_found_by_verify(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(100), "n": {"x": 1}}, tmp_path / "ck")
    items = dcp.ShardedReader(tmp_path / "ck").index.columns["place"][:, :2].tolist()
    file = next((tmp_path / "ck").glob("*.distcp"))
    good = file.read_bytes()
    for position in [at for begin, length in items for at in (*range(begin, begin + length, 13), begin + length - 1)]:
        bad = bytearray(good)
        bad[position] ^= 0x10
        file.write_bytes(bad)
        assert not dcp.verify(tmp_path / "ck").ok, f"byte {position}"


def test_truncated_data_is_named(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(100)}, tmp_path / "ck")
    file = next((tmp_path / "ck").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(dcp.CheckpointCorrupt, match=f"{file.name} is truncated"):
        dcp.load({"a": torch.zeros(100)}, tmp_path / "ck")


@pytest.mark.parametrize(
    "change",
    [{"kinds": 3}, {"kinds": {"a": 1}}, {"step": "x"}, {"time": None}, {"format": "other"}, {"versions": 1}],
    ids=str,
)
def test_a_forged_summary_is_corrupt_and_nothing_else(tmp_path: Path, change: dict[str, Any]) -> None:
    dcp.save({"a": torch.arange(4)}, tmp_path / "ck")
    change_summary(tmp_path / "ck", **change)
    with pytest.raises(dcp.CheckpointCorrupt):
        dcp.load({"a": torch.zeros(4)}, tmp_path / "ck")
    assert dcp.latest(tmp_path) is None


def test_a_sparse_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointMismatch, match=r"extra\.s is a sparse"):
        dcp.save({"extra": {"s": torch.eye(3).to_sparse()}}, tmp_path / "ck")


def test_a_data_file_that_links_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(4)}, tmp_path / "ck")
    file = next((tmp_path / "ck").glob("*.distcp"))
    os.rename(file, tmp_path / "secret")
    os.symlink(tmp_path / "secret", file)
    with pytest.raises(dcp.CheckpointCorrupt, match="a link to a place outside the checkpoint"):
        dcp.load({"a": torch.zeros(4)}, tmp_path / "ck")
