"""The hosts of the tests are apart from each other, and each fault does what it says."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dcp_plugin.core.media.disk import posix
from tests import launch
from tests.host_process import Process, why_no_namespaces
from tests.hosts import Host, Hosts, hosts, python
from tests.limits import HANG

pytestmark = pytest.mark.ranks
launch.preload(__name__)
apart = pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces())


def _sum(elements: int = 1) -> tuple[str, float, str]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=HANG))
    total = torch.full((elements,), float(os.environ["RANK"]))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return socket.gethostname(), total[-1].item(), os.environ["LOCAL_RANK"]


def _reaches(patience: float, *addresses: str) -> list[bool]:
    """Whether hosts answer, if only that nothing listens there."""

    def answers(address: str) -> bool:
        try:
            socket.create_connection((address, 7), timeout=patience).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return True

    return [answers(address) for address in addresses]


def _others_reached(h: Hosts, number: int, patience: float = 30.0) -> list[bool]:
    return list(h[number].run(_reaches, patience, *(one.address for one in h)).result())


def _add_until_it_fails(met: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=HANG))
    impatient = dist.new_group(timeout=timedelta(seconds=1))
    dist.barrier()
    met.touch()
    while True:
        dist.all_reduce(torch.ones(1), group=impatient)


def _stay(folder: Path) -> None:
    """For ever, and so do a daemon and a child that is detached from that."""
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
    (folder / str(os.getpid())).touch()
    signal.pause()


def _start_four(h: Host, folder: Path) -> Process:
    folder.mkdir()
    started = h.run(_stay, folder)
    while len(list(folder.iterdir())) < 4:
        assert started.pid in h.processes()
    return started


def _write(*paths: Path, size: int = 1 << 16) -> list[str]:
    """The names of the errors."""

    def wrote(path: Path) -> str:
        try:
            path.write_bytes(bytes(size))
        except OSError as error:
            return errno.errorcode[error.errno or 0]
        return ""

    return [wrote(path) for path in paths]


def _ask(address: str, port: int) -> bytes:
    with socket.create_connection((address, port)) as connection:
        connection.sendall(b"?")
        return connection.recv(9)


def _identity() -> tuple[str, str]:
    return posix.machine(), socket.gethostname()


@apart
def test_ranks_on_hosts_meet_over_the_network(tmp_path: Path) -> None:
    with hosts(3, tmp_path) as h:
        summed = h.launch(_sum, ranks_per_host=2).results()
        assert summed == [(f"host{host}", 15.0, str(local)) for host in range(3) for local in range(2)]
        assert h.launch(_sum, on=[2, 1]).results() == [("host2", 1.0, "0"), ("host1", 1.0, "0")]


@apart
def test_links_are_cut_and_mended(tmp_path: Path) -> None:
    with hosts(3, tmp_path) as h:
        h.cut(0, 1)
        assert _others_reached(h, 0, 0.3) == [True, False, True]
        assert _others_reached(h, 2) == [True, True, True]
        h[2].cut()
        assert _others_reached(h, 2, 0.3) == [False, False, True]
        h.mend()
        assert [_others_reached(h, number) for number in range(3)] == [[True] * 3] * 3


@apart
def test_ranks_whose_link_is_cut_fail_within_their_timeout(tmp_path: Path) -> None:
    with hosts(2, tmp_path) as h:
        ranks = h.launch(_add_until_it_fails, tmp_path / "met")
        while not (tmp_path / "met").exists():
            assert ranks[0].pid in h[0].processes()
        h[1].cut()
        assert [rank.wait() for rank in ranks] == [1, 1]
        assert "Timed out" in ranks[0].log.read_text()


@apart
def test_a_slow_link(tmp_path: Path) -> None:
    with hosts(2, tmp_path) as h:
        h[1].slow(mbit=8)
        h.launch(_sum, 1 << 16).results()
        shaped = [h[1].do("tc -s qdisc show dev eth0"), h.switch.do("tc -s qdisc show dev port1")]
        assert all("rate 8Mbit" in said and "overlimits 0 " not in said for said in shaped)
        h[1].mend()
        assert "tbf" not in h[1].do("tc qdisc show dev eth0") + h.switch.do("tc qdisc show dev port1")


@pytest.mark.parametrize("kind", [pytest.param("apart", marks=apart), "folders"])
def test_a_host_is_killed_with_what_is_detached_and_lost_with_what_it_holds(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "folders":
        monkeypatch.setattr("tests.hosts.why_no_namespaces", lambda: "as the test wants it")
    with hosts(2, tmp_path) as h:
        kept, killed = (_start_four(host, tmp_path / f"on{host.number}") for host in h)
        for host in h:
            assert host.run(_write, host.memory / "x", host.disk / "x").result() == ["", ""]
        assert len(h[1].processes()) == 4
        h[1].kill()
        assert killed.wait() == -signal.SIGKILL
        assert h[1].processes() == [] and len(h[0].processes()) == 4
        assert h[1].at(h[1].memory / "x").exists() and h[1].at(h[1].disk / "x").exists()
        h[1].reboot()
        assert not h[1].at(h[1].memory / "x").exists() and h[1].at(h[1].disk / "x").exists()
        h[1].lose()
        assert not h[1].at(h[1].disk / "x").exists()
        assert h[0].at(h[0].memory / "x").exists() and h[0].at(h[0].disk / "x").exists()
        assert h[1].run(_write, h[1].memory / "x", h[1].disk / "x", h.shared.path / "x").result() == ["", "", ""]
    assert kept.wait() == -signal.SIGKILL


@apart
def test_each_host_and_each_boot_is_another_machine(tmp_path: Path) -> None:
    with hosts(2, tmp_path) as h:
        before = [host.run(_identity).result() for host in h]
        h[1].reboot()
        after = [host.run(_identity).result() for host in h]
    assert [name for _, name in before + after] == ["host0", "host1"] * 2
    assert before[0] == after[0] and len({machine for machine, _ in [*before, *after, _identity()]}) == 4


def test_a_server_of_the_test_is_reached(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, hosts(2, tmp_path) as h:
        asking = [host.run(_ask, *h.reach(server.getsockname()[1])) for host in h]
        for _ in asking:
            connection, _ = server.accept()
            with connection:
                connection.sendall(connection.recv(1))
        assert [one.result() for one in asking] == [b"?", b"?"]


@apart
def test_memory_and_disk_that_are_full(tmp_path: Path) -> None:
    with hosts(2, tmp_path, memory="1M", disk="2M") as h:
        places = [h[0].memory / "x", h[0].disk / "x"]
        assert h[0].run(partial(_write, size=3 << 19), *places).result() == ["ENOSPC", ""]
        h[0].fill_memory(leave=1 << 14)
        h[0].fill_disk()
        more = [h[0].memory / "more", h[0].disk / "more"]
        assert h[0].run(_write, *more).result() == ["ENOSPC", "ENOSPC"]
        assert h[1].run(_write, *more).result() == ["", ""]
        h[0].free()
        h[0].at(places[0]).unlink()
        assert h[0].run(_write, *more).result() == ["", ""]


@apart
def test_a_shared_folder_that_is_taken_away(tmp_path: Path) -> None:
    with hosts(2, tmp_path, disk=None) as h:
        h.shared.take_away(1)
        there, below = h.shared.path / "x", h.shared.path / "below" / "x"
        assert h[1].run(_write, there, below).result() == ["EROFS", "ENOENT"]
        assert h[0].run(_write, there).result() == [""]
        h.shared.give_back()
        assert h[1].at(there).exists()


def _fail() -> None:
    raise ValueError("unsuitable")


def test_a_program_and_a_command(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import atexit, os, sys
        atexit.register(print, "the end")
        print(sys.argv[1], os.environ["RANK"])
        sys.exit(3)
    """)
    program = tmp_path / "program.py"
    program.write_text(code)
    with hosts(2, tmp_path) as h:
        ranks = h.launch(python, program, "rank")
        assert [rank.wait() for rank in ranks] == [3, 3]
        assert [rank.log.read_text() for rank in ranks] == ["rank 0\nthe end\n", "rank 1\nthe end\n"]
        said = h[0].run(["sh", "-c", "echo $HOST_DISK $WORD; kill -9 $$"], env={"WORD": "too"})
        assert said.wait() == -signal.SIGKILL and said.log.read_text() == f"{h[0].disk} too\n"
        with pytest.raises(AssertionError, match="unsuitable"):
            h[0].run(_fail).result()
        with pytest.raises(AssertionError, match="did not end within 0 s"):
            h[0].run(["cat", "/dev/zero"]).wait(timeout=0)


@apart
def test_nothing_remains_of_a_test_that_is_killed(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        from tests import launch
        from tests.hosts import hosts
        from tests.limits import HANG
        launch._CONTEXT.set_forkserver_preload([])  # none of it is needed here
        with hosts(2, Path(sys.argv[1])) as h:
            started = h[0].run(["sh", "-c", "setsid sleep 1000 & exec sleep 1000"])
            while len(h[0].processes()) < 2:
                assert started.pid in h[0].processes()
            print(*h[0].processes(), *(host.shell.pid for host in h), h.switch.pid, flush=True)
            started.wait(HANG)
    """)
    command = [sys.executable, "-c", program, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as killed:
        assert killed.stdout
        descriptors = [os.pidfd_open(int(pid)) for pid in killed.stdout.readline().split()]
        killed.kill()
    assert len(descriptors) == 5
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], HANG)[0]
        os.close(descriptor)
