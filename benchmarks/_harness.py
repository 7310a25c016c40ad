"""Runs peers against each other: on real ranks, interleaved, each result checked byte for byte before it counts.

The cases of a repetition are run one after another, in an order of its own (:func:`shuffled`), so whatever else the
machine does hits all of them alike. The first repetition warms up and is thrown away. A rank's time is that of its
call, between barriers; the case's is that of its slowest rank. CPU seconds are those of all threads of all ranks.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import random
import shutil
import socket
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks import _machine
from benchmarks._peer import OURS, Peer, State

COLUMNS = 256  # of a tensor; a row is 1 KiB
_ROW = COLUMNS * 4

CONTEXT = mp.get_context("forkserver")
"""Ranks are forked from a process that has imported torch, or most of a short run would be imports."""
CONTEXT.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "dcp_plugin.api"])


T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """One run of one peer: on one rank, or of all of them."""

    seconds: float
    cpu: float
    peak: int
    """Memory over what was in use before, the largest of all ranks."""
    read: int
    """Bytes read through system calls, metadata included."""
    requests: int = 0
    """To an object store."""
    moved: int = 0
    """Bytes to and from an object store."""

    @staticmethod
    def of_all(ranks: Iterable[Sample]) -> Sample:
        ranks = list(ranks)
        return Sample(
            max(rank.seconds for rank in ranks),
            sum(rank.cpu for rank in ranks),
            max(rank.peak for rank in ranks),
            sum(rank.read for rank in ranks),
            sum(rank.requests for rank in ranks),
            sum(rank.moved for rank in ranks),
        )


Samples = dict[str, list[Sample]]


def on_ranks(world: int, function: Callable[..., Samples], *args: Any) -> Samples:
    """``function(*args)`` on every rank of a new process group (none for one rank); the samples of all together."""
    results = CONTEXT.Queue()
    port = free_port()
    ranks = [
        CONTEXT.Process(target=_rank, args=(results, rank, world, port, function, args), daemon=True)
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    found = {}
    for _ in ranks:
        number, result, error = results.get(timeout=3600)
        if error:
            raise SystemExit(f"rank {number} failed:\n{error}")
        found[number] = result
    for rank in ranks:
        rank.join()
    return {
        name: [Sample.of_all(samples) for samples in zip(*(found[rank][name] for rank in range(world)), strict=True)]
        for name in found[0]
    }


def _rank(results: Any, rank: int, world: int, port: int, function: Callable[..., Samples], args: Any) -> None:
    try:
        meet(rank, world, port)
        results.put((rank, function(*args), ""))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def meet(rank: int, world: int, port: int, address: str = "127.0.0.1") -> None:
    """Make this process a rank: one of several, or one without a process group."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    if world > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=600))


def interleaved(
    peers: list[Peer], repeats: int, before: Callable[[Peer], None], run: Callable[[Peer], None]
) -> Samples:
    """Time ``run`` of all peers in turn; ``before`` is not timed, and neither is the first repetition."""
    samples: Samples = {peer.name: [] for peer in peers}
    for repetition in range(repeats + 1):
        for peer in shuffled(peers, repetition):
            before(peer)
            barrier()
            sample = _sample(lambda peer=peer: run(peer))  # type: ignore[misc]
            if repetition:
                samples[peer.name].append(sample)
            barrier()
    return samples


def shuffled(cases: list[T], repetition: int) -> list[T]:
    """The order of one repetition, the same on all ranks and in every run.

    If the order only rotated, a case would always come after the same other one. What that leaves behind counts: a
    virtual machine gives freed memory back to its host, and who takes it again pays for that with CPU time.
    """
    return random.Random(repetition).sample(cases, len(cases))


