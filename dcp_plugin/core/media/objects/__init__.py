"""Checkpoints in an object store: :class:`~dcp_plugin.core.media.objects.object_store.ObjectStore`, for paths that are
URLs.

A save in flight has no directory of its own: its *directory* stands for the objects below the prefix of the checkpoint
that have the token of the save in their names.
"""
