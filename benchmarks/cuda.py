"""On a GPU: staging against a pinned copy, calls of large saves, training beside a save, loads, and FSDP2 over NCCL.

It needs a checkout and a Python with torch, numpy, safetensors and xxhash: no network, no installation. Each section
runs in processes of its own, in this order, until ``--seconds`` are over. Figures are written when they are measured,
so a time limit or a crash loses only the rest. The JSON file has ``device``, ``left_out`` (with the reasons) and
``tables``: by case and column, a value for each repetition, of the slowest rank. The Markdown file next to it is one
table, to be pasted into an issue. Sections, their cases and columns:

- ``staging``: ``GB/s`` until the host has the bytes, of a copy into pinned memory (``cudaMemcpyAsync`` and a wait) and
  of background saves; ``call, s``, what the call of the save takes; ``complete, s``, until it is published;
- ``training``: a step beside a background save, and one without;
- ``loads``: into the memory of the device, from the page cache (warm) or from the disk (cold);
- ``fsdp2``: one rank for each device: calls, training and loads with NCCL (gloo on a CPU);
- ``sizes``: calls for a state of so many MiB. The first call of a saver allocates and pins the host memory.

Without CUDA it says so and ends with 3; ``--device cpu`` runs the same code there, which tells that it works.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Asks the driver's library for devices: a call of CUDA in the server of the ranks would spoil it in each of them.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dcp_plugin
from benchmarks._figures import Figures, markdown, no_figures, print_table
from benchmarks._harness import CONTEXT, Report, assert_same, barrier, forget, free_port, meet, remove
from benchmarks._machine import file_system_of
from benchmarks._options import scratch
from benchmarks._peer import IO_THREADS, State
from benchmarks.peers import ours, safetensors_file, stock, torch_save

NO_CUDA = 3
SMALLEST = ["--device", "cpu", "--devices", "2", "--mib", "1", "--sizes", "1", "2", "--repeats", "1"]
_TENSORS = 32
_ONCE = 16384
"""MiB from which on a save is measured once."""
_STAGINGS = ("blocking", "lazy")


@dataclass(frozen=True)
class _Run:
    """What a section works with, on one rank."""

    device: torch.device
    options: argparse.Namespace
    results: Any
    rank: int

    def add(self, case: str, **columns: float) -> None:
        """Send figures of the slowest rank. In names, ``__`` stands for a comma and ``_`` for a space."""
        for column, value in columns.items():
            slowest = -_largest(-value) if column.startswith("GB") else _largest(value)
            if self.rank == 0:
                self.results.put((case, column.replace("GB_s", "GB/s").replace("__", ", ").replace("_", " "), slowest))

    def leave_out(self, why: str) -> None:
        if self.rank == 0:
            self.results.put((None, "", why))

    def seconds(self, work: Callable[[], Any]) -> float:
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _largest(value: float) -> float:
    if not dist.is_initialized():
        return value
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return float(max(values))


def _saver(staging: Any) -> dcp_plugin.Checkpointer:
    return dcp_plugin.Checkpointer(async_save=True, staging=staging, io={"threads": IO_THREADS}, reuse=False)


def _weights(mib: int, device: torch.device) -> nn.Module:
    """Return trained parameters of so many MiB: lazy staging copies nothing else later."""
    count = max(1, (mib << 20) // 4 // _TENSORS)
    return nn.ParameterList(torch.randn(count, device=device) for _ in range(_TENSORS))


class _Training:
    """Linear layers with AdamW, sharded over all ranks if there is a process group."""

    def __init__(self, run: _Run) -> None:
        on_gpu = run.device.type == "cuda"
        width, self._wait = (4096 if on_gpu else 256), run.wait
        layers = max(2, (run.options.mib << 20) // (width * width * 4))
        self.model = nn.Sequential(*(nn.Linear(width, width, device=run.device) for _ in range(layers)))
        if dist.is_initialized():
            mesh = init_device_mesh(run.device.type, (dist.get_world_size(),))
            for layer in self.model:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=on_gpu)
        self._input = torch.randn(width, width, device=run.device)
        self.state = {"model": self.model, "optim": self.optimizer}

    def step(self) -> float:
        """Return the seconds of a step."""
        self._wait()
        began = time.perf_counter()
        self.model(self._input).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._wait()
        return time.perf_counter() - began


def _staging(run: _Run) -> None:
    model = _weights(run.options.mib, run.device)
    tensors = [parameter.detach() for parameter in model.parameters()]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    hosts = [torch.empty_like(tensor, device="cpu", pin_memory=run.device.type == "cuda") for tensor in tensors]

    def copy() -> None:
        for host, tensor in zip(hosts, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)

    for repetition in range(run.options.repeats + 1):
        seconds = run.seconds(copy)
        if repetition:
            run.add("copy to pinned memory", call__s=seconds, GB_s=nbytes / 1e9 / seconds)
    hosts.clear()
    for staging in _STAGINGS:
        saver = _saver(staging)
        for repetition in range(run.options.repeats + 1):
            _save(run, saver, {"model": model}, staging if repetition else f"{staging}, first", nbytes)
        saver.close()


def _save(run: _Run, saver: dcp_plugin.Checkpointer, state: dict[str, Any], case: str, nbytes: int) -> None:
    path = run.options.root / "saved"
    run.wait()
    barrier()
    began = time.perf_counter()
    handle = saver.save(state, path)
    called = time.perf_counter() - began
    handle.wait_staged()
    staged = time.perf_counter() - began
    handle.wait()
    run.add(case, call__s=called, GB_s=nbytes / 1e9 / staged, complete__s=time.perf_counter() - began)
    remove(path)


def _sizes(run: _Run) -> None:
    for mib in run.options.sizes:
        if why := _does_not_fit(run, mib << 20):
            run.leave_out(f"a save of {mib} MiB: {why}")
        else:
            _size(run, mib)


def _size(run: _Run, mib: int) -> None:
    state, path = {"model": _weights(mib, run.device)}, run.options.root / "saved"
    if mib < _ONCE:
        seconds = run.seconds(lambda: dcp_plugin.save(state, path, io={"threads": IO_THREADS}))
        run.add(f"{mib} MiB, not in the background", call__s=seconds, complete__s=seconds)
        remove(path)
    for staging in _STAGINGS:
        saver = _saver(staging)
        for repetition in range(run.options.repeats + 1 if mib < _ONCE else 1):
            _save(run, saver, state, f"{mib} MiB, {staging}{'' if repetition else ', first'}", mib << 20)
        saver.close()


def _does_not_fit(run: _Run, nbytes: int) -> str:
    """Return what has no room for a state of this size, its host copy and its files; empty if all have."""
    free = {"the disk": shutil.disk_usage(run.options.root).free, "the host": _available_memory()}
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
        free["the device"] = torch.cuda.mem_get_info(run.device)[0]
    lacking = [f"{place} has {room >> 20} MiB free" for place, room in free.items() if room < 1.2 * nbytes]
    return ", ".join(lacking)


def _available_memory() -> int:
    """Return the available memory in bytes: of the machine, or less if a control group limits it."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        return min(available, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no limit, or none that this container shows
        return available


