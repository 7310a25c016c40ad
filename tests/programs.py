"""Programs in processes of their own, as ``python`` starts them, but for the seconds in which it imports frameworks.

They are forked from a process that has imported what is named: this package only where the test says so, since what
an import of it does may be what is tested.
They end as Python does: with its exit handlers, the threads that it waits for, and its exit code. Only modules are not
taken apart at the end: that writes into all of the memory that they share with the process. The ranks of
``torch.distributed.run`` are forked as well: it starts the small program of :func:`python` for each. So are keepers,
where a test asks for the fixture ``forked_keepers``.
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
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import types
import weakref
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from tests.limits import HANG

ROOT = Path(__file__).parent.parent
PYTHON = sys.executable
"""The interpreter itself, whatever ``sys.executable`` is during a test."""

BARE = ("torch",)
TORCH = (*BARE, "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo")
LIGHTNING = (*TORCH, "lightning.pytorch", "s3fs", "omegaconf")
TRANSFORMERS = (*TORCH, "transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "peft")
PACKAGE = (*TORCH, "dcp_plugin.checkpointer", "dcp_plugin.tools.stream", "dcp_plugin.tools.cli.app", "pydantic")
KEEPER = (*TORCH, "dcp_plugin.core.format", "dcp_plugin.tiers.process")
HYDRA = (*PACKAGE, "hydra", "hydra.core.override_parser.overrides_parser", "hydra._internal.hydra")
"""What a program may find imported."""


def run(
    *arguments: object,
    imported: Sequence[str] = TORCH,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = HANG,
) -> subprocess.CompletedProcess[str]:
    """``python *arguments`` to its end: ``"-c", code``, ``"-m", module`` or a file, and what follows.

    The code may be indented as the test is.
    """
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
        if self.args[0] == "-c":
            self.args[1] = textwrap.dedent(self.args[1])
        self.returncode = 0
        environment = dict(os.environ if env is None else env)
        if self.args[:2] == ["-m", "torch.distributed.run"]:
            environment["PYTHON_EXEC"] = python(tuple(imported))
        request = json.dumps([self.args, str(cwd or Path.cwd()), environment])
        out, theirs = os.pipe()
        err, err_theirs = os.pipe() if stderr is None else (-1, os.dup(stderr))
        self._told = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._told.connect(_server(tuple(imported)))
        socket.send_fds(self._told, [request.encode()], [theirs, err_theirs])
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
def _server(imported: tuple[str, ...]) -> bytes:
    """The address of a process that forks for each connection. All workers of pytest-xdist share it, and it ends with
    the process that started them. A server that imports more than another one is forked from that."""
    session = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    address = f"\0dcp-programs-{session}-{zlib.crc32(repr(imported).encode()):x}".encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        try:
            listening.bind(address)
        except OSError:  # another worker has started it
            return address
        listening.listen(64)
        lives = os.pidfd_open(session)
        if less := next((names for names in (TORCH, BARE) if imported[: len(names)] == names != imported), None):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asker:
                asker.connect(_server(less))
                socket.send_fds(asker, [json.dumps(imported).encode()], [listening.fileno(), lives])
                asker.recv(1)  # it has them
            os.close(lives)
            return address
        code = f"from tests.programs import _serve; _serve({listening.fileno()}, {lives}, {imported!r})"
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        for descriptor in (listening.fileno(), lives):
            os.set_inheritable(descriptor, True)
        os.posix_spawn(PYTHON, [PYTHON, "-c", code], environment)  # it may outlive this worker of pytest-xdist
    os.close(lives)
    return address


_STAND_IN = """\
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    socket.send_fds(server, [json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()], [1, 2])
    pid = int(server.recv(20))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    code = os.waitstatus_to_exitcode(int(server.recv(20)))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@functools.cache
def python(imported: tuple[str, ...]) -> str:
    """A program that takes Python's arguments, has a server run them, and ends as they do."""
    folder = tempfile.TemporaryDirectory(prefix="dcp-programs-")
    atexit.register(folder.cleanup)
    code, program = Path(folder.name, "stand_in.py"), Path(folder.name, "python")
    code.write_text(_STAND_IN.format(address=_server(imported)))
    program.write_text(f'#!/bin/sh\nexec "{PYTHON}" -SE "{code}" "$@"\n')
    program.chmod(0o755)
    return str(program)


def _serve(listening: int, lives: int, imported: tuple[str, ...]) -> None:
    """Fork for each request: to run a program, or to be a server that has imported more."""
    for module in imported:
        importlib.import_module(module)
    gc.freeze()  # what was imported is no garbage: a program that looks for some looks at what is its own
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch would take its libraries of operators apart, which costs 50 ms
    requests = socket.socket(fileno=listening)
    while requests in select.select([requests, lives], [], [])[0]:
        with requests.accept()[0] as asker:
            message, files, *_ = socket.recv_fds(asker, 1 << 18, 2)
            request = json.loads(message)
            if not os.fork():
                requests.close()
                os.close(lives)
                if isinstance(request[0], str):  # names of modules
                    asker.close()
                    _serve(*files, imported=request)
                elif not _watches(*files, asker.detach()):
                    _be(*request)
                os._exit(0)
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
    """Fork once more. The parent tells the process ID of the child, and how it has ended. It kills the child if the
    asker ends before."""
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
    if told in select.select([told, os.pidfd_open(pid)], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(told, b"%d" % status)
    return True


def _be(arguments: list[str], cwd: str, environment: dict[str, str]) -> NoReturn:
    """Run a program to its end, as Python does."""
    code, interrupted = 0, False
    try:
        _run(arguments, cwd, environment)
    except SystemExit as error:
        if isinstance(error.code, int):
            code = error.code
        elif error.code is not None:
            print(error.code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _run(arguments: list[str], cwd: str, environment: dict[str, str]) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = environment.get("PYTHON_EXEC", sys.executable)  # what it starts is forked, too
    program, *rest = arguments
    if program == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        program, *rest = rest
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
