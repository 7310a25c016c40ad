"""``attach(accelerator, save_interval=...).due(step)``: the same answer on all ranks, and figures for the trackers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import dcp_plugin as dcp
from tests.launch import on_ranks


@on_ranks(2)
def test_a_script_saves_when_due_and_the_trackers_are_told(tmp_path: Path) -> None:
    from accelerate.tracking import GeneralTracker

    from tests.accelerate import training as t

    class Noting(GeneralTracker):
        name, requires_logging_directory = "noting", False

        def __init__(self) -> None:
            super().__init__(_blank=True)
            self.told: list[tuple[int, dict[str, float]]] = []

        tracker = property(lambda self: self.told)

        def store_init_configuration(self, values: Any) -> None:
            pass

        def log(self, values: Any, step: Any = None, **kwargs: Any) -> None:
            self.told.append((step, values))

    run = t.start("ddp", save_interval=1e-9)
    noting, saved = Noting(), []
    run.accelerator.trackers = [noting]
    assert run.attached is not None
    for step in range(1, 5):
        run.train(1)
        if run.attached.due(step):
            saved.append(step)
            run.accelerator.save_state(str(tmp_path / f"step-{step}"))
    proposed = run.attached.proposed_interval()
    assert proposed is not None and proposed.steps is not None
    everybody: list[Any] = [None, None]
    torch.distributed.all_gather_object(everybody, saved)
    assert everybody[0] == everybody[1] and saved[-2:] == [3, 4]
    assert dcp.latest(tmp_path) == tmp_path / "step-4"
    told = [step for step, values in noting.told if values["checkpoint/proposed_interval_seconds"] > 0]
    assert told == (saved[1:] if run.accelerator.is_main_process else [])
    run.attached.detach()
