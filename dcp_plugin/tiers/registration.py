"""The keeper's source and writer, for the core. Imported only where a configuration asks for a keeper."""

from __future__ import annotations

from dcp_plugin.core.sources import KeeperFactories
from dcp_plugin.tiers.keeper_writer import KeeperWriter
from dcp_plugin.tiers.source import NodesSource

KEEPER = KeeperFactories(NodesSource, KeeperWriter)
