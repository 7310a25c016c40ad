"""What has to be a subclass of a class of Lightning's, for ``lightning.pytorch``.

``dcp_plugin.lightning`` offers these names too, from here or from its sister module, by which package is imported.
"""

from dcp_plugin.integration.lightning_packages import LIGHTNING
from dcp_plugin.lightning.callback import dcp_callback_class
from dcp_plugin.lightning.strategy import dcp_strategy_class

DCPCallback = dcp_callback_class(LIGHTNING)
DCPSingleDeviceStrategy = dcp_strategy_class(LIGHTNING.strategies.SingleDeviceStrategy)
DCPDDPStrategy = dcp_strategy_class(LIGHTNING.strategies.DDPStrategy)
DCPFSDPStrategy = dcp_strategy_class(LIGHTNING.strategies.FSDPStrategy)
DCPModelParallelStrategy = dcp_strategy_class(LIGHTNING.strategies.ModelParallelStrategy)
