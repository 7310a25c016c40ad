"""Records of saves in flight, and leases, on a disk and in a store alike. By a lease, a process learns that the process
of another save has ended.

The process of a save touches its record every minute. A record that was not touched for :data:`LEASE` belongs to a
process that has ended. The age of a record is measured by the clock of the file system or the store, never by comparing
the clocks of two machines. A proof needs no lease: the process number on the same machine, or a lock that both
processes share.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from dcp_plugin.core.errors import warn_once
from dcp_plugin.core.format import json_object
from dcp_plugin.core.media.disk import posix
from dcp_plugin.core.media.medium import InFlight
from dcp_plugin.core.media.places import is_target
from dcp_plugin.core.ranks.launcher import launch_record

_BEAT = 60.0
LEASE = 15 * _BEAT
"""Seconds after which the process of an untouched record counts as ended."""


def maker(time: float) -> dict[str, Any]:
    """Return the entries of a record about this process, which begins a save at ``time``."""
    return {
        "host": socket.gethostname(),
        "machine": posix.machine(),
        "pid": os.getpid(),
        "time": time,
        "launch": launch_record(),
    }


def contents(data: bytes, record: object) -> dict[str, Any]:
    """Return the contents of a record in lines of JSON; nothing if it cannot be read. A line torn by a crash is left
    out.

    Args:
        record: The name of the record, for a warning.
    """
    noted: dict[str, Any] = {}
    try:
        for line in data.splitlines():
            noted.update(json_object(line))
    except ValueError as error:
        if not noted:
            warn_once(f"{record} cannot be read: {error}. It is garbage once its process has ended")
    return noted


def target_in(noted: Mapping[str, Any]) -> str | None:
    """Return the checkpoint of a record, relative to the parent of the workspace; None if the record names none."""
    target = noted.get("target")
    return target if is_target(target) else None


def in_flight(noted: Mapping[str, Any], time: float) -> InFlight:
    """Return the save of a record whose last heartbeat was at ``time``."""
    return InFlight(target_in(noted) or "?", time, noted.get("launch"))


def start_heartbeat(touch: Callable[[], None]) -> Callable[[], None]:
    """Call ``touch`` every minute in a thread. An OSError of ``touch`` misses one beat.

    Returns:
        A function that ends the thread. It waits for the thread, but not longer than a second: the path may hang.
    """
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT):
            with suppress(OSError):
                touch()

    def stop() -> None:
        ended.set()
        thread.join(1.0)

    thread = threading.Thread(target=beat, name="dcp-heartbeat", daemon=True)
    thread.start()
    return stop


def has_ended(noted: Mapping[str, Any], age: Callable[[], float]) -> bool:
    """Return whether the process that made a record has ended.

    Args:
        noted: The contents of the record. This process has no save in flight with it.
        age: Returns the seconds since the record was touched.
    """
    machine, pid = noted.get("machine"), noted.get("pid")
    is_of_this_process = bool(machine) and machine == posix.machine() and pid == os.getpid()
    return is_of_this_process or posix.has_ended(machine, pid) or age() > LEASE