def _sample(run: Callable[[], None]) -> Sample:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    memory, read = _machine.status_bytes("VmRSS"), _machine.bytes_read()
    began, cpu = time.perf_counter(), time.process_time()
    run()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    peak = max(0, _machine.status_bytes("VmHWM") - memory)
    return Sample(seconds, cpu, peak, _machine.bytes_read() - read)


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def sizes_of(kind: str, mib: int) -> list[int]:
    """Bytes of the tensors of a state: ``mixed``, 200 from 4 KiB to 32 MiB; or so many of 4 KiB."""
    if kind != "mixed":
        return [4096] * int(kind)
    powers = [4096 * (32 << 20 >> 12) ** (n / 199) for n in range(200)]
    scale = mib * 2**20 / sum(powers)
    return [max(4096, int(size * scale) // 4096 * 4096) for size in powers]


def build(kind: str, mib: int, filled: bool = True) -> State:
    """This rank's state: row-sharded over all ranks, if there are several. Names and order as in a model."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    generator = torch.Generator().manual_seed(dist.get_rank() if world > 1 else 0)
    mesh = init_device_mesh("cpu", (world,)) if world > 1 else None
    state: State = {}
    sizes = sizes_of(kind, mib)
    order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(0)).tolist()
    for number, slot in enumerate(order):
        local = torch.zeros(sizes[slot] // _ROW // world, COLUMNS)
        if filled:
            local.view(torch.int32).random_(generator=generator)
        state[f"layers.{number}.weight"] = DTensor.from_local(local, mesh, [Shard(0)]) if mesh else local
    return state


def local_of(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def check(peer: Peer, state: State, path: Path, target: State) -> None:
    """Load into ``target`` and compare every byte.

    Raises:
        AssertionError: Naming peer and key.
    """
    for value in target.values():
        local_of(value).zero_()
    peer.load(target, path)
    assert_same(peer, state, target)


def assert_same(peer: Peer, state: State, target: State) -> None:
    for key, value in state.items():
        one, other = local_of(value), local_of(target[key])
        same = torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        assert same, f"{peer.name} did not restore {key}: its figures would mean nothing"


def remove(path: Path) -> None:
    """On one rank; then nobody pays for data that others have left unwritten."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
    barrier()


def sync_files(path: Path) -> None:
    """Make this rank's share of a directory's files durable, for peers that do not. Costs nothing for others."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for file in sorted(file for file in path.rglob("*") if file.is_file())[rank::world]:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def forget(path: Path) -> None:
    """Drop a directory's files from the page cache."""
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Report:
    """Prints tables and keeps what is in them for the JSON file."""

    def __init__(self, name: str, options: Any) -> None:
        self._name = name
        self._out: Path = options.json or Path("outputs") / f"benchmark-{name}.json"
        self._load = _machine.busy_cores()
        self._said = {
            "benchmark": name,
            "options": {key: str(value) for key, value in vars(options).items()},
            "machine": _machine.describe(),
            "load_before": self._load,
        }
        self._tables: list[dict[str, Any]] = []
        for line in (*(f"{key}: {value}" for key, value in _machine.describe().items()), _machine.busy(self._load)):
            if line:
                print(line)

    def table(self, title: str, samples: Samples, columns: dict[str, Callable[[Sample], float]] | None = None) -> None:
        """Medians, the span of the times, and how many times ours each of them took."""
        extra = columns or {}
        ours = statistics.median(sample.seconds for sample in samples[OURS])
        ours_cpu = statistics.median(sample.cpu for sample in samples[OURS])
        print(f"\n{title}")
        head = f"{'':38}{'seconds':>9}{'min':>8}{'max':>8}{'÷ ours':>8}{'CPU s':>8}{'÷ ours':>8}{'extra MiB':>11}"
        print(head + "".join(f"{name:>{len(name) + 3}}" for name in extra))
        rows = []
        for name, runs in samples.items():
            times = [run.seconds for run in runs]
            median, cpu = statistics.median(times), statistics.median(run.cpu for run in runs)
            peak = statistics.median(run.peak for run in runs) / 2**20
            more = {key: statistics.median(of(run) for run in runs) for key, of in extra.items()}
            print(
                f"{name:38}{median:9.3f}{min(times):8.3f}{max(times):8.3f}{median / ours:8.2f}{cpu:8.3f}"
                f"{cpu / ours_cpu:8.2f}{peak:11.1f}" + "".join(f"{v:{len(key) + 3}.5g}" for key, v in more.items())
            )
            rows.append(
                {
                    "peer": name, "seconds": times, "median": median, "over_ours": median / ours,
                    "cpu": cpu, "cpu_over_ours": cpu / ours_cpu, "extra_mib": peak, **more,
                }
            )  # fmt: skip
        self._tables.append({"title": title, "rows": rows})

    def say(self, **more: Any) -> None:
        """Keep what figures depend on beside machine and options."""
        self._said |= more

    def note(self, row: dict[str, Any]) -> None:
        """Keep figures that were printed in another form."""
        self._tables.append(row)

    def close(self) -> None:
        after = _machine.busy_cores()
        print(f"\n{self._load:.1f} cores busy before, {after:.1f} after; written to {self._out}")
        self.say(load_after=after)
        self.write()

    def write(self) -> None:
        """Write the figures so far, for a benchmark that a time limit may end."""
        self._out.parent.mkdir(parents=True, exist_ok=True)
        said = {**self._said, "tables": self._tables}
        self._out.write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n")
