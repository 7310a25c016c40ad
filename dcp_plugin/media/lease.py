"""Leases: how a process learns that the process of another save has ended, on a disk and in a store alike.

The process of a save touches its record every minute. A record that was not touched for :data:`LEASE` belongs to a
process that has ended. The age of a record is measured by the clock of the file system or the store, never by comparing
the clocks of two machines. A proof needs no lease: the process number on the same machine, or a lock that both
processes share.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from dcp_plugin.media.disk import posix

_BEAT = 60.0
LEASE = 15 * _BEAT
"""Seconds after which the process of an untouched record counts as ended."""


def start_heartbeat(ended: threading.Event, touch: Callable[[], None]) -> None:
    """Call ``touch`` every minute in a thread until ``ended`` is set. An OSError of ``touch`` misses one beat."""

    def beat() -> None:
        while not ended.wait(_BEAT):
            with suppress(OSError):
                touch()

    threading.Thread(target=beat, name="dcp-heartbeat", daemon=True).start()


def has_ended(noted: Mapping[str, Any], age: Callable[[], float]) -> bool:
    """Return whether the process that made a record has ended.

    Args:
        noted: The contents of the record. This process has no save in flight with it.
        age: Returns the seconds since the record was touched.
    """
    machine, pid = noted.get("machine"), noted.get("pid")
    is_of_this_process = bool(machine) and machine == posix.machine() and pid == os.getpid()
    return is_of_this_process or posix.has_ended(machine, pid) or age() > LEASE
