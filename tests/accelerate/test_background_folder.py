"""An asynchronous ``save_state``: nothing of ours stands at the final path before the checkpoint is complete."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import dcp_plugin as dcp
from tests import launch
from tests.launch import on_ranks
from tests.limits import HANG


def _hold_back_writes(resume: threading.Event) -> None:
    """Have every later save of this process wait for an event before it writes its files."""
    from dcp_plugin.core.storage.part_writer import PartWriter

    write = PartWriter.write

    def held(self: PartWriter, *args: Any) -> Any:
        assert resume.wait(HANG)
        return write(self, *args)

    PartWriter.write = held  # type: ignore[method-assign]


@on_ranks(1)
def test_the_folder_appears_with_the_complete_checkpoint(tmp_path: Path) -> None:
    from tests.accelerate import training as t

    run, resume = t.start("single", async_save=True), threading.Event()
    _hold_back_writes(resume)
    path = Path(run.accelerator.save_state(str(tmp_path / "checkpoint-1")))
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        (path / "ema.pt").write_bytes(b"weights")
    resume.set()
    run.attached.wait()
    (path / "ema.pt").write_bytes(b"weights")
    assert dcp.latest(tmp_path) == path


@on_ranks(1)
def test_files_in_a_folder_that_the_script_has_made_are_kept(tmp_path: Path) -> None:
    from tests.accelerate import training as t

    run, resume = t.start("single", async_save=True), threading.Event()
    _hold_back_writes(resume)
    path = Path(run.accelerator.save_state(str(tmp_path / "checkpoint-1")))
    path.mkdir()
    (path / "ema.pt").write_bytes(b"weights")
    resume.set()
    run.attached.wait()
    assert (path / "ema.pt").read_bytes() == b"weights"
    assert dcp.latest(tmp_path) == path


@on_ranks(1)
def test_an_incomplete_checkpoint_is_refused_before_load_hooks_run(tmp_path: Path) -> None:
    from tests.accelerate import training as t

    run = t.start("single")
    run.accelerator.register_load_state_pre_hook(lambda models, folder: pytest.fail(f"called with {folder}"))
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(dcp.CheckpointError, match="checkpoint-1"):
        run.accelerator.load_state(str(tmp_path / "checkpoint-1"))


def _number_of(name: str) -> int:
    return int(name.removeprefix("checkpoint-"))


def _train_as_diffusers_does(root: Path, kill_after: float) -> None:
    """Save every step and keep at most two checkpoints, until a kill at a random moment."""
    from tests.accelerate import training as t

    run = t.start("single", async_save=True)
    names = sorted((name for name in os.listdir(root) if name.startswith("checkpoint-")), key=_number_of)
    step = 0
    if names:  # --resume_from_checkpoint latest
        run.accelerator.load_state(str(root / names[-1]))
        step = _number_of(names[-1])
    kill = threading.Timer(kill_after, lambda: os.kill(os.getpid(), signal.SIGKILL))
    while True:
        step += 1
        names = sorted((name for name in os.listdir(root) if name.startswith("checkpoint-")), key=_number_of)
        for name in names[:-1]:
            shutil.rmtree(root / name)
        run.accelerator.save_state(str(root / f"checkpoint-{step}"))
        if not kill.is_alive():
            run.attached.wait()
            kill.start()


@pytest.mark.parametrize("kills", [4, pytest.param(200, marks=pytest.mark.long)])
def test_after_a_kill_the_newest_name_is_a_complete_checkpoint(tmp_path: Path, kills: int) -> None:
    moments = random.Random(kills)
    for _ in range(kills):
        (outcome,) = launch.outcomes_of(_train_as_diffusers_does, 1, tmp_path, moments.uniform(0.05, 0.4))
        assert outcome.exit_code == -signal.SIGKILL, outcome.traceback
        newest = max((name for name in os.listdir(tmp_path) if name.startswith("checkpoint-")), key=_number_of)
        assert dcp.verify(tmp_path / newest).ok
