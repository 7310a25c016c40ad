"""Checkpoints on a file system that all ranks share."""
