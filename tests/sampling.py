"""A sample of a large list for ``make test``; ``make test-long`` runs the rest.

The sample follows from the commit, so that every case of a list runs within some commits. pytest's header shows its
seed, and ``TEST_SEED=<seed> make test`` draws the same sample again.
"""

from __future__ import annotations

import functools
import os
import subprocess
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


def sampled(names: Iterable[str], one_of: int) -> list[Any]:
    """Return the names as values of ``parametrize``: those that the sample of this seed lacks are marked long."""
    return [name if is_sampled(name, one_of) else pytest.param(name, marks=pytest.mark.long) for name in names]


def is_sampled(name: str, one_of: int) -> bool:
    """Return True for about one name of ``one_of``: those that the sample of this seed has."""
    return number(name, one_of) == 0
