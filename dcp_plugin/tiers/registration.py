"""The keeper's source and writer, for the core. Imported only where a configuration asks for a keeper."""

from __future__ import annotations

from dcp_plugin.core.saving.writers import WriterFactory
from dcp_plugin.core.sources import KeeperFactories
from dcp_plugin.tiers.keeper_writer import KeeperWriter
from dcp_plugin.tiers.source import NodesSource

_WRITER: WriterFactory = KeeperWriter
KEEPER = KeeperFactories(NodesSource, _WRITER)
