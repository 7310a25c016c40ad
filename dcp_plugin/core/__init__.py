"""Everything that a save and a load of live objects need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

keeper: Callable[[], Any] | None = None
"""Function that returns the :class:`~dcp_plugin.core.sources.KeeperFactories`. The package registers it, since nothing
here imports the keeper."""
