"""A training that lives many lives: saves, kills, resumes on other numbers of ranks, prunes, and readers beside it.

Each save has a tag, and a file beside the run notes the hash of all that was saved under it. Whoever loads a checkpoint
compares. At the end, what a process holds has to be what it held after the first lives: memory, descriptors, threads,
shared memory, and what lies in the directory of the run.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dcp_plugin as dcp
from tests import launch
from tests.faults.campaign import Campaign, Parts
from tests.layouts import WORLD_SIZE, build, train, whole_state
from tests.places import names_in

launch.preload("tests.faults.soak")

LAYOUTS = ["plain", "ddp", "fsdp1", "fsdp2", "fsdp2@3", "tp"]
_WARM = 12
"""Lives after which a process has all that it will ever hold."""
_GROWTH = 48 << 20
"""Bytes of memory that allocators may keep without there being a leak: less than 1 per mille of what was moved."""


@dataclass(frozen=True)
class Life:
    """One launch of the training."""

    layout: str
    config: dict[str, Any]
    first_tag: int
    saves: int
    name: str
    """Of its checkpoints; with the tag, or one that is overwritten."""
    killed_after: float | None = None
    """Seconds; all ranks or the last one are killed then."""
    killed: int = 0


def random_life(chance: random.Random, first_tag: int) -> Life:
    layout = chance.choice(LAYOUTS)
    staging = chance.choice([None, "blocking", "lazy"])
    config = {
        **({"async_save": True, "staging": staging} if staging else {}),
        "reuse": chance.random() < 0.5,
        "keep_last": chance.choice([None, 2, 3]),
        "io": {"threads": chance.choice([1, 2, 4]), "direct": chance.choice([False, "auto"])},
        "rng": chance.random() < 0.5,
        "timeout": 30.0,
    }
    name = chance.choice(["step-{}", "step-{}", "last"])
    killed_after = chance.uniform(0.05, 1.5) if chance.random() < 0.6 else None
    return Life(layout, config, first_tag, chance.randint(1, 4), name, killed_after, chance.randrange(4))


def live(root: Path, life: Life) -> None:
    """On every rank: go on from the newest checkpoint, check it, and save some more."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, optimizer = build(life.layout)
    state = {"model": model, "optim": optimizer, "tag": 0}
    checkpointer = dcp.Checkpointer(**life.config)
    promised = _noted(root, "published")
    started = dcp.resume_or_init(state, root / "run", checkpointer=checkpointer)
    if started.how == "resumed":
        _compare(root, model, optimizer, state["tag"])
    assert state["tag"] >= max(map(int, promised), default=0), f"{started} of {state['tag']}, and {promised} were there"
    if life.killed_after is not None and life.killed % (world_size + 1) in (rank, world_size):
        threading.Timer(life.killed_after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for tag in range(life.first_tag, life.first_tag + life.saves):
        train(model, optimizer, 1)
        state["tag"] = tag
        digest = _digest(model, optimizer)
        if rank == 0:
            _note(root, "digests", f"{tag} {digest}")
        handle = checkpointer.save(state, root / "run" / life.name.format(tag), step=tag)
        if rank == 0:
            handle.on_published(lambda finished: _note(root, "published", str(finished.step)))
    checkpointer.close()


def _digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    hashed = hashlib.sha256()
    for key, value in sorted(whole_state(model, optimizer).items()):
        hashed.update(f"{key} {value if not isinstance(value, torch.Tensor) else value.dtype}".encode())
        if isinstance(value, torch.Tensor):
            hashed.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def _compare(root: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, tag: int) -> None:
    known = dict(line.split() for line in _noted(root, "digests"))
    assert known[str(tag)] == _digest(model, optimizer), f"what was loaded is not what was saved as {tag}"


def _note(root: Path, name: str, line: str) -> None:
    with open(root / name, "a") as file:
        file.write(line + "\n")


def _noted(root: Path, name: str) -> list[str]:
    path = root / name
    return path.read_text().splitlines() if path.exists() else []


def look(root: Path) -> str:
    """Load the newest checkpoint and check it, as somebody beside the training; what came of it."""
    path = dcp.latest(root / "run")
    if path is None:
        return "nothing there"
    model, optimizer = build("plain")
    state = {"model": model, "optim": optimizer, "tag": 0}
    try:
        dcp.load(state, path)
    except dcp.CheckpointNotFound:
        return "deleted meanwhile"
    _compare(root, model, optimizer, state["tag"])
    return "loaded"


@contextmanager
def reader(root: Path, seed: int) -> Iterator[Counter[str]]:
    """A process that looks all the time. What it has seen is in the counter afterwards, and what it held at the end."""
    context = get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_read, args=(root, seed, theirs))
    process.start()
    seen: Counter[str] = Counter()
    try:
        yield seen
    finally:
        ours.send("end")
        seen.update(ours.recv())
        process.join()


