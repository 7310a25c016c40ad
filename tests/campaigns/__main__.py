"""``python -m tests.campaigns``: judge every case of the zoo with ``verify_resume`` and ``prove``, and print the table.

It ends with 1 if neither judge names a bug, or if one of them raises an alarm about a correct training.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.campaigns.case import Case, cases
from tests.campaigns.judges import Opinion, problem, proved, verified


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="cases with one of these in their names"
    )
    only = parser.parse_args().only
    chosen = [case for case in cases() if any(text in case.name for text in only)]
    wrong = 0
    print("| case | source | verify_resume | prove |\n|---|---|---|---|", flush=True)
    for case, by_load, by_runs in judged(chosen):
        wrong += bool(problem(case, by_load, by_runs))
        sources = ", ".join(map(_link, case.sources)) or "correct"
        print(f"| {case.name} | {sources} | {_cell(by_load)} | {_cell(by_runs)} |", flush=True)
    bugs = sum(case.kind == "bugs" for case in chosen)
    print(f"\n{bugs} bugs and {len(chosen) - bugs} correct trainings, {wrong} judged wrongly")
    return wrong > 0


def judged(chosen: Iterable[Case]) -> Iterator[tuple[Case, Opinion, Opinion]]:
    """Yield each case with the opinions of ``verify_resume`` and of ``prove``."""
    for case in chosen:
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            yield case, verified(case, Path(one)), proved(case, Path(other))


def _link(address: str) -> str:
    *_, repository, _, number = address.split("/")
    return f"[{repository}#{number}]({address})"


def _cell(opinion: Opinion) -> str:
    return f"{opinion.cause}: {opinion.leaf}" if opinion.verdict == "different" else opinion.verdict


if __name__ == "__main__":
    sys.exit(main())
