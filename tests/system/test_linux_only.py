"""On another system than Linux, a save and a load say so at their first call, and reading goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp_plugin as dcp


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_saves_and_loads_refuse_another_system_in_one_sentence(
    tmp_path: Path, system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.ones(3)}
    dcp.save(state, tmp_path / "linux")
    monkeypatch.setattr(sys, "platform", system)
    for call in (
        lambda: dcp.save(state, tmp_path / "other"),
        lambda: dcp.load(state, tmp_path / "linux"),
        lambda: dcp.resume_or_init(state, tmp_path),
        lambda: dcp.Checkpointer(async_save=True, keeper={}),
        lambda: stock.save(state, storage_writer=dcp.ShardedWriter(tmp_path / "other")),
    ):
        with pytest.raises(dcp.CheckpointError, match=rf"on Linux alone .*, and this system is {system}\.\n"):
            call()
    assert [path.name for path in tmp_path.iterdir() if path.name[0] != "."] == ["linux"]
    assert dcp.read(tmp_path / "linux")["w"].tolist() == [1, 1, 1]
    assert dcp.verify(tmp_path / "linux").ok and dcp.latest(tmp_path) == tmp_path / "linux"
