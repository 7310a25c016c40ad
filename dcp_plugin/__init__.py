"""Sharded, reshardable, asynchronous checkpoints on top of ``torch.distributed.checkpoint``.

Names are imported when they are first used: importing this package costs next to nothing, and imports no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dcp_plugin import core
from dcp_plugin.core.types import VERSION

if TYPE_CHECKING:
    from dcp_plugin import tools as tools
    from dcp_plugin.api import load, save
    from dcp_plugin.checkpointer import Checkpointer
    from dcp_plugin.core import events as events
    from dcp_plugin.core.config import IO, CheckpointConfig, Keeper
    from dcp_plugin.core.errors import (
        CheckpointCorrupt,
        CheckpointError,
        CheckpointIncomplete,
        CheckpointMismatch,
        CheckpointNotFound,
        CheckpointUnreadable,
        DurabilityUnknown,
        RankFailure,
        SaveFailed,
        UnsafeCheckpoint,
    )
    from dcp_plugin.core.partial import PartialLoad
    from dcp_plugin.core.records import LoadReport
    from dcp_plugin.core.retention import Retention
    from dcp_plugin.core.runs.catalog import latest, list_checkpoints
    from dcp_plugin.core.saving.queue import SaveHandle
    from dcp_plugin.core.state.random_streams import RandomStreams
    from dcp_plugin.core.storage.stock.stock_load import ShardedLoadPlanner, ShardedReader
    from dcp_plugin.core.storage.stock.stock_save import ShardedSavePlanner, ShardedWriter
    from dcp_plugin.core.types import PerRank
    from dcp_plugin.start import Start, resolve_resume, resume_or_init
    from dcp_plugin.tools.contents import inspect
    from dcp_plugin.tools.copy import copy
    from dcp_plugin.tools.diff import diff
    from dcp_plugin.tools.export import export
    from dcp_plugin.tools.prune import prune
    from dcp_plugin.tools.resume_check import verify_resume
    from dcp_plugin.tools.stream import read
    from dcp_plugin.tools.verify import verify


__version__ = VERSION

core.keeper = lambda: importlib.import_module("dcp_plugin.tiers.registration").KEEPER
core.resume_check = lambda: importlib.import_module("dcp_plugin.tools.resume_check")

_HOMES = {
    "dcp_plugin.api": ("load", "save"),
    "dcp_plugin.start": ("Start", "resolve_resume", "resume_or_init"),
    "dcp_plugin.core.saving.queue": ("SaveHandle",),
    "dcp_plugin.checkpointer": ("Checkpointer",),
    "dcp_plugin.core.config": ("CheckpointConfig", "IO", "Keeper"),
    "dcp_plugin.core.errors": (
        "CheckpointCorrupt",
        "CheckpointError",
        "CheckpointIncomplete",
        "CheckpointMismatch",
        "CheckpointNotFound",
        "CheckpointUnreadable",
        "DurabilityUnknown",
        "RankFailure",
        "SaveFailed",
        "UnsafeCheckpoint",
    ),
    "dcp_plugin.core.runs.catalog": ("latest", "list_checkpoints"),
    "dcp_plugin.tools.contents": ("inspect",),
    "dcp_plugin.tools.verify": ("verify",),
    "dcp_plugin.core.partial": ("PartialLoad",),
    "dcp_plugin.core.types": ("PerRank",),
    "dcp_plugin.core.state.random_streams": ("RandomStreams",),
    "dcp_plugin.core.storage.stock.stock_load": ("ShardedLoadPlanner", "ShardedReader"),
    "dcp_plugin.core.storage.stock.stock_save": ("ShardedSavePlanner", "ShardedWriter"),
    "dcp_plugin.tools.prune": ("prune",),
    "dcp_plugin.tools.resume_check": ("verify_resume",),
    "dcp_plugin.tools.diff": ("diff",),
    "dcp_plugin.tools.export": ("export",),
    "dcp_plugin.tools.stream": ("read",),
    "dcp_plugin.tools.copy": ("copy",),
    "dcp_plugin.core.records": ("LoadReport",),
    "dcp_plugin.core.retention": ("Retention",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "IO",
    "CheckpointConfig",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointIncomplete",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CheckpointUnreadable",
    "Checkpointer",
    "DurabilityUnknown",
    "Keeper",
    "LoadReport",
    "PartialLoad",
    "PerRank",
    "RandomStreams",
    "RankFailure",
    "Retention",
    "SaveFailed",
    "SaveHandle",
    "ShardedLoadPlanner",
    "ShardedReader",
    "ShardedSavePlanner",
    "ShardedWriter",
    "Start",
    "UnsafeCheckpoint",
    "copy",
    "diff",
    "export",
    "inspect",
    "latest",
    "list_checkpoints",
    "load",
    "prune",
    "read",
    "resolve_resume",
    "resume_or_init",
    "save",
    "verify",
    "verify_resume",
]


def __getattr__(name: str) -> Any:
    if name in ("events", "tools"):
        return importlib.import_module(f"dcp_plugin.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
