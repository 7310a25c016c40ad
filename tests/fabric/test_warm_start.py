"""``attach(fabric).resume_or_init``: ``fabric.load`` of the run's own checkpoint, else the weights of another's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import dcp_plugin as dcp
from tests.compare import assert_same
from tests.fabric import WORLD_SIZE
from tests.launch import on_ranks


@on_ranks(1, 2)
def test_a_run_starts_with_the_weights_of_init_from_or_its_own_checkpoint(tmp_path: Path, world_size: int) -> None:
    layouts = [name for name in WORLD_SIZE if WORLD_SIZE[name] == world_size]
    from dcp_plugin.fabric import Attachment, attach
    from tests.fabric import training as t

    torch.manual_seed(3)
    pretrained = t.Net()
    for layout in layouts:
        dcp.save({"model": pretrained}, tmp_path / "pretrained")
        fabric = t.fabric_for(layout)
        attached, run = attach(fabric), t.Training(fabric, seed=5)
        body = dcp.PartialLoad(include="net.body.*", rename={"net.": "model."})
        start = attached.resume_or_init(run.state, tmp_path / layout, init_from=tmp_path / "pretrained", partial=body)
        assert (start.how, start.path) == ("warm-started", tmp_path / "pretrained"), layout
        torch.manual_seed(5)
        taken = {f"body.{key}": value for key, value in pretrained.body.state_dict().items()}
        expected = {f"model.{key}": value for key, value in {**t.Net().state_dict(), **taken}.items()}
        assert_same({key: value for key, value in run.whole_state().items() if key in expected}, expected)

        run.run(until=2)
        fabric.save(tmp_path / layout / "step", run.state)
        saved = run.whole_state()
        shutil.rmtree(tmp_path / "pretrained", ignore_errors=True)
        fabric = t.fabric_for(layout)
        attached, run = attach(fabric), t.Training(fabric, seed=6)
        start = attached.resume_or_init(run.state, tmp_path / layout, init_from=tmp_path / "pretrained")
        assert (start.how, start.path) == ("resumed", tmp_path / layout / "step")
        assert_same(run.whole_state(), saved)
        with pytest.raises(dcp.CheckpointError, match="attach"):
            Attachment(fabric.strategy, None).resume_or_init({}, tmp_path)
        with pytest.raises(ValueError, match="init_from=PATH"):
            attached.resume_or_init(run.state, tmp_path / layout, partial=body)
