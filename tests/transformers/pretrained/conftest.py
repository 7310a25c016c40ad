"""The server that ranks are forked from imports transformers too: once, not once per rank."""

from __future__ import annotations

from tests import launch

launch.preload("tests.transformers.pretrained.models")
