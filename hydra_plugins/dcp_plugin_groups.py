"""Hydra loads this at each start, from the namespace package in which it looks for plugins.

Torch is not imported: ``dcp_plugin.conf``, in which Hydra looks for the groups, brings a few small modules of ours.
"""

import importlib
import warnings

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class DcpPluginGroups(SearchPathPlugin):
    """The groups ``dcp_plugin/…`` in the search path of every application."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        try:
            importlib.import_module("dcp_plugin.conf")
        except Exception as error:  # Hydra would end with it, also where an application asks for none of the groups
            warnings.warn(f"there are no groups dcp_plugin/…: dcp_plugin cannot be imported: {error!r}", stacklevel=1)
        else:
            search_path.append(provider="dcp-plugin", path="pkg://dcp_plugin.conf")
