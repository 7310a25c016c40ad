"""Tests of the Lightning integration. Lightning itself is imported by the ranks only, and by their server."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from torch.torch_version import TorchVersion

LIGHTNING = TorchVersion(version("lightning"))

TRUSTED: dict[str, Any] = {"weights_only": False} if LIGHTNING >= (2, 6) else {}
"""Options of Lightning's loads that permit pickled objects. Lightning 2.5 always permits them in files."""
