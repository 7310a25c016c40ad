"""The newest checkpoint of a run turns out to be damaged while it is loaded: which integration goes on with the one
before at once, and which at its next start. A path that somebody has named is refused, and no more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dcp_plugin as dcp
from tests.damage import flip_any
from tests.launch import on_ranks
from tests.messages import warned

MARK = "dcp_plugin.damaged"


def _damage(path: Path, prefix: str) -> None:
    if dist.get_rank() == 0:
        flip_any(path, prefix)
    dist.barrier()


def _refused(load: Callable[[], Any]) -> dcp.CheckpointCorrupt:
    with pytest.raises(dcp.CheckpointCorrupt, match="checksum differs") as caught:
        load()
    dist.barrier()
    return caught.value


@on_ranks(2)
def test_accelerate_goes_on_with_the_one_before(tmp_path: Path) -> None:
    from tests.accelerate import training as t

    run = t.start("ddp", project=tmp_path)
    for _ in range(2):
        run.train(1).accelerator.save_state()
    newest = tmp_path / "checkpoints" / "checkpoint_1"
    _damage(newest, "optim.")
    _refused(lambda: run.accelerator.load_state(str(newest)))
    _refused(lambda: run.attached.resume_or_init(resume="must"))
    assert not (newest / MARK).exists(), "it was named, or it had to be the newest"
    start = run.attached.resume_or_init()
    assert (start.path, start.damaged) == (newest.with_name("checkpoint_0"), (newest,))
    assert (newest / MARK).exists()
    run.accelerator.load_state()  # the newest of the project that is good
    run.train(1)
    assert run.accelerator.save_state() == newest.with_name("checkpoint_2")


@on_ranks(2)
def test_fabric_goes_on_with_the_one_before(tmp_path: Path) -> None:
    from dcp_plugin.fabric import attach
    from tests.fabric import training as t

    fabric = t.fabric_for("ddp")
    attached, run = attach(fabric), t.Training(fabric, seed=5)
    for step in (1, 2):
        run.run(until=step)
        fabric.save(tmp_path / f"step-{step}", run.state)
    newest = tmp_path / "step-2"
    _damage(newest, "optim")
    _refused(lambda: fabric.load(newest, run.state))
    assert not (newest / MARK).exists(), "it was named"
    start = attached.resume_or_init(run.state, tmp_path)
    assert (start.path, start.damaged) == (tmp_path / "step-1", (newest,))


@on_ranks(2)
def test_lightning_goes_on_with_the_one_before_at_its_next_start(tmp_path: Path) -> None:
    """What it is given is a path, and it goes on with that one: whoever chose it has to choose again."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tests.lightning import training as t

    keep: Any = {"filename": "{step}", "save_top_k": -1, "every_n_train_steps": 1, "enable_version_counter": False}
    t.trainer_for("ddp", [ModelCheckpoint(tmp_path, **keep)], max_steps=3).fit(t.Model("ddp"), t.plain_loader("ddp"))

    def fit(path: Any) -> Path:
        trainer = t.trainer_for("ddp", plugin=True, max_steps=4)
        trainer.fit(t.Model("ddp"), t.plain_loader("ddp"), ckpt_path=path)
        return trainer.strategy.checkpoint_io.started.path  # type: ignore[attr-defined, no-any-return]

    for step, prefix in ((3, "model."), (2, "optim.")):
        newest = tmp_path / f"step={step}.ckpt"
        _damage(newest, prefix)
        _refused(lambda newest=newest: fit(newest))  # type: ignore[misc]
        assert not (newest / MARK).exists(), "it was named"
        chosen = dcp.resolve_resume("auto", tmp_path)
        dist.barrier()
        assert chosen == newest
        error = _refused(lambda chosen=chosen: fit(chosen))  # type: ignore[misc]
        assert "the next automatic resume takes" in error.__notes__[0]
        assert (newest / MARK).exists()
    assert fit(dcp.resolve_resume("auto", tmp_path)) == tmp_path / "step=1.ckpt"


@pytest.mark.long
@on_ranks(2)
def test_the_trainer_of_transformers_goes_on_with_the_one_before_at_its_next_start(tmp_path: Path) -> None:
    from tests.transformers.trainer import training as t

    t.trainer(tmp_path, "ddp").train()
    newest = tmp_path / "checkpoint-6"
    _damage(newest, "optim.")
    _refused(lambda: t.trainer(tmp_path, "ddp").train(resume_from_checkpoint=str(newest)))
    assert not (newest / MARK).exists(), "it was named"
    error = _refused(lambda: t.trainer(tmp_path, "ddp").train(resume_from_checkpoint=True))
    assert "the next automatic resume takes" in error.__notes__[0]
    again = t.trainer(tmp_path, "ddp", save_total_limit=1)
    with warned("passes over") as said:
        again.train(resume_from_checkpoint=True)
    assert len(said) == (dist.get_rank() == 0) and all(f"{newest}: it is quarantined" in one for one in said)
    assert again.state.global_step == 6
    assert dcp.verify(newest).ok, "a save to the same name has replaced it"
