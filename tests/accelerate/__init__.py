"""Tests of the Accelerate integration. Accelerate itself is imported by the ranks only, and by their server."""

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
