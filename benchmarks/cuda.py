"""On GPUs, as many as there are: staging against a plain copy, what a save in the background costs, and NCCL beside it.

A state of so many MiB on one device, and on all of them together if there are several, one rank for each. The JSON
file has ``machine``, ``device`` (its name, or ``cpu``), ``ranks``, ``tests`` (exit code and last line of the GPU tests;
``null`` without a GPU) and ``tables`` with ``figures``: by case and column, a value for each repetition, of the slowest
rank. Cases and columns:

- ``copy to pinned memory``, ``blocking``, ``lazy``: ``call, s``, what the call takes; ``GB/s``, bytes of the state over
  the seconds until the host has them: of the copy alone (``cudaMemcpyAsync`` and a wait), and of staging;
- ``blocking``, ``lazy``: ``complete, s``, until published; ``slowdown``, a training step beside the save ÷ one without;
- ``all-reduce``: ``alone, ms`` and ``beside a save, ms``, of 64 MiB (NCCL; gloo on a CPU), of two ranks and more.

Without CUDA it says so and ends with 3; ``--device cpu`` runs the same code there, which tells that it works.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dcp_plugin
from benchmarks._figures import Figures, no_figures, show
from benchmarks._harness import CONTEXT, Report, barrier, free_port, meet, remove
from benchmarks._options import scratch
from benchmarks._peer import IO_THREADS

NO_CUDA = 3
SMALLEST = ["--device", "cpu", "--devices", "2", "--mib", "1", "--repeats", "1"]
TESTS = "tests/system/test_cuda.py"
"""All that need a GPU."""
_TENSORS = 32
_REDUCED = 64 << 20
_STAGINGS = ("blocking", "lazy")


def _state(mib: int, device: torch.device) -> dict[str, torch.Tensor]:
    count = max(1, (mib << 20) // 4 // _TENSORS)
    return {f"layers.{number}.weight": torch.randn(count, device=device) for number in range(_TENSORS)}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    began = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - began


class _Step:
    """A step of a training: products of matrices on the device, and small work of Python."""

    def __init__(self, device: torch.device) -> None:
        width = 4096 if device.type == "cuda" else 128
        self._device, self._left = device, torch.randn(width, width, device=device)

    def __call__(self) -> None:
        product = self._left
        for _ in range(10):
            product = product @ self._left
        _wait(self._device)


def _slowest(value: float) -> float:
    if not dist.is_initialized():
        return value
    found: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return max(found)


def _copy(state: dict[str, torch.Tensor], device: torch.device, found: Figures, repeats: int) -> None:
    """The same bytes into pinned memory that is warm: what staging cannot beat."""
    pinned = device.type == "cuda"
    hosts = {key: torch.empty_like(value, device="cpu", pin_memory=pinned) for key, value in state.items()}
    nbytes = sum(value.nbytes for value in state.values())

    def copy() -> None:
        for key, value in state.items():
            hosts[key].copy_(value, non_blocking=True)

    for repetition in range(repeats + 1):
        barrier()
        seconds = _slowest(_seconds(copy, device))
        if repetition:
            found["copy to pinned memory"]["call, s"].append(seconds)
            found["copy to pinned memory"]["GB/s"].append(nbytes / 1e9 / seconds)


def _save(staging: Any, state: dict[str, torch.Tensor], device: torch.device, found: Figures, options: Any) -> None:
    """Saves beside training steps, of one way of staging."""
    nbytes, step = sum(value.nbytes for value in state.values()), _Step(device)
    saver = dcp_plugin.Checkpointer(async_save=True, staging=staging, io={"threads": IO_THREADS}, reuse=False)
    for repetition in range(options.repeats + 1):
        path = options.root / f"{staging}-{repetition}"
        alone = statistics.median(_seconds(step, device) for _ in range(5))
        _wait(device)
        barrier()
        began = time.perf_counter()
        handle = saver.save({"state": state}, path)
        called = time.perf_counter() - began
        handle.wait_staged()
        staged = time.perf_counter() - began
        beside = [_seconds(step, device)]
        while not handle.done():
            beside.append(_seconds(step, device))
        handle.wait()
        complete = time.perf_counter() - began
        figures = {"call, s": called, "GB/s": nbytes / 1e9 / staged, "complete, s": complete}
        figures["slowdown"] = statistics.mean(beside) / alone
        if repetition:
            for column, value in figures.items():
                found[staging][column].append(-_slowest(-value) if column == "GB/s" else _slowest(value))
        remove(path)
    saver.close()


def _reduce(state: dict[str, torch.Tensor], device: torch.device, found: Figures, options: Any) -> None:
    """Collectives of a training, alone and while a save is under way."""
    gradient = torch.ones(min(_REDUCED, options.mib << 20) // 4, device=device)
    saver = dcp_plugin.Checkpointer(async_save=True, io={"threads": IO_THREADS}, reuse=False)

    def milliseconds() -> float:
        return statistics.median(_seconds(lambda: dist.all_reduce(gradient), device) for _ in range(5)) * 1e3

    for repetition in range(options.repeats + 1):
        path = options.root / f"reduce-{repetition}"
        barrier()
        alone = milliseconds()
        handle = saver.save({"state": state}, path)
        beside = milliseconds()
        handle.wait()
        if repetition:
            found["all-reduce"]["alone, ms"].append(_slowest(alone))
            found["all-reduce"]["beside a save, ms"].append(_slowest(beside))
        remove(path)
    saver.close()


def _rank(rank: int, world: int, port: int, options: argparse.Namespace, results: Any) -> None:
    device = torch.device(options.device, rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
        if world > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        meet(rank, world, port)
    state, found = _state(max(1, options.mib // world), device), no_figures()
    _copy(state, device, found, options.repeats)
    for staging in _STAGINGS:
        _save(staging, state, device, found, options)
    if world > 1:
        _reduce(state, device, found, options)
    barrier()
    if rank == 0:
        results.put({case: dict(columns) for case, columns in found.items()})
    if dist.is_initialized():
        dist.destroy_process_group()


def _measure(world: int, options: argparse.Namespace) -> Figures:
    """On so many ranks, one for each device.

    Raises:
        SystemExit: If a rank fails, whose traceback is printed.
    """
    results, port = CONTEXT.Queue(), free_port()
    ranks = [CONTEXT.Process(target=_rank, args=(rank, world, port, options, results)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if failed := [number for number, rank in enumerate(ranks) if rank.exitcode]:
        raise SystemExit(f"ranks {failed} failed")
    return results.get(timeout=60)  # type: ignore[no-any-return]


def _tests() -> dict[str, Any]:
    """Run them; how they have ended."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "pytest", "-q", TESTS]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if run.returncode:
        print(run.stdout[-4000:])
    return {"exit code": run.returncode, "said": run.stdout.strip().splitlines()[-1:]}


