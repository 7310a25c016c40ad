"""Tests of the Fabric integration. Fabric itself is imported by the ranks only, and by their server."""

WORLD_SIZE = {"single": 1, "ddp": 2, "fsdp1": 2, "fsdp2": 2, "hsdp": 4, "fsdp1_hsdp": 4}
"""Strategies to train with, and on how many ranks. ``hsdp`` is FSDP2 on a 2x2 mesh."""
