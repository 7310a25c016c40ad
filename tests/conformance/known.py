"""Differences that are being mended: delete a line when its mend has landed. The tests are strict: they fail if it has.

Patterns of the names of cases, by what is to be mended.
"""

from __future__ import annotations

from fnmatch import fnmatch

UNSHARDED_ROOT = "(1) FSDP2: the root is unsharded after a forward without a backward"
LOAD_BYPASSED = "(3) overrides and hooks of load_state_dict are not called, or not with the whole state dict"
RESIZING = "(5) buffers and parameters that resize themselves, or appear, while they are loaded"
WRAPPERS = "(6) wrapper subclasses and quantised tensors"
SHARDS_WRAPPER = "(7) LocalShardsWrapper"
NESTED_SHARDS = "(10) a module's own nested state dict with sharded tensors"
OTHER_DTYPE = "(12) the optimizer state of parameters that have another dtype than in the checkpoint keeps the old one"
CALLED_TWICE = "(11) state_dict is called twice during a load"

KNOWN: dict[str, tuple[str, ...]] = {}


def known_failure(name: str) -> str:
    """What has to be mended for this case; empty if nothing has to be."""
    return next((item for item, patterns in KNOWN.items() if any(fnmatch(name, each) for each in patterns)), "")
