"""HSDP: how evenly replicas share the writing, and what reading once and passing on costs and saves.

*Balance* is planned in one process: weights and Adam state of a 1B-parameter LLM, 8 shards and so many replicas.
*Broadcast* runs four real ranks, as HSDP 2x2 and as DDP, which load with ``read_broadcast`` off and on in turn: from
the page cache, and after the files were dropped from it. All ranks are on one machine, where the second reader of a
byte finds it in the cache, so what is measured is what the process group costs, and the bytes that storage saves.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dcp_plugin as dcp
from benchmarks._harness import CONTEXT
from dcp_plugin._torch import sharded_value
from dcp_plugin.planning.load_balance import HeldBoxes, balance_load

HIDDEN, VOCABULARY, LAYERS, SHARDS = 2048, 32000, 16, 8
SMALLEST = ["--replicas", "2", "--mib", "1", "--ranks", "2", "--repeats", "1"]
_LAYER = [*[(HIDDEN, HIDDEN)] * 4, *[(4 * HIDDEN, HIDDEN)] * 2, (HIDDEN, 4 * HIDDEN), *[(HIDDEN, 1)] * 2]
SHAPES = [(VOCABULARY, HIDDEN), *_LAYER * LAYERS, (HIDDEN, 1), (VOCABULARY, HIDDEN)] * 3


def balance(replicas: int) -> dict[str, Any]:
    """Largest ÷ mean bytes per rank."""
    world_size = SHARDS * replicas
    sizes = np.array([(rows // SHARDS, columns) for rows, columns in SHAPES for _ in range(SHARDS)])
    ranks = np.concatenate([np.arange(shard, world_size, SHARDS) for _ in SHAPES for shard in range(SHARDS)])
    count = np.full(len(sizes), replicas)
    held = HeldBoxes(sizes, np.full(len(sizes), 4), np.cumsum(count) - count, count, ranks)
    begin = time.process_time()
    parts = balance_load(held, world_size, 1 << 30)
    seconds = time.process_time() - begin
    written = np.zeros(world_size)
    np.add.at(written, ranks[held.first[parts.box] + parts.holder], parts.sizes.prod(axis=1) * 4)
    assert written.sum() == held.nbytes.sum()
    excess = float(written.max() - written.mean())
    return {
        "replicas": replicas,
        "largest ÷ mean": float(written.max() / written.mean()),
        "largest - mean, KiB": excess / 1024,
        "items": len(parts.box),
        "CPU seconds": seconds,
    }


def _model(kind: str, mib: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    width = int((mib * 2**20 / 4 / 16) ** 0.5)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(16)])
    if kind == "DDP":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


def _rank(rank: int, world: int, port: int, kind: str, root: str, mib: int, repeats: int, out: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    saved, model = _model(kind, mib, 0), _model(kind, mib, 1)
    dcp.save({"model": saved}, Path(root) / kind)
    loaders = {policy: dcp.Checkpointer(read_broadcast=policy) for policy in (False, True)}
    for repetition in range(repeats + 1):
        for cold in (False, True):
            for policy, loader in loaders.items():
                _forget(model)
                if cold and rank == 0:
                    _drop(Path(root) / kind)
                dist.barrier()
                begin = time.perf_counter()
                report = loader.load({"model": model}, Path(root) / kind)
                dist.barrier()
                seconds = time.perf_counter() - begin
                assert _same(saved, model), "what was loaded differs from what was saved"
                read = torch.tensor(report.bytes_read)
                dist.all_reduce(read)
                if rank == 0 and repetition:
                    out.put((kind, "cold" if cold else "warm", policy, seconds, read.item()))
    for loader in loaders.values():
        loader.close()
    dist.barrier()
    if rank == 0:
        out.put(None)
    dist.destroy_process_group()


def _forget(model: nn.Module) -> None:
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()


def _same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(
        torch.equal(a.tensor, b.tensor)
        for left, right in pairs
        for a, b in zip(sharded_value(left).chunks, sharded_value(right).chunks, strict=True)
    )


def _drop(checkpoint: Path) -> None:
    """Out of the page cache."""
    for path in checkpoint.iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def broadcast(kind: str, world: int, mib: int, repeats: int, where: Path) -> list[dict[str, Any]]:
    out = CONTEXT.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=where) as root:
        args = (world, port, kind, root, mib, repeats, out)
        ranks = mp.start_processes(_rank, args, world, join=False, start_method="forkserver")
        found = list(iter(lambda: out.get(timeout=600), None))
        while not ranks.join():
            pass
    unique = min(read for *_, read in found)
    rows = []
    for cache in ("warm", "cold"):
        seconds = {policy: [s for _, c, p, s, _ in found if (c, p) == (cache, policy)] for policy in (False, True)}
        read = {policy: max(b for _, c, p, _, b in found if (c, p) == (cache, policy)) for policy in (False, True)}
        rows.append(
            {
                "wrapper": kind,
                "ranks": world,
                "cache": cache,
                "seconds off": statistics.median(seconds[False]),
                "seconds on": statistics.median(seconds[True]),
                "spread off": (min(seconds[False]), max(seconds[False])),
                "spread on": (min(seconds[True]), max(seconds[True])),
                "read ÷ unique, off": read[False] / unique,
                "MiB read on": read[True] / 2**20,
            }
        )
    return rows


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks hsdp", description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 8, 64, 128], help="(default %(default)s)")
    parser.add_argument("--mib", type=int, default=256, help="parameters of the loaded model (default %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="(default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--where", type=Path, default=Path("outputs"), help="where the checkpoint is written")
    parser.add_argument("--json", type=Path, default=Path("outputs/benchmark-hsdp.json"))
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"load {load:.1f} on {os.cpu_count()} cores")
    rows = [balance(replicas) for replicas in options.replicas]
    for world in options.ranks:
        for kind in ("DDP", "HSDP") if world > 2 else ("DDP",):
            rows += broadcast(kind, world, options.mib, options.repeats, options.where)
    for row in rows:
        print(
            "; ".join(
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
            )
        )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"load": load, "rows": rows}, indent=2, ensure_ascii=False) + "\n")