def _read(root: Path, seed: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    seen: Counter[str] = Counter()
    held: dict[str, int] = {}
    while not pipe.poll():
        try:
            seen[look(root)] += 1
        except Exception as error:
            seen[f"{type(error).__name__}: {error}"[:500]] += 1
        if sum(seen.values()) == 10 * _WARM:
            held = holdings()
    pipe.send(seen + Counter(f"the reader's {said}" for said in grown(held, holdings()) if held))


def holdings() -> dict[str, int]:
    """What this process, and those before it, hold of the machine."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes of memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "entries of /dev/shm": len([name for name in os.listdir("/dev/shm") if "dcp" in name]),
    }


def grown(before: dict[str, int], now: dict[str, int]) -> list[str]:
    allowed = {"bytes of memory": _GROWTH}
    more = {name: count - before[name] for name, count in now.items() if name in before}
    return [f"{name}: {count} more" for name, count in more.items() if count > allowed.get(name, 0)]


def soak(minutes: float, seed: int, most_lives: int = 1 << 30) -> Iterator[list[str]]:
    """What is wrong with each life of so many minutes, or with each of so many lives; at last, what is left of all.
    Print a line for each life."""
    chance, wrong = random.Random(seed), False
    root = Path(tempfile.mkdtemp(prefix="dcp-soak-"))
    end, tag, lives, killed, held = time.monotonic() + 60 * minutes, 1, 0, 0, holdings()
    own = dcp.Checkpointer(async_save=True, keep_last=2)
    with reader(root, seed) as seen:
        while time.monotonic() < end and lives < most_lives:
            life = random_life(chance, tag)
            outcomes = launch.outcomes_of(live, WORLD_SIZE[life.layout], root, life)
            tag, lives = tag + life.saves, lives + 1
            killed += any(outcome.exit_code not in (0, None) for outcome in outcomes)
            problems = [o.traceback for o in outcomes if o.traceback and not _is_excused(o, outcomes)]
            problems += _leftovers(root / "run") if not any(o.traceback or o.exit_code for o in outcomes) else []
            own.save({"life": lives, "w": torch.full((1 << 16,), float(lives))}, root / "own" / f"step-{lives}")
            if lives == _WARM:
                held = holdings()
            print(f"{lives}: {life}", flush=True)
            wrong = wrong or bool(problems)
            yield problems
    own.close()
    problems = grown(held, holdings()) if lives > _WARM else []
    problems += [f"the reader: {what} ({count} times)" for what, count in seen.items() if what not in _FINE]
    there = names_in(root / "own")
    problems += [f"left of keep_last=2: {there}"] if len(there) != min(2, lives) else []
    print(f"{lives} lives, {killed} of them killed, {tag - 1} saves begun, the reader: {dict(seen)}")
    if not wrong and not problems:
        shutil.rmtree(root)
    yield problems


_FINE = ("nothing there", "deleted meanwhile", "loaded")


def _is_excused(outcome: launch.Outcome, outcomes: list[launch.Outcome]) -> bool:
    """A rank that lost another one."""
    return any(one.exit_code not in (0, None) for one in outcomes) and "AssertionError" not in outcome.traceback


def _leftovers(run: Path) -> list[str]:
    committed = {state.path for state in dcp.list_checkpoints(run) if state.committed}
    return [f"left behind: {name}" for name in names_in(run) if run / name not in committed]


def _parts(chosen: Any) -> Parts:
    yield "lives", soak(chosen.minutes, chosen.seed)


CAMPAIGN = Campaign(__doc__, _parts, {"minutes": 30.0, "seed": 0})
