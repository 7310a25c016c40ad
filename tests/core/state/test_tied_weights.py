"""Weights that are tied at a save and not at a load, or the other way around: the moments follow the weight."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dcp_plugin as dcp
from tests.compare import assert_same, full, full_state
from tests.launch import on_ranks


class Net(nn.Module):
    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        if is_tied:
            self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(x))  # type: ignore[no-any-return]


def _made(is_tied: bool, steps: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(steps)
    model = Net(is_tied)
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + steps)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(6)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@on_ranks(1, 2)
def test_both_parameters_get_the_moments_of_the_tied_weight(tmp_path: Path, world_size: int) -> None:
    tied, optimizer = _made(is_tied=True, steps=2)
    dcp.save({"model": tied, "optim": optimizer}, tmp_path / "c")
    model, loaded = _made(is_tied=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = dcp.load({"model": model, "optim": loaded}, tmp_path / "c")
    assert not report.missing
    for weight in (model.emb.weight, model.head.weight):
        assert_same(full_state(loaded.state[weight]), full_state(optimizer.state[tied.emb.weight]))
        assert torch.equal(full(weight), full(tied.emb.weight))
    assert loaded.param_groups[0]["lr"] == 2.1
    first, second = (loaded.state[weight]["exp_avg"] for weight in (model.emb.weight, model.head.weight))
    assert first is not second


@on_ranks(1, 2)
def test_two_values_are_not_loaded_into_a_tied_weight(tmp_path: Path, world_size: int) -> None:
    untied, optimizer = _made(is_tied=False, steps=2)
    dcp.save({"model": untied, "optim": optimizer}, tmp_path / "c")
    model, loaded = _made(is_tied=True)
    before = full(model.emb.weight)
    with pytest.raises(dcp.CheckpointMismatch, match=r"model\.head\.weight is here the same parameter as emb\.weight"):
        dcp.load({"model": model, "optim": loaded}, tmp_path / "c")
    assert torch.equal(full(model.emb.weight), before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dcp.load({"model": model, "optim": loaded}, tmp_path / "c", dcp.PartialLoad(exclude="*.head.weight"))
    assert torch.equal(full(model.emb.weight), full(untied.emb.weight))
    assert_same(full_state(loaded.state[model.emb.weight]), full_state(optimizer.state[untied.emb.weight]))


def test_equal_values_of_stock_load_into_a_tied_weight(tmp_path: Path) -> None:
    """Stock stores a tied weight twice, without checksums."""
    tied, _ = _made(is_tied=True, steps=2)
    stock.save({"model": tied.state_dict()}, checkpoint_id=tmp_path / "c")
    model, _ = _made(is_tied=True)
    dcp.load({"model": model}, tmp_path / "c")
    assert_same(model.state_dict(), tied.state_dict())


def test_two_values_of_stock_end_as_in_a_load_of_stock(tmp_path: Path) -> None:
    untied, _ = _made(is_tied=False, steps=2)
    stock.save({"model": untied.state_dict()}, checkpoint_id=tmp_path / "c")
    right, model = Net(is_tied=True), Net(is_tied=True)
    right.load_state_dict(untied.state_dict())
    dcp.load({"model": model}, tmp_path / "c")
    assert_same(model.state_dict(), right.state_dict())


def test_a_parameter_that_was_frozen_starts_with_fresh_state(tmp_path: Path) -> None:
    model, _ = _made(is_tied=False)
    optimizer = torch.optim.AdamW(model.emb.parameters())
    model(torch.arange(6)).sum().backward()
    optimizer.step()
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "c")
    unfrozen, loaded = _made(is_tied=False)
    with pytest.warns(UserWarning, match="start with fresh optimizer state"):
        dcp.load({"model": unfrozen, "optim": loaded}, tmp_path / "c")
    assert unfrozen.head.weight not in loaded.state
