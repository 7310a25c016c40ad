"""What planning costs on rank 0 and on the wire, with 8 to 16384 simulated ranks: stock DCP's planner and ours.

Every rank of ours is a thread that runs the code of a real save; what they exchange is pickled, counted and unpickled
as between processes, and rank 0's CPU time is that of its thread. With more ranks than threads can be (``--threads``),
or 10^6 chunks, only rank 0 runs under ``fsdp``, where the messages of the others differ in the offsets alone: they are
made beforehand. *extra*: rank 0's peak memory. For stock, the plans of all ranks are made by the
rule of its planner for DTensors, and rank 0 does what ``torch.distributed.checkpoint.save`` does there.

*plan*: from the messages of all ranks to what each has to write. *again*: the same save once more. *commit*: from the
results of all ranks to the tables of contents, ready to be written. *read*: a rank opens the checkpoint, in seconds of
the clock; *local*: it plans its reads. Both make every box of the checkpoint once; the run ends if they do not.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import pickle
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks import _machine
from dcp_plugin.core.format import index_file
from dcp_plugin.core.format.index import CheckpointIndex, Places
from dcp_plugin.core.format.metadata import pieces
from dcp_plugin.core.format.payload import block_counts
from dcp_plugin.core.format.summary import fingerprint
from dcp_plugin.core.planning.local_inventory import Holdings, LocalInventory
from dcp_plugin.core.planning.reads import ReadPlanner
from dcp_plugin.core.planning.save import DIGEST, PlanExchange, in_table_order, items_to_write
from dcp_plugin.core.ranks.collectives import Ranks
from dcp_plugin.core.records import RankPlan
from dcp_plugin.core.types import Flat, LocalChunk, ShardedValue

MESHES = ("fsdp", "hsdp", "uneven", "mixed")
COLUMNS = 1024
LARGEST = 10**6
"""Ranks x tensors from which on there is one run, without stock, and of ``fsdp`` of rank 0 alone."""
SMALLEST = ["--ranks", "8", "12", "--threads", "8", "--tensors", "6", "--repeats", "1"]


@dataclass
class Figures:
    """CPU seconds of rank 0 by step, and bytes that all ranks exchange."""

    seconds: dict[str, float] = field(default_factory=dict)
    gathered: int = 0
    scattered: int = 0
    results: int = 0
    again: int = 0
    """Bytes that a rank sends when the save is repeated."""
    largest_share: float = 0.0
    boxes: int = 0
    extra_mib: float = 0.0

    def time(self, step: str, work: Callable[[], Any], clock: Callable[[], float] = time.thread_time) -> Any:
        gc.collect()
        begin = clock()
        result = work()
        self.seconds[step] = clock() - begin
        return result


# The state: which boxes of which tensor a rank has


def _rows(mesh: str, ranks: int) -> int:
    return {"fsdp": 4 * ranks, "hsdp": 1024, "uneven": 7 * ranks, "mixed": 4 * ranks}[mesh]


def _box(mesh: str, tensor: int, rank: int, ranks: int) -> tuple[int, int] | None:
    """First row and number of rows; ``hsdp``: 8 shards. ``uneven``: every tensor cut at other rows. ``mixed``: a third
    of the tensors sharded over all ranks, a third over half of them and twice, a third whole on every fourth rank."""
    rows = _rows(mesh, ranks)
    if mesh == "fsdp" or (mesh == "mixed" and tensor % 3 == 0):
        return rank * 4, 4
    if mesh == "hsdp":
        return rank % 8 * (rows // 8), rows // 8
    if mesh == "uneven":
        cut = [7 * r + (r * 2654435761 ^ (tensor + 1) * (r + 40503) * 97) % 1013 % 7 - 3 for r in (rank, rank + 1)]
        cut[0] = 0 if rank == 0 else cut[0]
        cut[1] = rows if rank == ranks - 1 else cut[1]
        return (cut[0], cut[1] - cut[0]) if cut[1] > cut[0] else None
    if tensor % 3 == 1:
        return rank % (ranks // 2) * 8, 8
    return (0, rows) if rank % 4 == 0 else None


def _key(tensor: int) -> str:
    return f"model.layers.{tensor // 9}.self_attention.projection_{tensor % 9}.weight"


def _boxes(mesh: str, rank: int, ranks: int, tensors: int) -> Iterator[tuple[str, int, tuple[int, int]]]:
    for tensor in range(tensors):
        box = _box(mesh, tensor, rank, ranks)
        if box is not None:
            yield _key(tensor), _rows(mesh, ranks), box


def _state(mesh: str, rank: int, ranks: int, tensors: int) -> Flat:
    """Views of one float; each tensor has its own, so that none are taken for tied."""
    state: Flat = {}
    floats = torch.empty(tensors)
    for number, (key, rows, (first, count)) in enumerate(_boxes(mesh, rank, ranks, tensors)):
        memory = floats[number].expand(count, COLUMNS)
        plain = mesh == "mixed" and (first, count) == (0, rows)
        chunk = LocalChunk((first, 0), (count, COLUMNS), memory)
        state[key] = ShardedValue((rows, COLUMNS), torch.float32, (chunk,), any_rank=not plain)
    return state


# Ours: every rank is a thread


class _Mailbox:
    """Where simulated ranks leave what they send."""

    def __init__(self, ranks: int) -> None:
        self.sent: list[bytes] = [b""] * ranks
        self.received: list[bytes] = [b""] * ranks
        self.barrier = threading.Barrier(ranks, timeout=300)
        self.gathered = self.scattered = 0


class _Thread(Ranks):
    """A rank among threads, which exchanges pickles."""

    def __init__(self, rank: int, mailbox: _Mailbox) -> None:
        super().__init__()
        self.rank, self.size, self._mailbox = rank, len(mailbox.sent), mailbox

    def combine(self, step: str, work: Any, combine: Any) -> Any:
        return self._round(work, lambda results: [combine(results)] * self.size)

    def scatter(self, step: str, work: Any, combine: Any) -> Any:
        return self._round(work, combine)

    def _round(self, work: Any, answers_of: Any) -> Any:
        box = self._mailbox
        box.sent[self.rank] = pickle.dumps(work())
        box.barrier.wait()
        if self.rank == 0:
            answers = answers_of([pickle.loads(data) for data in box.sent])
            first = pickle.dumps(answers[0])
            same = all(answer is answers[0] for answer in answers)
            box.received = [first if same else pickle.dumps(answer) for answer in answers]
            box.gathered += sum(map(len, box.sent[1:]))
            box.scattered += sum(map(len, box.received[1:]))
        box.barrier.wait()
        return pickle.loads(box.received[self.rank])


class _First(Ranks):
    """Rank 0 alone. The others have sent already."""

    def __init__(self, sent: list[bytes], shares: list[bytes]) -> None:
        super().__init__()
        self.rank, self.size = 0, len(sent) + 1
        self.sent, self._shares = sent, shares
        self.gathered = self.scattered = 0

    def combine(self, step: str, work: Any, combine: Any) -> Any:
        return self._round(work, lambda told: [combine(told)])

    def scatter(self, step: str, work: Any, combine: Any) -> Any:
        self.sent = self._shares
        return self._round(work, combine)

    def _round(self, work: Any, answers_of: Any) -> Any:
        answers = answers_of([work(), *map(pickle.loads, self.sent)])
        first, *others = map(pickle.dumps, answers)
        self.gathered += sum(map(len, self.sent))
        self.scattered += sum(map(len, others)) if others else len(first) * (self.size - 1)
        return pickle.loads(first)


def _inventory(state: Flat) -> LocalInventory:
    return LocalInventory.of_state(state, {}, Holdings(replicas=frozenset(state)))


def _planned(exchange: PlanExchange, ranks: Ranks, inventory: LocalInventory, state: Flat) -> RankPlan:
    claim = partial(exchange.claim, Path("run/step-1"), ranks, state, inventory)
    return exchange.plan("plan", ranks, inventory, ranks.combine("plan", claim, exchange.answer))


def _plan_of_first(mesh: str, ranks: int, tensors: int, figures: Figures) -> tuple[RankPlan, list[bytes]]:
    """The plan as rank 0 makes it for ``fsdp``, and what all ranks say of what they have written."""
    state = _state(mesh, 0, ranks, tensors)
    mine = _inventory(state)
    step = np.zeros_like(mine.steps)
    step[:, 0] = 1
    others = (LocalInventory(mine.description, mine.like, rank * step) for rank in range(1, ranks))
    told = [(other.digest, pickle.dumps((b"", other.pack_offsets()))) for other in others]
    description = mine.description.digest

    def claims(last: bytes) -> list[bytes]:
        return [
            pickle.dumps(bytes(8) + b"".join(one[:DIGEST] for one in (last, description, digest, digest)))
            for digest, _ in told
        ]

    exchange, first, again = PlanExchange(), _First(claims(bytes(DIGEST)), [data for _, data in told]), _First([], [])

    def plan(alone: _First) -> RankPlan:
        return _planned(exchange, alone, LocalInventory(mine.description, mine.like, mine.steps), state)

    planned = figures.time("plan", lambda: plan(first))
    again.sent, again.size = claims(planned.digest), ranks
    figures.time("again", lambda: plan(again))
    assert exchange.repeated
    figures.gathered, figures.scattered, figures.again = first.gathered, first.scattered, again.gathered // (ranks - 1)
    written = _written(0, [4 * COLUMNS * 4] * tensors)
    return planned, [pickle.dumps(replace(written, files=[f"__{rank}_0.distcp"])) for rank in range(ranks)]


def _plan_of_threads(mesh: str, ranks: int, tensors: int, figures: Figures) -> tuple[RankPlan, list[bytes]]:
    """As :func:`_plan_of_first`, with a thread for each rank."""
    mailbox, again = _Mailbox(ranks), _Mailbox(ranks)
    results: list[bytes] = [b""] * ranks
    plans: list[RankPlan] = []

    def rank_of_a_save(rank: int) -> None:
        state = dict(_state(mesh, rank, ranks, tensors))
        exchange = PlanExchange()

        def plan(box: _Mailbox) -> RankPlan:
            return _planned(exchange, _Thread(rank, box), _inventory(state), state)

        begin = time.thread_time()
        planned = plan(mailbox)
        first = time.thread_time() - begin
        begin = time.thread_time()
        plan(again)
        second = time.thread_time() - begin
        assert exchange.repeated
        sizes = [4 * prod(item.sizes) for item in items_to_write(planned, state) if item.sizes]
        results[rank] = pickle.dumps(_written(rank, sizes))
        if rank == 0:
            figures.seconds |= {"plan": first, "again": second}
            plans.append(planned)

    def rank_of_all(rank: int) -> None:
        try:
            rank_of_a_save(rank)
        except BaseException:
            mailbox.barrier.abort()
            again.barrier.abort()
            raise

    threading.stack_size(512 * 1024)
    threads = [threading.Thread(target=rank_of_all, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    figures.gathered, figures.scattered = mailbox.gathered, mailbox.scattered
    figures.again = again.gathered // max(1, ranks - 1)
    return plans[0], results


def _ours(mesh: str, ranks: int, tensors: int, directory: Path, most_threads: int) -> Figures:
    figures = Figures()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _machine.status_bytes("VmRSS")
    is_large = ranks > most_threads or ranks * tensors >= LARGEST
    how = _plan_of_first if is_large and mesh == "fsdp" else _plan_of_threads
    planned, results = how(mesh, ranks, tensors, figures)
    global_plan = planned.global_plan
    assert global_plan is not None
    figures.results = sum(map(len, results))
    written = np.zeros(ranks)
    for _, chunks, boxes in itertools.chain.from_iterable(
        map(global_plan.table.by_ndim, global_plan.table.stretches())
    ):
        np.add.at(written, global_plan.rank[chunks], boxes[:, 1].prod(axis=1))
    figures.largest_share, figures.boxes = written.max() / written.mean(), len(global_plan.rank)

    def commit() -> bytes:
        places = Places.merged([pickle.loads(result) for result in results], in_table_order(global_plan))
        index = CheckpointIndex.of(global_plan.table, places, dict.fromkeys(places.files, 1 << 50))
        assert sum(map(len, pieces(index, StorageMeta()))) > figures.boxes
        return index_file.encode(index)

    encoded = figures.time("commit", commit)
    figures.extra_mib = max(0, _machine.status_bytes("VmHWM") - before) / 2**20  # with the messages of all ranks
    (directory / "index").write_bytes(encoded)
    state = {
        key: replace(
            wanted,
            chunks=tuple(chunk._replace(tensor=torch.empty(chunk.sizes, device="meta")) for chunk in wanted.chunks),
        )
        for key, wanted in _state(mesh, ranks // 2, ranks, tensors).items()
    }
    digest = fingerprint(encoded)
    index = figures.time(
        "read",
        lambda: index_file.decode((directory / "index").read_bytes(), digest, "the index"),
        time.perf_counter,
    )

    def local() -> None:
        ReadPlanner(state, index, {key: key for key in state}).plan()

    figures.time("local", local)
    return figures


def _written(rank: int, sizes: Sequence[int]) -> Places:
    lengths = np.array(sizes, np.int64)
    ends = np.cumsum(lengths + 1664)
    place = np.stack((ends - lengths - 1664, lengths + 1600, np.full_like(lengths, 1000), lengths), axis=1)
    hashes = np.full(block_counts(lengths).sum(), 12345, np.uint64)
    files = [f"__{rank}_0.distcp"] if sizes else []
    return Places.of_items(files, np.zeros(len(sizes), np.int32), place, np.ones(len(sizes), np.uint32), hashes)


# Stock: what torch.distributed.checkpoint.save does on rank 0


class _Target:
    """What stock's planner asks a sharded tensor for."""

    def __init__(self, rows: int, first: int, count: int) -> None:
        self._size = torch.Size((rows, COLUMNS))
        self._chunk = ChunkStorageMetadata(torch.Size((first, 0)), torch.Size((count, COLUMNS)))

    def size(self) -> torch.Size:
        return self._size

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk]


