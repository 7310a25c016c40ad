"""``save_interval`` under a real trainer: what is saved when a save is due."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

import dcp_plugin as dcp
from dcp_plugin import events
from dcp_plugin.core.paths import Where
from tests.compare import assert_same
from tests.launch import on_ranks

ALWAYS = 1e-9
"""Seconds: due after every step but the first."""


@on_ranks(2)
def test_what_is_due_is_saved_to_one_name_and_the_last_resumes_from_there(place: Where) -> None:
    from tests.lightning import training as t

    straight, model = t.trainer_for("ddp"), t.Model("ddp")
    straight.fit(model, t.stateful_loader("ddp"))
    saved: list[events.SaveFinished] = []
    unsubscribe = events.subscribe(lambda e: saved.append(e) if isinstance(e, events.SaveFinished) else None)

    def saving() -> t.ModelCheckpoint:
        return t.ModelCheckpoint(str(place), filename="mine", every_n_train_steps=3)

    io = t.DCPCheckpointIO(save_interval=ALWAYS)
    first = t.trainer_for("ddp", [saving()], plugin=io, max_steps=5)
    first.fit(t.Model("ddp"), t.stateful_loader("ddp"))
    unsubscribe()
    names = [(event.path.name, event.step) for event in saved]
    timed = [("last-timed.ckpt", step) for step in range(2, 6)]
    assert names == [*timed[:1], ("mine.ckpt", 3), *timed[1:]], "the usual ones, and these besides"
    second, resumed = t.trainer_for("ddp", [saving()]), t.Model("ddp", seed=5)
    second.fit(resumed, t.stateful_loader("ddp"), ckpt_path="last")
    assert resumed.losses == model.losses[5:]
    assert_same(t.whole_state(straight), t.whole_state(second))
    if torch.distributed.get_rank() == 0:
        assert dcp.latest(place) is not None


@on_ranks(1)
def test_one_save_for_each_step_of_the_optimizer(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    from tests.lightning import training as t

    steps: list[int | None] = []
    unsubscribe = events.subscribe(lambda e: steps.append(e.step) if isinstance(e, events.SaveFinished) else None)
    trainer = t.trainer_for(
        "single",
        [t.ModelCheckpoint(tmp_path / "ck", save_top_k=0)],
        plugin=t.DCPCheckpointIO(save_interval=ALWAYS),
        logger=CSVLogger(tmp_path / "csv", version=0),
        accumulate_grad_batches=2,
        max_steps=4,
    )
    trainer.fit(t.Model(), t.plain_loader("single", steps=8))
    unsubscribe()
    assert steps == [1, 2, 3, 4]
    with open(tmp_path / "csv" / "lightning_logs" / "version_0" / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row.get("checkpoint/seconds")]
    assert len(rows) == 4


@on_ranks(1)
def test_without_a_place_for_them_the_fit_does_not_begin() -> None:
    from tests.lightning import training as t

    trainer = t.trainer_for("single", plugin=t.DCPCheckpointIO(save_interval=60.0))
    with pytest.raises(ValueError, match="this Trainer has none: add one"):
        trainer.fit(t.Model(), t.plain_loader("single"))
