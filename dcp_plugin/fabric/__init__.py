"""Layer 9: the Fabric door.

``attach(fabric)`` is all there is to do; see :mod:`dcp_plugin.fabric.strategy`. What ``fabric.save`` puts where is
told in :mod:`dcp_plugin.fabric.state_mapping`, and how a training continues in :mod:`dcp_plugin.fabric.state_mapping`.

``DCPSingleDeviceStrategy``, ``DCPDDPStrategy``, ``DCPFSDPStrategy`` and ``DCPModelParallelStrategy`` are those of
``lightning.fabric``; for ``lightning_fabric``: ``dcp_strategy_class(FSDPStrategy)``.
"""

from __future__ import annotations

from typing import Any

from dcp_plugin.fabric.strategy import Attachment, attach, dcp_strategy_class
from dcp_plugin.integration.lightning_packages import SUPPORTED

__all__ = ["Attachment", "attach", "dcp_strategy_class", *(f"DCP{name}" for name in SUPPORTED)]


def __getattr__(name: str) -> Any:
    """The strategies, when they are asked for: ``lightning`` need not be installed for ``lightning_fabric``."""
    base = name.removeprefix("DCP")
    if base == name or base not in SUPPORTED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning.fabric import strategies

    return dcp_strategy_class(getattr(strategies, base))
