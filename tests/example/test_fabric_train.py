"""examples/fabric_train.py: a run that is stopped and started again prints the losses of one that was not."""

from pathlib import Path

from tests import launch
from tests.example.scripts import losses, run

launch.preload("tests.fabric.training")
launch.preload("hydra.utils")


def test_a_stopped_run_goes_on_where_it_was_and_on_one_rank_too(tmp_path: Path) -> None:
    saves = ["checkpoint.every=4", "checkpoint.config.async_save=true"]
    straight, *_ = launch.run(run, 2, "fabric_train", "fsdp2", str(tmp_path), ["steps=6", *saves])
    assert [step for step, _ in losses(straight)] == ["1", "2", "3", "4", "5", "6"]
    resumed, *_ = launch.run(
        run, 2, "fabric_train", "fsdp2", str(tmp_path), ["steps=6", "resume=must", "checkpoint.every=9"]
    )
    assert f"resumed from {tmp_path / 'checkpoints' / 'step-000004'}" in resumed
    assert losses(resumed) == losses(straight)[4:]
    alone, *_ = launch.run(
        run, 1, "fabric_train", "single", str(tmp_path), ["steps=6", "resume=auto", "checkpoint.every=9"]
    )
    assert [step for step, _ in losses(alone)] == ["5", "6"]
