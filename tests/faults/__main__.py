"""``python -m tests.faults``: every fault at every call of every scene, and every state after a loss of power.

Other campaigns have arguments of their own (``--help``)::

    python -m tests.faults beside    # readers beside a writer
    python -m tests.faults flips     # damage to files
    python -m tests.faults fuzz      # hostile files
    python -m tests.faults keepers   # saves by keepers: kills, hosts lost, memory full, links and stores that fail
    python -m tests.faults stores    # kills at requests to an object store
    python -m tests.faults soak      # many lives of a training: kills, resumes on other ranks, readers beside it
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from tests.faults import beside, counted, flips, fuzz, keepers, mounts, soak, stores
from tests.faults.scenes import SCENES
from tests.faults.sweep import after_power_loss, sweep
from tests.faults.test_calls import FAULTS
from tests.faults.victims import NO_EXCHANGE, NO_LINKS, Victims

CAMPAIGNS = {
    "beside": beside.main,
    "flips": flips.main,
    "fuzz": fuzz.main,
    "keepers": keepers.main,
    "soak": soak.main,
    "stores": stores.main,
}


def _runs(victims: Victims, scene: str, every: int) -> Iterator[tuple[str, Iterator[object]]]:
    """What is done to a scene, and what came of it each time: None, or what was wrong."""
    for kind, lacks in {"": (), " without exchange and links": (NO_EXCHANGE, NO_LINKS)}.items():
        for name, fault in FAULTS.items():
            yield name + kind, sweep(victims, scene, fault, lacks, every)
    yield "power lost", after_power_loss(victims, scene, every)
    if said := mounts.why_no_ext4():
        print(f"no power cut from an ext4, no disks that are full: {said}")
    else:
        yield "power cut from an ext4", mounts.after_cuts(victims, scene, every)
        yield "disk full from the start", mounts.on_full_disks(victims, scene, 4 * every)


def main() -> int:
    if sys.argv[1:2] and sys.argv[1] in CAMPAIGNS:
        return CAMPAIGNS[sys.argv[1]](sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("scenes", nargs="*", choices=[[], *SCENES], help="some scenes only")
    parser.add_argument("--every", type=int, default=1, help="only every so many calls, and states")
    chosen = parser.parse_args()
    wrong = injected = 0
    with Victims() as victims:
        for scene in chosen.scenes or SCENES:
            for name, found in _runs(victims, scene, chosen.every):
                times, bad = counted(f"{scene}, {name}", found)
                injected, wrong = injected + times, wrong + bad
    print(f"{injected} faults, {wrong} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
