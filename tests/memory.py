"""How much memory a call needs over what was in use before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def extra_peak(call: Callable[[], Any]) -> int:
    """Peak resident bytes during the call, less those before it, as the kernel counts them."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
