"""The server that ranks are forked from imports Lightning too: once, not once per rank."""

from __future__ import annotations

from tests import launch

launch.preload("tests.lightning.training")
# Lightning imports them in a save where they are installed, which takes a fifth of a second on each rank.
for module in ("s3fs", "fsspec.implementations.chained", "omegaconf"):
    launch.preload(module)
