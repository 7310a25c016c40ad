"""A training whose saves a keeper writes, for :mod:`tests.faults.keepers`: one life of it, on every rank.

What it saves is a function of the step, element by element: whoever loads it, in whatever layout, knows each byte. What
it learns of its saves it notes at once, in a file that survives the host, as a line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp_plugin as dcp
from dcp_plugin import events
from dcp_plugin.core.paths import as_path, resolved
from dcp_plugin.tiers.spool import Spool
from tests import launch
from tests.faults.in_keeper import sitecustomize
from tests.layouts import build

launch.preload(__name__)

ALL = -1
"""In place of a rank."""


@dataclass(frozen=True)
class Life:
    """One launch of the training.

    Args:
        root: The folder of checkpoints.
        notes: A folder for what the ranks note.
        saves: How many; the steps go on from what was resumed.
        dies: A rank, or ALL, and at which call of a function of ours, counted from the first save on.
        ends: Whether it says goodbye; else it is killed after the last save has returned.
        kills_keeper: At which such calls a rank kills the keeper of its node.
        stops: A rank, and at which such call it stops (SIGSTOP).
        one_path: Whether all saves go to one path.
        in_keeper: The folder of :mod:`tests.faults.in_keeper.sitecustomize`.
        waits: For each save, so many: ``"local"``, ``"end"``, or nothing.
    """

    root: str
    notes: Path
    saves: int = 5
    layout: str = "fsdp2"
    config: dict[str, Any] = field(default_factory=dict)
    dies: tuple[int, int] | None = None
    counted: str = ""
    """What is in the path of the modules whose calls are counted."""
    ends: bool = True
    kills_keeper: tuple[int, ...] = ()
    stops: tuple[int, int] | None = None
    one_path: bool = False
    in_keeper: Path | None = None
    waits: str = ""
    commands: dict[int, str] = field(default_factory=dict)
    """By number of the save, from 1 on: what the test is asked to do before it, while the ranks wait."""


def note(life: Life, **what: Any) -> None:
    """One write, which a kill leaves whole or undone."""
    data = json.dumps({"rank": dist.get_rank(), **what}) + "\n"
    file = os.open(life.notes / "notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, data.encode())
    os.close(file)


def noted(notes: Path) -> list[dict[str, Any]]:
    path = notes / "notes"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class State:
    """What the training has, and what it has to be at a step."""

    def __init__(self, layout: str) -> None:
        self.model, self.optimizer = build(layout)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        bulk = torch.arange(1 << 18, dtype=torch.float32)
        if dist.get_world_size() > 1:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            bulk = distribute_tensor(bulk, mesh, [Shard(0)])
        self.saved: dict[str, Any] = {"model": self.model, "optim": self.optimizer, "bulk": bulk, "step": 0}
        self._first = [tensor.clone() for tensor in self._tensors()]

    def _tensors(self) -> Iterator[torch.Tensor]:
        slots = [slot for one in self.optimizer.state.values() for name, slot in one.items() if name != "step"]
        for tensor in (*self.model.parameters(), *slots, self.saved["bulk"]):
            yield (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()

    def advance(self, step: int) -> None:
        for tensor, first in zip(self._tensors(), self._first, strict=True):
            torch.add(first, step, out=tensor)
        self.saved["step"] = step

    def is_of(self, step: int) -> bool:
        """Whether each byte of this rank is what it was at a step."""
        expected = (first + step for first in self._first)
        tensors = zip(self._tensors(), expected, strict=True)
        return self.saved["step"] == step and all(torch.equal(*pair) for pair in tensors)


def _calls(wanted: Callable[[int], None], of: str) -> list[int]:
    """Have ``wanted`` called with the number of each call of a function of the package in this thread."""
    ours, count = str(Path(dcp.__file__).parent), [0]

    def called(frame: FrameType, event: str, argument: object) -> None:
        where = frame.f_code.co_filename
        if event == "call" and of in where and (where.startswith(ours) or where == __file__):
            count[0] += 1
            wanted(count[0])

    sys.setprofile(called)
    return count


def resume(checkpointer: dcp.Checkpointer, life: Life, state: State) -> dict[str, Any]:
    """Load the newest of what survives and of what is at its path; what came of it."""
    started = dcp.resume_or_init(state.saved, life.root, checkpointer=checkpointer)
    report = started.report
    if report is None:
        return {"step": 0, "sources": {}, "passed_over": [], "equal": True}
    step = state.saved["step"]
    return {
        "step": step, "sources": report.sources, "passed_over": report.passed_over, "equal": state.is_of(step),
        "seconds": report.seconds,
    }  # fmt: skip


def live(life: Life) -> dict[str, Any]:
    """On every rank: go on from the newest that can be put together, check it, and save."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if life.in_keeper is not None:
        sitecustomize.set_clock(life.in_keeper)
        path = os.pathsep.join(filter(None, [str(Path(sitecustomize.__file__).parent), os.environ.get("PYTHONPATH")]))
        os.environ |= {sitecustomize.FOLDER: str(life.in_keeper), "PYTHONPATH": path}
    state = State(life.layout)
    checkpointer = dcp.Checkpointer(async_save=True, **life.config)
    found = resume(checkpointer, life, state)
    note(life, resumed=found["step"], **{name: found[name] for name in ("sources", "passed_over", "equal")})
    keeper = Spool.of(resolved(as_path(life.root)), checkpointer.config.keeper.dir)

    def at(call: int) -> None:
        if life.dies is not None and call == life.dies[1] and life.dies[0] in (ALL, dist.get_rank()):
            os.kill(os.getpid(), signal.SIGKILL)
        if life.stops == (dist.get_rank(), call):
            os.kill(os.getpid(), signal.SIGSTOP)
        if call in life.kills_keeper and (pid := keeper.pid()) is not None and keeper.is_kept():
            os.kill(pid, signal.SIGKILL)
            note(life, killed_keeper=pid)

    events.subscribe(lambda event: _tell(life, event))
    handles = []
    counted = _calls(at, life.counted) if life.dies is not None or life.kills_keeper or life.stops else [0]
    for step in range(found["step"] + 1, found["step"] + 1 + life.saves):
        _await(life, life.commands.get(step - found["step"]))
        state.advance(step)
        name = "last" if life.one_path else f"step-{step}"
        handle = checkpointer.save(state.saved, f"{life.root}/{name}", step=step)
        note(life, returned=step, calls=counted[0])
        handles.append(handle)
        if life.waits == "local":
            handle.wait_local()
        elif life.waits == "end":
            handle.wait_done()
    sys.setprofile(None)
    _await(life, life.commands.get(life.saves + 1))
    note(life, holds=holdings(keeper))
    if not life.ends:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        checkpointer.close()
        error = None
    except dcp.CheckpointError as failed:
        error = str(failed)
    ends = {int(handle.step or 0): _end_of(handle, checkpointer) for handle in handles}
    dist.destroy_process_group()
    return {**found, "rank": int(os.environ["RANK"]), "ends": ends, "error": error}


