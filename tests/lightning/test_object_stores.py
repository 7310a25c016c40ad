"""What differs where checkpoints are prefixes in a bucket: names, listings, and what a dead save has left there."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import launch
from tests.compare import assert_same
from tests.launch import on_ranks
from tests.messages import warned
from tests.object_server import Bucket


def _leave_a_torn_save(path: Any) -> None:
    """What is there of a save that has died while it wrote."""
    from dcp_plugin.core.format.packed import new_token
    from dcp_plugin.core.media.objects.client import client_of

    client_of(path).put(f"{path.key}/__0_0-{new_token(1_700_000_000.0)}.distcp", b"the beginning")


def _from_last(folder: Any, *callbacks: Any) -> tuple[dict[str, Any], list[str]]:
    """The state that a training begins with, empty for a new one; and the warnings."""
    from tests.lightning import training as t

    look = t.AtTrainStart()
    trainer = t.trainer_for("single", [t.ModelCheckpoint(folder), *callbacks, look])
    with warned() as said:
        trainer.fit(t.Model(seed=5), t.plain_loader("single"), ckpt_path="last")
    return look.state if trainer.ckpt_path else {}, said


def _trained(t: Any) -> Any:
    trainer = t.trainer_for("single", max_steps=3, plugin=True)
    trainer.fit(t.Model(), t.plain_loader("single"))
    return trainer


@on_ranks(1)
def test_last_is_the_newest_that_can_be_loaded_and_never_a_training_from_scratch() -> None:
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    from dcp_plugin import CheckpointNotFound
    from dcp_plugin.core.media import medium_of
    from dcp_plugin.core.paths import as_path
    from tests.lightning import training as t

    folder = as_path("memory://last")
    state, said = _from_last(folder)
    assert not state and any("there is none in memory://last" in text for text in said)
    trainer = _trained(t)
    trainer.save_checkpoint(folder / "last.ckpt")
    _leave_a_torn_save(folder / "last-v1.ckpt")
    state, said = _from_last(folder)
    assert_same(t.whole_state(trainer), state)
    assert any("passes over" in text and "last-v1.ckpt" in text for text in said)
    # What an exception has left is newer than what is called last, where it is a checkpoint.
    after_exception = OnExceptionCheckpoint(str(folder))
    _leave_a_torn_save(folder / "on_exception.ckpt")
    assert_same(t.whole_state(trainer), _from_last(folder, after_exception)[0])
    medium_of(folder).remove(folder / "last.ckpt")
    trainer.save_checkpoint(folder / "step=3.ckpt")
    assert_same(t.whole_state(trainer), _from_last(folder)[0])
    medium_of(folder).remove(folder / "step=3.ckpt")
    with pytest.raises(CheckpointNotFound, match="nothing here can be resumed from"):
        _from_last(folder)


@on_ranks(1)
def test_slurm_resumes_from_what_was_saved_and_numbers_go_on() -> None:
    from dcp_plugin.core.paths import as_path
    from tests.lightning import training as t

    root = as_path("memory://slurm")
    trainer = _trained(t)

    def again() -> Any:
        return t.trainer_for("single", [t.ModelCheckpoint(), t.AtTrainStart()], default_root_dir=str(root))

    connector = again()._checkpoint_connector
    assert (connector._hpc_resume_path, connector.hpc_save_path(root)) == (None, root / "hpc_ckpt_1.ckpt")
    for number in (9, 10):
        trainer.save_checkpoint(root / f"hpc_ckpt_{number}.ckpt")
    _leave_a_torn_save(root / "hpc_ckpt_11.ckpt")
    resumed = again()
    resumed.fit(t.Model(seed=5), t.plain_loader("single"), ckpt_path="hpc")
    assert resumed.ckpt_path == root / "hpc_ckpt_10.ckpt"
    assert resumed.global_step == 3
    assert resumed._checkpoint_connector.hpc_save_path(root) == root / "hpc_ckpt_12.ckpt"


@on_ranks(1)
def test_a_listing_that_s3fs_remembers_decides_nothing(bucket: Bucket) -> None:
    """It lists the folder when a fit begins, and knows of nothing that comes after that. A training that asked it would
    save over a checkpoint."""
    import fsspec

    import dcp_plugin as dcp
    from dcp_plugin.core.paths import as_path
    from tests.lightning import training as t

    folder = as_path(bucket.url) / "run"
    _trained(t).save_checkpoint(folder / "before.ckpt")
    _leave_a_torn_save(folder / "same-v1.ckpt")
    for _ in range(2):
        saving = t.ModelCheckpoint(folder, filename="same", every_n_train_steps=2)
        t.trainer_for("single", [saving], max_steps=2).fit(t.Model(), t.plain_loader("single"))
        assert fsspec.url_to_fs(saving.best_model_path)[0].exists(saving.best_model_path)
    there = {one.path.name: one.committed for one in dcp.list_checkpoints(folder)}
    assert there == {"before.ckpt": True, "same.ckpt": True, "same-v1.ckpt": True}


def _die_in_the_second_save(place: Any, disk: Path) -> None:
    from dcp_plugin import events
    from tests.lightning import training as t

    straight = t.trainer_for("fsdp2", max_steps=2)
    straight.fit(t.Model("fsdp2"), t.stateful_loader("fsdp2"))
    whole = t.whole_state(straight)
    if dist.get_rank() == 0:
        torch.save(whole, disk / "after two steps.pt")

    def die(event: events.Event) -> None:
        if isinstance(event, events.BytesWritten) and event.path.name == "step=4.ckpt" and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    events.subscribe(die)
    io = t.DCPCheckpointIO(async_save=True, staging="lazy")
    saving = t.ModelCheckpoint(place, filename="{step}", every_n_train_steps=2, save_last=True)
    t.trainer_for("fsdp2", [saving], plugin=io).fit(t.Model("fsdp2"), t.stateful_loader("fsdp2"))


def _go_on_alone(place: Any, disk: Path) -> None:
    import dcp_plugin as dcp
    from tests.lightning import training as t

    look = t.AtTrainStart()
    t.trainer_for("single", [look, t.ModelCheckpoint(place)]).fit(
        t.Model(seed=5), t.stateful_loader("single"), ckpt_path="last"
    )
    assert_same(torch.load(disk / "after two steps.pt", weights_only=True), look.state)
    saving = t.ModelCheckpoint(place, filename="{step}", every_n_train_steps=2, save_last=True)
    trainer = t.trainer_for("single", [saving], max_steps=4)
    trainer.fit(t.Model(seed=5), t.stateful_loader("single"), ckpt_path="last")
    assert saving.best_model_path == place / "step=4.ckpt", "what the dead save has left takes no name"
    assert {one.path.name: (one.step, one.committed) for one in dcp.list_checkpoints(place)} == {
        "step=4.ckpt": (4, True),
        "last.ckpt": (4, True),
    }


def test_a_training_on_a_bucket_that_is_killed_in_a_save_goes_on_with_fewer_ranks(
    bucket: Bucket, tmp_path: Path
) -> None:
    from dcp_plugin.core.paths import as_path

    place = as_path(bucket.url) / "run"
    outcomes = launch.outcomes_of(_die_in_the_second_save, 2, place, tmp_path)
    assert outcomes[1].exit_code == -signal.SIGKILL, outcomes
    launch.run(_go_on_alone, 1, place, tmp_path)
