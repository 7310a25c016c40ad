"""examples/train.py: every choice of its configuration composes, and a stopped run goes on where it was."""

import re
import subprocess
from pathlib import Path

import hydra
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from train import build_strategy

from dcp_plugin import PartialLoad
from tests import programs
from tests.example.scripts import ROOT, TINY, compose, logged_losses
from tests.programs import LIGHTNING


def train(run_dir: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "examples" / "train.py"
    return programs.run(script, f"run_dir={run_dir}", *TINY, *overrides, imported=LIGHTNING, cwd=run_dir)


@pytest.mark.one_of("resume")
@pytest.mark.parametrize("resume", ["auto", "must", "never", "outputs/train/checkpoints/step-000100.ckpt"])
@pytest.mark.parametrize("checkpoint", ["sync", "async", "off"])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp1", "fsdp2", "hsdp"])
def test_every_choice_composes(strategy: str, checkpoint: str, resume: str) -> None:
    cfg = compose(f"strategy={strategy}", f"checkpoint={checkpoint}", f"resume={resume}")
    assert cfg.strategy.name == strategy
    assert cfg.checkpoint.enabled == (checkpoint != "off")
    assert hydra.utils.instantiate(cfg.checkpoint.config).async_save == (checkpoint == "async")
    assert cfg.resume == resume


@pytest.mark.parametrize("partial", [file.stem for file in (ROOT / "configs" / "partial").iterdir()])
def test_what_init_from_gives_composes(partial: str) -> None:
    cfg = compose("init_from=there", f"partial={partial}")
    assert isinstance(hydra.utils.instantiate(cfg.partial), type(None) if partial == "none" else PartialLoad)


def test_the_demonstration_composes() -> None:
    cfg = compose("+experiment=demo", "strategy=hsdp")
    assert cfg.callbacks.witness.folder == "outputs/demo/witness"


def test_strategies_are_what_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert build_strategy(compose("strategy=single")) == "auto"
    assert build_strategy(compose("strategy=ddp", "devices=2")) == "ddp"
    assert isinstance(build_strategy(compose("strategy=fsdp1")), FSDPStrategy)
    for strategy in ("fsdp2", "hsdp"):
        assert isinstance(build_strategy(compose(f"strategy={strategy}", "devices=4")), ModelParallelStrategy)


def test_devices_are_what_torchrun_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    cfg = compose()
    assert (cfg.devices, cfg.nodes) == (4, 2)


def test_fsdp1_without_a_gpu_says_so_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^strategy=fsdp1 needs a GPU; strategy=fsdp2 shards on CPUs too\.$"):
        build_strategy(compose("strategy=fsdp1"))


def test_single_on_two_ranks_is_refused() -> None:
    with pytest.raises(SystemExit, match="one process, not 2"):
        build_strategy(compose("strategy=single", "devices=2"))


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    stopped = train(tmp_path, "steps=4", "resume=never")
    assert stopped.returncode == 0, stopped.stderr
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == [
        "step-000002.ckpt",
        "step-000004.ckpt",
    ]
    assert list(logged_losses(tmp_path, life=0)) == [0, 1, 2, 3]

    resumed = train(tmp_path, "steps=6", "resume=must", "checkpoint.enabled=false")
    assert resumed.returncode == 0, resumed.stderr
    assert list(logged_losses(tmp_path, life=1)) == [4, 5]


def test_resume_must_without_a_checkpoint_fails(tmp_path: Path) -> None:
    refused = train(tmp_path, "strategy=single", "resume=must")
    assert refused.returncode != 0
    assert re.search("CheckpointNotFound: resume=must, but there is no committed checkpoint", refused.stderr)
