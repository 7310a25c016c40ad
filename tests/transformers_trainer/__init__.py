"""Tests of the Trainer's integration. transformers is imported by the ranks only, and by their server."""

WORLD_SIZE = {"single": 1, "ddp": 2, "fsdp1": 2, "fsdp2": 2, "hsdp": 4}
"""Ways to train, and on how many ranks. ``hsdp`` is FSDP2 on a 2x2 mesh."""
