"""Paths are what the kernel takes them for, and names that no search would find are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp_plugin as dcp
from dcp_plugin.core.paths import Where, absolute


@pytest.fixture
def linked(tmp_path: Path) -> str:
    """A path of which ``os.path.abspath`` names another place."""
    (tmp_path / "disk" / "scratch").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "scratch")
    return f"{tmp_path}/link/../run"


def test_a_link_before_two_dots_is_resolved(linked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save({"n": 1}, linked, step=1)
    assert os.path.exists(linked) and (tmp_path / "disk" / "run" / ".metadata").exists()
    monkeypatch.chdir(tmp_path)
    assert dcp.latest("link/..") == tmp_path / "disk" / "run" and dcp.inspect("link/../run").step == 1
    state = {"t": torch.zeros(2)}
    stock.save({"t": torch.ones(2)}, checkpoint_id=f"{linked}/../stock")
    dcp.load(state, "link/../stock")
    assert state["t"].tolist() == [1, 1]


@pytest.mark.parametrize("name", [".dcp_plugin", ".dcp_plugin-5", ".dcp_plugin-5/step-1"])
def test_a_name_that_no_search_finds_is_refused(place: Where, name: str) -> None:
    dcp.save({"n": 1}, place / "step-1")
    with pytest.raises(dcp.SaveFailed, match="no search looks for checkpoints in it"):
        dcp.save({"n": 1}, place / name)
    with pytest.raises(dcp.CheckpointError, match=r"to (another|a new) name"):
        dcp.copy(place / "step-1", place / name)
    assert dcp.latest(place) == place / "step-1"


@pytest.mark.parametrize("letter", ["\t", "\n", "\x7f"])
def test_a_control_character_in_a_url_is_refused_and_named(letter: str) -> None:
    for call in (dcp.latest, dcp.inspect, lambda path: dcp.save({"n": 1}, path)):
        with pytest.raises(ValueError, match=r"'s3://bucket/run\\.*' has '\\.*' in it, .* Leave it out"):
            call(f"s3://bucket/run{letter}1/step-1")


def test_other_links_and_the_last_component_stay(linked: str, tmp_path: Path) -> None:
    assert absolute(tmp_path / "link" / "run") == tmp_path / "link" / "run"
    assert absolute(f"{tmp_path}/gone/../link") == tmp_path / "link"
    dcp.save({"n": 1}, tmp_path / "step-1", step=1)
    (tmp_path / "disk" / "last").symlink_to(tmp_path / "step-1")
    dcp.save({"n": 2}, f"{linked}/../last", step=2)
    assert not (tmp_path / "disk" / "last").is_symlink() and dcp.inspect(tmp_path / "step-1").step == 1
    (tmp_path / "disk" / "best").symlink_to(tmp_path / "step-1")
    dcp.Checkpointer().remove(f"{linked}/../best")
    assert not (tmp_path / "disk" / "best").is_symlink() and (tmp_path / "step-1").exists()
