"""examples/accelerate_train.py: a run that is stopped and started again prints the losses of one that was not."""

import contextlib
import io
import re
import sys
import warnings
from pathlib import Path

import pytest

from tests import launch
from tests.example.test_train import ROOT, TINY, compose

launch.preload("tests.accelerate.training")


def _run(strategy: str, run_dir: str, settings: list[str]) -> str:
    """The script on this rank, as torchrun would start it."""
    sys.path.insert(0, str(ROOT / "examples"))
    cfg = compose(f"run_dir={run_dir}", f"strategy={strategy}", *TINY, *settings)
    warnings.simplefilter("ignore")
    import accelerate_train

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        accelerate_train.main.__wrapped__(cfg)
    return printed.getvalue()


def losses(printed: str) -> list[tuple[str, str]]:
    return re.findall(r"^step (\d+) loss ([\d.]+)$", printed, re.MULTILINE)


@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp2", 2), pytest.param("hsdp", 4, marks=pytest.mark.long)])
def test_a_stopped_run_goes_on_where_it_was_and_on_one_rank_too(tmp_path: Path, strategy: str, ranks: int) -> None:
    saves = ["checkpoint.every=4", "checkpoint.async_save=true"]
    straight, *_ = launch.run(_run, ranks, strategy, str(tmp_path), ["steps=6", *saves])
    assert [step for step, _ in losses(straight)] == ["1", "2", "3", "4", "5", "6"]
    resumed, *_ = launch.run(_run, ranks, strategy, str(tmp_path), ["steps=6", "resume=must", "checkpoint.every=9"])
    assert re.search(f"resumed: loaded .* from {tmp_path / 'checkpoints' / 'step-000004'}", resumed)
    assert losses(resumed) == losses(straight)[4:]
    alone, *_ = launch.run(_run, 1, "single", str(tmp_path), ["steps=6", "resume=auto", "checkpoint.every=9"])
    assert [step for step, _ in losses(alone)] == ["5", "6"]
