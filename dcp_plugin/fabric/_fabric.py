"""The one place for what is private in Lightning Fabric, each with the reason.

``tests/fabric/test_canaries.py`` fails loudly when one of these moves or changes its meaning.
"""

from __future__ import annotations

from typing import Any

from dcp_plugin.integration.lightning_packages import package_behind


def plugin_of(strategy: Any) -> Any:
    """The ``CheckpointIO`` of a strategy; FSDP and ModelParallel have none, and raise when they are asked."""
    try:
        return strategy.checkpoint_io
    except NotImplementedError:
        return None


def unwrapped(fabric: Any, objects: dict[str, Any]) -> dict[str, Any]:
    """What the strategy has made of modules, without Fabric's own wrapper, whose state dict under FSDP1 is not that of
    the shards. ``fabric.load`` does the same; the function is not public."""
    return dict(package_behind(fabric).fabric("wrappers")._unwrap_objects(objects))
