"""Tests of the Accelerate integration. Accelerate itself is imported by the ranks only, and by their server."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from torch.torch_version import TorchVersion

ACCELERATE = TorchVersion(version("accelerate"))

resumes_fsdp2_alone = pytest.mark.skipif(
    ACCELERATE < (1, 13), reason="Accelerate before 1.13 saves an optimizer of FSDP2 and does not load it"
)

WORLD_SIZE = {
    "single": 1,
    "ddp": 2,
    "fsdp1": 2,
    "fsdp2": 2,
    "hsdp": 4,
    "own_fsdp2": 2,
    "own_fsdp1": 2,
    "own_hsdp": 4,
}
"""How to train, and on how many ranks. ``own_…``: sharded by the user, on a CPU as Accelerate allows it; the others
that shard go through Accelerate's own FSDP code, which tests force onto the CPU."""
