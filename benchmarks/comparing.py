"""How long does it take to find out what differs between two checkpoints of equal layout?

Two saves of a state, with no file in common, of which a part of the tensors differs. The peer maps both ``torch.save``
files into memory and calls ``torch.equal`` for each tensor; it does not say how much differs. The raw figure opens both
tables of contents, which is the least that a comparison reads.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch

import dcp_plugin
from benchmarks import _options
from benchmarks._harness import Report, Samples, build, forget, interleaved, on_ranks, remove
from benchmarks._options import parser, scratch
from benchmarks._peer import OURS, Peer, State

SMALLEST = [*_options.SMALLEST, "--state", "mixed"]


def _save(state: State, root: Path, name: str) -> None:
    dcp_plugin.save({"model": state}, root / name / "ours")
    torch.save(state, root / name / "torch.pt")
    os.sync()


def _changed(state: State, percent: float) -> set[str]:
    """Flip a bit of the first element of enough tensors that these have so many percent of the bytes."""
    total, changed = sum(tensor.nbytes for tensor in state.values()), 0
    keys = set()
    for key, tensor in state.items():
        if changed + tensor.nbytes <= max(total * percent / 100, tensor.nbytes if not keys else 0):
            tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
            changed += tensor.nbytes
            keys.add(f"model.{key}")
    return keys


def _ours(state: State, root: Path, expected: set[str], amounts: bool) -> None:
    found = dcp_plugin.diff(root / "a" / "ours", root / "b" / "ours", amounts=amounts)
    assert {tensor.key for tensor in found.changed} == expected
    assert not found.read


def _torch(state: State, root: Path, expected: set[str]) -> None:
    one, other = (torch.load(root / name / "torch.pt", mmap=True, weights_only=True) for name in "ab")
    same = {key: torch.equal(one[key].view(torch.int32), other[key].view(torch.int32)) for key in one}  # NaN is no NaN
    assert {f"model.{key}" for key in one if not same[key]} == expected


def _raw(state: State, root: Path) -> None:
    for name in "ab":
        with dcp_plugin.ShardedReader(root / name / "ours") as reader:
            assert len(reader.index)


def _nothing(state: State, root: Path) -> None:
    """All are saved once, before the clock starts."""


def _measure(kind: str, mib: int, percent: float, repeats: int, root: Path, cold: bool) -> Samples:
    state = build(kind, mib)
    _save(state, root, "a")
    expected = _changed(state, percent)
    _save(state, root, "b")
    state.clear()
    peers = [
        Peer(OURS, _nothing, partial(_ours, expected=expected, amounts=True)),
        Peer(f"{OURS}, amounts=False", _nothing, partial(_ours, expected=expected, amounts=False)),
        Peer("torch.load(mmap) and torch.equal", _nothing, partial(_torch, expected=expected)),
        Peer("raw: opening both", _nothing, _raw),
    ]
    samples = interleaved(
        peers, repeats, lambda peer: forget(root) if cold else None, lambda peer: peer.load(state, root)
    )
    remove(root)
    return samples


def main() -> None:
    options = parser("comparing", __doc__)
    about = "mixed: 200 tensors of 4 KiB to 32 MiB; a number: so many of 4 KiB (default %(default)s)"
    options.add_argument("--state", nargs="+", default=["mixed", "100000"], help=about)
    options.add_argument("--percent", type=float, default=1.0, help="of the bytes, in tensors that differ")
    options.add_argument("--cold", action="store_true", help="with nothing of the files in memory")
    chosen = options.parse_args()
    report = Report("comparing", chosen)
    for where in chosen.where:
        for kind in chosen.state:
            with scratch(where) as root:
                arguments = (kind, chosen.mib, chosen.percent, chosen.repeats, root, chosen.cold)
                size = (
                    f"two of {chosen.mib} MiB in 200 tensors" if kind == "mixed" else f"two of {kind} tensors of 4 KiB"
                )
                temperature = "cold" if chosen.cold else "warm"
                title = f"{temperature}, {size}, {chosen.percent:g} % differs, {where}"
                report.table(title, on_ranks(1, _measure, *arguments))
    report.close()


if __name__ == "__main__":
    main()
