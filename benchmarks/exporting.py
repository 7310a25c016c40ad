"""How long does it take to make one safetensors file of a checkpoint, and how much memory?

The yardstick is ``cp`` of the checkpoint's directory, which changes nothing, alone and with the files made durable, as
ours are. The peer is what there is without us: ``dcp_to_torch_save``, ``torch.load`` and ``save_file``, which need
memory for all of it. Everything begins with files that are not in the page cache, but for ``--warm``.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import dcp_plugin
from benchmarks import _options
from benchmarks._harness import Report, Samples, assert_same, build, forget, interleaved, on_ranks, remove, sync_files
from benchmarks._machine import file_system_of
from benchmarks._options import parser, scratch
from benchmarks._peer import OURS, Peer, State

SMALLEST = _options.SMALLEST
Export = Callable[[Path, Path], None]
"""From a checkpoint, into an empty directory."""


def _ours(path: Path, to: Path) -> None:
    dcp_plugin.export(path, to / "model.safetensors", "safetensors", rename={"model.": ""})


def _cp(path: Path, to: Path, durable: bool) -> None:
    subprocess.run(["cp", "-r", path, to / "copy"], check=True)
    if durable:
        sync_files(to)


def _stock(path: Path, to: Path) -> None:
    dcp_to_torch_save(path, to / "model.pt")
    state = torch.load(to / "model.pt", mmap=True, weights_only=True)["model"]
    save_file(state, to / "model.safetensors")
    (to / "model.pt").unlink()
    sync_files(to)


WAYS: dict[str, Export] = {
    OURS: _ours,
    "cp": partial(_cp, durable=False),
    "cp, durable": partial(_cp, durable=True),
    "dcp_to_torch_save + save_file": _stock,
}


def _measure(mib: int, repeats: int, root: Path, cold: bool, wanted: list[str] | None) -> Samples:
    state = build("mixed", mib)
    path, to = root / "checkpoint", root / "to"
    dcp_plugin.save({"model": state}, path)
    ways = {name: way for name, way in WAYS.items() if wanted is None or name == OURS or name in wanted}
    for name, way in ways.items():
        if not name.startswith("cp"):
            to.mkdir()
            way(path, to)
            assert_same(_peer(name), state, load_file(to / "model.safetensors"))
            remove(to)
    state.clear()

    def before(peer: Peer) -> None:
        remove(to)
        to.mkdir()
        if cold:
            forget(path)

    samples = interleaved([*map(_peer, ways)], repeats, before, lambda peer: ways[peer.name](path, to))
    remove(to)
    return samples


def _peer(name: str) -> Peer:
    def unused(state: State, path: Path) -> None:
        raise NotImplementedError

    return Peer(name, unused, unused)


def main() -> None:
    made = parser("exporting", __doc__)
    made.set_defaults(mib=8192)
    made.add_argument("--warm", action="store_true", help="leave the checkpoint in the page cache")
    options = made.parse_args()
    report = Report("exporting", options)
    for where in options.where:
        with scratch(where) as root:
            kept = file_system_of(root)
            cold = not options.warm and not kept.startswith("tmpfs")
            title = f"{'cold' if cold else 'warm'}, {options.mib} MiB in 200 tensors, {where} ({kept})"
            report.table(title, on_ranks(1, _measure, options.mib, options.repeats, root, cold, options.peers))
    report.close()


if __name__ == "__main__":
    main()
