"""DCP's ``StorageWriter`` and ``StorageReader``, which join the format and a medium.

A writer takes a plan and writes bytes; a reader takes a plan and fills tensors. The rule: only
:mod:`dcp_plugin.core.format` interprets bytes, and only a :class:`~dcp_plugin.core.media.medium.Medium` reads and
writes them.
"""