def main() -> None:
    made = argparse.ArgumentParser(prog="python -m benchmarks cuda", description=(__doc__ or "").splitlines()[0])
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--devices", type=int, help="how many of them (default all)")
    made.add_argument("--mib", type=int, default=4096, help="of the state (default %(default)s)")
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--where", type=Path, default=Path("outputs"), help="where checkpoints are written")
    made.add_argument("--no-tests", action="store_true", help="only measure")
    made.add_argument("--json", type=Path, help="where the figures go (default outputs/benchmark-cuda.json)")
    options = made.parse_args()
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured (--device cpu runs the same code on the CPU)")
        raise SystemExit(NO_CUDA)
    world = options.devices or (torch.cuda.device_count() if on_gpu else 1)
    tests = _tests() if on_gpu and not options.no_tests else None
    report = Report("cuda", options)
    report.say(device=torch.cuda.get_device_name(0) if on_gpu else "cpu", ranks=world, tests=tests)
    with scratch(options.where) as root:
        options.root = root
        for ranks in sorted({1, world}):
            show(report, f"{ranks} device(s), {options.mib} MiB in all", _measure(ranks, options))
    report.close()
    if tests and tests["exit code"]:
        raise SystemExit("GPU tests failed")


if __name__ == "__main__":
    main()
