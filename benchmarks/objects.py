"""How fast are saves to a bucket and loads from it? Peers, ours and raw transfers of the same bytes, one server.

The server (``_s3_server.py``) is a process on the same machine, so on few cores it takes part of every figure, the
ceiling's too. Two scenes: the loopback as it is, and a link of 1 Gbit/s with a round trip of 20 ms (``_link.py``, as
root). Besides seconds: requests per GiB and bytes moved ÷ bytes needed, as the server counts them.

- save, load: all peers. *raw obstore* puts one object per thread in parts, and gets them in ranges into the tensors;
- reshard: saved by four ranks, loaded by two (``--reshard``);
- unchanged: a second checkpoint of which nothing has changed, against copies by the server and an upload;
- blocked: what the call of an asynchronous save takes, to the bucket and to a disk;
- steps: as many training steps (products of matrices, one thread) as an upload takes, beside one and without.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dcp_plugin
from benchmarks import _buckets, _options
from benchmarks._buckets import RAW, SCENES, counts, key_of, peers, url, use
from benchmarks._harness import Report, Sample, Samples, assert_same, build, interleaved, local_of, on_ranks, sizes_of
from benchmarks._harness import remove as remove_directory
from benchmarks._options import parser, scratch
from benchmarks._peer import IO_THREADS, OURS, Peer, State
from benchmarks.reshard import ROWS, sharded_state

_SMALLEST = "--mib 2 --scenes loopback --questions save load unchanged blocked steps"  # ranks that meet take seconds
SMALLEST = [*_options.SMALLEST, *_SMALLEST.split(), "--peers", "stock, s3fs"]
QUESTIONS = ("save", "load", "reshard", "unchanged", "blocked", "steps")
_TO_DISK = f"{OURS}, to a disk"
Run = Callable[[Peer], None]


def _counted(found: list[Peer], repeats: int, before: Run, run: Run) -> Samples:
    """``interleaved``, with what the server was asked for by each run, on rank 0."""
    requests: dict[str, list[tuple[int, int]]] = {peer.name: [] for peer in found}
    here = not dist.is_initialized() or dist.get_rank() == 0

    def begin(peer: Peer) -> None:
        close()
        before(peer)
        if here:
            begun[:] = [(peer.name, counts())]

    def close() -> None:
        for name, at in begun:
            now = counts()
            moved = now["bytes_in"] + now["bytes_out"] - at["bytes_in"] - at["bytes_out"]
            requests[name].append((now["requests"] - at["requests"], moved))
        begun.clear()

    begun: list[tuple[str, dict[str, int]]] = []
    samples = interleaved(found, repeats, begin, run)
    close()
    if not here:
        return samples
    return {
        name: [
            replace(run, requests=asked, moved=moved)
            for run, (asked, moved) in zip(runs, requests[name][1:], strict=True)
        ]
        for name, runs in samples.items()
    }


def _save_and_load(endpoint: str, mib: int, repeats: int, wanted: list[str] | None) -> Samples:
    use(endpoint)
    state, target = build("mixed", mib), build("mixed", mib, filled=False)
    savers, loaders = peers("save", 1, wanted, say=print), peers("load", 1, wanted)

    def fresh(peer: Peer) -> None:
        peer.prepare(state)
        _buckets.remove(key_of(peer))

    def zero(peer: Peer) -> None:
        for tensor in target.values():
            tensor.zero_()

    def load(peer: Peer) -> None:
        peer.load(target, key_of(peer))

    saved = _counted(savers, repeats, fresh, lambda peer: peer.save(state, key_of(peer)))
    for peer in loaders:
        if "dropped" not in peer.name:
            zero(peer)
            load(peer)
            assert_same(peer, state, target)
    loaded = _counted(loaders, repeats, zero, load)
    return {
        f"{what}:{name}": runs for what, found in (("save", saved), ("load", loaded)) for name, runs in found.items()
    }


def _reshard_save(endpoint: str, mib: int, wanted: list[str] | None) -> Samples:
    use(endpoint)
    state = sharded_state(mib, ROWS, filled=True)
    for peer in peers("reshard", dist.get_world_size(), wanted):
        if dist.get_rank() == 0:
            _buckets.remove(key_of(peer))
        dist.barrier()
        peer.save(state, key_of(peer))
    return {}


def _reshard_load(endpoint: str, mib: int, repeats: int, wanted: list[str] | None) -> Samples:
    use(endpoint)
    state, target = sharded_state(mib, ROWS, filled=True), sharded_state(mib, ROWS, filled=False)
    found = peers("reshard", dist.get_world_size(), wanted)

    def zero(peer: Peer) -> None:
        for value in target.values():
            local_of(value).zero_()

    for peer in found:
        zero(peer)
        peer.load(target, key_of(peer))
        assert_same(peer, state, target)
    return _counted(found, repeats, zero, lambda peer: peer.load(target, key_of(peer)))


def _nothing(*_: Any) -> None:
    pass


def _unchanged(endpoint: str, mib: int, repeats: int) -> Samples:
    """The second checkpoint of a run, of a model that is frozen."""
    import obstore

    use(endpoint)
    state = build("mixed", mib)
    model = {"model": nn.ParameterList(nn.Parameter(value, requires_grad=False) for value in state.values())}
    (raw,) = (peer for peer in peers("unchanged", 1, [RAW]) if peer.name == RAW)
    first, second = Path("unchanged/step-1"), Path("unchanged/step-2")
    saver: list[dcp_plugin.Checkpointer] = []

    def save_first(peer: Peer) -> None:
        for old in saver:
            old.close()
        _buckets.remove(first.parent)
        raw.prepare(state)
        if peer.name.startswith(OURS):
            saver[:] = [dcp_plugin.Checkpointer(io={"threads": IO_THREADS}, reuse=peer.name == OURS)]
            saver[0].save(model, url(first))
        else:
            raw.save(state, first)

    def save_second(peer: Peer) -> None:
        if peer.name.startswith(OURS):
            saver[0].save(model, url(second))
        elif peer.name == RAW:
            raw.save(state, second)
        else:
            for page in obstore.list(_buckets.store(), f"{first}/"):
                for there in page:
                    obstore.copy(_buckets.store(), there["path"], f"{second}/{there['path'].rpartition('/')[2]}")

    cases = (OURS, f"{OURS}, reuse=False", RAW, f"{RAW}, copies by the server")
    return _counted([Peer(name, _nothing, _nothing) for name in cases], repeats, save_first, save_second)


class _Background:
    """Asynchronous saves of one state to several places, one at a time."""

    def __init__(self, state: State, disk: Path) -> None:
        self._state = state
        self._places: dict[str, str | Path] = {OURS: url(Path("async/step")), _TO_DISK: disk / "step"}
        self.names = list(self._places)
        self._saver = dcp_plugin.Checkpointer(async_save=True, io={"threads": IO_THREADS}, reuse=False)
        self._handle: Any = None

    def clear(self) -> None:
        """Wait for the save under way, and remove what it made."""
        if self._handle:
            self._handle.wait()
        self._handle = None
        _buckets.remove(Path("async"))
        remove_directory(Path(self._places[_TO_DISK]))

    def begin(self, name: str) -> None:
        if name in self._places:
            self._handle = self._saver.save({"state": self._state}, self._places[name])

    def seconds(self, name: str) -> float:
        """Of a save from the call until it is published, while nothing else runs."""
        self.clear()
        began = time.perf_counter()
        self.begin(name)
        self._handle.wait()
        return time.perf_counter() - began

    def close(self) -> None:
        self.clear()
        self._saver.close()


def _blocked(endpoint: str, mib: int, repeats: int, disk: Path) -> Samples:
    use(endpoint)
    background = _Background(build("mixed", mib), disk)
    cases = [Peer(name, _nothing, _nothing) for name in background.names]
    samples = interleaved(cases, repeats, lambda _: background.clear(), lambda peer: background.begin(peer.name))
    background.close()
    return samples


def _steps(endpoint: str, mib: int, repeats: int, disk: Path) -> Samples:
    use(endpoint)
    background = _Background(build("mixed", mib), disk)
    left, right = torch.randn(512, 512), torch.randn(512, 512)

    def steps(count: int) -> None:
        for _ in range(count):
            torch.mm(left, right)

    background.seconds(background.names[0])
    took = max(background.seconds(name) for name in background.names)
    steps(20)
    began = time.perf_counter()
    steps(20)
    count = 1 + int(took / (time.perf_counter() - began) * 20)

    def before(peer: Peer) -> None:
        background.clear()
        background.begin(peer.name)

    cases = [Peer(name, _nothing, _nothing) for name in (*background.names, "without a save")]
    samples = interleaved(cases, repeats, before, lambda _: steps(count))
    background.close()
    return samples


def _columns(mib: int) -> dict[str, Callable[[Sample], float]]:
    needed = sum(sizes_of("mixed", mib))
    return {
        "MB/s": lambda run: needed / 1e6 / run.seconds,
        "requests/GiB": lambda run: run.requests / needed * 2**30,
        "moved ÷ needed": lambda run: run.moved / needed,
    }


def _scene(scene: str, options: argparse.Namespace, report: Report, disk: Path) -> None:
    mib, repeats, wanted = options.mib, options.repeats, options.peers
    said = f"{mib} MiB in 200 tensors, {SCENES[scene].said}"
    with _buckets.served(scene) as endpoint:
        if {"save", "load"} & set(options.questions):
            both = on_ranks(1, _save_and_load, endpoint, mib, repeats, wanted)
            for what in ("save", "load"):
                runs = {name.partition(":")[2]: found for name, found in both.items() if name.startswith(what)}
                report.table(f"{what}, {said}", runs, _columns(mib))
                _against_ceiling(runs)
        if "reshard" in options.questions:
            before, after = options.reshard
            on_ranks(before, _reshard_save, endpoint, mib, wanted)
            runs = on_ranks(after, _reshard_load, endpoint, mib, repeats, wanted)
            report.table(f"reshard, {before} to {after} ranks, {said}", runs, _columns(mib))
        if "unchanged" in options.questions:
            runs = on_ranks(1, _unchanged, endpoint, mib, repeats)
            report.table(f"a second checkpoint, nothing changed, {said}", runs, _columns(mib))
        for what, measure in (("blocked", _blocked), ("steps", _steps)):
            if what in options.questions:
                report.table(f"{what}, {said}", on_ranks(1, measure, endpoint, mib, repeats, disk))


def _against_ceiling(samples: Samples) -> None:
    """Rate ÷ that of raw transfers, repetition by repetition."""
    compared = ((OURS, RAW), (OURS, f"{RAW}, signed payload"), (f"{OURS}, unsigned payload", RAW))
    for name, ceiling in compared:
        if name in samples and ceiling in samples:
            pairs = zip(samples[ceiling], samples[name], strict=True)
            ratios = sorted(raw.seconds / peer.seconds for raw, peer in pairs)
            span = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
            print(f"{name}: {statistics.median(ratios):.2f} of the rate of {ceiling}, pair by pair ({span})")


def main() -> None:
    made = parser("objects", __doc__)
    made.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES), help="(default all)")
    made.add_argument("--questions", nargs="+", choices=QUESTIONS, default=QUESTIONS, help="(default all)")
    made.add_argument("--reshard", nargs=2, type=int, default=[4, 2], help="ranks that save, and that load")
    made.set_defaults(mib=256, where=[Path("outputs")])
    options = made.parse_args()
    report = Report("objects", options)
    with scratch(options.where[0]) as disk:
        for scene in options.scenes:
            if lacks := _buckets.missing(scene):
                print(f"left out: {SCENES[scene].said} ({lacks})")
            else:
                _scene(scene, options, report, disk)
    report.close()


if __name__ == "__main__":
    main()
