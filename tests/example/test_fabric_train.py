"""examples/fabric_train.py: a run that is stopped and started again prints the losses of one that was not."""

import contextlib
import io
import os
import re
import sys
import warnings
from pathlib import Path

from tests import launch
from tests.example.test_train import ROOT, TINY, compose

launch.preload("tests.fabric.training")
launch.preload("hydra.utils")


def _run(strategy: str, run_dir: str, settings: list[str]) -> str:
    """The script on this rank, as torchrun would start it."""
    sys.path.insert(0, str(ROOT / "examples"))
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0", GROUP_WORLD_SIZE="1")
    cfg = compose(f"run_dir={run_dir}", f"strategy={strategy}", *TINY, *settings)
    warnings.simplefilter("ignore")
    import fabric_train

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        fabric_train.main.__wrapped__(cfg)
    return printed.getvalue()


def losses(printed: str) -> list[tuple[str, str]]:
    return re.findall(r"^step (\d+) loss ([\d.]+)$", printed, re.MULTILINE)


def test_a_stopped_run_goes_on_where_it_was_and_on_one_rank_too(tmp_path: Path) -> None:
    saves = ["checkpoint.every=4", "checkpoint.async_save=true"]
    straight, *_ = launch.run(_run, 2, "fsdp2", str(tmp_path), ["steps=6", *saves])
    assert [step for step, _ in losses(straight)] == ["1", "2", "3", "4", "5", "6"]
    resumed, *_ = launch.run(_run, 2, "fsdp2", str(tmp_path), ["steps=6", "resume=must", "checkpoint.every=9"])
    assert f"resumed from {tmp_path / 'checkpoints' / 'step-000004'}" in resumed
    assert losses(resumed) == losses(straight)[4:]
    alone, *_ = launch.run(_run, 1, "single", str(tmp_path), ["steps=6", "resume=auto", "checkpoint.every=9"])
    assert [step for step, _ in losses(alone)] == ["5", "6"]
