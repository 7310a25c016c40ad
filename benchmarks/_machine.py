"""What a figure depends on beside the code: the machine, its versions, and whether it was busy."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "xxhash", "safetensors", "torch_checkpointing", "dlrover", "nvidia-resiliency-ext")
_BUSY = 0.5
"""The share of all cores that other work may keep busy; above it, a figure is not to be trusted."""


def describe() -> dict[str, Any]:
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": f"{cpu}, {os.cpu_count()} cores, {memory / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": {name: _version(name) for name in PACKAGES},
    }


def file_system_of(path: Path) -> str:
    """Type and device of the mount that holds a path."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [mount for mount in mounts if path.resolve().is_relative_to(mount[1])]
    device, _, kind, *_ = max(inside, key=lambda mount: len(mount[1]))
    return f"{kind} on {device}"


def busy_cores() -> float:
    """How many cores are busy while this process waits for a second.

    A load average would count the benchmark that has just ended too.
    """
    before = _busy_seconds()
    time.sleep(1.0)
    return _busy_seconds() - before


def _busy_seconds() -> float:
    """Seconds of all cores together, since the machine was started."""
    user, nice, system, _idle, _waiting, *more = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(more)) / os.sysconf("SC_CLK_TCK")


def busy(before: float) -> str:
    """A sentence if the machine had other work when a run began."""
    cores = os.cpu_count() or 1
    if before <= _BUSY * cores:
        return ""
    return f"THE MACHINE WAS BUSY ({before:.1f} of {cores} cores): trust ratios only, and those with care."


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def status_bytes(name: str) -> int:
    """A memory figure of this process from ``/proc/self/status``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {name} in /proc/self/status")


def bytes_read() -> int:
    """What this process has read from files through system calls since it began."""
    line = Path("/proc/self/io").read_text().splitlines()[0]
    return int(line.removeprefix("rchar: "))
