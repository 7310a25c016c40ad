"""Writers and readers of checkpoints, which join the format and a medium.

A writer takes a plan and writes bytes. A reader takes a plan and fills tensors. ``stock/`` has the classes that stock
DCP drives. The rule: only :mod:`dcp_plugin.core.format` interprets bytes, and only a
:class:`~dcp_plugin.core.media.medium.Medium` reads and writes them.
"""
