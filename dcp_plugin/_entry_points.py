"""Functions that Lightning's ``callbacks_factory`` entry points call whenever a Trainer is built, with or without this
package.

The rule: import nothing and return nothing unless the user has imported ``dcp_plugin.lightning``. Break it and every
Lightning script on a machine that has this package installed starts slower or behaves differently.
"""

from __future__ import annotations

import sys
from typing import Any


def lightning_callbacks() -> list[Any]:
    """Return the callbacks for ``lightning.pytorch``."""
    return _callbacks("lightning.pytorch")


def pytorch_lightning_callbacks() -> list[Any]:
    """Return the callbacks for ``pytorch_lightning``."""
    return _callbacks("pytorch_lightning")


def _callbacks(package: str) -> list[Any]:
    callback = sys.modules.get("dcp_plugin.lightning.callback")
    return callback.callbacks_for_new_trainer(package) if callback is not None else []
