"""``save_interval`` in a Trainer: it saves when due, besides what ``save_strategy`` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_plugin import CheckpointConfig, resolve_resume
from tests.launch import on_ranks
from tests.places import is_tidy


@pytest.mark.one_of
@pytest.mark.parametrize(("strategy", "saved"), [("no", []), ("steps", [3, 6])])
@on_ranks(2)
def test_a_trainer_saves_when_due(tmp_path: Path, strategy: str, saved: list[int]) -> None:
    from tests.transformers.trainer import training as t

    trainer = t.trainer(tmp_path, "ddp", config=CheckpointConfig(save_interval=1e-9), save_strategy=strategy)
    trainer.train()
    there = {int(path.name.removeprefix("checkpoint-")) for path in tmp_path.glob("checkpoint-*")}
    assert there >= {2, 3, 4, 5, 6, *saved}
    assert resolve_resume("auto", tmp_path) == tmp_path / "checkpoint-6"


@on_ranks(1)
def test_without_an_interval_a_trainer_is_as_before(tmp_path: Path) -> None:
    from tests.transformers.trainer import training as t

    trainer = t.trainer(tmp_path)
    trainer.train()
    assert {path.name for path in tmp_path.iterdir()} >= {"checkpoint-3", "checkpoint-6"}
    assert is_tidy(tmp_path)
