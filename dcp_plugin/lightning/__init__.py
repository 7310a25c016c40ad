"""The integration for Lightning's Trainer, of ``lightning`` and of ``pytorch_lightning``.

Users only write ``Trainer(plugins=[DCPCheckpointIO()])``. :mod:`.callback` describes how the plugin reaches all ranks,
:mod:`.resume` how a training continues. Enters: a Trainer with the plugin. Leaves: checkpoints under the names of
:mod:`dcp_plugin.integration.stored`. The rule: a Trainer without the plugin behaves as if this package did not
exist.
"""

import importlib
from typing import Any

from dcp_plugin.integration import lightning_packages

lightning_packages.installed()  # raises an error with the install command if none is

from dcp_plugin.lightning import callback as _callback  # noqa: E402, F401  (the entry points look for it)
from dcp_plugin.lightning.io import DCPCheckpointIO  # noqa: E402
from dcp_plugin.lightning.live_load import load_from_checkpoint  # noqa: E402
from dcp_plugin.lightning.strategy import dcp_strategy_class  # noqa: E402

__all__ = [
    "DCPCallback",
    "DCPCheckpointIO",
    "dcp_strategy_class",
    "load_from_checkpoint",
    *(f"DCP{name}" for name in lightning_packages.SUPPORTED),
]


def __getattr__(name: str) -> Any:
    """Return a class that derives from Lightning's, for the Lightning package that is in use."""
    if name in __all__:
        return getattr(importlib.import_module(lightning_packages.in_use().classes), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
