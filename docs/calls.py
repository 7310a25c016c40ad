"""Draw the calls between the rooms of the package during one FSDP2 save and one load, from a trace of rank 0.

``python docs/calls.py`` prints two Mermaid flowcharts, which docs/project/calls.md shows. A number on an arrow is the
order of the first call. Three kinds of calls are left out: those within a room, those to rooms that all others use
(ranks, tensors, format, media and small modules), and those of events to their subscribers.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard

import dcp_plugin as dcp

PACKAGE = Path(dcp.__file__).parent
USED_BY_ALL = {
    "config", "errors", "events", "format", "interrupts", "media", "options", "paths", "ranks", "records", "tensors",
    "types",
}  # fmt: skip
EVENTS = str(PACKAGE / "core" / "events.py")


def room_of(file: str) -> str:
    """Return the room of a source file: its folder below the package or ``core/``, or its module; empty outside the
    package and in shared rooms."""
    if not file.startswith(f"{PACKAGE}/"):
        return ""
    parts = Path(file).relative_to(PACKAGE).parts
    room = parts[parts[0] == "core"].removesuffix(".py")
    return "" if room in USED_BY_ALL or room.startswith("_") else room


@contextmanager
def traced(edges: dict[tuple[str, str], None]) -> Iterator[None]:
    """Collect the calls from room to room, in the order of their first occurrence, in every thread."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not (callee := room_of(frame.f_code.co_filename)) or frame.f_code.co_name == "<module>":
            return
        caller: FrameType | None = frame.f_back
        while caller is not None and not room_of(caller.f_code.co_filename):
            if caller.f_code.co_filename == EVENTS:
                return
            caller = caller.f_back
        if caller is not None and (room := room_of(caller.f_code.co_filename)) != callee:
            edges.setdefault((room, callee))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def run(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    state = {"model": model, "optim": optimizer}
    checkpointer = dcp.Checkpointer()
    calls: dict[str, Callable[..., Any]] = {"save": checkpointer.save, "load": checkpointer.load}
    for name, call in calls.items():
        call(state, f"{folder}/first")  # modules that are imported late are imported now
        edges: dict[tuple[str, str], None] = {}
        with traced(edges):
            call(state, f"{folder}/second" if name == "save" else f"{folder}/first")
        if rank == 0:
            print(f"%% {name}\n" + flowchart(edges))
    dist.destroy_process_group()


def flowchart(edges: dict[tuple[str, str], None]) -> str:
    lines = [f"  {caller} -->|{number}| {callee}" for number, (caller, callee) in enumerate(edges, 1)]
    return "\n".join(["flowchart TD", *lines])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder,), nprocs=2)
