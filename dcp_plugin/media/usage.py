"""Bytes that checkpoints take, and the bytes that deleting them gives back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dcp_plugin.media import Medium, files_below, snapshot
from dcp_plugin.paths import Where


@dataclass(frozen=True)
class Usage:
    """The bytes of some files, each counted once, whatever number of names (hard links) it has."""

    files: Mapping[Any, tuple[int, int, int]] = field(default_factory=dict)
    """By the identity of a file: its bytes, the number of its listed names, and the number of all its names."""

    @classmethod
    def of_all(cls, usages: Iterable[Usage]) -> Usage:
        """Return the bytes of files in several places, which have no name in common."""
        files: dict[Any, tuple[int, int, int]] = {}
        for usage in usages:
            for identity, (nbytes, here, names) in usage.files.items():
                files[identity] = (nbytes, here + files.get(identity, (0, 0, 0))[1], names)
        return cls(files)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for nbytes, _, _ in self.files.values())

    @property
    def own(self) -> int:
        """The bytes that deleting all listed names gives back: those of files that have no other name."""
        return sum(nbytes for nbytes, here, names in self.files.values() if here >= names)


def usage(medium: Medium, path: Where) -> Usage:
    """Return the bytes of the file or of all files at a path. Links are not followed. Raises OSError."""
    is_folder = medium.kind(path) == "folder"
    entries = [entry for _, entry in files_below(snapshot(path, medium), path)] if is_folder else []
    entries = entries or [entry for entry in medium.entries(path.parent) if entry.path == path]
    files: dict[Any, tuple[int, int, int]] = {}
    for entry in entries:
        with suppress(FileNotFoundError):  # deleted since it was listed
            if entry.is_file:
                status = entry.status()
                _, names, _ = files.get(status.identity, (0, 0, 0))
                files[status.identity] = (status.size, names + 1, status.names)
    return Usage(files)
