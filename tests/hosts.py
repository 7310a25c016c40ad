"""Hosts for the tests: processes that have a network address, memory, a disk and a name that other hosts do not have.

Where root may make namespaces, each host has those of its own: network (``eth0`` at 10.77.0.1, 10.77.0.2, ... on one
switch), mounts (``/dev/shm`` and ``disk`` are file systems of chosen sizes, at the same path on every host), host name,
boot ID and process numbers. ``shared`` is one folder that all see. Elsewhere hosts are folders and processes of this
machine: the same calls, but a test that asks for a fault which needs root is skipped, with the reason::

    with hosts(3, tmp_path, memory="512M", disk="1G") as h:
        ranks = h.launch(train, h.shared.path, ranks_per_host=2)  # with torchrun's variables; or a program: python
        h[1].lose()  # kill -9 of all its processes, detached ones too; memory and disk are empty
        codes = [rank.wait() for rank in ranks]
        results = h.launch(resume, h.shared.path, on=[0, 2]).results()

Faults are commands of a shell. ``do`` runs one as root inside of a host, and ``h.switch`` where the ends ``port0``,
``port1``, ... of the links are, so that a new fault is one line: ``h[1].do("mount -o remount,ro /dev/shm")``.

Nothing of it has a name outside: all namespaces, mounts, links and processes are gone when the ``with`` ends, and
when the test's process does, in whatever way.
"""

from __future__ import annotations

import atexit
import itertools
import multiprocessing.reduction
import os
import pickle
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests import host_process, launch, programs
from tests.host_process import Process, Ranks, Shell, why_no_namespaces

_FILLER = ".filler"


@contextmanager
def hosts(number: int, folder: Path, *, memory: str = "512M", disk: str | None = "1G") -> Iterator[Hosts]:
    """So many hosts. ``folder`` gets ``shared``, ``disk`` and ``logs``, what the processes print.

    Args:
        memory: The size of each host's ``/dev/shm``.
        disk: The size of each host's ``disk``, which is in memory, too; None: a folder of this machine's disk.
    """
    with ExitStack() as opened:
        why = why_no_namespaces()
        switch = Shell(0, why) if why else opened.enter_context(host_process.switched())
        made = Hosts(folder, [Host(at, folder, memory, disk, switch) for at in range(number)], switch, opened)
        for host in made:
            host.start()
            opened.callback(host.end)
            if not why:
                host.furnish([f"{one.address} {one.name}" for one in made])
        yield made