def _beside(run: _Run, training: _Training, case: str, staging: str) -> None:
    """Steps alone, and steps beside a save."""
    saver = _saver(staging)
    for repetition in range(run.options.repeats + 1):
        path = run.options.root / "saved"
        alone = statistics.median(training.step() for _ in range(5))
        barrier()
        began = time.perf_counter()
        handle = saver.save(training.state, path)
        called = time.perf_counter() - began
        beside = [training.step()]
        while not _largest(handle.done()):  # the same number of steps on all ranks, which meet in each
            beside.append(training.step())
        handle.wait()
        if repetition:
            mean = statistics.mean(beside)
            run.add(case, call__s=called, step_alone__ms=alone * 1e3, step_beside__ms=mean * 1e3, slowdown=mean / alone)
        remove(path)
    saver.close()


def _training(run: _Run) -> None:
    training = _Training(run)
    training.step()
    for staging in _STAGINGS:
        _beside(run, training, staging, staging)


def _loads(run: _Run) -> None:
    count = max(1, (run.options.mib << 20) // 4 // _TENSORS)
    state: State = {f"layers.{number}.weight": torch.randn(count, device=run.device) for number in range(_TENSORS)}
    nbytes = sum(value.nbytes for value in state.values())
    target = {key: torch.zeros_like(value) for key, value in state.items()}
    root = run.options.root
    ours.save(state, root / "ours")
    torch_save.save(state, root / "torch")
    safetensors_file.save(state, root / "safetensors")
    device = str(run.device)

    def of_torch(target: State, path: Path) -> None:
        target.update(torch.load(path / "state.pt", mmap=True, weights_only=True, map_location=device))

    def of_safetensors(target: State, path: Path) -> None:
        from safetensors.torch import load_file

        target.update(load_file(path / "state.safetensors", device=device))

    cases: dict[str, tuple[Callable[[State, Path], None], Path]] = {
        "dcp_plugin": (ours.load, root / "ours"),
        "stock DCP on the same checkpoint": (stock.load, root / "ours"),
        "torch.load(mmap=True)": (of_torch, root / "torch"),
        "safetensors": (of_safetensors, root / "safetensors"),
    }
    for is_cold in (False, True):
        if is_cold and file_system_of(root).startswith("tmpfs"):
            run.leave_out("cold loads: the files are in memory")
            break
        for repetition in range(run.options.repeats + 1):
            for name, (load, path) in cases.items():
                filled = {key: value.zero_() for key, value in target.items()}
                if is_cold:
                    forget(path)
                seconds = run.seconds(partial(load, filled, path))
                if repetition:
                    run.add(f"{name}, {'cold' if is_cold else 'warm'}", load__s=seconds, GB_s=nbytes / 1e9 / seconds)
                elif not is_cold:
                    for key, value in state.items():
                        assert torch.equal(filled[key], value), f"{name} did not restore {key}"


def _fsdp2(run: _Run) -> None:
    training, path = _Training(run), run.options.root / "loaded"
    training.step()
    ranks = f"{dist.get_world_size()} rank(s)"
    for staging in _STAGINGS:
        _beside(run, training, f"{ranks}, {staging}", staging)
    dcp_plugin.save(training.state, path, io={"threads": IO_THREADS})
    before = {key: value.detach().clone() for key, value in training.model.state_dict().items()}
    for repetition in range(run.options.repeats + 1):
        training.step()
        barrier()
        seconds = run.seconds(lambda: dcp_plugin.load(training.state, path))
        if repetition:
            run.add(f"{ranks}, load", load__s=seconds)
    after = {key: value.detach() for key, value in training.model.state_dict().items()}
    assert_same(ours.PEERS[0], before, after)
    remove(path)


SECTIONS: dict[str, Callable[[_Run], None]] = {
    "staging": _staging,
    "training": _training,
    "loads": _loads,
    "fsdp2": _fsdp2,
    "sizes": _sizes,
}


def _rank(rank: int, world: int, port: int, name: str, options: argparse.Namespace, results: Any) -> None:
    try:
        device = torch.device(options.device, rank) if options.device == "cuda" else torch.device("cpu")
        if device.type == "cpu":
            meet(rank, 1, port)
        else:
            torch.cuda.set_device(device)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
        if name == "fsdp2":
            backend, bound = ("cpu:gloo,cuda:nccl", device) if device.type == "cuda" else ("gloo", None)
            dist.init_process_group(backend, device_id=bound)
        SECTIONS[name](_Run(device, options, results, rank))
        barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        results.put((None, "failed", f"{name}, rank {rank}: {traceback.format_exc()}"))
        raise SystemExit(1) from None


class _Results:
    """Figures as they come, written each time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._report, self._tables = Report("cuda", options), dict[str, Figures]()
        self._page = (options.json or Path("outputs/benchmark-cuda.json")).with_suffix(".md")
        self._left_out: list[str] = []
        device = torch.cuda.get_device_name(0) if options.device == "cuda" else "cpu"
        self._head = (
            f"dcp_plugin {dcp_plugin.__version__} on {device}, torch {torch.__version__}, "
            f"{options.where} ({file_system_of(options.root)}), {options.mib} MiB"
        )
        self._report.say(device=device)
        self.failed = False

    def run(self, name: str, world: int, options: argparse.Namespace, deadline: float) -> None:
        """Run a section on so many ranks. A failure, or the end of the time, ends this section only."""
        if (left := deadline - time.monotonic()) <= 0:
            self._leave_out(f"{name}, {world} rank(s): no time was left")
            return
        if name not in self._tables:
            self._tables[name] = no_figures()
            self._report.note({"title": name, "figures": self._tables[name]})
        figures = self._tables[name]
        received, port = CONTEXT.Queue(), free_port()
        ranks = [CONTEXT.Process(target=_rank, args=(n, world, port, name, options, received)) for n in range(world)]
        for rank in ranks:
            rank.start()
        while True:
            # A process is joined after it has written its queue, so what it has sent is here when it is not alive.
            has_ended = not any(rank.is_alive() for rank in ranks)
            try:
                self._take(figures, received.get(timeout=0.1))
                continue
            except queue.Empty:
                pass
            if has_ended:
                break
            left = deadline - time.monotonic()
            if left <= 0 or any(rank.exitcode for rank in ranks):
                for rank in ranks:
                    rank.kill()
        if any(rank.exitcode for rank in ranks):
            self.failed = self.failed or left > 0
            codes = ", ".join(str(rank.exitcode) for rank in ranks)
            why = f"its ranks ended with {codes}" if left > 0 else "the time was over before its end"
            self._leave_out(f"{name}, {world} rank(s): {why}")

    def _take(self, figures: Figures, result: tuple[str | None, str, Any]) -> None:
        case, column, value = result
        if case is None:
            self._leave_out(value)
            return
        figures[case][column].append(value)
        self.write()

    def _leave_out(self, why: str) -> None:
        print(f"left out: {why}")
        self._left_out.append(why)
        self.write()

    def write(self) -> None:
        self._report.say(left_out=self._left_out)
        self._report.write()
        short = [why.strip().splitlines()[-1] if "\n" in why else why for why in self._left_out]
        lines = [self._head, "", markdown(self._tables), *(f"- left out: {why}" for why in short)]
        self._page.write_text("\n".join(lines) + "\n")

    def close(self) -> None:
        for name, figures in self._tables.items():
            print_table(name, figures)
        self.write()
        self._report.close()
        print(f"the table is in {self._page}")


def main() -> None:
    made = argparse.ArgumentParser(prog="python -m benchmarks cuda", description=(__doc__ or "").splitlines()[0])
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--devices", type=int, help="how many of them for fsdp2 (default all)")
    made.add_argument("--mib", type=int, default=2048, help="of the state (default %(default)s)")
    about = "MiB of the states of which calls are measured; from 16384 on, once (default %(default)s)"
    made.add_argument("--sizes", type=int, nargs="+", default=[1024, 8192, 32768], help=about)
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--seconds", type=float, default=270.0, help="after which nothing is begun (default %(default)s)")
    made.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    made.add_argument("--where", type=Path, default=Path("outputs"), help="where checkpoints are written")
    made.add_argument("--json", type=Path, help="where the figures go (default outputs/benchmark-cuda.json)")
    options = made.parse_args()
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured (--device cpu runs the same code on the CPU)")
        raise SystemExit(NO_CUDA)
    world = options.devices or (torch.cuda.device_count() if on_gpu else 1)
    deadline = time.monotonic() + options.seconds
    with scratch(options.where) as root:
        options.root = root
        results = _Results(options)
        for name in (name for name in SECTIONS if name in options.only):
            for ranks in sorted({1, world}) if name == "fsdp2" else [1]:
                results.run(name, ranks, options, deadline)
        results.close()
    if results.failed:
        raise SystemExit("a section failed")


if __name__ == "__main__":
    main()
