"""A program of a user, as mypy and pyright see it with the package installed: see tests/project/test_packaging.py."""

from pathlib import Path
from typing import assert_type

import torch

import dcp_plugin as dcp


def train(root: Path) -> int:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    checkpointer = dcp.Checkpointer(dcp.CheckpointConfig(async_save=True, keep_last=3))
    newest = dcp.latest(root)
    if newest is not None:
        report = checkpointer.load(state, newest)
        assert_type(report, dcp.LoadReport)
    try:
        handle = checkpointer.save(state, root / "step-1", step=1)
        checkpointer.wait()
    except dcp.SaveFailed as error:
        raise SystemExit(str(error)) from error
    finally:
        checkpointer.close()
    assert_type(dcp.verify(root / "step-1"), dcp.tools.VerifyReport)
    assert_type(dcp.verify(root / "step-1").ok, bool)
    assert_type(handle, dcp.SaveHandle)
    step = dcp.inspect(root / "step-1").step
    return step or 0
