"""Programs in processes of their own, as ``python`` starts them, but for the seconds in which it imports frameworks.

They are forked from a process that has imported what is named, and never this package, which is left to the program.
They end as Python does: with its exit handlers, the threads that it waits for, and its exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.limits import HANG

ROOT = Path(__file__).parent.parent
TORCH = ("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo")
LIGHTNING = (*TORCH, "lightning.pytorch")
"""What a program may find imported."""


def run(
    *arguments: object,
    imported: Sequence[str] = TORCH,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = HANG,
) -> subprocess.CompletedProcess[str]:
    """``python *arguments`` to its end: ``"-c", code``, ``"-m", module`` or a file, and what follows."""
    program = Program(*arguments, imported=imported, cwd=cwd, env=env)
    out, err = program.communicate(timeout)
    return subprocess.CompletedProcess(program.args, program.returncode, out, err)


class Program:
    """As ``subprocess.Popen`` in text mode, with pipes.

    Args:
        imported: The modules that it finds imported.
        env: Its environment; that of the test without.
        stderr: A descriptor to write errors to, instead of a pipe.
    """

    def __init__(
        self,
        *arguments: object,
        imported: Sequence[str] = TORCH,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stderr: int | None = None,
    ) -> None:
        self.args = [str(argument) for argument in arguments]
        self.returncode = 0
        request = json.dumps([self.args, str(cwd or Path.cwd()), dict(os.environ if env is None else env)])
        out, theirs = os.pipe()
        err, err_theirs = os.pipe() if stderr is None else (-1, os.dup(stderr))
        self._told, told_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with told_theirs:
            socket.send_fds(_server(tuple(imported)), [request.encode()], [theirs, err_theirs, told_theirs.fileno()])
        os.close(theirs)
        os.close(err_theirs)
        self.stdout = os.fdopen(out)
        self.stderr = os.fdopen(err) if stderr is None else None
        self.pid = int(self._told.recv(20))

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float = HANG) -> tuple[str, str]:
        """Wait for its end, and kill it where that takes too long; what it has said."""
        streams = [stream for stream in (self.stdout, self.stderr) if stream]
        with ThreadPoolExecutor(len(streams)) as readers, self._told:
            said = [readers.submit(stream.read) for stream in streams]
            self._told.settimeout(timeout)
            try:
                ended = self._told.recv(20)
            except TimeoutError:
                self.send_signal(signal.SIGKILL)
                raise
        for stream in streams:
            stream.close()
        self.returncode = os.waitstatus_to_exitcode(int(ended))
        out, err = [*(text.result() for text in said), ""][:2]
        return out, err


@functools.cache
def _server(imported: tuple[str, ...]) -> socket.socket:
    """The process that forks, and the socket in which it is asked to."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"from tests.programs import _serve; _serve({theirs.fileno()}, {imported!r})"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    server = subprocess.Popen([sys.executable, "-c", code], env=environment, pass_fds=[theirs.fileno()])
    theirs.close()

    @atexit.register
    def end() -> None:
        ours.close()
        server.wait()

    return ours


def _serve(control: int, imported: tuple[str, ...]) -> None:
    """Fork for each request. Returns in the processes that have run a program, and they end as Python does."""
    for module in imported:
        importlib.import_module(module)
    gc.freeze()  # what was imported is no garbage: a program that looks for some looks at what is its own
    requests = socket.socket(fileno=control)
    while True:
        request, files, *_ = socket.recv_fds(requests, 1 << 18, 3)
        if not request:
            return
        if not os.fork():
            requests.close()
            if _watches(*files):
                os._exit(0)
            _be(*json.loads(request))
            return
        for file in files:
            os.close(file)
        while _reaped():
            pass


def _reaped() -> bool:
    """One of the processes that have watched, if one has ended."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    return False


def _watches(out: int, err: int, told: int) -> bool:
    """Fork once more. The parent tells the process ID of the child, and how it has ended."""
    pid = os.fork()
    if pid == 0:
        os.close(told)
        for file, name in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
            os.dup2(file, name)
            os.close(file)
        return False
    os.close(out)
    os.close(err)
    os.write(told, b"%d" % pid)
    _, status = os.waitpid(pid, 0)
    os.write(told, b"%d" % status)
    return True


def _be(arguments: list[str], cwd: str, environment: dict[str, str]) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    program, *rest = arguments
    if program == "-c":
        code, *rest = rest
        sys.argv, sys.path[0] = [program, *rest], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(main))
    elif program == "-m":
        module, *rest = rest
        sys.argv, sys.path[0] = [module, *rest], cwd
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [program, *rest], str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
