"""The scripts of ``examples/``, as their users start them, with a small model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tests.example.scripts import ROOT, SMALLEST


def train(out: Path) -> None:
    """examples/train.py"""
    _run("train", out)


def accelerate_train(out: Path) -> None:
    """examples/accelerate_train.py"""
    _run("accelerate_train", out)


def fabric_train(out: Path) -> None:
    """examples/fabric_train.py"""
    _run("fabric_train", out)


def hf_trainer(out: Path) -> None:
    """examples/hf_trainer.py"""
    _run("hf_trainer", out)


def _run(script: str, out: Path) -> None:
    file = ROOT / "examples" / f"{script}.py"
    settings = ["checkpoint=sync", "checkpoint.keep=-1", "steps=6", f"run_dir={out}"]
    sys.argv = [str(file), *SMALLEST, *settings]
    sys.path.insert(0, str(file.parent))
    runpy.run_path(str(file), run_name="__main__")
