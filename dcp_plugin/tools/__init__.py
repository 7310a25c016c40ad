"""Tools that list, inspect, compare, export, copy and prune checkpoints.

Enters: paths or URLs that :mod:`dcp_plugin.core.storage.open` can open. Leaves: reports and files. The rule: no tool
needs a model, a process group or a GPU, and the memory of a tool does not grow with the checkpoint.

The names here are those that few users write: the results of tools, and tools for complete runs. As in the package
itself, each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_plugin.core.types import CheckpointState
    from dcp_plugin.tools.contents import CheckpointInfo
    from dcp_plugin.tools.copy import CopyReport
    from dcp_plugin.tools.diff import CheckpointDiff
    from dcp_plugin.tools.divergence import Divergence, first_divergence
    from dcp_plugin.tools.export import ExportReport
    from dcp_plugin.tools.listing import ListedCheckpoint, Run, list_runs
    from dcp_plugin.tools.probes import DoctorReport, Probe, doctor
    from dcp_plugin.tools.prune import PrunedCheckpoint, PrunedLeftover, PruneReport
    from dcp_plugin.tools.run_report.page import report
    from dcp_plugin.tools.verify import VerifyReport

_HOME_OF = {
    "CheckpointDiff": "dcp_plugin.tools.diff",
    "CheckpointInfo": "dcp_plugin.tools.contents",
    "CheckpointState": "dcp_plugin.core.types",
    "CopyReport": "dcp_plugin.tools.copy",
    "Divergence": "dcp_plugin.tools.divergence",
    "DoctorReport": "dcp_plugin.tools.probes",
    "ExportReport": "dcp_plugin.tools.export",
    "ListedCheckpoint": "dcp_plugin.tools.listing",
    "Probe": "dcp_plugin.tools.probes",
    "PruneReport": "dcp_plugin.tools.prune",
    "PrunedCheckpoint": "dcp_plugin.tools.prune",
    "PrunedLeftover": "dcp_plugin.tools.prune",
    "Run": "dcp_plugin.tools.listing",
    "VerifyReport": "dcp_plugin.tools.verify",
    "doctor": "dcp_plugin.tools.probes",
    "first_divergence": "dcp_plugin.tools.divergence",
    "list_runs": "dcp_plugin.tools.listing",
    "report": "dcp_plugin.tools.run_report.page",
}

__all__ = [
    "CheckpointDiff",
    "CheckpointInfo",
    "CheckpointState",
    "CopyReport",
    "Divergence",
    "DoctorReport",
    "ExportReport",
    "ListedCheckpoint",
    "Probe",
    "PruneReport",
    "PrunedCheckpoint",
    "PrunedLeftover",
    "Run",
    "VerifyReport",
    "doctor",
    "first_divergence",
    "list_runs",
    "report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
