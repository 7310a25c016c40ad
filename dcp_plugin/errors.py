"""The exceptions of this package, for users. The package defines them in :mod:`dcp_plugin.core.errors`."""

from __future__ import annotations

from dcp_plugin.core.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointUnreadable,
    DurabilityUnknown,
    NotInCheckpoint,
    RankFailure,
    SaveFailed,
    UnsafeCheckpoint,
)

__all__ = [
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointIncomplete",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CheckpointUnreadable",
    "DurabilityUnknown",
    "NotInCheckpoint",
    "RankFailure",
    "SaveFailed",
    "UnsafeCheckpoint",
]
