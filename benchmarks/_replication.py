"""Copies of each other's part, between two hosts with a slow link: ours, and ``sendfile`` of the same bytes."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

import torch.distributed as dist

import dcp_plugin
from benchmarks import _harness, _restarts
from benchmarks._figures import Figures, in_turn, no_figures
from benchmarks._harness import barrier
from benchmarks._peer import IO_THREADS, OURS
from benchmarks.peers.ceiling import local_bytes
from tests.host_process import why_no_namespaces
from tests.hosts import hosts

RAW = "sendfile, both ways at once"
ALONE, COPIED = f"{OURS}, no replica", f"{OURS}, one replica"
_PORT = 29_000


def missing() -> str:
    """What this machine lacks, or nothing."""
    return why_no_namespaces()


def measure(mib: int, repeats: int, gbit: float, folder: Path) -> Figures:
    """Between two hosts with half of the state each. ``folder`` is empty, and gone afterwards."""
    with hosts(2, folder, memory=f"{mib * 5 + 256}M") as both:  # host copies, parts of two saves, replicas
        for host in both:
            host.slow(mbit=gbit * 1000)
        heard = both.launch(_on_rank, mib, repeats, both.shared.path / "run").results(timeout=600)
    found = no_figures()
    for name in heard[0]:
        found[name]["seconds"] = [max(of_all) for of_all in zip(*(rank[name] for rank in heard), strict=True)]
    copying = [one - none for one, none in zip(found[COPIED]["seconds"], found[ALONE]["seconds"], strict=True)]
    gbits = sum(_harness.sizes_of("mixed", mib)) / 2 * 8e-9
    found[COPIED]["copying alone"] = copying
    found[COPIED]["Gbit/s each way"] = [gbits / seconds for seconds in copying]
    found[RAW]["Gbit/s each way"] = [gbits / seconds for seconds in found[RAW]["seconds"]]
    found[COPIED]["of sendfile's rate"] = [
        raw / seconds for raw, seconds in zip(found[RAW]["seconds"], copying, strict=True)
    ]
    return found


def _on_rank(mib: int, repeats: int, run: Path) -> dict[str, list[float]]:
    """Seconds of each case."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo")
    state, memory = _restarts.state_of(mib, 0), Path(os.environ["HOST_MEMORY"])
    savers = {
        name: dcp_plugin.Checkpointer(
            async_save=True,
            io={"threads": IO_THREADS},
            keeper={"dir": str(memory / f"local-{replicas}"), "keep": 1, "replicas": replicas, "durable_every": None},
        )
        for replicas, name in enumerate((ALONE, COPIED))
    }
    found: dict[str, list[float]] = {name: [] for name in (*savers, RAW)}
    with socket.socket() as listener:
        far = _connected(listener)

        def once(repetition: int, name: str) -> None:
            _restarts.refill(state, repetition)
            barrier()
            began = time.perf_counter()
            if name in savers:
                savers[name].save({"state": state}, run / name / f"step-{repetition}").wait_local()
            else:
                _exchange(far, file, size)
            barrier()
            if repetition:
                found[name].append(time.perf_counter() - began)

        size = sum(map(len, local_bytes(state)))
        with tempfile.TemporaryFile(dir=memory) as file:
            for view in local_bytes(state):
                file.write(view)
            file.flush()
            in_turn(list(found), repeats + 1, once)
        far.close()
    for saver in savers.values():
        saver.close()
    dist.destroy_process_group()
    return found


def _connected(listener: socket.socket) -> socket.socket:
    """One connection between both ranks."""
    address = os.environ["MASTER_ADDR"], _PORT
    if dist.get_rank() == 0:
        listener.bind(address)
        listener.listen()
        barrier()
        return listener.accept()[0]
    barrier()
    return socket.create_connection(address)


def _exchange(far: socket.socket, file: IO[bytes], size: int) -> None:
    """Send the file, and take as many bytes from the other side."""

    def take() -> None:
        buffer, left = memoryview(bytearray(1 << 20)), size
        while left:
            left -= far.recv_into(buffer[: min(left, len(buffer))])

    taking = threading.Thread(target=take)
    taking.start()
    far.sendfile(file, 0, size)
    taking.join()
