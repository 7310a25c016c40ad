"""What is saved by not writing what has not changed, and what it costs to find out when everything has.

Saved: bytes that the second checkpoint of a run writes, and the time that it takes, over the first one's. A backbone
with nine tenths of the bytes is frozen (with ``reuse``, and with ``trainable_only``); a 12-layer GPT over bytes trains
LoRA of rank 8 on q and v under AdamW. Every checkpoint is checked byte for byte before its figures count.

Cost: saves in which nothing can be reused, with ``reuse=True`` and ``False`` in turn: of what trains (it is sampled),
of what is frozen for the first time (it is hashed as it is written), and of what was frozen and changed all the same
(it is hashed in vain, once).

Resumed: the first save of a process that has loaded a checkpoint of a frozen model. It hashes what is in memory, reads
the files to see that they still have these bytes, and links them. The ceiling reads the same files once, with as many
threads. Another row also hashes the files by blocks, and compares them with memory: no save can do less. All with and
without the files in the page cache.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import dcp_plugin as dcp
from benchmarks import _options
from benchmarks._harness import Report, Samples, barrier, build, forget, interleaved, local_of, on_ranks, remove
from benchmarks._machine import file_system_of
from benchmarks._options import parser, scratch
from benchmarks._peer import IO_THREADS, OURS, Peer
from benchmarks.peers.ceiling import hash_blocks
from dcp_plugin import events
from dcp_plugin.core.format.payload import SMALLEST_BLOCK
from dcp_plugin.core.storage.reuse import WORTH_LINKING
from dcp_plugin.core.tensors.host_memory import READ_PIECE, equal_bytes
from examples.gpt import BYTES, GPT

SMALLEST = [*_options.SMALLEST, "--ranks", "1", "--dim", "48", "--depth", "1"]
READ = "reading the files once"
COMPARED = "raw read, hash and compare"
Objects = dict[str, Any]


class Tensors(nn.Module):
    """The tensors of the mixed state as parameters, of which every ``one_in``-th trains."""

    def __init__(self, mib: int, one_in: int = 10, filled: bool = True) -> None:
        super().__init__()
        tensors = sorted(build("mixed", mib, filled).values(), key=lambda tensor: tensor.numel(), reverse=True)
        for number, tensor in enumerate(tensors):
            trains = one_in > 0 and number % one_in == one_in // 2
            self.register_parameter(f"tensor_{number}", nn.Parameter(tensor, requires_grad=trains))


class LoRA(nn.Module):
    """A frozen fused projection, and low-rank changes of its q and v."""

    def __init__(self, qkv: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.qkv = qkv
        dim = qkv.in_features
        self.q_a, self.v_a = (nn.Parameter(torch.randn(rank, dim) / dim) for _ in range(2))
        self.q_b, self.v_b = (nn.Parameter(torch.zeros(dim, rank)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return torch.cat(
            (q + F.linear(F.linear(x, self.q_a), self.q_b), k, v + F.linear(F.linear(x, self.v_a), self.v_b)), -1
        )


def gpt_with_lora(dim: int = 768, depth: int = 12) -> Objects:
    """The model and AdamW over its LoRA, after a step."""
    gpt = GPT(dim=dim, depth=depth, heads=12, context=128, dropout=0.0).requires_grad_(False)
    for block in gpt.blocks:
        block.qkv = LoRA(block.qkv)
    optimizer = torch.optim.AdamW([parameter for parameter in gpt.parameters() if parameter.requires_grad])
    state = {"model": gpt, "optim": optimizer}
    train(state)
    return state


def train(state: Objects) -> None:
    """One step of the optimizer, or of none: then what trains is added to."""
    if "optim" not in state:
        with torch.no_grad():
            for parameter in state["model"].parameters():
                if parameter.requires_grad:
                    local_of(parameter).add_(1.0)
        return
    tokens = torch.randint(BYTES, (1, 17))
    F.cross_entropy(state["model"](tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    state["optim"].step()
    state["optim"].zero_grad()


@dataclass
class Written:
    """What saves said when they ended."""

    bytes: int = 0
    seconds: float = 0.0

    def note(self, event: events.Event) -> None:
        if isinstance(event, events.SaveFinished):
            self.bytes, self.seconds = event.bytes, event.seconds


def savings(make: Callable[[], Objects], root: Path, repeats: int, **options: Any) -> dict[str, float]:
    """Bytes and seconds of a second checkpoint over those of the first. With ``trainable_only``, of one that leaves out
    what the first has over that one."""
    state, other = make(), make()
    said = Written()
    unsubscribe = events.subscribe(said.note)
    ratios: list[tuple[float, float]] = []
    for number in range(repeats + 1):
        first, second = root / f"{number}-first", root / "run" / f"{number}-second"
        ours = dcp.Checkpointer(io={"threads": IO_THREADS}, **options)
        if options.get("trainable_only"):
            dcp.save(state, first, io={"threads": IO_THREADS})
        else:
            ours.save(state, first)
        before = Written(said.bytes, said.seconds)
        if options.get("trainable_only"):
            ours.load(state, first)
        train(state)
        ours.save(state, second)
        if number:  # the first repetition warms up
            ratios.append((said.bytes / before.bytes, said.seconds / before.seconds))
        if options.get("trainable_only"):
            dcp.load(other, first)
        dcp.load(other, second)
        check(state, other)
        ours.close()
        remove(second)
        remove(first)
    unsubscribe()
    seconds = [ratio for _, ratio in ratios]
    return {
        "bytes": statistics.median(ratio for ratio, _ in ratios),
        "seconds": statistics.median(seconds), "min": min(seconds), "max": max(seconds),
    }  # fmt: skip


def check(state: Objects, other: Objects) -> None:
    for (key, one), two in zip(state["model"].state_dict().items(), other["model"].state_dict().values(), strict=True):
        one, two = (local_of(value).contiguous().view(torch.uint8) for value in (one, two))
        assert torch.equal(one, two), f"{key} was not restored: the figures would mean nothing"


def cost(world: int, mib: int, repeats: int, root: Path) -> Samples:
    """Saves of a state of which everything has changed, as it comes and without reuse, in turn."""
    models = {OURS: Tensors(mib, one_in=1)}
    models["reuse=False"] = models[OURS]
    models["frozen, first save"] = models["frozen, but all has changed"] = Tensors(mib, one_in=0)
    saving = {name: dcp.Checkpointer(io={"threads": IO_THREADS}, reuse=name != "reuse=False") for name in models}

    def change(name: str) -> None:
        for parameter in models[name].parameters():
            local_of(parameter.data).view(torch.int32).add_(1)

    def before(peer: Peer) -> None:
        name = peer.name
        old = root / name / "old"
        remove(old)
        if name.startswith("frozen"):
            saving[name].close()
            saving[name] = dcp.Checkpointer(io={"threads": IO_THREADS})
        if name == "frozen, but all has changed":
            saving[name].save({"model": models[name]}, old)
        remove(root / name / "new")
        change(name)

    def run(peer: Peer) -> None:
        saving[peer.name].save({"model": models[peer.name]}, root / peer.name / "new")

    def nothing(*_: Any) -> None:
        pass

    samples = interleaved([Peer(name, nothing, nothing) for name in models], repeats, before, run)
    for name, model in models.items():
        other = Tensors(mib, filled=False)
        change(name)
        saving[name].save({"model": model}, root / name / "new")
        dcp.load({"model": other}, root / name / "new")
        check({"model": model}, {"model": other})
        saving[name].close()
        barrier()
    return samples


def resumed(mib: int, repeats: int, root: Path, cold: bool) -> Samples:
    """First saves after a load of what is all frozen, and reads of the same files, in turn."""
    state = {"model": Tensors(mib, one_in=0)}
    loaded, saved = root / "loaded", root / "saved"
    first = dcp.Checkpointer(io={"threads": IO_THREADS})
    first.save(state, loaded)
    first.close()
    in_memory = {file: bytearray(file.read_bytes()) for file in loaded.glob("*.distcp")}
    said = Written()
    unsubscribe = events.subscribe(said.note)
    saving: list[dcp.Checkpointer] = []

    def before(peer: Peer) -> None:
        remove(saved)
        if peer.name == OURS:  # as a new process: it has seen none of these files
            for old in saving:
                old.close()
            saving[:] = [dcp.Checkpointer(io={"threads": IO_THREADS})]
            saving[0].load(state, loaded)
        if cold:
            forget(loaded)

    def run(peer: Peer) -> None:
        if peer.name == OURS:
            saving[0].save(state, saved)
            assert said.bytes < WORTH_LINKING, "nothing was to be written: the figures would mean nothing"
        else:
            read_once(loaded, in_memory if peer.name == COMPARED else {})

    def nothing(*_: Any) -> None:
        pass

    samples = interleaved([Peer(name, nothing, nothing) for name in (OURS, READ, COMPARED)], repeats, before, run)
    unsubscribe()
    for one in saving:
        one.close()
    return samples


def read_once(root: Path, in_memory: Mapping[Path, bytearray]) -> None:
    """Read all data files, with ``IO_THREADS`` threads, each a part of every file through a megabyte of its own.

    Those whose bytes are ``in_memory`` are also hashed by blocks and compared with these.
    """

    def read(part: int) -> None:
        memory = [memoryview(bytearray(READ_PIECE if in_memory else 1 << 20))]
        for file in sorted(root.glob("*.distcp")):
            with file.open("rb", buffering=0) as opened:
                size = file.stat().st_size
                for at in range(size * part // IO_THREADS, size * (part + 1) // IO_THREADS, len(memory[0])):
                    piece = memory[0][: os.preadv(opened.fileno(), memory, at)]
                    if file in in_memory:
                        hash_blocks(piece, SMALLEST_BLOCK)
                        assert equal_bytes(piece, memoryview(in_memory[file])[at : at + len(piece)])

    with ThreadPoolExecutor(IO_THREADS) as pool:
        list(pool.map(read, range(IO_THREADS)))


def main() -> None:
    made = parser("reuse", __doc__)
    made.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="for the cost (default %(default)s)")
    made.add_argument("--dim", type=int, default=768, help="of the GPT (default %(default)s)")
    made.add_argument("--depth", type=int, default=12, help="of the GPT (default %(default)s)")
    options = made.parse_args()
    report = Report("reuse", options)
    for where in options.where:
        with scratch(where) as root:
            print(f"\nsecond checkpoint ÷ first, {where} ({file_system_of(root)})")
            print(f"{'':42}{'bytes':>9}{'seconds':>9}{'min':>8}{'max':>8}")
            rows: dict[str, tuple[Callable[[], Objects], dict[str, Any]]] = {
                "backbone frozen, reuse": (lambda: {"model": Tensors(options.mib)}, {}),
                "backbone frozen, reuse=False": (lambda: {"model": Tensors(options.mib)}, {"reuse": False}),
                "backbone frozen, trainable_only": (lambda: {"model": Tensors(options.mib)}, {"trainable_only": True}),
                "LoRA on q and v, reuse": (lambda: gpt_with_lora(options.dim, options.depth), {}),
                "LoRA on q and v, trainable_only": (
                    lambda: gpt_with_lora(options.dim, options.depth),
                    {"trainable_only": True},
                ),
            }
            for name, (make, how) in rows.items():
                began = time.perf_counter()
                said = savings(make, root, options.repeats, **how)
                print(
                    f"{name:42}{said['bytes']:9.4f}{said['seconds']:9.3f}{said['min']:8.3f}{said['max']:8.3f}",
                    flush=True,
                )
                report.note({"where": str(where), "case": name, **said, "took": time.perf_counter() - began})
        for world in options.ranks:
            with scratch(where) as root:
                samples = on_ranks(world, cost, world, options.mib, options.repeats, root)
                report.table(f"cost when nothing can be reused, {options.mib} MiB, {world} rank(s), {where}", samples)
                pairs = zip(samples[OURS], samples["reuse=False"], strict=True)
                ratios = sorted(ours.seconds / without.seconds for ours, without in pairs)
                span = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
                print(f"reuse=True ÷ reuse=False, pair by pair: median {statistics.median(ratios):.3f} ({span})")
        for cold in (False,) if file_system_of(where).startswith("tmpfs") else (False, True):
            with scratch(where) as root:
                samples = resumed(options.mib, options.repeats, root, cold)
                title = f"first save after a resume, {'cold' if cold else 'warm'}, {options.mib} MiB frozen, {where}"
                report.table(title, samples)
                pairs = zip(samples[OURS], samples[READ], strict=True)
                ratio = statistics.median(ours.seconds / once.seconds for ours, once in pairs)
                print(f"first save ÷ reading once, pair by pair: median {ratio:.2f}")
    report.close()


if __name__ == "__main__":
    main()
