"""Choice of the medium of a path: a file system or an object store.

The rule: what only one kind of path needs is imported when such a path is used.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Literal, cast

from dcp_plugin.core.format import uncommitted_reason as reason_in
from dcp_plugin.core.media.medium import Medium
from dcp_plugin.core.media.places import unpacked
from dcp_plugin.core.paths import ObjectPath, Where


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
