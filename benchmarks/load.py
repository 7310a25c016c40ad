"""How long does a load take, from the page cache and from the disk?

Into existing tensors of the layout that was saved.
Every peer loads what it saved itself, but for the case that reads stock's checkpoint with our reader. A cold load
begins with files that the page cache does not hold; a file system in memory has none.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import _options
from benchmarks._harness import Report, Samples, assert_same, build, check, forget, interleaved, on_ranks, remove
from benchmarks._options import load_cases, parser, with_state
from benchmarks._peer import Peer, find

SMALLEST = [*_options.SMALLEST, "--state", "mixed", "--ranks", "1", "--peers", "stock"]


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


def main() -> None:
    options = with_state(parser("load", __doc__)).parse_args()
    report = Report("load", options)
    for case in load_cases(options):
        arguments = (case.world, case.state, options.mib, options.repeats, case.root, options.peers, case.cold)
        report.table(f"load, {case.title}", on_ranks(case.world, _measure, *arguments))
    report.close()


if __name__ == "__main__":
    main()