class Host:
    """One host. ``address``, ``memory`` and ``disk`` are what its processes know it by."""

    def __init__(self, number: int, folder: Path, memory: str, disk: str | None, switch: Shell) -> None:
        self.number, self.name, self._switch, self._private = number, f"host{number}", switch, not switch.why_not
        self._own, self._logs, self._count = folder / f"host{number}", folder / "logs", itertools.count()
        self.address = f"10.77.0.{number + 1}" if self._private else "127.0.0.1"
        self.memory = Path("/dev/shm") if self._private else self._own / "memory"
        self.disk = folder / "disk" if self._private else self._own / "disk"
        outside, self._boot_id = self._own / "disk", self._own / "boot_id"
        sized = "mount -t tmpfs -o mode=1777,size="
        self._mounts = {
            self.memory: f"{sized}{memory} memory {self.memory}",
            self.disk: f"{sized}{disk} disk {self.disk}" if disk else f"mount --bind {outside} {self.disk}",
        }
        self._folders = {self.disk: outside} if self._private else {self.disk: self.disk, self.memory: self.memory}
        self._sized = [self.memory, self.disk] if disk else [self.memory]
        for made in (self._logs, self.disk, *self._folders.values()):
            made.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        self._started: list[Process] = []
        self._asking = threading.Lock()
        self._control, theirs = launch._CONTEXT.Pipe()
        self._process = launch._CONTEXT.Process(target=host_process.start, args=(theirs, self._private))
        self._process.start()
        theirs.close()
        self._pid: int = self._control.recv()
        self.shell = Shell(self._pid, self._switch.why_not)

    def furnish(self, names: Sequence[str]) -> None:
        """It gets its link, mounts and names."""
        port, known = f"port{self.number}", self._own / "hosts"
        self._boot_id.write_text(f"{uuid.uuid4()}\n")
        known.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        self._switch.do(
            f"ip link add {port} type veth peer name eth0 netns {self._pid}; ip link set {port} master switch up"
        )
        self.do(
            f"""mount --make-rprivate /
            mount -t proc proc /proc
            mount --bind {self._boot_id} /proc/sys/kernel/random/boot_id
            mount --bind {known} /etc/hosts  # gloo looks for the address of the host's name
            echo {self.name} > /proc/sys/kernel/hostname
            ip link set lo up
            ip address add {self.address}/24 dev eth0
            ip link set eth0 up"""
        )
        self.do("; ".join(self._mounts.values()))

    def end(self) -> None:
        self.kill()
        for process in self._started:
            process.wait()
        self._control.close()
        self._process.join()

    def do(self, command: str) -> str:
        """A command of the shell as root in this host, and what it prints. Skips the test where hosts are folders."""
        return self.shell.do(command)

    def at(self, path: Path) -> Path:
        """A path of this host's, for the test."""
        return Path(f"/proc/{self._pid}/root{path}") if self._private else path

    def run(
        self,
        what: Callable[..., Any] | Sequence[object],
        *args: Any,
        env: Mapping[str, str] | None = None,
        log: str = "",
    ) -> Process:
        """Start a command, or a function in a process that has imported torch. It is in a session of its own.

        Args:
            what: A list is a command and its arguments. A function is one of a module; see :meth:`Process.result`.
            env: More variables. ``HOST_MEMORY`` and ``HOST_DISK`` are set.
            log: The name of its log.
        """
        path = self._logs / f"{log or self.name}-{next(self._count)}.log"
        path.touch()
        environment = {**os.environ, "HOST_MEMORY": str(self.memory), "HOST_DISK": str(self.disk), **(env or {})}
        command = None if callable(what) else [str(argument) for argument in what]
        called = pickle.dumps((what, args)) if command is None else b""
        with self._asking:
            self._control.send((command, called, environment, path))
            number = self._control.recv()
            descriptor = multiprocessing.reduction.recv_handle(self._control)
        self._started.append(Process(number, descriptor, path, self._ended))
        return self._started[-1]

    def _ended(self, number: int) -> int:
        with self._asking:
            self._control.send(number)
            return int(self._control.recv())

    def processes(self) -> list[int]:
        """The numbers, outside, of the processes that run in it: also of those that are detached."""
        return host_process.descendants(self._pid)

    def kill(self) -> None:
        """``kill -9`` of all its processes, also of those that are detached. They are gone when it returns."""
        host_process.kill_all(self._pid)

    def reboot(self) -> None:
        """Its processes are killed and its memory is empty. What is on its disk stays."""
        self.kill()
        self._empty(self.memory)
        if self._private:
            self._boot_id.write_text(f"{uuid.uuid4()}\n")

    def lose(self) -> None:
        """The host breaks, and a new one takes its name: nothing runs, and memory and disk are empty."""
        self.reboot()
        self._empty(self.disk)

    def _empty(self, place: Path) -> None:
        if self._private:
            self.do(f"umount -l {place}")
        if place in self._folders:
            shutil.rmtree(self._folders[place])
            self._folders[place].mkdir()
        if self._private:
            self.do(self._mounts[place])

    def fill_memory(self, leave: int = 0) -> None:
        """All but so many bytes of ``/dev/shm`` are taken, until :meth:`free`."""
        self._fill(self.memory, leave)

    def fill_disk(self, leave: int = 0) -> None:
        """All but so many bytes of its disk are taken, until :meth:`free`."""
        self._fill(self.disk, leave)

    def _fill(self, place: Path, leave: int) -> None:
        self.do(":")  # where this skips, ``place`` is on a disk of this machine
        assert place in self._sized, "a disk of this machine is not filled: hosts(..., disk=size)"
        with open(self.at(place / _FILLER), "wb") as file:
            there = os.statvfs(file.fileno())
            if (more := there.f_bavail * there.f_frsize - leave) > 0:
                os.posix_fallocate(file.fileno(), 0, more)

    def free(self) -> None:
        """The opposite of both."""
        for place in (self.memory, self.disk):
            self.at(place / _FILLER).unlink(missing_ok=True)

    def cut(self) -> None:
        """The cable is out: packets from and to it are lost, and nobody is told."""
        self._switch.do(f"ip link set port{self.number} down")

    def slow(self, mbit: float) -> None:
        """Its link carries so much per second, each way."""
        shape = f"root tbf rate {mbit}mbit burst {max(64_000, int(mbit * 500))} latency 100ms"  # burst: 4 ms
        self._switch.do(f"tc qdisc replace dev port{self.number} {shape}")
        self.do(f"tc qdisc replace dev eth0 {shape}")

    def mend(self) -> None:
        """Its link is as it was: not cut, to no other host, and not slow."""
        self._switch.do(f"ip link set port{self.number} up; tc qdisc del dev port{self.number} root 2>&- || :")
        self.do("tc qdisc del dev eth0 root 2>&- || :; ip neigh flush dev eth0 nud permanent; ip neigh flush dev eth0")


