"""What ``setup_module`` returned is warm-started like any module, but for FSDP1, whose state dict Fabric hides."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

import dcp_plugin as dcp
from tests import launch
from tests.compare import assert_same, full_state


def test_a_module_of_fabric_is_warm_started(tmp_path: Path) -> None:
    launch.run(_warm_start, 2, tmp_path, ["ddp", "fsdp2"])


def _warm_start(root: Path, layouts: list[str]) -> None:
    from dcp_plugin.state import gather_module
    from tests.fabric import training as t

    torch.manual_seed(3)
    pretrained = t.Net()
    dcp.save({"model": pretrained}, root / "pretrained")
    for layout in layouts:
        state = t.Training(t.fabric_for(layout), seed=5).state
        body = dcp.PartialLoad(include="net.body.*")
        start = dcp.resume_or_init(state, root / "run", init_from=root / "pretrained", partial=body)
        assert start.report is not None and len(start.report.loaded) == 4, layout
        torch.manual_seed(5)
        expected = {
            **t.Net().state_dict(),
            **{f"body.{key}": value for key, value in pretrained.body.state_dict().items()},
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_same(full_state(gather_module(state["net"])), expected)
