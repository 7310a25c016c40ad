"""examples/finetune.py: started, killed in the middle of a save, and started again by the same command."""

import importlib
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import dcp_plugin as dcp
from tests import launch
from tests.example.scripts import ROOT, TINY, compose, logged_losses

launch.preload("tests.lightning.training")
launch.preload("hydra.utils")


def _run(script: str, run_dir: Path, settings: list[str], killed: bool = False) -> None:
    """The script on this rank, as torchrun would start it. ``killed``: rank 1 dies in the middle of the second save."""

    def die(event: dcp.events.Event) -> None:
        if isinstance(event, dcp.events.BytesWritten) and "step-000004" in str(event.path):
            os.kill(os.getpid(), signal.SIGKILL)

    if killed and os.environ["RANK"] == "1":
        dcp.events.subscribe(die)
    sys.path.insert(0, str(ROOT / "examples"))
    if os.environ["WORLD_SIZE"] != "1":
        os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0", GROUP_WORLD_SIZE="1")
    cfg = compose(f"run_dir={run_dir}", *TINY, *settings, config=script)
    warnings.simplefilter("ignore")
    main: Any = importlib.import_module(script).main
    main.__wrapped__(cfg)


def test_the_settings_compose() -> None:
    cfg = compose("strategy=fsdp2", "init_from=here", config="finetune")
    assert cfg.partial.exclude == "*.lora_*"
    assert (cfg.resume, cfg.init_from, cfg.run_dir) == ("auto", "here", "outputs/finetune")


def test_a_backbone_that_nobody_has_trained_is_not_fine_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    main: Any = importlib.import_module("finetune").main
    with pytest.raises(SystemExit, match="init_from=PATH is missing"):
        main.__wrapped__(compose(config="finetune"))


def test_the_same_command_starts_it_and_restarts_it_after_a_kill(tmp_path: Path) -> None:
    launch.run(_run, 1, "train", tmp_path / "pretraining", ["steps=2"])
    pretrained = tmp_path / "pretraining" / "checkpoints" / "step-000002.ckpt"
    settings = ["strategy=fsdp2", "steps=6", f"init_from={pretrained}"]

    launch.run(_run, 2, "finetune", tmp_path / "straight", settings)
    outcomes = launch.outcomes_of(_run, 2, "finetune", tmp_path / "run", settings, True)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert dcp.latest(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "step-000002.ckpt"
    os.rename(pretrained, tmp_path / "moved")
    launch.run(_run, 2, "finetune", tmp_path / "run", settings)

    without_interruption = logged_losses(tmp_path / "straight", life=0)
    assert list(without_interruption) == [0, 1, 2, 3, 4, 5]
    assert logged_losses(tmp_path / "run", life=1) == {step: without_interruption[step] for step in (2, 3, 4, 5)}

    backbone: dict[str, Any] = {}
    tuned: dict[str, Any] = {}
    last = tmp_path / "run" / "checkpoints" / "step-000006.ckpt"
    dcp.load({"model": backbone}, tmp_path / "moved")
    dcp.load({"model": tuned}, last)
    assert all(tuned[key].equal(value) for key, value in backbone.items())
    assert {key.rpartition(".")[2] for key in tuned.keys() - backbone.keys()} == {"lora_a", "lora_b"}
    slots = [tensor.key for tensor in dcp.inspect(last).tensors if tensor.key.startswith("optim.state")]
    assert slots and all("lora_" in key for key in slots)
