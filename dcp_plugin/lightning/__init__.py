"""Floor 5: the Lightning door.

``Trainer(plugins=[DCPCheckpointIO()])`` is all there is to do; see :mod:`dcp_plugin.lightning.callback` for how the
plugin reaches all ranks, and :mod:`dcp_plugin.lightning.resume` for how a training continues.
"""

from dcp_plugin.lightning.callback import DCPCallback
from dcp_plugin.lightning.io import DCPCheckpointIO
from dcp_plugin.lightning.strategy import (
    DCPDDPStrategy,
    DCPFSDPStrategy,
    DCPModelParallelStrategy,
    DCPSingleDeviceStrategy,
    dcp_strategy_class,
)

__all__ = [
    "DCPCallback",
    "DCPCheckpointIO",
    "DCPDDPStrategy",
    "DCPFSDPStrategy",
    "DCPModelParallelStrategy",
    "DCPSingleDeviceStrategy",
    "dcp_strategy_class",
]
