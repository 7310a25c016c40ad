"""Layer 7: the checkpoints of a run: the newest, which to resume from, which to keep, and what is in one."""
