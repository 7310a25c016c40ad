"""A training that is killed, and the next process of it, which restores what the first one saved.

Both are forked from a process that has imported torch: a process' start is measured for itself, as it is the same for
everybody. The targets are memory that has been written to, as an initialized model's is.
"""

from __future__ import annotations

import importlib
import os
import queue
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import _harness
from benchmarks._harness import CONTEXT, barrier, forget, free_port, local_of, meet
from benchmarks._peer import IO_THREADS, State
from benchmarks.peers import ceiling, stock

_PIECE = 4 << 20


@dataclass(frozen=True)
class Place:
    """Where one training keeps what it saves."""

    disk: Path
    memory: Path
    """On a tmpfs."""
    step: int

    @property
    def run(self) -> Path:
        """The durable store's folder of this training."""
        return self.disk / "run"

    @property
    def checkpoint(self) -> Path:
        return self.run / f"step-{self.step}"


def _nothing(_: Place) -> None:
    pass


def _alone(_: Place) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Way:
    """How a training saves, and how the next process of it restores."""

    name: str
    save: Callable[[State, Place], Any]
    """Returns when there is what the restart needs; what it returns lives until the kill."""
    load: Callable[[State, Place], None]
    """Into the tensors of the state, which all have their values then."""
    lose: Callable[[Place], None] = _nothing
    """What goes with the processes."""
    world: int = 1
    start: Callable[[Place], None] = _nothing
    """What each process has to do before the clock starts: more imports, a process group."""
    beside: Callable[[Place], AbstractContextManager[None]] = _alone
    """What runs on the machine from before the first process until after the second."""


@dataclass(frozen=True)
class Comeback:
    """Of the slowest rank."""

    saved: float
    """The save, until there was what the restart needed."""
    restored: float
    restored_cpu: float
    """Of all threads of a rank."""
    kill_to_step: float
    """From the kill to the end of the first step, imports left out."""
    memcpy: float
    """The restored bytes from warm memory to the same targets, with as many threads as everybody has."""
    memcpy_one_thread: float

    @classmethod
    def of(cls, way: Way, mib: int, place: Place) -> Comeback:
        """Train, save, be killed, come back.

        Raises:
            SystemExit: A rank failed; with its traceback.
        """
        with way.beside(place):
            first = _Ranks(way.world, _train, way, mib, place)
            saved = max(first.said())
            killed = time.monotonic()
            first.kill()
            at = time.monotonic()
            way.lose(place)
            aside = time.monotonic() - at
            second = _Ranks(way.world, _come_back, way, mib, place)
            heard = second.said()
            second.kill()
        restored, cpu, stepped, *copied = map(max, zip(*heard, strict=True))
        return cls(saved, restored, cpu, stepped - killed - aside, *copied)


class _Ranks:
    """The processes of a training: each says one thing, and lives on until all are killed."""

    def __init__(self, world: int, function: Callable[..., tuple[Any, Any]], *args: Any) -> None:
        self._said, port = CONTEXT.Queue(), free_port()
        ranks = range(world)
        self._ranks = [
            CONTEXT.Process(target=_rank, args=(self._said, rank, world, port, function, args), daemon=True)
            for rank in ranks
        ]
        for process in self._ranks:
            process.start()

    def said(self) -> list[Any]:
        found = []
        for _ in self._ranks:
            rank, what, error = self._next()
            if error:
                self.kill()
                raise SystemExit(f"rank {rank} failed:\n{error}")
            found.append(what)
        return found

    def _next(self) -> tuple[int, Any, str]:
        while True:
            try:
                return self._said.get(timeout=5)  # type: ignore[no-any-return]
            except queue.Empty:
                if ended := [rank for rank, process in enumerate(self._ranks) if not process.is_alive()]:
                    self.kill()
                    raise SystemExit(f"ranks {ended} ended without a word") from None

    def kill(self) -> None:
        for process in self._ranks:
            process.kill()
        for process in self._ranks:
            process.join()


def _rank(said: Any, rank: int, world: int, port: int, function: Callable[..., tuple[Any, Any]], args: Any) -> None:
    try:
        meet(rank, world, port)
        what, _kept = function(*args)
        said.put((rank, what, ""))
    except BaseException:
        said.put((rank, None, traceback.format_exc()))
    while True:
        signal.pause()


