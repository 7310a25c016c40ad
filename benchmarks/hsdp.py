"""HSDP: how evenly replicas share the writing, and what reading once and passing on costs and saves.

*Balance* is planned in one process: weights and Adam state of a 1B-parameter LLM, 8 shards and so many replicas.
*Broadcast* runs real ranks, as DDP and as HSDP 2x2, which load with ``io.broadcast`` off, on and ``"auto"`` in turn.
From the disk of one host, where the second reader of a byte finds it in the page cache, so what is measured is what the
process group costs; from a file server of a limited rate, which one or several hosts have mounted, each with a page
cache of its own (``_slow_mount.py``); and from an object store behind a link of 1 Gbit/s (``_link.py``). What the hosts
pass on goes over the loopback, which is as fast as their network would have to be.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
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
from benchmarks import _buckets, _machine
from benchmarks._harness import CONTEXT, free_port, meet
from benchmarks._options import scratch
from benchmarks._slow_mount import mounted
from benchmarks._slow_mount import why_not as why_not_mounted
from dcp_plugin.core.planning.load_balance import HeldBoxes, balance_load
from dcp_plugin.core.tensors._torch import sharded_value

HIDDEN, VOCABULARY, LAYERS, SHARDS = 2048, 32000, 16, 8
SMALLEST = ["--replicas", "2", "--mib", "1", "--ranks", "2", "--repeats", "1", "--media", "disk"]
MEDIA = ("disk", "mount", "store")
POLICIES: dict[Any, str] = {False: "off", True: "on", "auto": "auto"}
_NEW_HOST_NAME = 0x04000000  # CLONE_NEWUTS
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
    parts = balance_load(held, np.zeros(world_size, np.int64), 1 << 30)
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


@dataclass(frozen=True)
class Scene:
    """Where ranks load from.

    Args:
        places: Of the checkpoints, for each host; a URL, or a directory.
        saves: Where they are saved to.
        cold: Whether what was read before is out of the page cache.
        served: Bytes that a server has sent so far, if there is one.
    """

    title: str
    places: Sequence[str]
    saves: str
    cold: bool
    served: Any = None

    def moved(self) -> int:
        if self.served is not None:
            return int(self.served.value)
        return _buckets.counts()["bytes_out"] if _is_url(self.saves) else 0


def _is_url(place: str) -> bool:
    return "://" in place


def _become(host: str) -> None:
    """Be on another host, by the name that a process goes by."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_HOST_NAME):
        raise OSError(ctypes.get_errno(), "no host name of its own")
    socket.sethostname(host)


def _rank(rank: int, world: int, port: int, kind: str, scene: Scene, mib: int, repeats: int, out: Any) -> None:
    hosts = len(scene.places)
    host, first_of_host = rank * hosts // world, rank % (world // hosts) == 0
    if hosts > 1:
        _become(f"host{host}")
    meet(rank, world, port)
    saved, model = _model(kind, mib, 0), _model(kind, mib, 1)
    dcp.save({"model": saved}, f"{scene.saves}/{kind}")
    dist.barrier()
    path = f"{scene.places[host]}/{kind}"
    loaders = {policy: dcp.Checkpointer(io={"broadcast": policy}) for policy in POLICIES}
    for repetition in range(repeats + 1):
        for policy, loader in loaders.items():
            _forget(model)
            if scene.cold and first_of_host and not _is_url(path):
                _drop(Path(path))
            dist.barrier()
            before = scene.moved()
            dist.barrier()
            begin = time.perf_counter()
            report = loader.load({"model": model}, path)
            dist.barrier()
            seconds = time.perf_counter() - begin
            moved = scene.moved() - before
            assert _same(saved, model), "what was loaded differs from what was saved"
            read = torch.tensor(report.bytes_read)
            dist.all_reduce(read)
            if rank == 0 and repetition:
                out.put((policy, seconds, read.item(), moved))
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


