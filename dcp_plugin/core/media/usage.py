"""Bytes that checkpoints take, and the bytes that deleting them gives back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from dcp_plugin.core.media.medium import FileStatus, Medium
from dcp_plugin.core.media.places import files_below, snapshot
from dcp_plugin.core.paths import Where


@dataclass(frozen=True)
class Usage:
    """The bytes of some files, each counted once, whatever number of names (hard links) it has."""

    names: tuple[FileStatus, ...] = ()
    """The status of the file of each listed name."""

    @classmethod
    def of_all(cls, usages: Iterable[Usage]) -> Usage:
        """Return the bytes of files in several places, which have no name in common."""
        return cls(tuple(status for usage in usages for status in usage.names))

    @property
    def nbytes(self) -> int:
        return sum({status.identity: status.size for status in self.names}.values())

    @property
    def own(self) -> int:
        """The bytes that deleting all listed names gives back: those of files that have no other name."""
        listed = Counter(status.identity for status in self.names)
        files = {status.identity: status for status in self.names}
        return sum(file.size for file in files.values() if listed[file.identity] >= file.names)


def usage(medium: Medium, path: Where) -> Usage:
    """Return the bytes of the file or of all files at a path. Links are not followed. Raises OSError."""
    is_folder = medium.kind(path) == "folder"
    entries = [entry for _, entry in files_below(snapshot(medium, path), path)] if is_folder else []
    entries = entries or [entry for entry in medium.entries(path.parent) if entry.path == path]
    names: list[FileStatus] = []
    for entry in entries:
        with suppress(FileNotFoundError):  # deleted since it was listed
            if entry.is_file:
                names.append(entry.status())
    return Usage(tuple(names))
