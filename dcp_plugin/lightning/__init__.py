"""Layer 9: the Lightning door, for ``lightning`` and for ``pytorch_lightning``.

``Trainer(plugins=[DCPCheckpointIO()])`` is all there is to do; see :mod:`dcp_plugin.lightning.callback` for how the
plugin reaches all ranks, and :mod:`dcp_plugin.lightning.resume` for how a training continues.
"""

import importlib
from typing import Any

from dcp_plugin.integration import lightning_packages

lightning_packages.installed()  # or say how to get it, before anything else fails

from dcp_plugin.lightning import callback as _callback  # noqa: E402, F401  (the entry points look for it)
from dcp_plugin.lightning.io import DCPCheckpointIO  # noqa: E402
from dcp_plugin.lightning.loading import load_from_checkpoint  # noqa: E402
from dcp_plugin.lightning.strategy import dcp_strategy_class  # noqa: E402

__all__ = [
    "DCPCallback",
    "DCPCheckpointIO",
    "DCPDDPStrategy",
    "DCPFSDPStrategy",
    "DCPModelParallelStrategy",
    "DCPSingleDeviceStrategy",
    "dcp_strategy_class",
    "load_from_checkpoint",
]


def __getattr__(name: str) -> Any:
    """The classes that derive from Lightning's: those of the package that is in use."""
    if name in __all__:
        return getattr(importlib.import_module(lightning_packages.in_use().classes), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
