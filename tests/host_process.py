"""The first process of a host: it starts what it is asked to, reaps what has ended, and ends with the test's process.

It is forked from the server of ``launch.py``, so that what it forks has imported torch and has no thread.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing.reduction
import os
import pickle
import re
import select
import shutil
import signal
import socket
import socketserver
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.limits import HANG

_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # mounts, host name, IPC, PIDs, network
_SUBREAPER = 36
_SWITCH = "10.77.0.254"
_LIBC = ctypes.CDLL(None, use_errno=True)


class Process:
    """A process that was started in a host. ``pid`` is its number outside of it, and ``log`` what it has printed."""

    def __init__(self, number: int, descriptor: int, log: Path, ended: Callable[[int], int]) -> None:
        self.log, self._number, self._descriptor, self._ended = log, number, descriptor, ended
        self.pid = int(re.findall(r"Pid:\s*(-?\d+)", Path(f"/proc/self/fdinfo/{descriptor}").read_text())[0])
        self.returncode: int | None = None

    def wait(self, timeout: float = HANG) -> int:
        """Its exit code when it has ended; negative is the signal. It is killed where that takes too long.

        Raises:
            AssertionError: It took too long.
        """
        if self.returncode is None:
            in_time, *_ = select.select([self._descriptor], [], [], timeout)
            if not in_time:
                self.kill()
                select.select([self._descriptor], [], [])
            self.returncode = self._ended(self._number)
            os.close(self._descriptor)
            assert in_time, f"did not end within {timeout} s:\n{self.log.read_text()}"
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def result(self, timeout: float = HANG) -> Any:
        """What its function has returned; AssertionError with what it has printed if it has not ended well."""
        code = self.wait(timeout)
        assert code == 0, f"{self.log.name}, exit code {code}:\n{self.log.read_text()}"
        return pickle.loads(self.log.with_suffix(".result").read_bytes())


class Ranks(list[Process]):
    """The processes of one launch, in the order of ranks."""

    def results(self, timeout: float = HANG) -> list[Any]:
        return [rank.result(timeout) for rank in self]


@functools.cache
def why_no_namespaces() -> str:
    """Why hosts are only folders here; empty if they have namespaces."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip", "tc"))):
        return "needs root, unshare, nsenter, ip and tc"
    shaped = "tc qdisc add dev port0 root tbf rate 1mbit burst 9kb latency 9ms"
    tried = f"ip link add switch type bridge; ip link add port0 type veth; {shaped}"
    made = subprocess.run(["unshare", "-mnuip", "--fork", "sh", "-ec", tried], capture_output=True, text=True)
    return f"no namespaces here: {made.stderr.strip()}" if made.returncode else ""


class Shell:
    """Commands of a shell in the namespaces of a process; ``why_not`` says why tests that need them are skipped."""

    def __init__(self, pid: int, why_not: str = "") -> None:
        self.pid, self.why_not = pid, why_not

    def do(self, command: str) -> str:
        if self.why_not:
            pytest.skip(self.why_not)
        enter = ["nsenter", "-a", "-t", str(self.pid), "sh", "-ec", command]
        made = subprocess.run(enter, capture_output=True, text=True)
        assert made.returncode == 0, f"{command}: {made.stderr}"
        return made.stdout


@contextmanager
def switched() -> Iterator[Shell]:
    """A network without links, of which the host ``switch`` is what links are put into."""
    made = f"ip link add switch type bridge; ip address add {_SWITCH}/24 dev switch; ip link set switch up"
    made += "; echo; exec cat"  # which ends with this process
    holder = subprocess.Popen(["unshare", "-n", "sh", "-ec", made], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout and holder.stdout.readline()
        yield Shell(holder.pid)


@contextmanager
def door(switch: Shell, to: int) -> Iterator[tuple[str, int]]:
    """Connections to this address in the switch's network go on to a port of this machine's loopback."""

    def listening() -> socket.socket:
        with open(f"/proc/{switch.pid}/ns/net") as network:
            if _LIBC.setns(network.fileno(), 0):
                raise OSError(ctypes.get_errno(), "no such network")
        return socket.create_server((_SWITCH, 0))

    with ThreadPoolExecutor(1) as thread:  # the only one that is in the other network
        listener = thread.submit(listening).result()
    with _Door(listener, to) as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield listener.getsockname()
        made.shutdown()


class _Door(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket, to: int) -> None:
        super().__init__(listener.getsockname(), socketserver.BaseRequestHandler, bind_and_activate=False)
        self.socket.close()
        self.socket, self._to = listener, to

    def finish_request(self, request: Any, client_address: Any) -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._to)) as there:
            back = threading.Thread(target=_pass_on, args=(there, request), daemon=True)
            back.start()
            _pass_on(request, there)
            back.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(1 << 18):
            target.sendall(piece)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def descendants(of: int) -> list[int]:
    """Those that run. What is detached is a child of its host's first process."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(path.parent.name))
    found = list(children.get(of, []))
    for pid in found:  # it grows
        found += children.get(pid, [])
    return found


def kill_all(of: int) -> None:
    """They are gone when it returns."""
    while running := descendants(of):
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def start(control: Connection, private: bool) -> None:
    """Be the first process of a host, or its parent, which tells the number of the first one."""
    if private and _LIBC.unshare(_NAMESPACES):
        raise OSError(ctypes.get_errno(), "no namespaces")
    if (pid := os.fork()) == 0:
        _serve(control)
    else:
        control.send(pid)
        control.close()
        os.waitpid(pid, 0)


def _serve(control: Connection) -> None:
    """Start what is asked for, and tell how it has ended. Returns in the processes that it has started."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _LIBC.prctl(_SUBREAPER, 1)  # what is detached is ours
    ended: dict[int, int] = {}

    def reap(*_: object) -> None:
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended[found[0]] = os.waitstatus_to_exitcode(found[1])

    signal.signal(signal.SIGCHLD, reap)
    while True:
        try:
            asked = control.recv()
        except EOFError:
            if os.getpid() != 1:  # with the first process of a namespace the kernel ends all others
                kill_all(os.getpid())
            return
        if isinstance(asked, int):
            reap()
            control.send(ended.pop(asked))
            continue
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        pid = os.fork()
        if pid == 0:
            control.close()
            _be(*asked)
            return
        descriptor = os.pidfd_open(pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        control.send(pid)
        multiprocessing.reduction.send_handle(control, descriptor, 0)
        os.close(descriptor)


def _be(command: list[str] | None, called: bytes, environment: dict[str, str], log: Path) -> None:
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    os.setsid()
    for file, name in ((os.open(os.devnull, os.O_RDONLY), 0), (os.open(log, os.O_WRONLY | os.O_CREAT, 0o600), 1)):
        os.dup2(file, name)
        os.close(file)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(environment)
    if command is not None:
        os.execvp(command[0], command)
    import torch

    torch.set_num_threads(1)
    function, args = pickle.loads(called)
    log.with_suffix(".result").write_bytes(pickle.dumps(function(*args)))
