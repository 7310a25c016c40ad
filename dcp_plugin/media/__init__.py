"""Layer 2: where the bytes of a checkpoint are.

A medium writes the part of a rank, publishes a checkpoint, reads ranges of bytes, lists and removes. It never sees a
dtype or a key. The local disk (:mod:`dcp_plugin.media.disk`) is one.
"""
