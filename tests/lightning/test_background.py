"""``async_save=True`` under a real trainer: nothing is lost, deleted too early, or kept silent."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import launch
from tests.compare import assert_same


def _async_io() -> Any:
    from dcp_plugin.lightning import DCPCheckpointIO

    return DCPCheckpointIO(async_save=True)


def _saving_often(root: Path, **options: Any) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint(root, filename="{step}", every_n_train_steps=1, **options)


def test_a_training_with_background_saves_resumes_like_any_other(tmp_path: Path) -> None:
    launch.run(_resume, 2, tmp_path)


def _resume(root: Path) -> None:
    from tests.lightning import training as t

    for layout in ("ddp", "fsdp1", "fsdp2"):
        straight, model = t.trainer_for(layout), t.Model(layout)
        straight.fit(model, t.stateful_loader(layout))
        io = _async_io()
        first = t.trainer_for(layout, [_saving_often(root / layout, save_top_k=-1)], plugin=io, max_steps=5)
        first.fit(t.Model(layout), t.stateful_loader(layout))
        assert not any(thread.name == "dcp-save" for thread in threading.enumerate())
        second, resumed = t.trainer_for(layout, plugin=io), t.Model(layout, seed=5)
        second.fit(resumed, t.stateful_loader(layout), ckpt_path=str(root / layout / "step=2.ckpt"))
        assert resumed.losses == model.losses[2:]
        assert_same(t.whole_state(straight), t.whole_state(second))


def test_the_old_checkpoint_is_deleted_when_the_new_one_is_there(tmp_path: Path) -> None:
    launch.run(_replace, 2, tmp_path)


def _replace(root: Path) -> None:
    import dcp_plugin as dcp
    from dcp_plugin import progress
    from tests.lightning import training as t

    loadable: list[int] = []

    def look(event: progress.Event) -> None:
        if isinstance(event, progress.BytesWritten):
            loadable.append(sum(state.committed for state in dcp.list_checkpoints(root)))

    progress.subscribe(look)
    trainer = t.trainer_for("ddp", [_saving_often(root, save_top_k=1)], plugin=_async_io())
    trainer.fit(t.Model("ddp"), t.plain_loader("ddp"))
    first_save = loadable.count(0)
    assert all(loadable[first_save:]), f"a save began with nothing to fall back to: {loadable}"
    torch.distributed.barrier()
    assert [state.path.name for state in dcp.list_checkpoints(root)] == ["step=6.ckpt"]


def test_a_failed_background_save_ends_the_training_and_is_raised_once(tmp_path: Path) -> None:
    launch.run(_fail, 2, tmp_path)


def _fail(root: Path) -> None:
    from dcp_plugin import CheckpointError
    from tests.lightning import training as t

    _disk_full_at(step=6)
    io = _async_io()
    trainer = t.trainer_for("fsdp2", [_saving_often(root, save_top_k=-1)], plugin=io)
    with pytest.raises(CheckpointError, match="disk full"):
        trainer.fit(t.Model("fsdp2"), t.plain_loader("fsdp2"))
    io.teardown()


def test_the_trainings_own_exception_comes_first(tmp_path: Path) -> None:
    launch.run(_fail_twice, 2, tmp_path)


def _fail_twice(root: Path) -> None:
    from tests.lightning import training as t

    class Diverging(t.Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 3:
                raise ArithmeticError("the loss is NaN")

    _disk_full_at(step=3)
    io = _async_io()
    trainer = t.trainer_for("fsdp2", [_saving_often(root, save_top_k=-1)], plugin=io)
    warnings.simplefilter("ignore")  # it warns, too
    with pytest.raises(ArithmeticError, match="the loss is NaN") as raised:
        trainer.fit(Diverging("fsdp2"), t.plain_loader("fsdp2"))
    assert "disk full" in raised.value.__notes__[0]
    io.teardown()


def _disk_full_at(step: int) -> None:
    from dcp_plugin import progress

    def fail(event: progress.Event) -> None:
        if isinstance(event, progress.SaveStarted) and event.step == step:
            raise OSError("disk full")

    progress.subscribe(fail)
