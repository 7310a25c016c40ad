"""``attach(accelerator, save_interval=...).due(step)``: the same answer on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import dcp_plugin as dcp
from tests.launch import on_ranks


@on_ranks(2)
def test_a_script_saves_when_due(tmp_path: Path) -> None:
    from tests.accelerate import training as t

    run = t.start("ddp", save_interval=1e-9)
    saved: list[int] = []
    assert run.attached is not None
    for step in range(1, 5):
        run.train(1)
        if run.attached.due(step):
            saved.append(step)
            run.accelerator.save_state(str(tmp_path / f"step-{step}"))
    everybody: list[Any] = [None, None]
    torch.distributed.all_gather_object(everybody, saved)
    assert everybody[0] == everybody[1] and saved[-2:] == [3, 4]
    assert dcp.latest(tmp_path) == tmp_path / "step-4"
    run.attached.detach()
