"""The scripts of the tutorials, as their readers start them."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

from tests.programs import ROOT


def accelerate(out: Path) -> None:
    """docs/tutorials/accelerate.md"""
    _run("accelerate", out)


def fabric(out: Path) -> None:
    """docs/tutorials/fabric.md"""
    _run("fabric", out)


def lightning(out: Path) -> None:
    """docs/tutorials/lightning.md"""
    _run("lightning", out)


def plain(out: Path) -> None:
    """docs/tutorials/plain.md"""
    _run("plain", out)


def transformers(out: Path) -> None:
    """docs/tutorials/transformers.md"""
    _run("transformers", out)


def _run(tutorial: str, out: Path) -> None:
    """Run the script in a directory of its own; it saves in "run" there."""
    page = (ROOT / "docs" / "tutorials" / f"{tutorial}.md").read_text()
    code = re.findall(r'^```python title="train.py"\n(.*?)^```', page, re.M | re.S)[0]
    out.mkdir(parents=True, exist_ok=True)
    os.chdir(out)
    Path("train.py").write_text(code)
    runpy.run_path("train.py", run_name="__main__")
