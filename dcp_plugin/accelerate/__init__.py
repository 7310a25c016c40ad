"""Layer 9: the doors of Hugging Face Accelerate and of ``transformers.Trainer``.

``attach(accelerator)`` is all there is to do for the one; see :mod:`dcp_plugin.accelerate.attachment`. Transformers is
imported by those only who ask for ``DCPTrainerMixin``.
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
