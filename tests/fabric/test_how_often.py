"""``attach(fabric, save_interval=...).due(step)``: the same answer on all ranks, and figures for the loggers."""

from __future__ import annotations

import csv
from pathlib import Path

import dcp_plugin as dcp
from tests.launch import on_ranks


@on_ranks(2)
def test_a_script_saves_when_due_and_the_loggers_are_told(tmp_path: Path) -> None:
    from lightning.fabric.loggers import CSVLogger

    from dcp_plugin.fabric import attach
    from tests.fabric import training as t

    logger = CSVLogger(tmp_path / "csv", version=0, flush_logs_every_n_steps=1)
    fabric = t.fabric_for("ddp", loggers=logger)
    with attach(fabric, save_interval=1e-9) as checkpoints:
        training, saved = t.Training(fabric), []
        for step in range(1, 5):
            training.run(step)
            if checkpoints.due(step):
                saved.append(step)
                training.save(tmp_path / f"step-{step}")
        proposed = checkpoints.proposed_interval()
        assert proposed is not None and proposed.steps is not None
    assert fabric.all_gather(len(saved)).tolist() == [len(saved)] * 2
    assert saved[-2:] == [3, 4]
    latest = dcp.latest(tmp_path)
    assert latest == tmp_path / "step-4"
    if fabric.global_rank == 0:
        with open(next((tmp_path / "csv").rglob("metrics.csv"))) as file:
            rows = [row for row in csv.DictReader(file) if row.get("checkpoint/proposed_interval_seconds")]
        assert [int(row["step"]) for row in rows] == saved[1:], "when there is something to tell"
