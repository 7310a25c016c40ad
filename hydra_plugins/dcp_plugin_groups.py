"""Plugin that Hydra loads at each start, from the namespace package of its plugins.

This module does not import torch: ``dcp_plugin.conf``, the package of the groups, imports only small modules.
"""

import importlib
import warnings

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class DcpPluginGroups(SearchPathPlugin):
    """Plugin that adds the groups ``dcp_plugin/…`` to the search path of every application."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        try:
            importlib.import_module("dcp_plugin.conf")
        except Exception as error:  # otherwise Hydra fails, even for an application without these groups
            warnings.warn(f"there are no groups dcp_plugin/…: dcp_plugin cannot be imported: {error!r}", stacklevel=1)
        else:
            search_path.append(provider="dcp-plugin", path="pkg://dcp_plugin.conf")
