"""How long does a warm start from another tool's file take: safetensors, and torch.save?

Into existing tensors, whole on one rank or sharded by rows over several. The peers are the tools' own ways: with
several ranks, each takes its rows from the mapped file. The ceiling reads as many bytes with plain system calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dcp_plugin
from benchmarks import _options
from benchmarks._harness import Report, Samples, barrier, build, check, forget, interleaved, local_of, on_ranks, remove
from benchmarks._options import load_cases, parser, with_state
from benchmarks._peer import IO_THREADS, OURS, Peer, State
from benchmarks.peers import ceiling
from dcp_plugin.core.tensors._torch import DTensor

SMALLEST = [*_options.SMALLEST, "--state", "mixed", "--ranks", "1"]
Write = Callable[[State, Path], None]


def _whole(state: State, path: Path, write: Write) -> None:
    """Rank 0 writes the whole tensors."""
    whole = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}
    if not dist.is_initialized() or dist.get_rank() == 0:
        path.mkdir()
        write(whole, path / "file")
    barrier()


def _ours(state: State, path: Path) -> None:
    dcp_plugin.load({"model": state}, path / "file", io={"threads": IO_THREADS})


def _safetensors(state: State, path: Path) -> None:
    if not dist.is_initialized():
        for key, tensor in load_file(path / "file").items():
            state[key].copy_(tensor)
        return
    with safe_open(path / "file", framework="pt") as file:
        for key, value in state.items():
            local = local_of(value)
            first = dist.get_rank() * len(local)
            local.copy_(file.get_slice(key)[first : first + len(local)])


def _torch(state: State, path: Path) -> None:
    for key, tensor in torch.load(path / "file", mmap=True, weights_only=True).items():
        local = local_of(state[key])
        first = dist.get_rank() * len(local) if dist.is_initialized() else 0
        local.copy_(tensor[first : first + len(local)])


_FORMATS: dict[str, tuple[Write, str, Callable[[State, Path], None]]] = {
    "safetensors": (save_file, "safetensors", _safetensors),
    "torch.save": (torch.save, "torch.load(mmap)", _torch),
}


def _peers(name: str) -> list[Peer]:
    write, theirs, load = _FORMATS[name]
    save = partial(_whole, write=write)
    return [Peer(OURS, save, _ours), Peer(theirs, save, load), *ceiling.PEERS]


def _measure(name: str, world: int, kind: str, mib: int, repeats: int, root: Path, cold: bool) -> Samples:
    state, target = build(kind, mib), build(kind, mib, filled=False)
    peers = _peers(name)
    saved = {peer.name: root / ("raw" if peer in ceiling.PEERS else "file") for peer in peers}
    for peer in peers:
        if not saved[peer.name].exists():
            barrier()
            peer.prepare(state)
            peer.save(state, saved[peer.name])
        barrier()
        check(peer, state, saved[peer.name], target)

    def before(peer: Peer) -> None:
        if cold:
            forget(saved[peer.name])

    samples = interleaved(peers, repeats, before, lambda peer: peer.load(target, saved[peer.name]))
    for path in saved.values():
        remove(path)
    return samples


def main() -> None:
    options = with_state(parser("foreign", __doc__)).parse_args()
    report = Report("foreign", options)
    for name in _FORMATS:
        for case in load_cases(options):
            arguments = (name, case.world, case.state, options.mib, options.repeats, case.root, case.cold)
            report.table(f"{name}, {case.title}", on_ranks(case.world, _measure, *arguments))
    report.close()


if __name__ == "__main__":
    main()
