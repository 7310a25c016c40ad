"""The server that ranks are forked from imports Fabric too: once, not once per rank."""

from __future__ import annotations

from tests import launch

launch.preload("tests.fabric.training")
