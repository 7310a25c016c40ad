"""The plugin keeps no object of the user. A Trainer has reference cycles of its own, and waits for the collector."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.launch import on_ranks
from tests.memory import names_alive


@pytest.mark.parametrize("async_save", [False, True])
@on_ranks(1)
def test_a_dropped_trainer_is_collected_with_all_that_it_had(tmp_path: Path, async_save: bool) -> None:
    from tests.lightning import training as t

    def trained_and_resumed() -> dict[str, weakref.ref[Any]]:
        objects: dict[str, Any] = {}
        for fit, path in (("first", None), ("second", tmp_path / "single-stateful" / "step=3.ckpt")):
            saving, plugin = t.checkpoints(tmp_path, "single", "stateful"), t.DCPCheckpointIO(async_save=async_save)
            trainer = t.trainer_for("single", saving, plugin=plugin)
            model, loader = t.Model(), t.stateful_loader("single")
            trainer.fit(model, loader, ckpt_path=path)
            of_fit = {"trainer": trainer, "model": model, "loader": loader, "optimizer": trainer.optimizers[0]}
            of_fit |= {"parameter": model.net.head.weight, "plugin": plugin, "callback": saving[0]}
            objects |= {f"{fit} {name}": value for name, value in of_fit.items()}
        return {name: weakref.ref(value) for name, value in objects.items()}

    references = trained_and_resumed()
    gc.collect()
    assert [name for name, reference in references.items() if reference() is not None] == []


@on_ranks(1)
def test_what_is_saved_and_loaded_without_a_trainer_is_freed_at_once(tmp_path: Path) -> None:
    from dcp_plugin.lightning import load_from_checkpoint
    from tests.lightning import training as t

    def saved_and_loaded(path: Path) -> dict[str, weakref.ref[Any]]:
        saved, plugin = t.Model(), t.DCPCheckpointIO()
        plugin.save_checkpoint({"state_dict": saved.state_dict()}, path)
        checkpoint, loaded = plugin.load_checkpoint(path), load_from_checkpoint(t.Model, path)
        objects = {"plugin": plugin, "loaded": loaded, "parameter": loaded.net.head.weight}
        objects |= {"saved": saved.net.head.weight, "read": checkpoint["state_dict"]["net.head.weight"]}
        return {name: weakref.ref(value) for name, value in objects.items()}

    assert names_alive(tmp_path, saved_and_loaded) == [set()]
