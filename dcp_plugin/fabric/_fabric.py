"""The one place for private names of Lightning Fabric, each with its reason.

``tests/fabric/test_canaries.py`` fails loudly when one of these moves or changes its meaning.
"""

from __future__ import annotations

from typing import Any

from dcp_plugin.integration.lightning_packages import package_behind


def plugin_of(strategy: Any) -> Any:
    """Return the ``CheckpointIO`` of a strategy; None for FSDP and ModelParallel, whose property raises."""
    try:
        return strategy.checkpoint_io
    except NotImplementedError:
        return None


def unwrapped(fabric: Any, objects: dict[str, Any]) -> dict[str, Any]:
    """Return the modules that the strategy has made, without Fabric's wrapper, whose state dict under FSDP1 is not that
    of the shards. ``fabric.load`` does the same; the function is not public."""
    return dict(package_behind(fabric).fabric("wrappers")._unwrap_objects(objects))
