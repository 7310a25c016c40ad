"""``attach(fabric, save_interval=...).due(step)``: the same answer on all ranks."""

from __future__ import annotations

from pathlib import Path

import dcp_plugin as dcp
from tests.launch import on_ranks


@on_ranks(2)
def test_a_script_saves_when_due(tmp_path: Path) -> None:
    from dcp_plugin.fabric import attach
    from tests.fabric import training as t

    fabric = t.fabric_for("ddp")
    with attach(fabric, save_interval=1e-9) as checkpoints:
        training, saved = t.Training(fabric), []
        for step in range(1, 5):
            training.run(step)
            if checkpoints.due(step):
                saved.append(step)
                training.save(tmp_path / f"step-{step}")
    assert fabric.all_gather(len(saved)).tolist() == [len(saved)] * 2
    assert saved[-2:] == [3, 4]
    latest = dcp.latest(tmp_path)
    assert latest == tmp_path / "step-4"
