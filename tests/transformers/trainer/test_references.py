"""Objects that the Trainer alone frees at once are freed at once with the mixin too, without the collector."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest

import dcp_plugin as dcp
from tests.launch import on_ranks
from tests.memory import names_alive


@pytest.mark.one_of
@pytest.mark.parametrize("options", [{}, {"async_save": True, "save_interval": 60.0}], ids=["sync", "async"])
@on_ranks(1)
def test_the_mixin_keeps_no_object_longer_than_the_trainer_alone(tmp_path: Path, options: dict[str, Any]) -> None:
    from tests.transformers.trainer import training as t

    def trained(root: Path, kind: Any, **options: Any) -> dict[str, weakref.ref[Any]]:
        trainer = t.trainer(root, kind=kind, **options)
        trainer.train()
        trainer.train(resume_from_checkpoint=str(root / "checkpoint-3"))
        objects = {"trainer": trainer, "accelerator": trainer.accelerator, "model": trainer.model}
        objects |= {"optimizer": trainer.optimizer.optimizer, "data": trainer.train_dataset}
        return {name: weakref.ref(value) for name, value in objects.items()}

    config = dcp.CheckpointConfig(**options)
    stock, ours = names_alive(
        tmp_path,
        lambda path: trained(path, t.OnCPU),
        lambda path: trained(path, t.Ours, config=config),
    )
    assert ours == stock == set()
