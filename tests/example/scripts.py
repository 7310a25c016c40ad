"""The scripts of examples/ on ranks that have been launched, as torchrun starts them."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
import warnings

from tests.example.test_train import ROOT, TINY, compose


def run(script: str, strategy: str, run_dir: str, settings: list[str]) -> str:
    """What it prints on this rank."""
    sys.path.insert(0, str(ROOT / "examples"))
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0", GROUP_WORLD_SIZE="1")
    cfg = compose(f"run_dir={run_dir}", f"strategy={strategy}", *TINY, *settings)
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        importlib.import_module(script).main.__wrapped__(cfg)
    return printed.getvalue()


def losses(printed: str) -> list[tuple[str, str]]:
    return re.findall(r"^step (\d+) loss ([\d.]+)$", printed, re.MULTILINE)
