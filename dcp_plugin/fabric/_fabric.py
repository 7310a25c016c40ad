"""The only module that uses private names of Lightning Fabric; each use gives its reason.

``tests/fabric/test_canaries.py`` fails loudly when such a name moves or changes its meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcp_plugin.integration.lightning_packages import package_behind


def plugin_of(strategy: Any) -> Any:
    """Return the ``CheckpointIO`` of a strategy; None for FSDP and ModelParallel, whose property raises."""
    try:
        return strategy.checkpoint_io
    except NotImplementedError:
        return None


def unwrapper(fabric: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that puts the strategy's modules in place of Fabric's wrappers, for a Fabric or its strategy.
    Under FSDP1 a wrapper's state dict does not have the shards. ``fabric.load`` does the same; it is not public."""
    return package_behind(fabric).fabric("wrappers")._unwrap_objects  # type: ignore[no-any-return]
