"""``python -m tests.conformance [PART OF A NAME ...]``: run the cases with these names and print what differs."""

from __future__ import annotations

import argparse
import time

from tests.conformance import warm_up
from tests.conformance.cases import all_cases, find
from tests.conformance.launching import slowest, verdicts


def main() -> None:
    warm_up()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument(
        "--all", action="store_true", help="show what is declared, what only ours can do, and what both cannot"
    )
    parser.add_argument("--table", action="store_true", help="print every case with its verdict")
    parser.add_argument("--slowest", type=int, default=0, metavar="N", help="show the N cases that take longest")
    arguments = parser.parse_args()
    chosen = [find(name) for name in arguments.names if name.startswith("random/")] or [
        case for case in all_cases() if all(part in case.name for part in arguments.names)
    ]
    began = time.monotonic()
    counts = dict.fromkeys(("same", "fails", "better", "declared", "different", "invalid"), 0)
    for name, verdict in verdicts(chosen).items():
        kind = verdict.kind
        counts[kind] += 1
        if arguments.table:
            print(f"{name:75} {verdict.outcome or kind}")
        if kind in ("different", "invalid") or (kind != "same" and arguments.all):
            print(f"{kind:9} {name}\n{verdict.told(arguments.all)}")
    for seconds, tool, name in sorted(slowest(), reverse=True)[: arguments.slowest]:
        print(f"{seconds:6.2f} s {tool} {name}")
    print(f"{len(chosen)} cases in {time.monotonic() - began:.0f} s: {counts}")


if __name__ == "__main__":
    main()
