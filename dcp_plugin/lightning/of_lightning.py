"""Classes that derive from Lightning's, for ``lightning.pytorch``.

``dcp_plugin.lightning`` exports these names too, from this module or its sister, for the package that is imported.
"""

from dcp_plugin.integration.lightning_packages import LIGHTNING
from dcp_plugin.lightning.callback import dcp_callback_class
from dcp_plugin.lightning.strategy import dcp_strategy_class

DCPCallback = dcp_callback_class(LIGHTNING)
DCPSingleDeviceStrategy = dcp_strategy_class(LIGHTNING.strategies.SingleDeviceStrategy)
DCPDDPStrategy = dcp_strategy_class(LIGHTNING.strategies.DDPStrategy)
DCPFSDPStrategy = dcp_strategy_class(LIGHTNING.strategies.FSDPStrategy)
DCPModelParallelStrategy = dcp_strategy_class(LIGHTNING.strategies.ModelParallelStrategy)
