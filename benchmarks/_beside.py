"""What a save in the background costs a training whose steps are mostly Python."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import async_save
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import dcp_plugin
from benchmarks import _harness
from benchmarks._figures import Figures, in_turn, no_figures
from benchmarks._peer import IO_THREADS, OURS, State
from benchmarks._restarts import state_of

_FEWEST = 100
"""Steps that are measured alone; as many as the last save took, if that is more."""


class _Loop:
    """Steps of small tensors and much arithmetic."""

    def __init__(self) -> None:
        self._left, self._right = torch.randn(32, 32), torch.randn(32, 32)

    def step(self) -> None:
        total = 0
        for number in range(10_000):
            total += number * number % 7
        for _ in range(100):
            self._left.add(self._right).mul_(0.5)

    def seconds(self, steps: int) -> float:
        """Of one of so many steps."""
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - began) / steps


Save = Callable[[Path], Any]
"""Begins a save; what it returns knows when it is ``done()``."""


def _savers(state: State, stack: list[Callable[[], None]]) -> dict[str, Save]:
    def ours(keeper: dcp_plugin.Keeper | None) -> Save:
        saver = dcp_plugin.Checkpointer(async_save=True, io={"threads": IO_THREADS}, reuse=False, keeper=keeper)
        stack.append(saver.close)
        return lambda path: saver.save({"state": state}, path)

    def stocks(kind: AsyncCheckpointerType) -> Save:
        return lambda path: async_save({"state": state}, checkpoint_id=path, async_checkpointer_type=kind)

    return {
        f"{OURS}, thread": ours(None),
        f"{OURS}, keeper": ours(dcp_plugin.Keeper()),
        "stock async_save, thread": stocks(AsyncCheckpointerType.THREAD),
        "stock async_save, process": stocks(AsyncCheckpointerType.PROCESS),
    }


def measure(mib: int, repeats: int, root: Path, wanted: list[str] | None) -> Figures:
    """Of every saver, or of those with one of these in their names. In this process, which must be no daemon."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    opened: list[Callable[[], None]] = []
    state, loop, found = state_of(mib, 1), _Loop(), no_figures()
    savers = _savers(state, opened)
    names = [name for name in savers if wanted is None or any(part in name for part in wanted)]
    counts = dict.fromkeys(names, _FEWEST)

    def run(repetition: int, name: str) -> None:
        before = loop.seconds(counts[name])
        began = time.perf_counter()
        save = savers[name](root / "step")
        called = time.perf_counter()
        steps = 0
        while steps == 0 or not save.done():
            loop.step()
            steps += 1
        beside = (time.perf_counter() - called) / steps
        counts[name] = max(_FEWEST, steps)
        alone = (before + loop.seconds(counts[name])) / 2
        _harness.remove(root / "step")
        if repetition:
            figures = found[name]
            figures["the call blocks"].append(called - began)
            figures["then until complete"].append(beside * steps)
            figures["lost, s"].append((beside - alone) * steps)
            figures["lost, %"].append((beside / alone - 1) * 100)
            figures["a step alone"].append(alone)

    in_turn(names, repeats + 1, run)
    for close in opened:
        close()
    dist.destroy_process_group()
    return found
