"""How long does a load take, from the page cache and from the disk?

Into existing tensors of the layout that was saved.
Every peer loads what it saved itself, but for the case that reads stock's checkpoint with our reader. A cold load
begins with files that the page cache does not hold; a file system in memory has none. *saved*: a load right after a
save, as it leaves the page cache, in the process that saved and in another one.

The rate at which one thread hashes is printed first. A load that verifies is compared with *raw read and hash*.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import _options
from benchmarks._harness import (
    CONTEXT,
    Report,
    Samples,
    assert_same,
    build,
    check,
    forget,
    interleaved,
    on_ranks,
    remove,
    sync_files,
)
from benchmarks._machine import file_system_of
from benchmarks._options import load_cases, parser, scratch, with_state
from benchmarks._peer import Peer, State, find
from benchmarks.peers.ceiling import hash_blocks
from dcp_plugin.core.format.payload import LARGEST_BLOCK, SMALLEST_BLOCK

SMALLEST = [*_options.SMALLEST, "--state", "mixed", "--ranks", "1", "--peers", "stock"]
CACHES = ("warm", "cold", "saved")


def _measure(
    world: int, kind: str, mib: int, repeats: int, root: Path, wanted: list[str] | None, cold: bool
) -> Samples:
    state = build(kind, mib)
    target = build(kind, mib, filled=False)
    peers = find("load", world, wanted)
    saved = {peer.name: root / str(number) for number, peer in enumerate(peers)}
    for peer in peers:
        peer.prepare(state)
        remove(saved[peer.name])
        peer.save(state, saved[peer.name])
        check(peer, state, saved[peer.name], target)

    def before(peer: Peer) -> None:
        if cold:
            forget(saved[peer.name])

    samples = interleaved(peers, repeats, before, lambda peer: peer.load(target, saved[peer.name]))
    assert_same(peers[-1], state, target)
    return samples


def _saver(state: State, wanted: list[str] | None, root: Path) -> Callable[[str], None]:
    """Saves anew by a peer's name, durably."""
    peers = {peer.name: peer for peer in find("load", 1, wanted)}

    def save(name: str) -> None:
        path = root / str(list(peers).index(name))
        peers[name].prepare(state)
        remove(path)
        peers[name].save(state, path)
        sync_files(path)

    return save


def _saves_on_request(names: Any, done: Any, kind: str, mib: int, wanted: list[str] | None, root: Path) -> None:
    """A process of its own, whose state is the same: it saves for each name that it is given."""
    save = _saver(build(kind, mib), wanted, root)
    for name in iter(names.get, None):
        save(name)
        done.put(name)


def _measure_after_save(
    kind: str, mib: int, repeats: int, root: Path, wanted: list[str] | None, elsewhere: tuple[Any, Any] | None
) -> Samples:
    state, target = build(kind, mib), build(kind, mib, filled=False)
    here = None if elsewhere else _saver(state, wanted, root)
    peers = find("load", 1, wanted)

    def before(peer: Peer) -> None:
        for tensor in target.values():
            tensor.zero_()
        if here:
            here(peer.name)
        elif elsewhere:
            elsewhere[0].put(peer.name)
            elsewhere[1].get(timeout=600)

    def load(peer: Peer) -> None:
        peer.load(target, root / str(peers.index(peer)))

    samples = interleaved(peers, repeats, before, load)
    for peer in peers:
        before(peer)
        load(peer)
        assert_same(peer, state, target)
    return samples


def _after_saves(options: argparse.Namespace, report: Report) -> None:
    """Of one rank, on what is no file system in memory: those keep what was written in any case."""
    for where in options.where:
        for process in ("same", "another"):
            with scratch(where) as root:
                kept = file_system_of(root)
                if kept.startswith("tmpfs"):
                    continue
                names, done = CONTEXT.Queue(), CONTEXT.Queue()
                arguments = (names, done, "mixed", options.mib, options.peers, root)
                saver = CONTEXT.Process(target=_saves_on_request, args=arguments, daemon=True)
                elsewhere = (names, done) if process == "another" else None
                if elsewhere:
                    saver.start()
                samples = on_ranks(
                    1, _measure_after_save, "mixed", options.mib, options.repeats, root, options.peers, elsewhere
                )
                if elsewhere:
                    names.put(None)
                    saver.join()
                size = f"{options.mib} MiB in 200 tensors, {where} ({kept})"
                report.table(f"load, right after a save, {process} process, {size}", samples)


def _hash_rates() -> dict[str, float]:
    """GB/s of one thread by the size of a block, over more memory than a processor's cache usually has."""
    memory, rates = memoryview(bytearray(256 << 20)), {}
    for block in (SMALLEST_BLOCK, LARGEST_BLOCK):
        times = []
        for _ in range(3):
            began = time.perf_counter()
            hash_blocks(memory, block)
            times.append(time.perf_counter() - began)
        rates[f"{block >> 10} KiB"] = len(memory) / min(times) / 1e9
    return rates


def main() -> None:
    made = with_state(parser("load", __doc__))
    made.add_argument("--caches", nargs="+", choices=CACHES, default=CACHES, help="(default all)")
    options = made.parse_args()
    report = Report("load", options)
    rates = _hash_rates()
    print("hash: " + ", ".join(f"{rate:.1f} GB/s in blocks of {size}" for size, rate in rates.items()))
    report.say(hash_gb_per_s=rates)
    for case in load_cases(options):
        if ("cold" if case.cold else "warm") in options.caches:
            arguments = (case.world, case.state, options.mib, options.repeats, case.root, options.peers, case.cold)
            report.table(f"load, {case.title}", on_ranks(case.world, _measure, *arguments))
    if "saved" in options.caches and "mixed" in options.state:
        _after_saves(options, report)
    report.close()


if __name__ == "__main__":
    main()
