"""On a GPU: device tensors, NCCL, fused optimizers, CPU-offloaded FSDP. Skipped where there is none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dcp_plugin as dcp
from tests.compare import assert_same
from tests.launch import on_ranks
from tests.layouts import Net, whole_state

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _fsdp2(model: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cuda", (1,))
    fully_shard(model.block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "fsdp1": lambda model: FullyShardedDataParallel(model, use_orig_params=True),
    "fsdp1 flat": FullyShardedDataParallel,
    "fsdp1 offloaded": lambda model: FullyShardedDataParallel(
        model, cpu_offload=CPUOffload(True), use_orig_params=True
    ),
    "fsdp2": _fsdp2,
    "fsdp2 offloaded": lambda model: _fsdp2(model, offload_policy=CPUOffloadPolicy()),
    "compiled": torch.compile,
}


def _make(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = WRAPS[kind](Net().cuda())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused="offloaded" not in kind)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        model(torch.randn(8, 6, generator=generator).cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _use_nccl() -> None:
    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", 0))
    warnings.simplefilter("ignore")


@on_ranks(1)
def test_every_wrapper_on_a_gpu_loads_what_any_other_saved(tmp_path: Path) -> None:
    _use_nccl()
    saved = {}
    for kind in WRAPS:
        model, optimizer = _make(kind, 0)
        _train(model, optimizer, 3)
        dcp.save({"model": model, "optim": optimizer}, tmp_path / kind)
        saved[kind] = whole_state(model, optimizer)
    for kind in WRAPS:
        for source in WRAPS:
            model, optimizer = _make(kind, 1)
            dcp.load({"model": model, "optim": optimizer}, tmp_path / source)
            state = whole_state(model, optimizer)
            hyper = [key for key in state if key.endswith(".fused")]  # differs for the offloaded ones
            assert_same(
                {key: value for key, value in state.items() if key not in hyper},
                {key: value for key, value in saved[source].items() if key not in hyper},
            )
            devices = {slot.device.type for slots in optimizer.state.values() for slot in slots.values()}
            assert devices <= {"cpu", "cuda"}
            if source == kind:
                _train(model, optimizer, 1)


@pytest.mark.parametrize("staging", ["blocking", "lazy"])
@on_ranks(1)
def test_background_saves_from_a_gpu_hold_the_state_of_their_call(tmp_path: Path, staging: str) -> None:
    _use_nccl()
    ours = dcp.Checkpointer(async_save=True, staging=staging)
    model, optimizer = _make("fsdp2", 0)
    expected = []
    for step in range(3):
        _train(model, optimizer, 1, seed=step)
        expected.append(whole_state(model, optimizer))
        ours.save({"model": model, "optim": optimizer}, tmp_path / str(step), step)
        _train(model, optimizer, 3, seed=step)
    ours.close()
    for step, state in enumerate(expected):
        other, fresh = _make("fsdp2", 1)
        dcp.load({"model": other, "optim": fresh}, tmp_path / str(step))
        assert_same(whole_state(other, fresh), state)


@pytest.mark.parametrize("options", [{}, {"async_save": True}, {"async_save": True, "staging": "lazy"}])
@on_ranks(1, 2)
def test_a_default_device_changes_no_save_and_no_load(tmp_path: Path, world_size: int, options: dict[str, Any]) -> None:
    torch.set_default_device("cuda")
    state = {"on device": torch.randn(5, 7), "on host": torch.ones(300, device="cpu"), "number": [1, "text"]}
    ours = dcp.Checkpointer(**options)
    for number in range(2):
        ours.save(state, tmp_path / str(number))
    ours.close()
    target = {"on device": torch.zeros(5, 7), "on host": torch.zeros(300, device="cpu"), "number": None}
    dcp.load(target, tmp_path / "1")
    assert target["on device"].is_cuda and not target["on host"].is_cuda
    assert_same(target, state)
    assert dcp.verify(tmp_path / "1").ok
    assert_same(dcp.read(tmp_path / "1", include=["on device"]), {"on device": state["on device"].cpu()})


def test_the_host_copy_of_device_memory_is_pinned_and_reused(tmp_path: Path) -> None:
    model = nn.Linear(1000, 1000).cuda()
    ours = dcp.Checkpointer(async_save=True, staging="lazy")
    pool = ours._writer.pool
    places = set()
    for number in range(3):
        ours.save({"model": model}, tmp_path / str(number)).wait()
        (slab,) = pool.slabs
        assert slab.is_pinned()
        places.add(slab.data_ptr())
        del slab
    assert len(places) == 1
    ours.close()
    assert not pool.nbytes
    target = nn.Linear(1000, 1000).cuda()
    dcp.load({"model": target}, tmp_path / "2")
    assert_same(target.state_dict(), model.state_dict())


def test_a_save_without_device_memory_may_follow_one_with_it(tmp_path: Path) -> None:
    ours = dcp.Checkpointer(async_save=True)
    for device in ("cuda", "cpu", "cuda"):
        ours.save({"x": torch.ones(1000, device=device)}, tmp_path / "ck")
    ours.close()
    assert dcp.verify(tmp_path / "ck").ok


def test_a_lazy_copy_waits_for_what_the_device_has_still_to_compute_and_is_waited_for(tmp_path: Path) -> None:
    model = nn.Linear(4096, 4096, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ours = dcp.Checkpointer(async_save=True, staging="lazy")
    big = torch.randn(4096, 4096, device="cuda")
    for number in range(3):
        with torch.no_grad():
            product = big
            for _ in range(20):
                product = product @ big / 64
            model.weight.copy_(product)
        ours.save({"model": model}, tmp_path / str(number))
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        target = nn.Linear(4096, 4096, bias=False).cuda()
        ours.load({"model": target}, tmp_path / str(number))
        assert_same({"w": target.weight.detach()}, {"w": product})
    ours.close()


def test_what_a_gpu_saved_loads_on_the_host_and_back(tmp_path: Path) -> None:
    big = torch.randn(3 << 19, dtype=torch.float64, device="cuda")
    dcp.save({"t": big, "half": big.bfloat16(), "turned": big.reshape(512, -1).t()}, tmp_path / "ck")
    target = {
        "t": torch.zeros_like(big, device="cpu"),
        "half": torch.zeros_like(big, dtype=torch.bfloat16),
        "turned": torch.zeros(big.numel() // 512, 512, dtype=torch.float64, device="cuda"),
    }
    dcp.load(target, tmp_path / "ck")
    assert_same(target, {"t": big, "half": big.bfloat16(), "turned": big.reshape(512, -1).t()})


def test_what_the_device_has_still_to_compute_is_saved_and_tensors_of_many_blocks_come_back(tmp_path: Path) -> None:
    """Copies run on streams of their own: they must wait for the caller's work, and blocks for the copies."""
    big = torch.randn(4096, 4096, device="cuda")
    product = big
    for _ in range(20):
        product = product @ big / 64
    state = {"product": product, "turned": product.t(), "columns": product[:, 100:3000], "half": product.half()}
    dcp.save(state, tmp_path / "ck")
    target = {key: torch.zeros_like(value) for key, value in state.items()}
    dcp.load(target, tmp_path / "ck")
    assert_same(target, state)
