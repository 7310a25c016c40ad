"""Layer 3: DCP's ``StorageWriter`` and ``StorageReader``: the format, on a medium.

A plan goes in and bytes are written, or a plan goes in and tensors are filled. What both need, an opened checkpoint and
the reuse of an earlier one, is here as well.
"""
