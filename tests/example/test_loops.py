"""examples/accelerate_train.py and fabric_train.py: a run that is stopped and goes on prints the losses of one that is
not."""

import re
from pathlib import Path

import pytest

from tests import launch
from tests.example.scripts import printed_losses, run
from tests.object_server import Bucket

for module in ("tests.accelerate.training", "tests.fabric.training", "hydra.utils"):
    launch.preload(module)

RESUMED = {
    "accelerate_train": "resumed at step 4: loaded .* from {path}",
    "fabric_train": "resumed at step 4: loaded .* from {path}",
}
"""What the scripts print."""


@pytest.mark.parametrize(
    ("script", "strategy", "ranks"),
    [
        ("accelerate_train", "fsdp2", 2),
        pytest.param("accelerate_train", "hsdp", 4, marks=pytest.mark.long),
        ("fabric_train", "fsdp2", 2),
    ],
)
def test_a_stopped_run_goes_on_where_it_was_and_on_one_rank_too(
    tmp_path: Path, script: str, strategy: str, ranks: int
) -> None:
    saves = ["checkpoint.every=4", "checkpoint.config.async_save=true"]
    straight, *_ = launch.run(run, ranks, script, strategy, tmp_path, "steps=6", *saves)
    assert [step for step, _ in printed_losses(straight)] == ["1", "2", "3", "4", "5", "6"]
    resumed, *_ = launch.run(run, ranks, script, strategy, tmp_path, "steps=6", "resume=must", "checkpoint.every=9")
    assert re.search(RESUMED[script].format(path=tmp_path / "checkpoints" / "step-000004"), resumed)
    assert printed_losses(resumed) == printed_losses(straight)[4:]
    alone, *_ = launch.run(run, 1, script, "single", tmp_path, "steps=6", "resume=auto", "checkpoint.every=9")
    assert [step for step, _ in printed_losses(alone)] == ["5", "6"]


def test_the_checkpoints_of_a_run_may_be_in_a_bucket(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Hydra gives of how the bucket is reached is in containers of its own."""
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    there = f"{bucket.url}/run"
    store = f"storage_options={{endpoint: '{bucket.server.url}', client_options: {{allow_http: true}}}}"
    settings = ["steps=3", f"checkpoints={there}", store, "checkpoint.every=2"]
    straight, *_ = launch.run(run, 1, "accelerate_train", "single", tmp_path, *settings)
    resumed, *_ = launch.run(run, 1, "accelerate_train", "single", tmp_path, "resume=must", *settings)
    assert re.search(f"resumed at step 2: loaded .* from {there}/step-000002", resumed)
    assert printed_losses(resumed) == printed_losses(straight)[2:]
    assert not list(tmp_path.iterdir())
