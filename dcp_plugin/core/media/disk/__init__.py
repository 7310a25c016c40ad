"""Checkpoints on a file system that all ranks share: :class:`~dcp_plugin.core.media.disk.local_disk.LocalDisk`."""
