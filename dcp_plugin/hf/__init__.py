"""Hugging Face models: ``from_pretrained(AutoModelForCausalLM, "run/checkpoint-500")``, read from the shards.

Input: a class of transformers and a checkpoint of any framework, of stock DCP or of another tool. Output: the model, as
``from_pretrained`` of transformers would return it. Each rank reads only its part. The rule: a checkpoint supplies
settings and tensors, and none of its code is executed.
"""

from __future__ import annotations

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError('dcp_plugin.hf needs transformers: pip install "dcp-plugin[hf]"') from error

from dcp_plugin.hf.loading import from_pretrained

__all__ = ["from_pretrained"]
