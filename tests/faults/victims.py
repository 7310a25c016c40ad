"""Processes in which a fault is injected: forked from one that has imported torch and the fault layer once."""

from __future__ import annotations

import ctypes
import errno
import functools
import importlib
import os
import pickle
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("layer.c")
ALWAYS = 1 << 62
_ACTIONS = {"count": 1, "fail": 2, "kill": 3, "stop": 4, "cut": 5}


@dataclass(frozen=True)
class Fault:
    """What happens at which file-system calls.

    Args:
        action: ``"count"`` nothing, ``"fail"`` with ``code``, ``"kill"`` (SIGKILL), ``"stop"`` (SIGSTOP) or
            ``"cut"``: the file system, an ext4, loses what it has not written, and the process is killed.
        at: The first call that is hit, from 1; ``until``: the last.
        calls: Names of calls, all if empty: open, create, read, write, truncate, allocate, sync, rename, exchange,
            link, symlink, mkdir, remove, list.
        containing: Only calls on paths with this text.

    ``stat`` is another name of a call, that has to be said.
    """

    action: str = "count"
    code: int = errno.EIO
    at: int = 1
    until: int = ALWAYS
    calls: tuple[str, ...] = ()
    containing: str = ""

    def nth(self, number: int) -> Fault:
        """The same at one call only."""
        return replace(self, at=number, until=number)


COUNT = Fault()
NO_EXCHANGE = Fault("fail", errno.EINVAL, calls=("exchange",))
"""A file system that cannot exchange two names."""
NO_LINKS = Fault("fail", errno.EPERM, calls=("link",))


@dataclass(frozen=True)
class Outcome:
    """How a victim ended: its result, or the exception that it raised, or neither if it was killed."""

    exit_code: int
    result: Any = None
    error: BaseException | None = None
    traceback: str = ""
    calls: int = 0
    """How many calls were counted."""
    beside: Outcome | None = None
    """Of the other process, if the victim was stopped."""


@dataclass(frozen=True)
class Beside:
    """What another process does once the victim has been stopped: until it ends or is stopped itself. Then the victim
    goes on until it ends, and last the other one."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    faults: tuple[Fault, ...] = ()


@functools.cache
def build() -> Path:
    """Compile the layer, once per version of its source and Python."""
    name = f"dcp-faults-{os.getuid()}-{SOURCE.stat().st_mtime_ns}-{sysconfig.get_config_var('SOABI')}.so"
    library = Path(tempfile.gettempdir()) / name
    if not library.exists():
        unfinished = library.with_suffix(f".{os.getpid()}")
        compiler = ["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", unfinished, SOURCE]
        subprocess.run([*compiler, "-ldl", "-lpthread"], check=True)
        unfinished.rename(library)
    return library


def arm(below: Path, faults: Sequence[Fault], log: Path | None = None) -> None:
    """From now on, in this process, act at the calls below a directory that the faults name. ``log`` records them."""
    layer = ctypes.CDLL(None)
    files = [str(log), f"{log}.data"] if log else ["", ""]
    layer.fault_begin(os.fsencode(below), *map(os.fsencode, files))
    for fault in faults:
        layer.fault_rule(
            _ACTIONS[fault.action], fault.code, ctypes.c_long(fault.at), ctypes.c_long(fault.until),
            os.fsencode(",".join(fault.calls)), os.fsencode(fault.containing),
        )  # fmt: skip


def disarm() -> int:
    """The number of calls that the first fault was asked about."""
    layer = ctypes.CDLL(None)
    layer.fault_end()
    layer.fault_seen.restype = ctypes.c_long
    return int(layer.fault_seen(0))


@dataclass
class Victims:
    """Runs functions in forked processes with the layer. A context manager.

    Args:
        preload: Modules that need not be imported in each of them.
    """

    preload: Sequence[str] = ()
    _process: subprocess.Popen[bytes] = field(init=False)

    def __enter__(self) -> Victims:
        preloads = [str(build()), *filter(None, [os.environ.get("LD_PRELOAD")])]
        environment = {**os.environ, "LD_PRELOAD": ":".join(preloads), "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tests.faults import victims; victims._serve()", *self.preload],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        below: Path,
        faults: Sequence[Fault] = (),
        log: Path | None = None,
        beside: Beside | None = None,
    ) -> Outcome:
        """``function(*args)`` in a process of its own, with faults at its calls below a directory."""
        _send(self._process.stdin, pickle.dumps((function, args, beside, below, [*faults, COUNT], log)))
        outcome: Outcome = pickle.loads(_receive(self._process.stdout))
        return outcome


def _send(pipe: Any, data: bytes) -> None:
    pipe.write(struct.pack("q", len(data)) + data)
    pipe.flush()


def _receive(pipe: Any) -> bytes:
    length = pipe.read(8)
    if len(length) < 8:
        raise EOFError("the process that forks has ended")
    return bytes(pipe.read(struct.unpack("q", length)[0]))


def _serve() -> None:
    import torch.distributed  # noqa: F401 - once, for all victims

    import dcp_plugin.checkpointer  # noqa: F401

    for module in sys.argv[1:]:
        importlib.import_module(module)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a victim prints is no answer
    while True:
        try:
            job = pickle.loads(_receive(sys.stdin.buffer))
        except EOFError:
            return
        _send(answers, pickle.dumps(_outcome_of(*job)))


def _outcome_of(function: Callable[..., Any], args: tuple[Any, ...], beside: Beside | None, *arming: Any) -> Outcome:
    pid, pipe = _forked(function, args, *arming)
    if beside is None:
        return _told(pid, pipe)
    if not _stopped(pid):
        return _told(pid, pipe)
    other, others_pipe = _forked(beside.function, beside.args, arming[0], [*beside.faults, COUNT], None)
    stopped = _stopped(other)
    os.kill(pid, signal.SIGCONT)
    outcome = _told(pid, pipe)
    if stopped:
        os.kill(other, signal.SIGCONT)
    return replace(outcome, beside=_told(other, others_pipe))


def _stopped(pid: int) -> bool:
    """Wait until a child is stopped, or has ended."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    assert ended is not None
    return ended.si_code == os.CLD_STOPPED


def _forked(function: Callable[..., Any], args: tuple[Any, ...], *arming: Any) -> tuple[int, int]:
    """A victim, and the pipe in which it tells its outcome."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        _be_a_victim(theirs, function, args, *arming)
    os.close(theirs)
    return pid, ours


def _told(pid: int, pipe: int) -> Outcome:
    with os.fdopen(pipe, "rb") as file:
        told = file.read()
    exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not told:
        return Outcome(exit_code)
    outcome: Outcome = pickle.loads(told)
    return replace(outcome, exit_code=exit_code)


def _be_a_victim(pipe: int, function: Callable[..., Any], args: tuple[Any, ...], *arming: Any) -> None:
    code = 1
    try:
        import torch

        torch.set_num_threads(1)
        arm(*arming)
        try:
            outcome = Outcome(0, result=function(*args))
        except BaseException as error:
            outcome = Outcome(0, error=error, traceback=traceback.format_exc())
        outcome = replace(outcome, calls=disarm())
        with os.fdopen(pipe, "wb") as file:
            file.write(pickle.dumps(outcome))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
