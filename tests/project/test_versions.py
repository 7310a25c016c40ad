"""What one version of torch wrote, another one reads: stock what we wrote, and we what anybody wrote."""

from __future__ import annotations

import pathlib
import sys
from pathlib import Path

import pytest
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.metadata import TensorProperties

import dcp_plugin as dcp
from dcp_plugin.core.format import metadata
from dcp_plugin.core.format.stock_metadata import decode
from dcp_plugin.core.storage.open import open_checkpoint
from tests.compare import same_tree
from tests.versions import HERE, state

PATHS = sorted(path for path in HERE.glob("*-*") if path.is_dir())
OURS = [path for path in PATHS if path.name.startswith("ours")]


def test_there_are_checkpoints_of_each_version() -> None:
    names = [f"{writer}-{version}" for writer in ("ours", "stock") for version in ("2.11.0", "2.13.0", "2.15.0")]
    assert [path.name for path in PATHS] == names


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_we_read_what_any_version_wrote(path: Path) -> None:
    for load in (
        lambda found: dcp.load(found, path),
        lambda found: stock.load(found, storage_reader=dcp.ShardedReader(path)),
        lambda found: stock.load(found, storage_reader=dcp.ShardedReader(path), planner=dcp.ShardedLoadPlanner()),
    ):
        found = state(0)
        load(found)
        assert same_tree(found, state(1))
    assert dcp.verify(path).ok


def test_we_read_what_stock_wrote_under_python_3_13(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, a path in the ``.metadata`` is one of ``pathlib._local``, and one string."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pathlib._local", pathlib)
        patch.setattr(pathlib.PosixPath, "__module__", "pathlib._local")
        patch.setattr(pathlib.PosixPath, "__reduce__", lambda self: (type(self), (str(self),)))
        stock.save(state(1), checkpoint_id=tmp_path / "checkpoint")
    assert b"pathlib._local" in (tmp_path / "checkpoint/.metadata").read_bytes()
    found = state(0)
    dcp.load(found, tmp_path / "checkpoint")
    assert same_tree(found, state(1))


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_stock_reads_what_we_wrote_under_any_version(path: Path) -> None:
    found = state(0)
    stock.load(found, checkpoint_id=path)
    assert same_tree(found, state(1))


@pytest.mark.parametrize("fields", ["its own", "those of 2.15", "more"])
@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_what_we_write_is_the_same_under_any_version(path: Path, fields: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte: no other version opens what torch 2.15 makes of its TensorProperties."""
    if fields != "its own":
        known, more = TensorProperties.__getstate__, ((2, 1), "new")[: 1 if fields == "those of 2.15" else 2]
        monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*known(self)[:5], *more))
    written = (path / ".metadata").read_bytes()
    index, saved = open_checkpoint(path).index, decode(written, "it")
    index.version = saved.version  # the first of these checkpoints name none
    assert metadata.encode(index, saved.storage_meta) == written
