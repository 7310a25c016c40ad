"""Floor 5: the doors of Accelerate and transformers.

Names are imported when they are first used: whoever wants one framework needs not have the other.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_plugin.accelerate.trainer import DCPTrainerMixin

_HOME_OF = {"DCPTrainerMixin": "dcp_plugin.accelerate.trainer"}

__all__ = ["DCPTrainerMixin"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value
