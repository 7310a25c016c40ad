"""Does gathering the state copy anything? Peak memory over that of the trained model, per wrapper.

Every wrapper runs on its own ranks; the figure is the largest of all ranks, as a share of that rank's own state.
Resident memory is what the kernel counts (peak reset through /proc/self/clear_refs); with CUDA, the allocator's peak.
FSDP1 makes its sharded state dict by gathering one flat parameter at a time and copying this rank's shards out of it;
that cost is torch's, and is what the table shows for it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks._harness import CONTEXT
from dcp_plugin.core.state.named_objects import adapters_of, gather_state

LAYERS = 16
RANKS = {"plain": 1, "ddp": 2, "fsdp1": 2, "fsdp2": 2, "hsdp": 4}
SMALLEST = ["--mib", "1", "--wrappers", "plain", "fsdp2"]


def _wrap(kind: str, model: nn.Module, device: torch.device) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp1":
        for number, layer in enumerate(model):
            model[number] = FullyShardedDataParallel(layer, device_id=device, use_orig_params=True)
        return FullyShardedDataParallel(model, device_id=device, use_orig_params=True)
    if kind in ("fsdp2", "hsdp"):
        world = dist.get_world_size()
        shape = (world,) if kind == "fsdp2" else (2, world // 2)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


class _Peak:
    """Peak memory since the start of the block, over what was in use at its start, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def __enter__(self) -> _Peak:
        Path("/proc/self/clear_refs").write_text("5")
        self._rss = _status("VmRSS")
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._allocated = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *args: object) -> None:
        self.rss = max(0, _status("VmHWM") - self._rss)
        self.cuda = torch.cuda.max_memory_allocated() - self._allocated if self._cuda else 0


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {name} in /proc/self/status")


def _rank(rank: int, world: int, port: int, kind: str, mib: int, device_type: str, out: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=timedelta(seconds=120))
    width = int((mib * 2**20 / 4 / LAYERS) ** 0.5)
    model = _wrap(kind, nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)]).to(device), device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, width, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with _Peak(device) as ours:
        leaves, _ = gather_state(adapters_of({"model": model, "optim": optimizer}))
    held = sum(chunk.nbytes for chunk in _tensors(leaves))
    del leaves
    with _Peak(device) as stock:
        state = get_state_dict(model, optimizer)
    del state
    out.put({"held": held, "ours": ours.rss, "stock": stock.rss, "ours_cuda": ours.cuda, "stock_cuda": stock.cuda})
    dist.destroy_process_group()


def _tensors(leaves: dict[str, Any]) -> list[torch.Tensor]:
    from dcp_plugin.core.tensors._torch import is_tensor, sharded_value

    return [chunk.tensor for leaf in leaves.values() if is_tensor(leaf) for chunk in sharded_value(leaf).chunks]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks state_memory", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--mib", type=int, default=1024, help="parameters of the whole model, MiB (default %(default)s)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--wrappers", nargs="+", choices=RANKS, default=list(RANKS), help="(default all)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    on_one = {"plain": 1, "fsdp1": 1, "fsdp2": 1}
    cases = {
        kind: world
        for kind, world in (on_one if options.device == "cuda" else RANKS).items()
        if kind in options.wrappers
    }
    rows = []
    print(
        f"{options.mib} MiB of parameters, SGD with momentum, {options.device}; extra peak memory of gathering, MiB\n"
    )
    print(
        f"{'wrapper':10}{'ranks':>6}{'state per rank':>16}{'ours':>10}{'stock':>10}{'ours cuda':>11}{'stock cuda':>12}"
    )
    for kind, world in cases.items():
        out = CONTEXT.Queue()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        args = (world, port, kind, options.mib, options.device, out)
        ranks = mp.start_processes(_rank, args, world, join=False, start_method="forkserver")
        found = [out.get(timeout=300) for _ in range(world)]
        while not ranks.join():
            pass
        row = {name: max(rank[name] for rank in found) / 2**20 for name in found[0]}
        rows.append({"wrapper": kind, "ranks": world, **row})
        print(
            f"{kind:10}{world:6}{row['held']:16.1f}{row['ours']:10.1f}{row['stock']:10.1f}"
            f"{row['ours_cuda']:11.1f}{row['stock_cuda']:12.1f}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
