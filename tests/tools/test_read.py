"""``read``: tensors and values without a model; and the documents of ``--json``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import dcp_plugin as dcp
from tests.commands import document_of, invoke, json_of
from tests.compare import assert_same, same_tree
from tests.object_server import Bucket

STATE = {"x": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([True, False])}, "n": 4, "s": "é"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("read") / "ck"
    more = {"nan": torch.tensor([float("nan"), -0.0]), "c": torch.tensor(1 + 2j), "long": torch.zeros(2000)}
    dcp.save({**STATE, "model": nn.Linear(2, 3), "more": more}, path)
    return path


def test_globs_choose_and_order_is_that_of_the_save(path: Path) -> None:
    found = dcp.read(path, include=["x.*", "n", "s"], exclude="x.b")
    assert same_tree(found, {"x.a": STATE["x"]["a"], "n": 4, "s": "é"})  # type: ignore[index]
    assert list(dcp.read(path, "model.*")) == ["model.weight", "model.bias"]


def test_progress_ends_with_all_bytes(path: Path) -> None:
    told: list[tuple[int, int]] = []
    dcp.read(path, "x.*", progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (26, 26)


def test_a_key_that_is_not_there_is_named_with_its_neighbour(path: Path) -> None:
    with pytest.raises(dcp.CheckpointMismatch, match=r"'model\.wieght'.*model\.weight"):
        dcp.read(path, "model.wieght")
    result = invoke("cat", path, "model.wieght", "--json")
    assert (result.exit_code, result.stderr.count("\n")) == (3, 2)
    assert document_of(result, "read")["error"]["type"] == "CheckpointMismatch"


def test_tensors_are_cut_short_for_people(path: Path) -> None:
    result = invoke("read", path, "x.*", "n", "more.long")
    assert result.stdout.splitlines() == [
        "x.a: float32 2 x 3  [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]",
        "x.b: bool 2  [True, False]",
        "n: 4",
        "more.long: float32 2000  [0, 0, 0, …, 0, 0, 0]",
    ]
    assert invoke("read", path, "more.long", "--full").stdout.count("0.0") == 2000


def test_what_programs_read_is_what_the_schema_says(path: Path) -> None:
    items = json_of("read", path)["items"]
    assert items["x.a"] == {"dtype": "float32", "shape": [2, 3], "data": [[0, 1, 2], [3, 4, 5]]}
    assert items["more.nan"]["data"] == [None, 0.0]
    assert items["more.c"]["data"] == [1.0, 2.0]
    assert items["n"] == {"value": 4}
    assert "data" not in items["more.long"]


def test_so_are_the_documents_of_export_and_import(path: Path, tmp_path: Path) -> None:
    exported = json_of("export", path, tmp_path / "m.safetensors", "--format", "safetensors")
    assert exported["export"]["tensors"] == 2
    result = invoke("import", tmp_path / "m.safetensors", tmp_path / "ck", "--json")
    assert document_of(result, "export")["export"]["format"] == "dcp"
    result = invoke("import", tmp_path / "m.safetensors", tmp_path / "ck", "--json")
    assert "exists" in document_of(result, "export")["error"]["message"]


def test_from_a_bucket(bucket: Bucket) -> None:
    dcp.save(STATE, f"{bucket.url}/ck")
    assert_same(dcp.read(f"{bucket.url}/ck", "x.a"), {"x.a": STATE["x"]["a"]})  # type: ignore[index]
