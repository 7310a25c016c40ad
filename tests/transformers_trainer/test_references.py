"""Objects that the Trainer alone frees at once are freed at once with the mixin too, without the collector."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

import dcp_plugin as dcp
from tests.launch import on_ranks


@pytest.mark.parametrize("options", [{}, {"async_save": True, "save_interval": 60.0}], ids=["sync", "async"])
@on_ranks(1)
def test_the_mixin_keeps_no_object_longer_than_the_trainer_alone(tmp_path: Path, options: dict[str, Any]) -> None:
    from tests.transformers_trainer import training as t

    config = dcp.CheckpointConfig(**options)
    _names_alive(tmp_path / "first-use", t.Ours, config=config)  # imports and caches
    gc.collect()
    gc.disable()
    stock = _names_alive(tmp_path / "stock", t.OnCPU)
    gc.collect()
    assert _names_alive(tmp_path / "ours", t.Ours, config=config) == stock == []


def _names_alive(root: Path, kind: Any, **options: Any) -> list[str]:
    """Train, resume, and drop everything; return the names of the objects that are still alive."""
    references = _trained(root, kind, **options)
    return [name for name, reference in references.items() if reference() is not None]


def _trained(root: Path, kind: Any, **options: Any) -> dict[str, weakref.ref[Any]]:
    from tests.transformers_trainer import training as t

    trainer = t.trainer(root, kind=kind, **options)
    trainer.train()
    trainer.train(resume_from_checkpoint=str(root / "checkpoint-3"))
    objects = {"trainer": trainer, "accelerator": trainer.accelerator, "model": trainer.model}
    objects |= {"optimizer": trainer.optimizer.optimizer, "data": trainer.train_dataset}
    return {name: weakref.ref(value) for name, value in objects.items()}
