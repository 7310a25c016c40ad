"""examples/hf_trainer.py: stopped on two ranks, it goes on as one process; what cannot run here says so."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from hf_trainer import choose_strategy

from tests import programs
from tests.example.scripts import ROOT, SMALLEST, compose
from tests.places import names_in
from tests.programs import TRANSFORMERS


def train(run_dir: Path, *overrides: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    arguments = [ROOT / "examples" / "hf_trainer.py", *SMALLEST, "optim.warmup=1", f"run_dir={run_dir}", *overrides]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return programs.run(*torchrun, *arguments, imported=TRANSFORMERS, cwd=run_dir, env=offline)


@pytest.mark.long
def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    stopped = train(tmp_path, "strategy=ddp", "checkpoint=async", "steps=4", "resume=auto", ranks=2)
    assert stopped.returncode == 0, stopped.stderr

    resumed = train(tmp_path, "strategy=single", "checkpoint=sync", "steps=6", "resume=must")
    assert resumed.returncode == 0, resumed.stderr
    checkpoints = tmp_path / "transformers"
    assert names_in(checkpoints) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    history = json.loads((checkpoints / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history] == [1, 2, 3, 4, 5, 6]
    assert resumed.stdout.count("'loss'") == 2


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["strategy=fsdp2"], "strategy=fsdp2 needs a GPU in transformers; strategy=ddp runs on CPUs too."),
        (["strategy=single", "devices=2"], "strategy=single is for one process: take strategy=ddp or fsdp2."),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence(overrides: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as refused:
        choose_strategy(compose("accelerator=cpu", *overrides))
    assert str(refused.value) == said
