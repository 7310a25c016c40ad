"""examples/accelerate_train.py: a run that is stopped and started again prints the losses of one that was not."""

import re
from pathlib import Path

import pytest

from tests import launch
from tests.example.scripts import losses, run
from tests.object_server import Bucket

launch.preload("tests.accelerate.training")


@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp2", 2), pytest.param("hsdp", 4, marks=pytest.mark.long)])
def test_a_stopped_run_goes_on_where_it_was_and_on_one_rank_too(tmp_path: Path, strategy: str, ranks: int) -> None:
    saves = ["checkpoint.every=4", "checkpoint.config.async_save=true"]
    straight, *_ = launch.run(run, ranks, "accelerate_train", strategy, str(tmp_path), ["steps=6", *saves])
    assert [step for step, _ in losses(straight)] == ["1", "2", "3", "4", "5", "6"]
    resumed, *_ = launch.run(
        run, ranks, "accelerate_train", strategy, str(tmp_path), ["steps=6", "resume=must", "checkpoint.every=9"]
    )
    assert re.search(f"resumed at step 4: loaded .* from {tmp_path / 'checkpoints' / 'step-000004'}", resumed)
    assert losses(resumed) == losses(straight)[4:]
    alone, *_ = launch.run(
        run, 1, "accelerate_train", "single", str(tmp_path), ["steps=6", "resume=auto", "checkpoint.every=9"]
    )
    assert [step for step, _ in losses(alone)] == ["5", "6"]


def test_the_checkpoints_of_a_run_may_be_in_a_bucket(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Hydra gives of how the bucket is reached is in containers of its own."""
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    there = f"{bucket.url}/run"
    store = f"storage_options={{endpoint: '{bucket.server.url}', client_options: {{allow_http: true}}}}"
    settings = [f"checkpoints={there}", store, "checkpoint.every=2"]
    straight, *_ = launch.run(run, 1, "accelerate_train", "single", str(tmp_path), ["steps=3", *settings])
    resumed, *_ = launch.run(run, 1, "accelerate_train", "single", str(tmp_path), ["steps=3", "resume=must", *settings])
    assert re.search(f"resumed at step 2: loaded .* from {there}/step-000002", resumed)
    assert losses(resumed) == losses(straight)[2:]
    assert not list(tmp_path.iterdir())
