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
- ``__init__.py``: the medium of a path, and the names that other folders use. What only one kind of path needs is
  imported when such a path is used.
- ``copies.py``: targets of copies, and of exports for other tools.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Literal, cast

from dcp_plugin.core.format import uncommitted_reason as reason_in
from dcp_plugin.core.media.medium import (
    IN_PLACE,
    PAGE,
    CannotLink,
    DataFile,
    Leftover,
    Listed,
    Medium,
    NewFile,
    RangedFile,
    RawRanges,
    Readable,
    ReadCost,
    Reservation,
    bytes_behind,
    first_bytes,
    stretches,
)
from dcp_plugin.core.media.places import (
    WORKSPACE,
    add_files,
    files_below,
    is_workspace,
    other_format_at,
    refuse_real_run,
    refuse_to_replace_other_format,
    snapshot,
    tree,
    unpacked,
    workspace_in,
    workspace_of,
    workspaces_in,
)
from dcp_plugin.core.paths import ObjectPath, Where

__all__ = [
    "IN_PLACE",
    "PAGE",
    "WORKSPACE",
    "CannotLink",
    "DataFile",
    "Leftover",
    "Listed",
    "Medium",
    "NewFile",
    "RangedFile",
    "RawRanges",
    "ReadCost",
    "Readable",
    "Reservation",
    "add_files",
    "bytes_behind",
    "files_below",
    "first_bytes",
    "is_workspace",
    "locate",
    "medium_of",
    "other_format_at",
    "refuse_real_run",
    "refuse_to_replace_other_format",
    "snapshot",
    "stretches",
    "tree",
    "uncommitted_reason",
    "unpacked",
    "workspace_in",
    "workspace_of",
    "workspaces_in",
]


def medium_of(path: Where, direct_io: bool | Literal["auto"] = "auto") -> Medium:
    """Return the medium of a path.

    Args:
        direct_io: For a file system, see :class:`~dcp_plugin.core.media.disk.local_disk.LocalDisk`.

    Raises:
        ValueError: It is a URL, and the client of its store is not installed.
    """
    if isinstance(path, ObjectPath):
        from dcp_plugin.core.media.objects.client import client_of  # needed for URLs alone
        from dcp_plugin.core.media.objects.object_store import ObjectStore

        return cast(Medium, ObjectStore(client_of(path)))
    from dcp_plugin.core.media.disk.local_disk import LocalDisk

    return cast(Medium, LocalDisk(direct_io))  # each takes its own kind of path, and is given no other


def locate(path: Where) -> Where:
    """Return ``path``, or the path that its checkpoint has after a crash in the middle of replacing it."""
    if isinstance(path, ObjectPath):
        return path
    from dcp_plugin.core.media.disk import commit

    return commit.locate(path)


def uncommitted_reason(path: Where, medium: Medium | None = None) -> str:
    """Return why no committed checkpoint is at a path; an empty string if there is one. Raises OSError."""
    medium = medium or medium_of(path)
    try:
        with closing(medium.open(path, pin=True)) as files:
            return reason_in([name.rstrip("/") for name in unpacked(files).names()])
    except OSError as error:
        if isinstance(path, Path) and not path.is_dir():
            return "not a directory" if path.exists() else "no such directory"
        if isinstance(path, ObjectPath) and isinstance(error, FileNotFoundError):
            return "no such directory"
        if files.moved():  # another process has just published it
            return uncommitted_reason(path, medium)
        raise
