"""The keeper's source and writer, for the core. Imported only where a configuration asks for a keeper."""

from __future__ import annotations

from dcp_plugin.keeper.source import NodesSource
from dcp_plugin.keeper.writer import KeeperWriter
from dcp_plugin.sources import KeeperFactories

KEEPER = KeeperFactories(NodesSource, KeeperWriter)
