"""How long does a load take, from the page cache and from the disk?

Into existing tensors of the layout that was saved.
Every peer loads what it saved itself, but for the case that reads stock's checkpoint with our reader. A cold load
begins with files that the page cache does not hold; a file system in memory has none.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks._harness import Report, Samples, assert_same, build, check, forget, interleaved, on_ranks, remove
from benchmarks._machine import file_system_of
from benchmarks._options import parser, scratch, with_state
from benchmarks._peer import Peer, find


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
    for where in options.where:
        for kind in options.state:
            for world in options.ranks:
                with scratch(where) as root:
                    kept = file_system_of(root)
                for cold in (False,) if kept.startswith("tmpfs") or kind != "mixed" else (False, True):
                    with scratch(where) as root:
                        arguments = (world, kind, options.mib, options.repeats, root, options.peers, cold)
                        samples = on_ranks(world, _measure, *arguments)
                    size = f"{options.mib} MiB in 200 tensors" if kind == "mixed" else f"{kind} tensors of 4 KiB"
                    title = f"load, {'cold' if cold else 'warm'}, {size}, {world} rank(s), {where} ({kept})"
                    report.table(title, samples)
    report.close()


if __name__ == "__main__":
    main()
