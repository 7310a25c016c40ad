"""``python -m tests.campaigns.case bugs.plain.moments_cast --out DIR`` runs one case, and a second time resumes it.

A case is a public function of a module below ``bugs`` or ``correct``. The first argument is the directory of its
checkpoints. The module is named for its framework; the cases of ``ranks`` run on two ranks of torchrun. The docstring
of a bug ends with the addresses of the reports.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from dcp_plugin.core import events
from dcp_plugin.core.events import SaveFinished

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    kind: str
    """``bugs`` or ``correct``."""
    framework: str
    """The module: plain, ranks, lightning, accelerate, trainer or fabric."""
    function: str
    about: str
    """The first sentence of the docstring."""
    sources: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.framework}.{self.function}"

    @property
    def module(self) -> str:
        return f"tests.campaigns.{self.kind}.{self.framework}"

    def arguments(self, out: str) -> list[str]:
        """Return what follows ``python`` to run the case with the directory ``out``."""
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return [*(ranks if self.framework == "ranks" else []), "-m", "tests.campaigns.case", self.name, "--out", out]


def cases() -> list[Case]:
    """Return all cases, without an import of their frameworks."""
    return [
        case for kind in ("bugs", "correct") for file in sorted(HERE.glob(f"{kind}/[a-z]*.py")) for case in _in(file)
    ]


def _in(file: Path) -> list[Case]:
    functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    documented = {node.name: ast.get_docstring(node) or "" for node in functions if not node.name.startswith("_")}
    return [
        Case(file.parent.name, file.stem, name, text.split("\n")[0], tuple(re.findall(r"https://[^\s,]+", text)))
        for name, text in documented.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--saves", type=int, help="end after so many saves, as by a kill")
    chosen = parser.parse_args()
    module, function = f"tests.campaigns.{chosen.case}".rsplit(".", 1)
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("dcp_plugin").setLevel(logging.INFO)
    torch.set_num_threads(1)  # sums in one order, whatever else the machine does
    if chosen.saves is not None:
        _end_after(chosen.saves)
    getattr(importlib.import_module(module), function)(chosen.out)


def _end_after(saves: int) -> None:
    left = iter(range(saves - 1))

    def end(event: events.Event) -> None:
        if isinstance(event, SaveFinished) and next(left, None) is None:
            os._exit(0)

    events.subscribe(end)


if __name__ == "__main__":
    main()
