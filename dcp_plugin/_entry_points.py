"""Functions that Lightning's ``callbacks_factory`` entry points call whenever a Trainer is built, with or without this
package.

The rule: import nothing and return nothing unless the user has imported ``dcp_plugin.lightning``. Break it and every
Lightning script on a machine that has this package installed starts slower or behaves differently.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any


def _callbacks(package: str) -> list[Any]:
    """Return the callbacks for one of Lightning's packages."""
    callback = sys.modules.get("dcp_plugin.lightning.callback")
    return callback.callbacks_for_new_trainer(package) if callback is not None else []


lightning_callbacks = partial(_callbacks, "lightning.pytorch")
pytorch_lightning_callbacks = partial(_callbacks, "pytorch_lightning")
