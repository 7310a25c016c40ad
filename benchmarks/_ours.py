"""This project's ways to come back: what is in memory, in another node's memory, on a disk or in a bucket.

A node is a directory of its own here, with a keeper of its own.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist

import dcp_plugin
from benchmarks import _buckets
from benchmarks._peer import IO_THREADS, OURS, State
from benchmarks._restarts import Place, Way, make_cold
from dcp_plugin.core.paths import resolved
from dcp_plugin.tiers.spool import Spool

# --- in keeper.dir, on a tmpfs


def _node(place: Place, number: int) -> str:
    return str(place.memory / f"node-{number}")


def _checkpointer(place: Place, nodes: int) -> dcp_plugin.Checkpointer:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return dcp_plugin.Checkpointer(
        async_save=True,
        io={"threads": IO_THREADS},
        keeper={"dir": _node(place, rank % nodes), "keep": 1, "replicas": nodes - 1, "durable_every": None},
    )


def _save_locally(state: State, place: Place, *, nodes: int) -> dcp_plugin.Checkpointer:
    saver = _checkpointer(place, nodes)
    saver.save({"state": state}, place.checkpoint, step=place.step).wait_local()
    return saver


def _load_nearest(state: State, place: Place, *, nodes: int) -> None:
    _resume(state, place.run, _checkpointer(place, nodes))


def _resume(state: State, root: str | Path, saver: dcp_plugin.Checkpointer) -> None:
    restart = dcp_plugin.resume_or_init({"state": state}, root, resume="must", checkpointer=saver)
    assert restart.report is not None and "durable" not in restart.report.sources


def _end_keeper(place: Place, number: int) -> None:
    """It is gone, and all that it had in memory."""
    spool = Spool.of(resolved(place.run), _node(place, number))
    if spool.is_kept() and (pid := spool.pid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        while spool.is_kept():
            time.sleep(0.01)
    shutil.rmtree(spool.folder, ignore_errors=True)


def _lose_first_node(place: Place) -> None:
    _end_keeper(place, 0)
    shutil.rmtree(_node(place, 0))


@contextmanager
def _keepers_ended(place: Place, *, nodes: int) -> Iterator[None]:
    try:
        yield
    finally:
        for number in range(nodes):
            _end_keeper(place, number)


# --- at path alone


def _save(state: State, place: Place, *, bucket: bool) -> dcp_plugin.Checkpointer:
    saver = dcp_plugin.Checkpointer(async_save=True, io={"threads": IO_THREADS})
    saver.save({"state": state}, f"{_root(place, bucket)}/step-{place.step}", step=place.step).wait()
    return saver


def _load(state: State, place: Place, *, bucket: bool) -> None:
    _resume(state, _root(place, bucket), dcp_plugin.Checkpointer(io={"threads": IO_THREADS}))


def _root(place: Place, bucket: bool) -> str:
    return _buckets.url(Path("recovery")) if bucket else str(place.run)


def _reach_bucket(place: Place) -> None:
    importlib.import_module("obstore")
    _buckets.use(_endpoint(place).read_text())


@contextmanager
def _bucket(place: Place) -> Iterator[None]:
    """A server that takes the memory of its objects with it."""
    with _buckets.served("loopback") as endpoint:
        _endpoint(place).write_text(endpoint)
        yield


def _endpoint(place: Place) -> Path:
    return place.memory / "endpoint"


def _locally(name: str, nodes: int, **more: object) -> Way:
    save, load, beside = (partial(what, nodes=nodes) for what in (_save_locally, _load_nearest, _keepers_ended))
    return Way(f"{OURS}, {name}", save, load, world=nodes, beside=beside, **more)  # type: ignore[arg-type]


def _durably(name: str, bucket: bool, **more: object) -> Way:
    save, load = (partial(what, bucket=bucket) for what in (_save, _load))
    return Way(f"{OURS}, {name}", save, load, **more)  # type: ignore[arg-type]


WAYS = [
    _locally("memory", 1),
    _locally("2 nodes, memory", 2),
    _locally("2 nodes, 1 lost: neighbour", 2, lose=_lose_first_node),
    _durably("disk, cold", False, lose=make_cold),
    _durably("bucket", True, start=_reach_bucket, beside=_bucket),
]
