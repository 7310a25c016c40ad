"""``keeper.dir`` under a Trainer: what Lightning links to, deletes and names is what is there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.launch import on_ranks

pytestmark = pytest.mark.usefixtures("forked_keepers")


def _io(root: Path) -> Any:
    from dcp_plugin.lightning import DCPCheckpointIO

    return DCPCheckpointIO(keeper={"dir": str(root / "node"), "durable_every": 2, "linger": 0.0}, async_save=True)


@on_ranks(1)
def test_links_lead_to_what_is_published_and_the_newest_durable_one_is_never_deleted(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    import dcp_plugin as dcp
    from tests.lightning import training as t

    run, seen = tmp_path / "run", []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            checkpointer = trainer.strategy.dcp_adapter.io.checkpointer
            checkpointer.wait()
            trainer.strategy.dcp_adapter.io.post_commit.settle()
            there = sorted(path.name for path in run.glob("step*"))
            local = [one.path.name for one in dcp.list_checkpoints(run, local_dir=tmp_path / "node")]
            link = os.readlink(run / "last.ckpt") if (run / "last.ckpt").is_symlink() else ""
            seen.append((there, link, local))

    saves = ModelCheckpoint(run, filename="{step}", every_n_train_steps=1, save_top_k=1, save_last="link")
    trainer = t.trainer_for("single", [saves, Look()], plugin=_io(tmp_path), max_steps=5)
    trainer.fit(t.Model("single"), t.stateful_loader("single"))
    assert seen == [
        ([], "", []),
        ([], "", ["step=1.ckpt"]),
        (["step=2.ckpt"], "step=2.ckpt", ["step=2.ckpt"]),
        (["step=2.ckpt"], "step=2.ckpt", ["step=2.ckpt", "step=3.ckpt"]),
        (["step=4.ckpt"], "step=4.ckpt", ["step=4.ckpt"]),
    ]
    assert [path.name for path in run.glob("step*")] == ["step=5.ckpt"], "the end of a fit brings the newest there"
    assert os.readlink(run / "last.ckpt") == "step=5.ckpt" == Path(saves.best_model_path).name
    assert dcp.verify(run / "last.ckpt").ok


@on_ranks(1)
def test_what_is_compared_with_others_is_durable_and_a_name_that_nodes_have_is_taken(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    import dcp_plugin as dcp
    from tests.lightning import training as t

    run, io = tmp_path / "run", _io(tmp_path)
    best = ModelCheckpoint(run, filename="best-{step}", monitor="step", mode="max", every_n_train_steps=1, save_top_k=3)
    trainer = t.trainer_for("single", [best], plugin=io, max_steps=3)
    trainer.fit(t.Model("single"), t.stateful_loader("single"))
    assert sorted(best.best_k_models) == sorted(str(path) for path in run.glob("best*"))
    local = dcp.Checkpointer(io.config, solo=True, keeper={"durable_every": None})
    local.save({"step": 1}, run / "name.ckpt").wait()
    local.close()
    assert io.has_locally(run / "name.ckpt") and not (run / "name.ckpt").exists()
    assert best.file_exists(str(run / "name.ckpt"), trainer)
    io.remove_checkpoint(run / "name.ckpt")
    assert not io.has_locally(run / "name.ckpt")
