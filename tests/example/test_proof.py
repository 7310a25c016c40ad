"""The examples resume exactly: ``dcp-plugin prove`` kills and resumes them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.example.scripts import ROOT, TINY
from tests.limits import HANG
from tests.programs import PYTHON


@pytest.mark.one_of("script")
@pytest.mark.parametrize("script", ["train", "accelerate_train", "hf_trainer", "fabric_train"])
def test_an_example_resumes_exactly(tmp_path: Path, script: str) -> None:
    training = [PYTHON, f"{ROOT}/examples/{script}.py", "run_dir={run}", *TINY, "steps=8"]
    command = [PYTHON, "-m", "dcp_plugin", "prove", "--dir", tmp_path, "--", *training]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    proved = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=2 * HANG)
    assert proved.returncode == 0, (proved.stdout, proved.stderr)
    assert not [*tmp_path.iterdir()], "the runs and their output are deleted"