def _end_of(handle: dcp.SaveHandle, checkpointer: dcp.Checkpointer) -> str:
    if handle.finished is None or handle.exception() is not None:
        return str(handle.exception())
    is_short = handle.finished.tier == "local" and handle.finished.copies < checkpointer.config.keeper.replicas
    return f"{handle.finished.tier}{', without its copies' * is_short}"


def holdings(spool: Spool) -> dict[str, int]:
    """What a keeper, and this rank, have of the machine."""
    found = {"files of a spool": len(os.listdir(spool.folder)) if spool.folder.is_dir() else 0}
    for who, pid in (("a keeper", spool.pid()), ("a rank", os.getpid())):
        with suppress(OSError):
            found |= {f"{what} of {who}": len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task")}
    return found


def _await(life: Life, command: str | None) -> None:
    """Have the test do something, and wait until it is done; not for each other, as links may be cut by it."""
    if command is not None:
        if dist.get_rank() == 0:
            (life.notes / command).touch()
        done = life.notes / f"{command}.done"
        while not done.exists():
            os.sched_yield()


def _tell(life: Life, event: events.Event) -> None:
    if isinstance(event, events.SavedLocally):
        note(life, local=event.step)
    elif isinstance(event, events.SaveFinished):
        note(life, **{event.tier: event.step})
    elif isinstance(event, events.SaveAborted):
        note(life, failed=event.step, why=str(event.error)[:300])
