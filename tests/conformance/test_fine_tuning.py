"""Pre-train; fine-tune a larger model that holds the pre-trained one frozen; stop; restart from the fine-tune."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dcp_plugin as dcp
from tests import launch
from tests.compare import assert_same, full_state
from tests.layouts import Net, build, train, whole_state


class FineTune(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pretrain = Net().requires_grad_(False)
        self.head = nn.Linear(1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pretrain(x))  # type: ignore[no-any-return]


def _make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = FineTune()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model.pretrain, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def _pretrain(root: Path) -> None:
    model, optimizer = build("fsdp2")
    train(model, optimizer, 3)
    dcp.save({"model": model, "optim": optimizer}, root / "pretrain")


def _fine_tune(root: Path) -> None:
    model, optimizer = _make(0)
    pretrained: dict[str, Any] = {}
    report = dcp.load({"model": model}, root / "pretrain", partial=dcp.PartialLoad.submodule(model.pretrain))
    assert report.loaded == [f"model.pretrain.{key}" for key in model.pretrain.state_dict()]
    assert report.left_out == ["model.head.weight", "model.head.bias"]
    dcp.load({"model": pretrained}, root / "pretrain")
    assert_same(full_state(model.pretrain.state_dict()), pretrained)
    frozen = copy.deepcopy(full_state(dict(model.pretrain.named_parameters())))
    losses = train(model, optimizer, 2)
    dcp.save({"model": model, "optim": optimizer}, root / "fine-tune", step=2)
    losses += train(model, optimizer, 2, seed=1)
    assert_same(full_state(dict(model.pretrain.named_parameters())), frozen)
    final = whole_state(model, optimizer)
    if torch.distributed.get_rank() == 0:
        torch.save((losses, final), root / "straight.pt")


def _restart(root: Path) -> None:
    model, optimizer = _make(1)
    dcp.load({"model": model, "optim": optimizer}, root / "fine-tune")
    losses = train(model, optimizer, 2, seed=1)
    expected_losses, expected = torch.load(root / "straight.pt", weights_only=True)
    assert losses == expected_losses[2:]
    assert_same(whole_state(model, optimizer), expected)
    assert not any(key.startswith("optim.state.pretrain") for key in expected)


def test_pretrain_fine_tune_restart(tmp_path: Path) -> None:
    launch.run(_pretrain, 2, tmp_path)
    launch.run(_fine_tune, 2, tmp_path)
    launch.run(_restart, 2, tmp_path)
