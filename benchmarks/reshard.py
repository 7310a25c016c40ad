"""Loading onto another layout than the one that saved: time, and bytes read ÷ bytes needed.

Bytes read are what the kernel counts for the read calls of all ranks, so they hold checksum blocks, frames, the index
and the metadata. They are those of the first load of a process as of any other.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks import _options
from benchmarks._harness import Report, Samples, assert_same, interleaved, local_of, on_ranks, remove, sizes_of
from benchmarks._machine import file_system_of
from benchmarks._options import parser, scratch
from benchmarks._peer import OURS, Peer, State, find

SMALLEST = [*_options.SMALLEST, "--cases", "4 to 2"]
ROWS, COLUMNS = 0, 1
CASES = {
    "4 to 2": (4, ROWS, 2, ROWS),
    "2 to 4": (2, ROWS, 4, ROWS),
    "4 to 3": (4, ROWS, 3, ROWS),
    "columns of 4 to rows of 2": (4, COLUMNS, 2, ROWS),
    "rows of 2 to columns of 4": (2, ROWS, 4, COLUMNS),
    "columns of 2 to columns of 4": (2, COLUMNS, 4, COLUMNS),
}


def sharded_state(mib: int, dim: int, filled: bool) -> State:
    """This rank's shards of tensors that are the same for any number of ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,))
    state: State = {}
    for number, size in enumerate(sizes_of("mixed", mib)):
        columns = 4096 if size >= 1 << 20 else 256
        shape = (size // 4 // columns, columns)
        whole = torch.empty(shape)
        if filled:
            whole.view(torch.int32).random_(generator=torch.Generator().manual_seed(number))
        chunks = whole.chunk(world, dim)
        local = chunks[rank].clone() if rank < len(chunks) else whole.narrow(dim, 0, 0).clone()
        local = local if filled else local.zero_()
        state[f"layers.{number}.weight"] = DTensor.from_local(
            local, mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=(columns, 1)
        )
    return state


def _save(mib: int, dim: int, root: Path, wanted: list[str]) -> Samples:
    state = sharded_state(mib, dim, filled=True)
    for peer in find("reshard", dist.get_world_size(), wanted):
        remove(root / peer.name)
        peer.save(state, root / peer.name)
    return {}


def _load(mib: int, dim: int, repeats: int, root: Path, wanted: list[str]) -> Samples:
    state, target = sharded_state(mib, dim, filled=True), sharded_state(mib, dim, filled=False)
    peers = find("reshard", dist.get_world_size(), wanted)

    def zero(peer: Peer) -> None:
        for value in target.values():
            local_of(value).zero_()

    def load_and_check(peer: Peer) -> None:
        zero(peer)
        peer.load(target, root / peer.name)
        assert_same(peer, state, target)

    for peer in peers:
        load_and_check(peer)
    return interleaved(peers, repeats, zero, lambda peer: peer.load(target, root / peer.name))


def main() -> None:
    made = parser("reshard", __doc__)
    made.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="(default all)", metavar="CASE")
    made.set_defaults(where=[Path("outputs")], peers=[OURS, "stock"], repeats=5)
    options: argparse.Namespace = made.parse_args()
    report = Report("reshard", options)
    needed = sum(sizes_of("mixed", options.mib))
    for where in options.where:
        for name in options.cases:
            before, saved, after, loaded = CASES[name]
            with scratch(where) as root:
                on_ranks(before, _save, options.mib, saved, root, options.peers)
                samples = on_ranks(after, _load, options.mib, loaded, options.repeats, root, options.peers)
                title = f"reshard, {name}, warm, {options.mib} MiB in 200 tensors, {where} ({file_system_of(root)})"
                columns = {"read ÷ needed": lambda run: run.read / needed}
                report.table(title, samples, columns)
    report.close()


if __name__ == "__main__":
    main()
