"""``python -m tests.faults``: every fault at every call of every scene, and every state after a loss of power.

``python -m tests.faults fuzz``: hostile files (:mod:`tests.faults.fuzz`).
"""

from __future__ import annotations

import argparse
import sys

from tests.faults import fuzz
from tests.faults.scenes import SCENES
from tests.faults.sweep import after_power_loss, sweep
from tests.faults.test_calls import FAULTS
from tests.faults.victims import NO_EXCHANGE, NO_LINKS, Victims


def main() -> int:
    if sys.argv[1:2] == ["fuzz"]:
        return fuzz.main(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("scenes", nargs="*", choices=[[], *SCENES], help="some scenes only")
    parser.add_argument("--every", type=int, default=1, help="only every so many calls, and states")
    chosen = parser.parse_args()
    wrong = injected = 0
    file_systems = {"": (), " without exchange and links": (NO_EXCHANGE, NO_LINKS)}
    with Victims() as victims:
        for scene in chosen.scenes or SCENES:
            runs = {
                f"{name}{kind}": sweep(victims, scene, fault, lacks, chosen.every)
                for kind, lacks in file_systems.items()
                for name, fault in FAULTS.items()
            }
            for name, found in {**runs, "power lost": after_power_loss(victims, scene, chosen.every)}.items():
                results = []
                for one in found:
                    results.append(one)
                    if one is not None:
                        print(one)
                bad = sum(one is not None for one in results)
                print(f"{scene}, {name}: {len(results)} times, {bad} wrong", flush=True)
                injected, wrong = injected + len(results), wrong + bad
    print(f"{injected} faults, {wrong} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
