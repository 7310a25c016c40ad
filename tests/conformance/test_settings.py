"""Settings of the interpreter, which need an interpreter of their own: no assertions, and warnings as errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import ROOT

PROGRAM = """
import sys, warnings
import torch, torch.distributed.checkpoint as stock, dcp_plugin as dcp
import dcp_plugin.core.saving.background

warnings.resetwarnings()
warnings.simplefilter("error")
model, path = torch.nn.Linear(3, 5), sys.argv[1]
state = {"model": model, "optim": torch.optim.AdamW(model.parameters()), "step": 3}
model(torch.ones(1, 3)).sum().backward()
state["optim"].step()
for number, options in enumerate([{}, {"async_save": True}, {"async_save": True, "staging": "lazy"}]):
    with dcp.Checkpointer(**options) as checkpointer:
        checkpointer.save(state, f"{path}/{number}", step=number)
    target = torch.nn.Linear(3, 5)
    checkpointer.load({"model": target, "step": 0}, f"{path}/{number}")
    if not torch.equal(target.weight, model.weight):
        sys.exit("another weight")
if not dcp.diff(f"{path}/0", f"{path}/2").equal or not dcp.verify(f"{path}/2").ok:
    sys.exit("another checkpoint")
"""


@pytest.mark.one_of
@pytest.mark.parametrize("flags", [["-O"], ["-OO"], []])
def test_saves_loads_and_tools_under_flags_of_the_interpreter(tmp_path: Path, flags: list[str]) -> None:
    command = [sys.executable, *flags, "-c", PROGRAM, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