class Hosts(list[Host]):
    """The hosts of a test."""

    def __init__(self, folder: Path, made: list[Host], switch: Shell, opened: ExitStack) -> None:
        super().__init__(made)
        self.switch, self.shared, self._opened = switch, Shared(folder / "shared", made), opened

    def reach(self, port: int) -> tuple[str, int]:
        """Where hosts reach, over their links, what listens on a port of this machine's loopback: a server of the test.

        Say ``store, port = h.reach(urlsplit(bucket.server.url).port)`` and, for ``env``,
        ``bucket.server.environment(f"http://{store}:{port}") | {"NO_PROXY": "*"}``.
        """
        if self.switch.why_not:
            return "127.0.0.1", port
        return self._opened.enter_context(host_process.door(self.switch, port))

    def launch(
        self,
        what: Callable[..., Any] | Sequence[object],
        *args: Any,
        ranks_per_host: int = 1,
        on: Sequence[int] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Ranks:
        """Start ranks of :meth:`Host.run`, with the variables that torchrun sets; ``on`` these hosts, or on all."""
        used = self if on is None else [self[number] for number in on]
        of_all = {"MASTER_ADDR": used[0].address, "MASTER_PORT": launch.free_port(), "LOCAL_WORLD_SIZE": ranks_per_host}
        ranks = Ranks()
        for group, host in enumerate(used):
            for local in range(ranks_per_host):
                mine = {"RANK": len(ranks), "LOCAL_RANK": local, "GROUP_RANK": group, **of_all}
                mine["WORLD_SIZE"] = len(used) * ranks_per_host
                variables = {name: str(value) for name, value in mine.items()} | dict(env or {})
                ranks.append(host.run(what, *args, env=variables, log=f"rank{len(ranks)}-{host.name}"))
        return ranks

    def cut(self, one: int, other: int) -> None:
        """Packets between two hosts are lost, and nobody is told. The others see both."""
        for host, far in [(one, other), (other, one)]:  # to an address that nobody has
            self[host].do(f"ip neigh replace {self[far].address} lladdr 02:00:00:00:00:01 nud permanent dev eth0")

    def mend(self) -> None:
        """All links are as they were."""
        for host in self:
            host.mend()


class Shared:
    """The folder that all hosts see at the same path."""

    def __init__(self, path: Path, of: list[Host]) -> None:
        self.path, self._hosts = path, of
        path.mkdir(parents=True, exist_ok=True)

    def take_away(self, *numbers: int) -> None:
        """These hosts, or all, see an empty folder without a right to write: ENOENT and EROFS. Open files stay open."""
        for host in self._hosts:
            if not numbers or host.number in numbers:
                host.do(f"mount -t tmpfs -o ro,size=4k away {self.path}")

    def give_back(self, *numbers: int) -> None:
        for host in self._hosts:
            if not numbers or host.number in numbers:
                host.do(f"while umount -l {self.path} 2>&-; do :; done")


def python(*arguments: object) -> None:
    """For :meth:`Hosts.launch`: be ``python *arguments``, but for the seconds in which it imports torch."""
    try:
        programs._be([str(one) for one in arguments], os.getcwd(), dict(os.environ))
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
