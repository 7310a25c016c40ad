"""What a call costs, without a clock: memory over what was in use before it, objects that it leaves, other calls."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any


def extra_peak(call: Callable[[], Any]) -> int:
    """Peak resident bytes during the call, less those before it, as the kernel counts them."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def names_alive(root: Path, *uses: Callable[[Path], dict[str, weakref.ref[Any]]]) -> list[set[str]]:
    """Make each use in a folder of its own, without the garbage collector. Leaves the collector off.

    Args:
        uses: Each drops its objects, and returns references to them by name. The last one is made once before, for
            imports and caches.

    Returns:
        For each use the names of the objects that are still alive after it.
    """
    uses[-1](root / "first-use")
    gc.collect()
    gc.disable()
    alive = []
    for number, use in enumerate(uses):
        alive.append({name for name, reference in use(root / str(number)).items() if reference() is not None})
        gc.collect()
    return alive


def calls_of(call: Callable[[], Any], kinds: tuple[str, ...] = ("call",)) -> int:
    """Count the functions that a call calls in this thread. With ``c_call`` among the kinds, those of C as well."""
    calls = 0

    def count(frame: Any, kind: str, argument: Any) -> None:
        nonlocal calls
        calls += kind in kinds

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(before)
    return calls


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
