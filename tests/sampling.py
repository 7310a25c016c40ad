"""A sample of a large list for ``make test``; ``make test-long`` runs the rest.

The sample follows from the commit, so that every case of a list runs within some commits. pytest's header shows its
seed, and ``TEST_SEED=<seed> make test`` draws the same sample again.

A test with many parameters is marked with those of which one value is enough in a run::

    @pytest.mark.one_of("place", "options")
    @pytest.mark.parametrize("place", ["disk", "s3"])
    @pytest.mark.parametrize("options", [{}, {"async_save": True}])
    @pytest.mark.parametrize("layout", ["ddp", "fsdp2"])

``make test`` runs it once for each layout, with one of the four combinations of the marked parameters. Without names,
``one_of`` stands for all parameters; and of the fixture ``place`` one value is enough in each test.
"""

from __future__ import annotations

import functools
import os
import subprocess
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest


@functools.cache
def seed() -> str:
    """Return ``TEST_SEED`` of the environment, else the hash of the commit, else ``0``."""
    if given := os.environ.get("TEST_SEED"):
        return given
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:  # no git
        return "0"
    return commit.stdout.strip() or "0"


def number(name: str, below: int) -> int:
    """Return a number from 0 that follows from the seed and this name."""
    return zlib.crc32(f"{seed()}/{name}".encode()) % below


def is_sampled(name: str, one_of: int) -> bool:
    """Return True for about one name of ``one_of``: those that the sample of this seed has."""
    return number(name, one_of) == 0


def mark_the_rest_long(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of tests with ``one_of`` that the sample of this seed lacks as long.

    Cases that differ in marked parameters only are a group, and each group keeps one case, or as many as ``count=`` of
    the mark says. Groups that follow each other keep cases that follow each other, so that few groups meet many values.
    """
    tests: dict[str, dict[str, list[pytest.Function]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("long") or not hasattr(item, "callspec"):
            continue
        mark, parameters = item.get_closest_marker("one_of"), item.callspec.params
        if mark or "place" in parameters:
            names = mark.args if mark else ("place",)
            marked = {"place", *names} if names else set(parameters)
            others = {name: value for name, value in parameters.items() if name not in marked}
            tests[item.nodeid.partition("[")[0]][repr(others)].append(item)
    for test, groups in tests.items():
        for place, group in enumerate(groups.values()):
            mark = group[0].get_closest_marker("one_of")
            count = min(mark.kwargs.get("count", 1), len(group)) if mark else 1
            first = number(test, len(group)) + place
            drawn = [group[(first + more) % len(group)] for more in range(count)]
            for item in group:
                if item not in drawn:
                    item.add_marker("long")
