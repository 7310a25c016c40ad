"""``read``: tensors and values without a model; and the documents of ``--json``."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import dcp_plugin as dcp
from dcp_plugin.cli.app import app
from tests.compare import assert_same, same_tree
from tests.object_server import Bucket

SCHEMAS = Path(__file__).parents[2] / "docs/schemas"
STATE = {"x": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([True, False])}, "n": 4, "s": "é"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("read") / "ck"
    more = {"nan": torch.tensor([float("nan"), -0.0]), "c": torch.tensor(1 + 2j), "long": torch.zeros(2000)}
    dcp.save({**STATE, "model": nn.Linear(2, 3), "more": more}, path)
    return path


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


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
    result = _run("cat", path, "model.wieght", "--json")
    assert (result.exit_code, result.stderr.count("\n")) == (3, 2)
    assert _validated("read", result)["error"]["type"] == "CheckpointMismatch"


def test_tensors_are_cut_short_for_people(path: Path) -> None:
    result = _run("read", path, "x.*", "n", "more.long")
    assert result.stdout.splitlines() == [
        "x.a: float32 2 x 3  [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]",
        "x.b: bool 2  [True, False]",
        "n: 4",
        "more.long: float32 2000  [0, 0, 0, …, 0, 0, 0]",
    ]
    assert _run("read", path, "more.long", "--full").stdout.count("0.0") == 2000


def test_what_programs_read_is_what_the_schema_says(path: Path) -> None:
    items = _validated("read", _run("read", path, "--json"))["items"]
    assert items["x.a"] == {"dtype": "float32", "shape": [2, 3], "data": [[0, 1, 2], [3, 4, 5]]}
    assert items["more.nan"]["data"] == [None, 0.0]
    assert items["more.c"]["data"] == [1.0, 2.0]
    assert items["n"] == {"value": 4}
    assert "data" not in items["more.long"]


def test_so_are_the_documents_of_export_and_import(path: Path, tmp_path: Path) -> None:
    result = _run("export", path, tmp_path / "m.safetensors", "--format", "safetensors", "--json")
    assert _validated("export", result)["export"]["tensors"] == 2
    result = _run("import", tmp_path / "m.safetensors", tmp_path / "ck", "--json")
    assert _validated("export", result)["export"]["format"] == "dcp"
    result = _run("import", tmp_path / "m.safetensors", tmp_path / "ck", "--json")
    assert "exists" in _validated("export", result)["error"]["message"]


def test_from_a_bucket(bucket: Bucket) -> None:
    dcp.save(STATE, f"{bucket.url}/ck")
    assert_same(dcp.read(f"{bucket.url}/ck", "x.a"), {"x.a": STATE["x"]["a"]})  # type: ignore[index]


def _validated(name: str, result: Result) -> dict[str, dict[str, object]]:
    document = json.loads(result.stdout)
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema)
    found: dict[str, dict[str, object]] = document
    return found
