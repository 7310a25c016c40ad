"""Hydra loads this at each start, from the namespace package in which it looks for plugins: nothing of ours, nor torch,
is imported before an application asks for one of the groups."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class DcpPluginGroups(SearchPathPlugin):
    """The groups ``dcp_plugin/…`` in the search path of every application."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="dcp-plugin", path="pkg://dcp_plugin.conf")
