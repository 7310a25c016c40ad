"""DCP's ``StorageWriter`` and ``StorageReader``, which join the format and a medium.

A plan goes in and bytes are written, or a plan goes in and tensors are filled. The rule: what bytes mean is asked of
:mod:`dcp_plugin.format`, and they are only read and written through a :class:`~dcp_plugin.media.Medium`.
"""
