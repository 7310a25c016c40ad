"""The one time limit of the tests. It only ends what hangs: no verdict depends on it. And a budget for a long list.

It is more than twenty times what the longest test takes on two quiet cores. ``TEST_TIMEOUT_SCALE=3`` triples it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

HANG = 1200.0 * float(os.environ.get("TEST_TIMEOUT_SCALE", "1"))
"""Seconds after which a rank, a program, a thread or a whole test counts as hanging."""

T = TypeVar("T")


def for_seconds(budget: float, items: Iterable[T]) -> Iterator[T]:
    """Yield the first item, and the next ones until the budget is spent."""
    end = time.monotonic() + budget
    for item in items:
        yield item
        if time.monotonic() > end:
            return
