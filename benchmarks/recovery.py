"""How soon does a training that was killed go on, and what does being ready for that cost it?

- start: what a process needs to import torch and this package. No other figure has it in it;
- restore: a training saves, is killed with ``kill -9``, and its next process restores and makes a step. The bytes come
  from this node's memory, another node's, a disk whose files the page cache does not hold, or a bucket on this machine.
  *memcpy* brings as many bytes from warm memory to the same targets, with two threads as everybody, and with one;
- blocked: what the call of a save takes, and what a loop full of Python loses while it is written: how much longer the
  steps take that run until the save is complete than those before and after it;
- replicate: a save, until each of two hosts has the other's part as well, less one without replicas; and ``sendfile``
  of the same bytes, both ways at once. Between them is a link of so many bits per second (as root);
- reload: a load right after a save.

Memory is needed for five such states (*restore*: two nodes with each other's parts), for ten in *replicate*.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

import dcp_plugin
from benchmarks import _beside, _harness, _replication, _restarts
from benchmarks._figures import Figures, in_turn, no_figures, ratios, show
from benchmarks._harness import Report, Samples, assert_same, build, interleaved, on_ranks
from benchmarks._machine import file_system_of
from benchmarks._options import parser, scratch
from benchmarks._peer import IO_THREADS, OURS, Peer, State
from benchmarks._restarts import Comeback, Place, Way
from benchmarks.peers import ours, stock

QUESTIONS = ("start", "restore", "blocked", "replicate", "reload")
SMALLEST = [
    *("--gib", "0.001", "--repeats", "1", "--questions", "restore", "blocked", "reload"),
    *("--only", f"{OURS}, memory", f"{OURS}, keeper"),
]
_MEMORY = Path("/dev/shm")


def _start(options: argparse.Namespace) -> Figures:
    found = no_figures()
    imported = {"torch": "torch.distributed.checkpoint", f"torch and {OURS}": "dcp_plugin.api"}

    def run(_: int, name: str) -> None:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {imported[name]}"], check=True)
        found[name]["seconds"].append(time.perf_counter() - began)

    in_turn(list(imported), options.repeats, run)
    return found


def _restore(options: argparse.Namespace) -> Figures:
    found = no_figures()
    with ExitStack() as opened:
        disk, memory = (opened.enter_context(scratch(where)) for where in (options.where[0], _MEMORY))

        def run(repetition: int, way: Way) -> None:
            place = Place(disk / "training", memory / "training", repetition + 1)
            for folder in (place.disk, place.memory):
                folder.mkdir()
            for name, value in asdict(Comeback.of(way, options.mib, place)).items():
                found[way.name][name].append(value)
            _restarts.remove(place)

        in_turn(_restarts.ways(options.only), options.repeats, run)
    for figures in found.values():
        pairs = zip(figures["memcpy"], figures["restored"], strict=True)
        figures["of memcpy's rate"] = [copied / restored for copied, restored in pairs]
    return found


def _reload(root: Path, mib: int, repeats: int) -> Samples:
    state, target = build("mixed", mib), build("mixed", mib)
    run, count = root / "reload", itertools.count()
    newest = run

    with scratch(_MEMORY) as memory:
        tiered = dcp_plugin.Checkpointer(
            async_save=True, io={"threads": IO_THREADS}, keeper={"dir": str(memory), "keep": 1}
        )

        def save_tiered(state: State, path: Path) -> None:
            tiered.save({"state": state}, path).wait()

        def load_tiered(state: State, path: Path) -> None:
            tiered.load({"state": state}, path)

        peers = [
            Peer(OURS, ours.save, ours.load),
            Peer(f"{OURS}, past the page cache", partial(ours.save, direct=True), ours.load),
            Peer(f"{OURS}, local tier in memory", save_tiered, load_tiered),
            Peer("stock", stock.save, stock.load),
        ]

        def before(peer: Peer) -> None:
            nonlocal newest
            if newest is not run:
                _harness.remove(newest)
            newest = run / f"step-{next(count)}"
            for tensor in target.values():
                tensor.zero_()
            peer.save(state, newest)

        def load(peer: Peer) -> None:
            peer.load(target, newest)

        samples = interleaved(peers, repeats, before, load)
        for peer in peers:
            before(peer)
            load(peer)
            assert_same(peer, state, target)
        tiered.close()
    return samples


def main() -> None:
    made = parser("recovery", __doc__)
    made.add_argument(
        "--gib", dest="mib", type=lambda text: max(1, round(float(text) * 1024)), help="size, in GiB (default 1)"
    )
    made.add_argument("--questions", nargs="+", choices=QUESTIONS, default=QUESTIONS, help="(default all)")
    made.add_argument("--only", nargs="+", metavar="PART", help="cases of restore and blocked with this in their names")
    made.add_argument("--gbit", nargs="+", type=float, default=[1, 10], help="of the link (default %(default)s)")
    made.set_defaults(where=[Path("outputs")])
    options = made.parse_args()
    report = Report("recovery", options)
    mib, repeats = options.mib, options.repeats
    with scratch(options.where[0]) as root:
        disk = f"{mib} MiB in 200 tensors, {options.where[0]} ({file_system_of(root)})"
        if "start" in options.questions:
            show(report, "start: seconds", _start(options))
        if "restore" in options.questions:
            found = _restore(options)
            show(report, f"restore: seconds, {disk}", found)
            ratios(found, "restored", over=f"{OURS}, memory")
        if "blocked" in options.questions:
            show(report, f"blocked: {disk}", _beside.measure(mib, repeats, root, options.only))
        if "replicate" in options.questions:
            _replicate(report, options, root)
        if "reload" in options.questions:
            report.table(f"reload: {disk}", on_ranks(1, _reload, root, mib, repeats))
    report.close()


def _replicate(report: Report, options: argparse.Namespace, root: Path) -> None:
    if lacks := _replication.missing():
        print(f"left out: replicate ({lacks})")
        return
    for gbit in options.gbit:
        found = _replication.measure(options.mib, options.repeats, gbit, root.resolve() / f"hosts-{gbit:g}")
        show(report, f"replicate: {options.mib} MiB, half on each of two hosts, a link of {gbit:g} Gbit/s", found)


if __name__ == "__main__":
    main()
