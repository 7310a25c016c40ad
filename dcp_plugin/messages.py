"""Text for error messages: lists cut to a readable length, and the name that a misspelled one may stand for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice

MAX_CANDIDATES = 20_000
"""Keys that are searched for a suggestion: a checkpoint may have a million, and an error has to come at once."""

_MAX_LINES = 20


def some(items: list[str], limit: int = 8, separator: str = ", ") -> str:
    """The first items for a message, and how many more there are."""
    more = f"{separator}and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + more


def first(lines: list[str]) -> list[str]:
    """The first lines for an error, and how many more there are."""
    more = len(lines) - _MAX_LINES
    return [*lines[:_MAX_LINES], *([f"and {more} more like this"] if more > 0 else [])]


def nearest(key: str, stored: Iterable[str]) -> str:
    """A hint at the stored key that a missing one may be a misspelling of; empty if none is similar."""
    near = difflib.get_close_matches(key, list(islice(stored, MAX_CANDIDATES)), n=1, cutoff=0.8)
    return f" (did you mean {near[0]}?)" if near else ""
