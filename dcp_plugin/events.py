"""The events of saves, for users. The package defines and emits them in :mod:`dcp_plugin.core.events`."""

from __future__ import annotations

from dcp_plugin.core.events import (
    BytesWritten,
    Event,
    ReplicasDiffer,
    SaveAborted,
    SavedLocally,
    SaveFinished,
    SaveRecord,
    SaveStarted,
    subscribe,
)

__all__ = [
    "BytesWritten",
    "Event",
    "ReplicasDiffer",
    "SaveAborted",
    "SaveFinished",
    "SaveRecord",
    "SaveStarted",
    "SavedLocally",
    "subscribe",
]
