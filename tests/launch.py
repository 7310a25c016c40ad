"""Run a test, or a function, on several real ranks: processes in a gloo group, or the failing rank's traceback.

Each launch has processes of its own. They are forked from a server that has imported torch, the test modules and the
frameworks they need once, and that has no thread and no process group: a launch costs tenths of a second.

A test whose whole body runs on every rank is marked::

    @on_ranks(2)
    def test_both_ranks_see_the_same(tmp_path: Path) -> None:
        ...

A test that does more than that, as one that saves on two ranks and loads on four, calls :func:`run` itself, or has a
fixture that does. Where ranks are killed, both are told which.

Other launchers are for what is no test on ranks: :mod:`tests.programs` starts a script, or a program that has to end as
a process does; :mod:`tests.hosts` starts ranks and programs on hosts that have an address, memory and a disk of their
own, and takes these away; :mod:`tests.users` calls a function as another user. :mod:`tests.object_server` is the one
server of buckets.
"""

from __future__ import annotations

import faulthandler
import functools
import inspect
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.limits import HANG

# Asks the driver's library for devices: a call of CUDA in the server, by a module that it imports, would spoil it in
# the ranks ("Cannot re-initialize CUDA in forked subprocess").
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOAD = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.utils.serialization",
    "torch.profiler._cupti_monitor",
    "numpy.ma",
    "dcp_plugin.checkpointer",
    "dcp_plugin.core.state.across_ranks",
    "dcp_plugin.core.planning.load_balance",
    "dcp_plugin.core.planning.replicas",
    "dcp_plugin.core.planning.sharing",
    "dcp_plugin.core.ranks.rank_group",
    "dcp_plugin.core.tensors._torch_sharded",
    "tests.launch",
]
"""Modules that a rank would import in its first training, save or load, which takes some 50 ms of CPU each time."""


def preload(module: str) -> None:
    """Have the server import a module, too. It starts with the first launch, so call this from a conftest."""
    if module not in _PRELOAD:
        _PRELOAD.append(module)
    _CONTEXT.set_forkserver_preload([*_PRELOAD, "tests.frozen"])


preload("tests.layouts")


def on_ranks(
    *world_sizes: int, of: Callable[..., int] | None = None, killed: Sequence[int] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test whose body runs on every rank of a new process group. It fails with the traceback of each failing rank.

    The body gets what pytest gives the test, parameters and fixtures, which are sent to the ranks and have to be
    picklable. It is the module's own function, so it is written as any test is, beneath ``parametrize``.

    Args:
        world_sizes: The number of ranks. For several the test runs once with each, and has to have a parameter
            ``world_size``. For none, this parameter says how many.
        of: Gives the number of ranks by parameters of the test that it names, instead of ``world_sizes``.
        killed: The ranks that SIGKILL ends in the body.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        preload(body.__module__)
        wanted = inspect.signature(of).parameters if of else ()

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            if of is not None:
                world_size = of(**{name: arguments[name] for name in wanted})
            else:
                world_size = world_sizes[0] if len(world_sizes) == 1 else arguments["world_size"]
            run(_Body(test, arguments), world_size, killed=killed)

        test = pytest.mark.ranks(test)
        return pytest.mark.parametrize("world_size", world_sizes)(test) if len(world_sizes) > 1 else test

    return decorate


@dataclass(frozen=True)
class _Body:
    """What :func:`on_ranks` has wrapped, sent to the ranks as the test's name."""

    test: Callable[..., None]
    arguments: dict[str, Any]

    def __call__(self) -> None:
        self.test.__wrapped__(**self.arguments)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: its result, or its traceback, or neither if it was killed."""

    result: Any = None
    traceback: str = ""
    exit_code: int | None = None


def run(function: Callable[..., Any], world_size: int, *args: Any, killed: Sequence[int] = ()) -> list[Any]:
    """``function(*args)`` on every rank of a new process group; the results in the order of ranks.

    Args:
        killed: The ranks that SIGKILL ends meanwhile. Their result is None.

    Raises:
        AssertionError: A rank raised, died unless it is in ``killed``, or did not end in time; with its traceback.
    """
    outcomes = outcomes_of(function, world_size, *args)
    right = {rank: -signal.SIGKILL if rank in killed else 0 for rank in range(world_size)}
    failed = {rank: o for rank, o in enumerate(outcomes) if o.traceback or o.exit_code != right[rank]}
    if failed:
        told = [f"rank {r}, exit code {o.exit_code}:\n{o.traceback or '(no traceback)'}" for r, o in failed.items()]
        raise AssertionError("\n".join(told))
    return [outcome.result for outcome in outcomes]


def outcomes_of(function: Callable[..., Any], world_size: int, *args: Any) -> list[Outcome]:
    """Like :func:`run` for tests in which ranks are meant to raise or to be killed.

    On a busy machine ranks may fail to meet before the function is called. They try again.
    """
    for _ in range(2):
        outcomes = _outcomes_of(function, world_size, *args)
        if not any(outcome.traceback.startswith(_NOT_MET) for outcome in outcomes):
            return outcomes
    return _outcomes_of(function, world_size, *args)


_NOT_MET = "The ranks did not meet.\n"


def _outcomes_of(function: Callable[..., Any], world_size: int, *args: Any) -> list[Outcome]:
    port = free_port()
    ranks = []
    for rank in range(world_size):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(
            target=_rank, args=(theirs, rank, world_size, port, dict(os.environ), function, args)
        )
        process.start()
        theirs.close()
        ranks.append((process, ours))
    deadline = time.monotonic() + HANG
    outcomes = []
    for process, pipe in ranks:
        result, said = None, ""
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                result, said = pipe.recv()
            elif process.is_alive():
                said = f"did not end within {HANG} s; where it was is on stderr"
                os.kill(process.pid, signal.SIGUSR1)
        except EOFError:
            pass
        process.join(max(0.1, deadline - time.monotonic()) if not said else 5.0)
        if process.is_alive():
            process.kill()
            process.join()
        outcomes.append(Outcome(result, said, process.exitcode))
    return outcomes


def gathered(value: Any) -> list[Any]:
    """Return what each rank gives. Collective."""
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def free_port() -> int:
    """A port below those that the kernel gives to outgoing connections: such a one may be gone a moment later."""
    for port in random.SystemRandom().sample(range(15_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port found in 100 tries")


def _rank(
    pipe: Connection,
    rank: int,
    world_size: int,
    port: int,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: Any,
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.clear()  # the server's is that of the first launch
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    sys.executable = environment.get("PYTHON_EXEC", sys.executable)  # see the fixture forked_keepers
    torch.set_num_threads(1)
    faulthandler.enable()  # tells where a rank crashes
    faulthandler.register(signal.SIGUSR1)  # tells where a rank hangs
    met = False
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=HANG))
        met = True
        pipe.send((function(*args), ""))
    except BaseException:
        pipe.send((None, ("" if met else _NOT_MET) + traceback.format_exc()))
    finally:
        pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
