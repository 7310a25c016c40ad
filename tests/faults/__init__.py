"""The campaign of faults: what a save, a load or a clean-up does when the machine, the disk or a person fails it.

``layer.c`` counts, records, fails or ends at the file-system calls of a process (loaded with LD_PRELOAD);
:mod:`tests.faults.victims` runs functions in forked processes that have it; :mod:`tests.faults.scenes` has them;
:mod:`tests.faults.oracle` says what has to hold afterwards; :mod:`tests.faults.power` builds the states that a loss of
power may leave; :mod:`tests.faults.flips` damages files. ``python -m tests.faults`` and, for damage to files,
``python -m tests.faults flips`` run all of it and print the counts; the tests run a sample.
"""

from __future__ import annotations

from collections.abc import Iterable


def counted(name: str, found: Iterable[object]) -> tuple[int, int]:
    """Print what was wrong of a part of a campaign, each as it is found, and how often; the number of times, and of
    those that were wrong. What is found is None or empty when nothing was wrong."""
    times = wrong = 0
    for one in found:
        times += 1
        if one:
            wrong += 1
            print(one, flush=True)
    print(f"{name}: {times} times, {wrong} wrong", flush=True)
    return times, wrong
