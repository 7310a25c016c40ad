"""Every command of ``dcp-plugin`` in a real terminal of 80 and of 120 columns: no line is cut, no row falls apart."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path

import pytest
from torch import nn

import dcp_plugin as dcp
from dcp_plugin.tools.cli.app import COMMANDS
from tests import programs
from tests.damage import flip

RUN = """
import sys
from dcp_plugin.tools.cli.app import app
for line in sys.argv[1:]:
    print("$", line, flush=True)
    app(line.split(), standalone_mode=False)
"""
CONTROL = re.compile(r"[^\n]*\x1b\[2K|\x1b\[[0-9;?]*[A-Za-z]|\r")
"""A progress bar that is erased, the controls of a terminal, and the carriage return of its line ends."""


def _in_terminal(lines: list[str], columns: int, cwd: Path) -> dict[str, list[str]]:
    """Run commands in a terminal, and return what each of them shows."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    python = programs.python(programs.PACKAGE)
    process = subprocess.Popen([python, "-c", RUN, *lines], stdout=theirs, stderr=theirs, cwd=cwd, env=env)
    os.close(theirs)
    printed = b""
    try:
        while part := os.read(ours, 1 << 16):
            printed += part
    except OSError:  # the last process that had the terminal has ended
        pass
    os.close(ours)
    assert process.wait() == 0, printed.decode()
    shown: dict[str, list[str]] = {}
    for section in CONTROL.sub("", printed.decode()).split("$ ")[1:]:
        command, *output = section.rstrip("\n").split("\n")
        shown[command] = output
    assert list(shown) == lines
    return shown


LINES = [
    "list runs", "inspect a", "inspect a --all --values", "inspect a --stats", "inspect a --key model.*",
    "verify a b c", "diff a b", "read a", "export a out --format safetensors", "export a file --format torch",
    "import out ck",
    "prune runs --keep-last 1 --best val_loss --dry-run", "copy runs copied", "report runs", "load-plan a --into b",
    "doctor runs --gb 0.01", "prove -- touch {run}/x", "explain CheckpointMismatch", "inspect nowhere",
]  # fmt: skip


@pytest.mark.one_of("columns")
@pytest.mark.parametrize("columns", [80, 120])
def test_every_command_fits_a_terminal(tmp_path: Path, columns: int) -> None:
    model = nn.ModuleDict({f"transformer_block_{n}": nn.LayerNorm(64) for n in range(3)})
    for step in range(100, 400, 100):
        metrics = {"val_loss": 30 / step, "accuracy": step / 400}
        dcp.save({"model": model, "epoch": step}, tmp_path / f"runs/step-{step}", step=step, metrics=metrics)
    for name in "abc":
        nn.init.uniform_(model["transformer_block_0"].weight)
        dcp.save({"model": model, "note": "a long text " * 20}, tmp_path / name, step=1)
    flip(tmp_path / "c", "model.transformer_block_1.weight")
    assert set(COMMANDS) == {line.split()[0] for line in LINES}
    shown = _in_terminal(LINES, columns, tmp_path)
    for line, output in shown.items():
        assert output, line
        too_long = [text for text in output if len(text) > columns and " " in text.strip()]
        assert not too_long, (line, too_long)
    rows = [text for text in shown["list runs"] if "step-" in text]
    assert len(rows) == 3 and all(re.search(r"step-(\d+) +\1 .* whole +val_loss", text) for text in rows)
    assert ("layout" in "".join(shown["list runs"][:2])) == (columns == 120)
    keys = [text.split()[-1] for text in shown["inspect a --all --values"] if "model." in text]
    assert set(keys) == set(dcp.read(tmp_path / "a", "model.*")), "no key is folded"
