"""The integration for Accelerate: ``attach(accelerator)``. This package also exports ``DCPTrainerMixin`` of
:mod:`dcp_plugin.transformers`.

Enters: an accelerator with its prepared models, optimizers, schedulers and dataloaders. Leaves: named state for the
core, and objects filled from it. The rule: an unchanged script saves and loads on any number of processes.
Transformers is imported only when ``DCPTrainerMixin`` is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcp_plugin.accelerate.attachment import Attachment, attach

if TYPE_CHECKING:
    from dcp_plugin.transformers import DCPTrainerMixin

__all__ = ["Attachment", "DCPTrainerMixin", "attach"]


def __getattr__(name: str) -> Any:
    if name == "DCPTrainerMixin":
        from dcp_plugin.transformers import DCPTrainerMixin

        return DCPTrainerMixin
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
