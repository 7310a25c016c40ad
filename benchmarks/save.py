"""How long does a durable save take? Peers, ours and the raw ceiling, in wall time and CPU seconds of all ranks.

Every file is synced inside of the measured time, by the harness for those that do not do it themselves. Before the
clock starts, the previous checkpoint is deleted and the page cache written out.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import _options
from benchmarks._harness import Report, Samples, build, check, interleaved, on_ranks, remove, sync_files
from benchmarks._machine import file_system_of
from benchmarks._options import parser, scratch, with_state
from benchmarks._peer import Peer, find

SMALLEST = [*_options.SMALLEST, "--state", "mixed", "--ranks", "1", "--peers", "stock"]


def _measure(world: int, kind: str, mib: int, repeats: int, root: Path, wanted: list[str] | None) -> Samples:
    state = build(kind, mib)
    peers = find("save", world, wanted)
    saved = {peer.name: root / str(number) for number, peer in enumerate(peers)}

    def before(peer: Peer) -> None:
        peer.prepare(state)
        remove(saved[peer.name])

    def run(peer: Peer) -> None:
        peer.save(state, saved[peer.name])
        sync_files(saved[peer.name])

    samples = interleaved(peers, repeats, before, run)
    target = build(kind, mib, filled=False)
    for peer in peers:
        check(peer, state, saved[peer.name], target)
    return samples


def main() -> None:
    options = with_state(parser("save", __doc__)).parse_args()
    report = Report("save", options)
    for where in options.where:
        for kind in options.state:
            for world in options.ranks:
                with scratch(where) as root:
                    samples = on_ranks(world, _measure, world, kind, options.mib, options.repeats, root, options.peers)
                    size = f"{options.mib} MiB in 200 tensors" if kind == "mixed" else f"{kind} tensors of 4 KiB"
                    report.table(f"save, {size}, {world} rank(s), {where} ({file_system_of(root)})", samples)
    report.close()


if __name__ == "__main__":
    main()
