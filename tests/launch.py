"""Run a function on several real ranks (processes, gloo) and get its results, or the failing rank's traceback.

Ranks are forked from a server that has imported torch once, so a launch costs tenths of a second.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "dcp_plugin.checkpointer"]


def preload(module: str) -> None:
    """Have the server import a module, too. It starts with the first launch, so call this from a conftest."""
    _PRELOAD.append(module)
    _CONTEXT.set_forkserver_preload(_PRELOAD)


_CONTEXT.set_forkserver_preload(_PRELOAD)


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: its result, or its traceback, or neither if it was killed."""

    result: Any = None
    traceback: str = ""
    exit_code: int | None = None


def run(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """``function(*args)`` on every rank of a new process group; the results in the order of ranks.

    Raises:
        AssertionError: A rank raised, died, or did not end in time; with its traceback.
    """
    outcomes = outcomes_of(function, world_size, *args, timeout=timeout)
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome.traceback or outcome.exit_code != 0}
    if failed:
        told = [f"rank {r}, exit code {o.exit_code}:\n{o.traceback or '(no traceback)'}" for r, o in failed.items()]
        raise AssertionError("\n".join(told))
    return [outcome.result for outcome in outcomes]


def outcomes_of(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Outcome]:
    """Like :func:`run` for tests in which ranks are meant to raise or to be killed.

    On a busy machine ranks may fail to meet before the function is called. They try again.
    """
    for _ in range(2):
        outcomes = _outcomes_of(function, world_size, *args, timeout=timeout)
        if not any(outcome.traceback.startswith(_NOT_MET) for outcome in outcomes):
            return outcomes
    return _outcomes_of(function, world_size, *args, timeout=timeout)


_NOT_MET = "The ranks did not meet.\n"


def _outcomes_of(function: Callable[..., Any], world_size: int, *args: Any, timeout: float) -> list[Outcome]:
    port = free_port()
    ranks = []
    for rank in range(world_size):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_rank, args=(theirs, rank, world_size, port, function, args))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    deadline = time.monotonic() + timeout
    outcomes = []
    for process, pipe in ranks:
        result, said = None, ""
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                result, said = pipe.recv()
            elif process.is_alive():
                said = f"did not end within {timeout} s; where it was is on stderr"
                os.kill(process.pid, signal.SIGUSR1)
        except EOFError:
            pass
        process.join(max(0.1, deadline - time.monotonic()) if not said else 5.0)
        if process.is_alive():
            process.kill()
            process.join()
        outcomes.append(Outcome(result, said, process.exitcode))
    return outcomes


def free_port() -> int:
    """A port below those that the kernel gives to outgoing connections: such a one may be gone a moment later."""
    for port in random.SystemRandom().sample(range(15_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port found in 100 tries")


def _rank(pipe: Connection, rank: int, world_size: int, port: int, function: Callable[..., Any], args: Any) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    torch.set_num_threads(1)
    faulthandler.enable()  # tells where a rank crashes
    faulthandler.register(signal.SIGUSR1)  # tells where a rank hangs
    met = False
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        met = True
        pipe.send((function(*args), ""))
    except BaseException:
        pipe.send((None, ("" if met else _NOT_MET) + traceback.format_exc()))
    finally:
        pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