def broadcast(kind: str, world: int, mib: int, repeats: int, scene: Scene) -> dict[str, Any]:
    """Seconds and bytes of each policy, in turn."""
    out = CONTEXT.Queue()
    args = (world, free_port(), kind, scene, mib, repeats, out)
    ranks = mp.start_processes(_rank, args, world, join=False, start_method="forkserver")
    found = list(iter(lambda: out.get(timeout=600), None))
    while not ranks.join():
        pass
    unique = min(read for _, _, read, _ in found)
    row: dict[str, Any] = {"wrapper": kind, "ranks": world, "from": scene.title, "hosts": len(scene.places)}
    for policy, name in POLICIES.items():
        runs = [(seconds, read, moved) for used, seconds, read, moved in found if used == policy]
        seconds = [one for one, _, _ in runs]
        row[f"seconds {name}"] = statistics.median(seconds)
        row[f"spread {name}"] = (min(seconds), max(seconds))
        row[f"read ÷ unique, {name}"] = max(read for _, read, _ in runs) / unique
        row[f"served ÷ unique, {name}"] = max(moved for *_, moved in runs) / unique
    return row


@contextmanager
def _on_disk(where: Path, cold: bool) -> Iterator[Scene]:
    with scratch(where) as root:
        yield Scene("local disk, cold" if cold else "local disk, warm", [str(root)], str(root), cold)


@contextmanager
def _on_mount(where: Path, hosts: int, rate: float) -> Iterator[Scene]:
    """A file server of so many 10^6 bytes per second for all hosts."""
    with scratch(where) as root:
        points = [root / f"host{host}" for host in range(hosts)]
        behind = root / "behind"
        behind.mkdir()
        with mounted(CONTEXT, behind, points, rate) as served:
            yield Scene(f"file server of {rate:g} MB/s", list(map(str, points)), str(behind), True, served)


@contextmanager
def _in_store(over: str) -> Iterator[Scene]:
    with _buckets.served(over) as endpoint:
        _buckets.use(endpoint)
        place = _buckets.url(Path("hsdp"))
        yield Scene(f"object store, {_buckets.SCENES[over].said}", [place], place, True)


def _scenes(options: argparse.Namespace, world: int) -> Iterator[AbstractContextManager[Scene]]:
    """What the machine can show of what was asked for."""
    if "disk" in options.media:
        yield _on_disk(options.where, cold=False)
        yield _on_disk(options.where, cold=True)
    if "mount" in options.media:
        if lacks := why_not_mounted():
            print(f"left out: a slow mount ({lacks})")
        else:
            yield from (_on_mount(options.where, hosts, rate) for rate in options.rates for hosts in {1, 2, world})
    if "store" in options.media:
        if lacks := _buckets.missing("link"):
            print(f"left out: an object store over a link ({lacks})")
        else:
            yield _in_store("link")


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks hsdp", description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 8, 64, 128], help="(default %(default)s)")
    parser.add_argument("--mib", type=int, default=256, help="parameters of the loaded model (default %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="(default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--media", nargs="+", default=list(MEDIA), choices=MEDIA, help="(default %(default)s)")
    rates = "of the file server, 10^6 bytes per second (default %(default)s)"
    parser.add_argument("--rates", type=float, nargs="+", default=[100.0, 400.0], help=rates)
    parser.add_argument("--where", type=Path, default=Path("outputs"), help="where the checkpoint is written")
    parser.add_argument("--json", type=Path, default=Path("outputs/benchmark-hsdp.json"))
    options = parser.parse_args()
    load = _machine.busy_cores()
    print(f"{load:.1f} of {os.cpu_count()} cores busy before")
    rows = [balance(replicas) for replicas in options.replicas]
    print(*map(_line, rows), sep="\n")
    for world in options.ranks:
        for made in _scenes(options, world):
            with made as scene:
                for kind in ("DDP", "HSDP") if world > 2 else ("DDP",):
                    rows.append(broadcast(kind, world, options.mib, options.repeats, scene))
                    print(_line(rows[-1]), flush=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"load": load, "rows": rows}, indent=2, ensure_ascii=False) + "\n")


def _line(row: dict[str, Any]) -> str:
    return "; ".join(f"{name} {_text(value)}" for name, value in row.items())


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return " to ".join(map(_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
