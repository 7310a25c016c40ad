"""The server that ranks are forked from imports Lightning too: once, not once per rank."""

from __future__ import annotations

from tests import launch

launch.preload("tests.lightning.training")
launch.preload("s3fs")  # ModelCheckpoint imports it, where it is installed