def _stock_plan(mesh: str, rank: int, ranks: int, tensors: int) -> SavePlan:
    items = []
    for key, rows, (first, count) in _boxes(mesh, rank, ranks, tensors):
        box = ChunkStorageMetadata(torch.Size((first, 0)), torch.Size((count, COLUMNS)))
        data = TensorWriteData(box, TensorProperties(dtype=torch.float32), torch.Size((rows, COLUMNS)))
        items.append(WriteItem(MetadataIndex(key, box.offsets), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items, planner_data={item.index.fqn: tuple(item.index.fqn.split(".", 1)) for item in items})


def _stock(mesh: str, ranks: int, tensors: int, directory: Path) -> Figures:
    figures = Figures()
    sent = [pickle.dumps(_stock_plan(mesh, rank, ranks, tensors)) for rank in range(ranks)]
    planner, writer = DefaultSavePlanner(), FileSystemWriter(directory / "stock")
    (directory / "stock").mkdir()
    planner.set_up_planner({}, is_coordinator=True)
    writer.set_up_storage_writer(True)
    found: list[Any] = []

    def plan() -> list[bytes]:
        plans, metadata = planner.create_global_plan([pickle.loads(data) for data in sent])
        found.append(metadata)
        return [pickle.dumps(plan) for plan in writer.prepare_global_plan(plans)]

    received = figures.time("plan", plan)
    results = [
        pickle.dumps(
            [
                WriteResult(item.index, 1, _StorageInfo(f"__{rank}_0.distcp", 64 * number, 1))
                for number, item in enumerate(pickle.loads(data).items)
            ]
        )
        for rank, data in enumerate(received)
    ]
    figures.gathered, figures.scattered = sum(map(len, sent[1:])), sum(map(len, received[1:]))
    figures.results = sum(map(len, results))

    def commit() -> None:
        writer.finish(found[0], [pickle.loads(result) for result in results])

    figures.time("commit", commit)
    figures.boxes = sum(len(stored.chunks) for stored in found[0].state_dict_metadata.values())
    found.clear()
    gc.collect()
    metadata = figures.time(
        "read", lambda: pickle.loads((directory / "stock" / ".metadata").read_bytes()), time.perf_counter
    )
    targets = {key: _Target(rows, *box) for key, rows, box in _boxes(mesh, ranks // 2, ranks, tensors)}
    figures.time("local", lambda: create_default_local_load_plan(targets, metadata))
    return figures


# The command


def _compare(mesh: str, ranks: int, tensors: int, repeats: int, with_stock: bool, most_threads: int) -> dict[str, Any]:
    """Medians of interleaved runs, and their spread."""
    runs: dict[str, list[Figures]] = {"ours": [], "stock": []}
    with_stock = with_stock and ranks <= most_threads  # whose objects would not fit into memory
    for _ in range(repeats):
        for name, run in (("ours", partial(_ours, most_threads=most_threads)), ("stock", _stock)):
            if name == "ours" or with_stock:
                with tempfile.TemporaryDirectory() as directory:
                    runs[name].append(run(mesh, ranks, tensors, Path(directory)))
    row: dict[str, Any] = {"mesh": mesh, "ranks": ranks, "tensors": tensors, "repeats": repeats}
    for name, found in runs.items():
        if found:
            steps = {step: [run.seconds[step] for run in found] for step in found[0].seconds}
            row[name] = {
                "seconds": {step: statistics.median(times) for step, times in steps.items()},
                "spread": {step: (min(times), max(times)) for step, times in steps.items()},
                **{what: getattr(found[0], what) for what in ("gathered", "scattered", "results", "boxes")},
            }
    row["ours"] |= {what: getattr(runs["ours"][0], what) for what in ("largest_share", "again", "extra_mib")}
    if with_stock and mesh == "fsdp" and row["ours"]["boxes"] != row["stock"]["boxes"]:
        raise SystemExit(f"ours makes {row['ours']['boxes']} boxes, stock {row['stock']['boxes']}")
    return row


def _print(row: dict[str, Any]) -> None:
    ours = row["ours"]
    print(f"\n{row['mesh']}, {row['ranks']} ranks x {row['tensors']} tensors, {row['repeats']} runs")
    print(f"  largest ÷ mean bytes written per rank: {ours['largest_share']:.4f}")
    print(
        f"  extra memory of rank 0: {ours['extra_mib']:.0f} MiB; sent by a rank for a repeated save: {ours['again']} B"
    )
    print(f"  planning, first ÷ again: {ours['seconds']['plan'] / ours['seconds']['again']:.0f}")
    for what in ("gathered", "scattered", "results"):
        stock = f"  stock {row['stock'][what] / 1e6:8.2f} MB" if "stock" in row else ""
        print(f"  {what:10} ours {ours[what] / 1e6:8.3f} MB{stock}")
    totals = {name: dict(row[name]["seconds"]) for name in ("ours", "stock") if name in row}
    for seconds in totals.values():
        seconds["plan+commit"] = seconds["plan"] + seconds["commit"]
    for step, seconds_ours in totals["ours"].items():
        low, high = ours["spread"].get(step, (seconds_ours, seconds_ours))
        line = f"  {step:12} ours {seconds_ours:8.4f} s ({low:.4f} to {high:.4f})"
        if step in totals.get("stock", {}):
            line += f"  stock {totals['stock'][step]:8.3f} s  stock ÷ ours {totals['stock'][step] / seconds_ours:7.1f}"
        print(line, flush=True)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks plan", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 128, 1024], help="(default %(default)s)")
    parser.add_argument("--tensors", type=int, nargs="+", default=[300], help="(default %(default)s)")
    parser.add_argument("--mesh", nargs="+", choices=MESHES, default=list(MESHES), help="(default all)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--large", type=int, default=200_000, help="ranks x tensors from which on there are 2 runs")
    parser.add_argument("--threads", type=int, default=2048, help="most ranks that are threads (default %(default)s)")
    parser.add_argument("--no-stock", action="store_true", help="stock takes half a minute at 1024 x 300")
    parser.add_argument("--json", type=Path, default=Path("outputs/benchmark-plan.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = _machine.busy_cores()
    print(f"CPU seconds of rank 0. {_machine.busy(load)}")
    rows = []
    for ranks in options.ranks:
        for tensors in options.tensors:
            for mesh in options.mesh:
                repeats = options.repeats if ranks * tensors < options.large else min(2, options.repeats)
                repeats, with_stock = (repeats, not options.no_stock) if ranks * tensors < LARGEST else (1, False)
                rows.append(_compare(mesh, ranks, tensors, repeats, with_stock, options.threads))
                _print(rows[-1])
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"load": load, "rows": rows}, indent=2) + "\n")
