"""What several ranks want is read by one of them and passed on; a read that fails, fails everywhere."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dcp_plugin as dcp
from dcp_plugin.core.media.disk.local_files import LocalFiles
from dcp_plugin.core.media.medium import ReadCost
from dcp_plugin.core.media.objects.object_files import ObjectFiles
from dcp_plugin.core.planning import reads, sharing
from tests.compare import full_state, same_bytes
from tests.damage import flip
from tests.launch import gathered, on_ranks
from tests.layouts import build, train, whole_state, wrap

NEVER, ALWAYS = None, 1
_OF_A_DISK = ReadCost().hosts


@pytest.mark.parametrize(
    ("policy", "from_store", "hosts", "least"),
    [
        (True, False, 1, ALWAYS),
        (True, True, 1, ALWAYS),
        (False, True, 9, NEVER),
        ("auto", True, 1, ALWAYS),  # nothing caches what a store has sent
        ("auto", False, 1, NEVER),  # a disk, memory, or a file server: one page cache
        ("auto", False, _OF_A_DISK - 1, NEVER),
        ("auto", False, 100, _OF_A_DISK),
    ],
)
def test_who_reads_for_whom_follows_from_the_medium_and_the_hosts(
    policy: Any, from_store: bool, hosts: int, least: int | None
) -> None:
    many = ObjectFiles.cost.hosts if from_store else _OF_A_DISK
    assert sharing.least_hosts(policy, many, hosts) == least


@on_ranks(2)
def test_as_many_hosts_as_the_rule_asks_for_read_each_byte_once(tmp_path: Path) -> None:
    saved = _model("ddp", seed=0)
    dcp.save({"model": saved}, tmp_path / "ck")
    expected = full_state(saved.state_dict())
    unique = sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
    host = socket.gethostname()
    socket.gethostname = lambda: f"{host}{dist.get_rank()}"  # type: ignore[misc]
    for many, times in ((3, 2.0), (2, 1.0)):
        LocalFiles.cost = ReadCost(hosts=many)  # type: ignore[assignment, misc]
        model = _model("ddp", seed=1)
        read = torch.tensor(dcp.load({"model": model}, tmp_path / "ck").bytes_read)
        restored = full_state(model.state_dict())
        assert all(same_bytes(expected[key], restored[key]) for key in expected)
        dist.all_reduce(read)
        assert times <= read.item() / unique < 1.02 * times


def _model(kind: str, seed: int) -> nn.Module:
    """Odd sizes, and a buffer that is not sharded. At a cut between two ranks, both read the block of 64 KiB: that is
    half a percent of the model."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(799, 4001), nn.BatchNorm1d(4001), nn.Linear(4001, 5))
    return wrap(kind, model, unit="")


def _use_small_windows() -> None:
    """Have a load of some megabytes take several windows."""
    sharing._WINDOW, sharing._MAX_MESSAGE = 1 << 20, 1 << 18


@on_ranks(4)
def test_replicas_read_every_byte_once(tmp_path: Path) -> None:
    _use_small_windows()
    for kind in ("ddp", "hsdp"):
        saved = _model(kind, seed=0)
        dcp.save({"model": saved}, tmp_path / kind)
        for policy, factor in ((True, 1), (False, {"ddp": 4, "hsdp": 2}[kind]), ("auto", {"ddp": 4, "hsdp": 2}[kind])):
            model = _model(kind, seed=1)
            report = dcp.load({"model": model}, tmp_path / kind, io={"broadcast": policy})
            expected, found = full_state(saved.state_dict()), full_state(model.state_dict())
            assert all(same_bytes(expected[key], found[key]) for key in expected)
            read = torch.tensor([report.bytes_read, report.bytes_read])
            dist.all_reduce(read[:1])
            dist.all_reduce(read[1:], op=dist.ReduceOp.MAX)
            unique = sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
            assert factor <= read[0].item() / unique < 1.01 * factor + 0.01
            if policy is True:
                assert read[1].item() < 0.3 * unique, "all ranks take part in the reading"


@on_ranks(2)
def test_ranks_divide_the_reads_of_the_one_plan_that_each_has_made(tmp_path: Path) -> None:
    dcp.save({"t": {str(n): torch.full((100_000,), float(n)) for n in range(8)}, "n": 1}, tmp_path / "ck")
    plans = []
    plan = reads.ReadPlanner.plan
    reads.ReadPlanner.plan = lambda self: plans.append(plan(self)) or plans[-1]  # type: ignore[func-returns-value, method-assign]
    for policy, times in ((True, 1), (False, 2)):
        target = {str(n): torch.zeros(100_000) for n in range(8)}
        report = dcp.load({"t": target, "n": 0}, tmp_path / "ck", io={"broadcast": policy})
        assert all((target[str(n)] == n).all() for n in range(8))
        read = torch.tensor(report.bytes_read)
        dist.all_reduce(read)
        assert times * 8 * 400_000 <= read.item() < (times + 0.5) * 8 * 400_000
    assert [len([*each.chunks, *each.boxes]) for each in plans] == [8, 8]


@on_ranks(4)
def test_targets_of_every_kind_are_filled_by_other_ranks(tmp_path: Path) -> None:
    """Optimizer state, casts, targets that are not contiguous, and ranks of which some want more than others."""
    _use_small_windows()
    model, optimizer = build("fsdp2_hsdp")
    train(model, optimizer, 2)
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "whole")
    other, fresh = build("fsdp2_hsdp", seed=1)
    dcp.load({"model": other, "optim": fresh}, tmp_path / "whole", io={"broadcast": True})
    expected, found = whole_state(model, optimizer), whole_state(other, fresh)
    assert all(same_bytes(expected[key], found[key]) for key in expected if isinstance(expected[key], torch.Tensor))

    saved = torch.randn(30, 50)
    large = torch.randn(400, 300)
    dcp.save({"t": {"a": saved, "b": saved + 1, "c": large}}, tmp_path / "plain")
    half = torch.zeros(30, 50, dtype=torch.float16)
    target: dict[str, Any] = {"a": torch.zeros(50, 30).t()}
    target["b"] = half if dist.get_rank() % 2 else torch.zeros(30, 50)
    target["c"] = torch.zeros(300, 400).t() if dist.get_rank() == 1 else torch.zeros(400, 300)  # one takes it in place
    dcp.load({"t": target}, tmp_path / "plain", io={"broadcast": True})
    expected = gathered(large)[0]
    assert all(same_bytes(expected, found) for found in gathered(target["c"].contiguous()))
    assert len({tensor.sum().item() for tensor in gathered(target["a"].contiguous())}) == 1
    assert (gathered(target["b"])[0].half() == gathered(target["b"])[1].half()).all()


@on_ranks(4)
def test_a_read_that_fails_fails_everywhere(tmp_path: Path) -> None:
    _use_small_windows()
    dcp.save({"t": {str(n): torch.full((1000,), float(n)) for n in range(8)}}, tmp_path / "ck")
    if dist.get_rank() == 0:
        flip(tmp_path / "ck", "t.3")
    dist.barrier()
    target = {str(n): torch.zeros(1000) for n in range(8)}
    with pytest.raises(dcp.CheckpointCorrupt, match=r"t\.3"):
        dcp.load({"t": target}, tmp_path / "ck", io={"broadcast": True}, timeout=20)
    dcp.save({"t": target}, tmp_path / "again")  # the group of ranks has survived
