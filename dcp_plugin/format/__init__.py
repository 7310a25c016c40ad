"""Layer 1: what the bytes of a checkpoint mean.

Bytes and columns go in, an index, values or metadata come out, and the other way round. Nothing here opens a file,
knows a path or talks to another rank, so each module is tested alone.
"""
