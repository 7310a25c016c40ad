"""Differences that are being mended: delete a line when its mend has landed. The tests are strict: they fail if it has.

By what is to be mended, patterns of the names of cases: ``{"hooks are called twice": ("modules/*-LoadPreHook",)}``.
"""

from __future__ import annotations

from fnmatch import fnmatch

KNOWN: dict[str, tuple[str, ...]] = {}


def known_failure(name: str) -> str:
    """What has to be mended for this case; empty if nothing has to be."""
    return next((item for item, patterns in KNOWN.items() if any(fnmatch(name, each) for each in patterns)), "")
