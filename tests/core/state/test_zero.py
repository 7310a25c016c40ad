"""torch's ZeroRedundancyOptimizer: each rank has the state of some parameters."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import dcp_plugin as dcp
from tests import launch
from tests.compare import assert_same, full_state
from tests.launch import on_ranks


def _made(seed: int, is_zero: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 4))
    groups = [{"params": [p for p in model.parameters() if p.dim() == dim], "lr": seed * 0.01 * dim} for dim in (1, 2)]
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    make: Any = ZeroRedundancyOptimizer if is_zero else torch.optim.AdamW
    optimizer = make(groups, **({"optimizer_class": torch.optim.AdamW} if is_zero else {}))
    return model, optimizer


def _train(model: nn.Module, optimizer: Any, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(8.0).view(2, 4)).square().sum().backward()
        optimizer.step()


def _save(path: Path, is_zero: bool) -> None:
    model, optimizer = _made(1, is_zero)
    _train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5  # as a scheduler does between two steps
    dcp.save({"model": model, "optim": optimizer}, path)


def _load(path: Path, is_zero: bool) -> None:
    """Load and train on. The oracle is a plain optimizer that was never saved."""
    right, of_right = _made(1, is_zero=False)
    _train(right, of_right)
    of_right.param_groups[0]["lr"] = 0.5
    model, optimizer = _made(2, is_zero)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = dcp.load({"model": model, "optim": optimizer}, path)
    assert not report.missing
    assert not report.unexpected
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in of_right.param_groups]
    _train(right, of_right)
    _train(model, optimizer)
    assert_same(full_state(model.state_dict()), full_state(right.state_dict()))
    if is_zero and dist.get_world_size() > 1:
        assert 0 < len(optimizer.optim.state) < 6


@pytest.fixture(scope="module", params=[True, False], ids=["zero", "plain"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("zero") / "c"
    launch.run(_save, 2, path, request.param)
    return path


@on_ranks(1, 2, 4)
def test_it_loads_what_it_or_a_plain_optimizer_saved(saved: Path, world_size: int) -> None:
    _load(saved, is_zero=True)


@on_ranks(2)
def test_a_plain_optimizer_loads_what_it_saved(saved: Path) -> None:
    _load(saved, is_zero=False)


def test_the_checkpoint_has_the_keys_of_the_plain_optimizer(saved: Path) -> None:
    model, optimizer = _made(1, is_zero=False)
    _train(model, optimizer)
    dcp.save({"model": model, "optim": optimizer}, saved.with_name("of one rank"))
    assert set(dcp.read(saved)) == set(dcp.read(saved.with_name("of one rank")))


@on_ranks(1)
def test_one_that_has_no_optimizer_yet_is_refused(tmp_path: Path) -> None:
    model, _ = _made(1, is_zero=False)
    late = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, overlap_with_ddp=True)
    with pytest.raises(dcp.CheckpointMismatch, match="after DDP has built its buckets"):
        dcp.save({"model": model, "optim": late}, tmp_path / "c")
