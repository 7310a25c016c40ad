"""Processes that resume with stock Lightning where this package cannot be imported.

Run as a module, on each rank, it resumes with the function ``resume`` of a module of these tests, and writes what that
returns as JSON: ``python -m tests.lightning.stock_processes MODULE LAYOUT CHECKPOINT OUT LAYOUT CHECKPOINT OUT …``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tests import launch
from tests.programs import LIGHTNING, Program


def resume_with_stock(module: str, world_size: int, jobs: Sequence[tuple[str, Path, Path]]) -> None:
    """Start the processes, with a layout, a checkpoint and a file for the results of each job."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launch.free_port())}
    sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    words = [word for job in jobs for word in job]
    processes = [
        Program(
            *("-m", "tests.lightning.stock_processes", f"tests.lightning.{module}", *words),
            imported=LIGHTNING,
            env={**os.environ, **address, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world_size)
    ]
    errors = [process.communicate()[1] for process in processes]
    # Not their exit codes: a process of stock's may end in "terminate called without an active exception" after its
    # work, where threads of torch are still running. Nothing of ours is in it.
    assert all(_done_by(jobs[-1][2], rank).exists() for rank in range(world_size)), "\n".join(errors)


def _done_by(results: Path, rank: int) -> Path:
    """The file that says that a rank has done all of its work, whatever becomes of the process then."""
    return results.with_suffix(f".done-by-{rank}")


def _main(module: str, *words: str) -> None:
    _without_this_package()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for layout, checkpoint, out in zip(words[::3], words[1::3], words[2::3], strict=True):
        results = importlib.import_module(module).resume(layout, Path(checkpoint))
        if dist.get_rank() == 0:
            Path(out).write_text(json.dumps(results))
    _done_by(Path(words[-1]), dist.get_rank()).touch()
    dist.destroy_process_group()


def _without_this_package() -> None:
    """As if it were not installed: it cannot be imported, and its entry points are not there."""
    from lightning.pytorch.trainer.connectors import callback_connector

    assert not any(name.startswith("dcp_plugin") for name in sys.modules)
    sys.modules["dcp_plugin"] = None  # type: ignore[assignment]
    callback_connector._load_external_callbacks = lambda group: []


if __name__ == "__main__":
    _main(*sys.argv[1:])
