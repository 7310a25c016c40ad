"""The integration for Lightning Fabric: ``attach(fabric)``.

Enters: a Fabric and the state of ``fabric.save`` and ``fabric.load``. Leaves: checkpoints under the names of
:mod:`dcp_plugin.integration.stored`. The rule: all ranks save directly from the objects and load directly into them.

``DCPSingleDeviceStrategy``, ``DCPDDPStrategy``, ``DCPFSDPStrategy`` and ``DCPModelParallelStrategy`` are those of
``lightning.fabric``; for ``lightning_fabric``: ``dcp_strategy_class(FSDPStrategy)``.
"""

from __future__ import annotations

from typing import Any

from dcp_plugin.fabric.adapter import Attachment, attach, dcp_strategy_class
from dcp_plugin.integration.lightning_packages import SUPPORTED

__all__ = ["Attachment", "attach", "dcp_strategy_class", *(f"DCP{name}" for name in SUPPORTED)]


def __getattr__(name: str) -> Any:
    """Return a strategy class on demand: users of ``lightning_fabric`` need not install ``lightning``."""
    base = name.removeprefix("DCP")
    if base == name or base not in SUPPORTED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning.fabric import strategies

    return dcp_strategy_class(getattr(strategies, base))
