"""Each framework with ``keeper.dir``: it goes on from a step that was nowhere but on its nodes when all was killed.

Ranks with a directory of their own are nodes of their own. Every second save is durable.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dcp_plugin as dcp
from tests import launch
from tests.compare import assert_same

pytestmark = pytest.mark.usefixtures("forked_keepers")


def _settings(root: Path, nodes: int) -> dict[str, Any]:
    node = root / f"node-{dist.get_rank() % nodes}"
    return {"keeper": {"dir": str(node), "durable_every": 2, "linger": 1.0}, "async_save": True}


def _die(checkpointer: dcp.Checkpointer) -> None:
    """With kill -9, when the newest save is complete on all nodes; what is to be durable is, then."""
    for handle in checkpointer._queue.handles:
        handle.wait_local()
        if int(handle.path.name.strip("abcdefghijklmnopqrstuvwxyz-_=.")) % 2 == 0:
            handle.wait()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _lightning(root: Path, dies: bool) -> Any:
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    from dcp_plugin.lightning import DCPCheckpointIO
    from tests.lightning import training as t

    class Dies(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if dies and trainer.global_step == 3:
                _die(trainer.strategy.dcp_adapter.io.checkpointer)

    io = DCPCheckpointIO(**_settings(root, nodes=2))
    saves = ModelCheckpoint(root / "run", filename="{step}", every_n_train_steps=1, save_top_k=-1, save_last="link")
    trainer = t.trainer_for("ddp", [saves, Dies()], plugin=io)
    trainer.fit(t.Model("ddp", seed=0 if dies else 5), t.stateful_loader("ddp"), ckpt_path=None if dies else "last")
    assert io.started is not None
    straight = t.trainer_for("ddp")
    straight.fit(t.Model("ddp"), t.stateful_loader("ddp"))
    assert_same(t.whole_state(straight), t.whole_state(trainer))
    return io.started


def _fabric(root: Path, dies: bool) -> Any:
    from dcp_plugin.fabric import attach
    from tests.fabric import training as t

    fabric = t.fabric_for("ddp")
    attached = attach(fabric, **_settings(root, nodes=2))
    training = t.Training(fabric, seed=0 if dies else 5)
    restart = attached.resume_or_init(training.state, root / "run")
    if dies:
        training.run(3)
        for number in (1, 2, 3):
            training.save(root / "run" / f"save-{number}")
        _die(attached.checkpointer)
    training.run(6)
    attached.close()
    straight = t.Training(fabric)
    straight.run(6)
    assert_same(straight.whole_state(), training.whole_state())
    return restart


def _accelerate(root: Path, dies: bool) -> Any:
    from tests.accelerate import training as t

    if not dies:
        straight = t.start("ddp", native=True).train(6).whole_state()
    run = t.start("ddp", seed=0 if dies else 5, project=root / "run", **_settings(root, nodes=1))
    if dies:
        run.accelerator.project_configuration.iteration = 1
        run.train(3, at=dict.fromkeys((1, 2, 3), run.accelerator.save_state))
        _die(run.attached.checkpointer)
    restart = run.attached.resume_or_init()
    assert run.accelerator.project_configuration.iteration == 4
    run.train(3)
    run.attached.close()
    assert_same(straight, run.whole_state())
    return restart


def _transformers(root: Path, dies: bool) -> Any:
    from tests.transformers.trainer import training as t

    class Dies(t.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if dies and state.global_step == 3:
                _die(trainer._dcp._checkpointer)

    config = dcp.CheckpointConfig(**_settings(root, nodes=1))
    net = t.model(seed=0 if dies else 5)
    trainer = t.trainer(root / "run", "ddp", config=config, net=net, save_steps=1, callbacks=[Dies()])
    if dies:
        trainer.train()
    begun = t.begin(t.trainer(root / "run", "ddp", config=config, net=t.model(seed=7)), resume=True)
    trainer.train(resume_from_checkpoint=True)
    straight = t.trainer(root / "straight", "ddp", save_strategy="no")
    straight.train()
    assert_same(t.whole_state(straight), t.whole_state(trainer))
    return begun.step


DOORS = {"lightning": _lightning, "fabric": _fabric, "accelerate": _accelerate, "transformers": _transformers}


def _begin(door: str, root: Path, dies: bool) -> str:
    return str(DOORS[door](root, dies))


@pytest.mark.one_of
@pytest.mark.parametrize("door", DOORS)
def test_a_killed_training_goes_on_from_a_step_that_only_its_nodes_have(tmp_path: Path, door: str) -> None:
    killed = launch.outcomes_of(_begin, 2, door, tmp_path, True)
    assert [outcome.exit_code for outcome in killed] == [-signal.SIGKILL] * 2, killed
    durable = [state.path.name for state in dcp.list_checkpoints(tmp_path / "run") if state.committed]
    local = dcp.list_checkpoints(tmp_path / "run", local_dir=tmp_path / "node-0")
    assert [name for name in durable if "2" in name] == durable != []
    assert "3" in local[-1].path.name and local[-1].tier == "local"
    assert all("3" in restart for restart in launch.run(_begin, 2, door, tmp_path, False))
