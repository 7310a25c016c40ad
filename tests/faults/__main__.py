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

import sys
from typing import Any

from tests.faults import beside, flips, fuzz, keepers, mounts, soak, stores
from tests.faults.campaign import Campaign, Parts
from tests.faults.scenes import SCENES
from tests.faults.sweep import after_power_loss, sweep
from tests.faults.test_calls import FAULTS
from tests.faults.victims import NO_EXCHANGE, NO_LINKS, Victims


def _parts(chosen: Any) -> Parts:
    no_ext4 = mounts.why_no_ext4()
    if no_ext4:
        print(f"no power cut from an ext4, no disks that are full: {no_ext4}")
    with Victims() as victims:
        for scene in SCENES:
            for kind, lacks in {"": (), " without exchange and links": (NO_EXCHANGE, NO_LINKS)}.items():
                for name, fault in FAULTS.items():
                    yield f"{scene}, {name}{kind}", sweep(victims, scene, fault, lacks, chosen.every)
            yield f"{scene}, power lost", after_power_loss(victims, scene, chosen.every)
            if not no_ext4:
                yield f"{scene}, power cut from an ext4", mounts.after_cuts(victims, scene, chosen.every)
                yield f"{scene}, disk full from the start", mounts.on_full_disks(victims, scene, 4 * chosen.every)


CAMPAIGNS = {
    "": Campaign(__doc__, _parts, {"every": 1}),
    "beside": beside.CAMPAIGN,
    "flips": flips.CAMPAIGN,
    "fuzz": fuzz.CAMPAIGN,
    "keepers": keepers.CAMPAIGN,
    "soak": soak.CAMPAIGN,
    "stores": stores.CAMPAIGN,
}

if __name__ == "__main__":
    named = sys.argv[1] if sys.argv[1:] and sys.argv[1] in CAMPAIGNS else ""
    sys.exit(CAMPAIGNS[named].run(named, sys.argv[2 if named else 1 :]))
