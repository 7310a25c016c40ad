"""How much longer does a resume take that compares the live state with what it has loaded?

The same checkpoint is loaded into the same tensors, page cache warm: by a resume that compares, by a resume with
``verify_resume=False``, and by a plain load.
"""

from __future__ import annotations

from pathlib import Path

import dcp_plugin
from benchmarks import _options
from benchmarks._harness import Report, Samples, assert_same, build, interleaved, on_ranks
from benchmarks._machine import file_system_of
from benchmarks._options import parser, scratch, with_state
from benchmarks._peer import IO_THREADS, OURS, Peer, State

SMALLEST = [*_options.SMALLEST, "--state", "mixed", "--ranks", "1"]


def _measure(kind: str, mib: int, repeats: int, root: Path) -> Samples:
    state, target = build(kind, mib), build(kind, mib, filled=False)
    dcp_plugin.save({"state": state}, root / "step-1", step=1)

    def resume(into: State, run: Path) -> None:
        dcp_plugin.resume_or_init({"state": into}, run, io={"threads": IO_THREADS})

    def resume_alone(into: State, run: Path) -> None:
        dcp_plugin.resume_or_init({"state": into}, run, verify_resume=False, io={"threads": IO_THREADS})

    def load(into: State, run: Path) -> None:
        dcp_plugin.load({"state": into}, run / "step-1", io={"threads": IO_THREADS})

    ways = {OURS: resume, "dcp_plugin, not comparing": resume_alone, "dcp_plugin, plain load": load}
    peers = [Peer(name, lambda _, path: None, way) for name, way in ways.items()]
    samples = interleaved(peers, repeats, lambda peer: None, lambda peer: peer.load(target, root))
    assert_same(peers[0], state, target)
    return samples


def main() -> None:
    options = with_state(parser("prove", __doc__)).parse_args()
    report = Report("prove", options)
    for where in options.where:
        for kind in options.state:
            for world in options.ranks:
                with scratch(where) as root:
                    samples = on_ranks(world, _measure, kind, options.mib, options.repeats, root)
                    size = f"{options.mib} MiB in 200 tensors" if kind == "mixed" else f"{kind} tensors of 4 KiB"
                    report.table(f"resume, {size}, {world} rank(s), {where} ({file_system_of(root)})", samples)
    report.close()


if __name__ == "__main__":
    main()