def _train(way: Way, mib: int, place: Place) -> tuple[float, Any]:
    way.start(place)
    state = state_of(mib, place.step)
    barrier()
    began = time.monotonic()
    kept = way.save(state, place)
    return time.monotonic() - began, (state, kept)


def _come_back(way: Way, mib: int, place: Place) -> tuple[tuple[float, ...], Any]:
    way.start(place)
    target = state_of(mib, 0)
    barrier()
    began, cpu = time.monotonic(), time.process_time()
    way.load(target, place)
    barrier()  # a step needs all ranks
    restored, cpu = time.monotonic() - began, time.process_time() - cpu
    torch.mm(local_of(next(iter(target.values()))), torch.ones(_harness.COLUMNS, 8))
    stepped = time.monotonic()
    for key, expected in values_of(target, place.step):
        got = local_of(target[key]).view(torch.int32)
        assert torch.equal(got, expected), f"{way.name} did not restore {key}: its figures would mean nothing"
    return (restored, cpu, stepped, memcpy(target, IO_THREADS), memcpy(target, 1)), target


def state_of(mib: int, step: int) -> State:
    """The mixed state, with the values of a step."""
    state = _harness.build("mixed", mib, filled=False)
    refill(state, step)
    return state


def refill(state: State, step: int) -> None:
    for key, values in values_of(state, step):
        local_of(state[key]).view(torch.int32).copy_(values)


def values_of(state: State, step: int) -> Iterator[tuple[str, torch.Tensor]]:
    """What a step's tensors hold: each number tells its place, the rank and the step."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for number, (key, value) in enumerate(state.items()):
        local = local_of(value)
        start = step * 1_000_003 + number * 10_007 + rank * 101
        yield key, torch.arange(start, start + local.numel(), dtype=torch.int32).view(local.shape)


def memcpy(state: State, threads: int) -> float:
    """Seconds to copy as many bytes from warm memory into a state.

    The source is 256 MiB, again and again: more than the caches hold, and no second state in memory.
    """
    views = [np.frombuffer(view, np.uint8) for view in ceiling.local_bytes(state)]
    pieces = [view[at : at + _PIECE] for view in views for at in range(0, len(view), _PIECE)]
    source = np.ones(min(256 << 20, max(_PIECE, sum(map(len, pieces)))), np.uint8)
    blocks = len(source) // _PIECE

    def copy(number: int) -> None:
        at = number % blocks * _PIECE
        np.copyto(pieces[number], source[at : at + len(pieces[number])])

    with ThreadPoolExecutor(threads) as pool:
        barrier()
        began = time.monotonic()
        list(pool.map(copy, range(len(pieces))))
        return time.monotonic() - began


# --- stock, and the ceiling


def _save_stock(state: State, place: Place) -> None:
    stock.save(state, place.checkpoint)
    _harness.sync_files(place.checkpoint)


def _load_stock(state: State, place: Place) -> None:
    stock.load(state, place.checkpoint)


def _save_raw(state: State, place: Place) -> None:
    ceiling.prepare(state)
    ceiling.save(state, place.memory / "raw")


def _load_raw(state: State, place: Place) -> None:
    ceiling.load(state, place.memory / "raw")


def make_cold(place: Place) -> None:
    forget(place.disk)


def fill(state: State, loaded: dict[str, torch.Tensor]) -> None:
    for key, value in state.items():
        value.copy_(loaded[key])


def ways(wanted: list[str] | None) -> list[Way]:
    """Those with one of these in their names, or all. What is not installed is left out, and said to be."""
    found = [
        Way("stock, disk, cold", _save_stock, _load_stock, lose=make_cold),
        Way("stock, disk, in the page cache", _save_stock, _load_stock),
        Way("raw preadv, /dev/shm", _save_raw, _load_raw),
    ]
    for module in ("_ours", "_dlrover", "_nvrx"):
        try:
            found += importlib.import_module(f"benchmarks.{module}").WAYS
        except ImportError as error:
            print(f"left out: {module[1:]} ({error})")
    return [way for way in found if wanted is None or any(part in way.name for part in wanted)]


def remove(place: Place) -> None:
    for folder in (place.disk, place.memory):
        shutil.rmtree(folder, ignore_errors=True)
    os.sync()
