"""The integration for transformers: ``class MyTrainer(DCPTrainerMixin, Trainer)``, and ``from_pretrained``.

Enters: a Trainer and the calls of its training loop; or a class of transformers and any checkpoint. Leaves:
``checkpoint-N`` directories, and a training that continues from such a directory; or a model, of which each rank has
read its part. The rules: the Trainer decides when to save and which checkpoint is best. A checkpoint supplies settings
and tensors, and none of its code is executed. :func:`from_pretrained` imports no Trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError('dcp_plugin.transformers needs transformers: pip install "dcp-plugin[hf]"') from error

from dcp_plugin.transformers.pretrained import from_pretrained

if TYPE_CHECKING:
    from dcp_plugin.transformers.mixin import DCPTrainerMixin

__all__ = ["DCPTrainerMixin", "from_pretrained"]


def __getattr__(name: str) -> Any:
    """Return the mixin on demand: the Trainer takes seconds to import."""
    if name != "DCPTrainerMixin":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dcp_plugin.transformers.mixin import DCPTrainerMixin

    return DCPTrainerMixin
