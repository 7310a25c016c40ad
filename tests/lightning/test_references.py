"""The plugin keeps no object of the user. A Trainer has reference cycles of its own, and waits for the collector."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.launch import on_ranks


@pytest.mark.parametrize("async_save", [False, True])
@on_ranks(1)
def test_a_dropped_trainer_is_collected_with_all_that_it_had(tmp_path: Path, async_save: bool) -> None:
    references = _trained_and_resumed(tmp_path, async_save)
    gc.collect()
    assert [name for name, reference in references.items() if reference() is not None] == []


def _trained_and_resumed(root: Path, async_save: bool) -> dict[str, weakref.ref[Any]]:
    from tests.lightning import training as t

    objects: dict[str, Any] = {}
    for fit, path in (("first", None), ("second", root / "single-stateful" / "step=3.ckpt")):
        saving, plugin = t.checkpoints(root, "single", "stateful"), t.DCPCheckpointIO(async_save=async_save)
        trainer, model, loader = t.trainer_for("single", saving, plugin=plugin), t.Model(), t.stateful_loader("single")
        trainer.fit(model, loader, ckpt_path=path)
        of_fit = {"trainer": trainer, "model": model, "loader": loader, "optimizer": trainer.optimizers[0]}
        of_fit |= {"parameter": model.net.head.weight, "plugin": plugin, "callback": saving[0]}
        objects |= {f"{fit} {name}": value for name, value in of_fit.items()}
    return {name: weakref.ref(value) for name, value in objects.items()}


@on_ranks(1)
def test_what_is_saved_and_loaded_without_a_trainer_is_freed_at_once(tmp_path: Path) -> None:
    _saved_and_loaded(tmp_path / "first-use")  # imports and caches
    gc.collect()
    gc.disable()
    references = _saved_and_loaded(tmp_path / "model")
    assert [name for name, reference in references.items() if reference() is not None] == []


def _saved_and_loaded(path: Path) -> dict[str, weakref.ref[Any]]:
    from dcp_plugin.lightning import load_from_checkpoint
    from tests.lightning import training as t

    saved, plugin = t.Model(), t.DCPCheckpointIO()
    plugin.save_checkpoint({"state_dict": saved.state_dict()}, path)
    checkpoint, loaded = plugin.load_checkpoint(path), load_from_checkpoint(t.Model, path)
    objects = {"saved": saved.net.head.weight, "read": checkpoint["state_dict"]["net.head.weight"], "plugin": plugin}
    objects |= {"loaded": loaded, "parameter": loaded.net.head.weight}
    return {name: weakref.ref(value) for name, value in objects.items()}
