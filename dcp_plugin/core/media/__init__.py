"""Media: places that store the bytes of checkpoints.

Named sequences of bytes enter a medium, and ranges of them leave it. A medium never sees a dtype, a key or another
rank; the meaning of the bytes belongs to :mod:`dcp_plugin.core.format`. The rule: until
:meth:`~dcp_plugin.core.media.medium.Medium.publish` returns, a reader finds the earlier checkpoint, complete, or no
checkpoint.

The files of this folder, each of which imports files of the same line or of a line above it:

- ``medium.py``: the protocol of a medium, and the records and files that it takes and returns. ``disk/posix.py``:
  system calls.
- ``places.py``: the workspace beside checkpoints, and the files at a path. ``lease.py``: the records of saves in
  flight. ``packed_view.py``: a checkpoint that was saved in place, under the usual names. ``usage.py``: the bytes that
  files take.
- ``disk/``: a file system that all ranks share. ``objects/``: a store of objects that have URLs. Each has its commit
  rule in its ``commit.py``.
- ``choice.py``: the medium of a path.
- ``output.py``: files for other tools. ``copies.py``: targets of copies.
"""
