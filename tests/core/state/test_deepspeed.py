"""Objects of DeepSpeed are refused at the first save. Stand-ins have what DeepSpeed gives its own: names and ds_id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dcp_plugin as dcp
from tests.launch import on_ranks


def _partitioned() -> nn.Module:
    """A model after deepspeed.zero.Init: no rank has the elements of a parameter between two steps."""
    model = nn.Sequential(nn.Linear(4, 4))
    for number, parameter in enumerate(model.parameters()):
        parameter.data = torch.empty(0)
        parameter.ds_id = number  # type: ignore[attr-defined]
    return model


class DeepSpeedEngine(nn.Module):
    __module__ = "deepspeed.runtime.engine"


class DeepSpeedZeroOptimizer:
    __module__ = "deepspeed.runtime.zero.stage_1_and_2"

    def state_dict(self) -> dict[str, Any]:
        return {"partition": object()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


class WarmupLR:
    __module__ = "deepspeed.runtime.lr_schedules"

    def __init__(self) -> None:
        self.step = 3

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


@pytest.mark.parametrize(
    "made", [_partitioned, DeepSpeedEngine, DeepSpeedZeroOptimizer, lambda: [DeepSpeedEngine()]], ids=range(4)
)
@pytest.mark.parametrize("options", [{}, {"async_save": True}], ids=str)
def test_a_save_is_refused_with_what_to_use(tmp_path: Path, made: Any, options: dict[str, Any]) -> None:
    with pytest.raises(dcp.CheckpointMismatch, match=r"is DeepSpeed's.*engine\.save_checkpoint"):
        dcp.Checkpointer(dcp.CheckpointConfig(**options)).save({"it": made()}, tmp_path / "c").wait()
    assert dcp.latest(tmp_path) is None


@on_ranks(2)
def test_every_rank_is_told(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointMismatch, match="is DeepSpeed's"):
        dcp.save({"model": _partitioned()}, tmp_path / "c")


def test_empty_tensors_and_schedulers_are_saved(tmp_path: Path) -> None:
    model = nn.ParameterList([torch.empty(0)])
    dcp.save({"model": model, "none": torch.empty(0), "schedule": WarmupLR()}, tmp_path / "c")
    assert dcp.read(tmp_path / "c")["schedule.step"] == 3
