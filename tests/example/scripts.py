"""The scripts of examples/: their settings, and a run on ranks that have been launched, as torchrun starts them."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import os
import re
import sys
import warnings
from pathlib import Path

import hydra
from omegaconf import DictConfig

ROOT = Path(__file__).parents[2]
SMALLEST = [
    "accelerator=cpu",
    "log_every=1",
    "model={dim: 16, depth: 1, heads: 2, context: 32, dropout: 0.1}",
    "data={megabytes: 0.05, batch_size: 4}",
    "checkpoint.every=2",
]
TINY = [*SMALLEST, "checkpoint=sync", "checkpoint.keep=-1"]


def compose(*overrides: str, config: str = "train") -> DictConfig:
    with hydra.initialize_config_dir(str(ROOT / "configs"), version_base=None):
        return hydra.compose(config, list(overrides))


def run(script: str, strategy: str, run_dir: Path, *settings: str) -> str:
    """What it prints on this rank."""
    sys.path.insert(0, str(ROOT / "examples"))
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0", GROUP_WORLD_SIZE="1")
    cfg = compose(f"run_dir={run_dir}", f"strategy={strategy}", *TINY, *settings)
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", "parameters or optimizer state that should be equal")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        importlib.import_module(script).main.__wrapped__(cfg)
    return printed.getvalue()


def printed_losses(printed: str) -> list[tuple[str, str]]:
    return re.findall(r"^step (\d+) loss ([\d.]+)$", printed, re.MULTILINE)


def logged_losses(run_dir: Path, life: int) -> dict[int, float]:
    with (run_dir / "logs" / f"version_{life}" / "metrics.csv").open() as lines:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(lines) if row["loss"]}
