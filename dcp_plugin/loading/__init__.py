"""Layer 6: one load, from an opened checkpoint to filled targets.

Everything that can be checked is checked on all ranks before the first byte of a target is overwritten.
"""
