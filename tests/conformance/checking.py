"""Runs cases with ours and with their oracle, in few launches, and judges them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from tests.conformance.cases import Case
from tests.conformance.launching import run_cases
from tests.conformance.tools import TOOLS
from tests.conformance.verdict import Verdict, judge


def verdicts(cases: Iterable[Case]) -> dict[str, Verdict]:
    """The verdict on each case by its name. One launch for each tool and world size, and one more for each crash."""
    cases = list(cases)
    batches: dict[tuple[str, int], list[str]] = defaultdict(list)
    for case in cases:
        batches["ours", case.world_size].append(case.name)
        if case.oracle in TOOLS:
            batches[case.oracle, case.world_size].append(case.name)
    seen = {batch: run_cases(tuple(names), *batch) for batch, names in batches.items()}
    return {
        case.name: judge(
            seen["ours", case.world_size][case.name],
            seen[case.oracle if case.oracle in TOOLS else "ours", case.world_size][case.name],
            case.oracle,
            case.differs,
            case.must_work,
        )
        for case in cases
    }
