"""Tests of models of transformers from checkpoints. transformers is imported by the ranks only, and by their server."""

KINDS = ("gpt2", "llama", "llama-tied")
"""Models: see :func:`tests.transformers.pretrained.models.config`."""
