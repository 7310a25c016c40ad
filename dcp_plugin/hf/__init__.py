"""Hugging Face models: ``from_pretrained(AutoModelForCausalLM, "run/checkpoint-500")``, straight from the shards.

Enters: a class of transformers and a checkpoint of any door, of stock DCP or of another tool. Leaves: the model, as
``from_pretrained`` of transformers would give it, of which each rank has read only what it holds. The rule: what a
checkpoint says of a model is settings and tensors; nothing of it is executed.
"""

from __future__ import annotations

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError('dcp_plugin.hf needs transformers: pip install "dcp-plugin[hf]"') from error

from dcp_plugin.hf.loading import from_pretrained

__all__ = ["from_pretrained"]
