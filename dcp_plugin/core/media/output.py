"""Output of this package for another tool: files with the names that the tool expects.

On a disk the output appears complete at its path, or not at all, as a save does. In an object store each object appears
when it is complete. An output that fails there deletes the objects that it has written, and no others.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, cast

from dcp_plugin.core.media import medium_of
from dcp_plugin.core.media.medium import Medium, NewFile, Reservation, ignore
from dcp_plugin.core.media.objects.client import client_of
from dcp_plugin.core.paths import ObjectPath, Where, is_link


class Output:
    """The output of one call at a path on a disk. Rank 0 begins and publishes it; every rank may write files.

    Args:
        is_file: True for a single file, false for a folder of files.
    """

    def __init__(self, path: Where, is_file: bool) -> None:
        self.path = path
        self.is_file = is_file
        self.medium: Medium = medium_of(path)
        self._reservation: Reservation[Any] | None = None

    def begin(self) -> Where:
        """Return the directory for the files of all ranks. Raises SaveFailed."""
        self._reservation = self.medium.reserve(self.path)
        return cast(Where, self._reservation.directory)

    def create(
        self, directory: Where, name: str, size: int, wrote: Callable[[int], None] = ignore
    ) -> AbstractContextManager[NewFile]:
        """Return a new file, which is durable when its ``with`` block ends. Raises OSError."""
        return self.medium.create(directory, name, size, wrote)

    def publish(self, directory: Where, last: Mapping[str, bytes]) -> None:
        """Add these small files, and give the output its name. Raises OSError."""
        assert self._reservation is not None, "rank 0 has begun"
        self.medium.publish(self._reservation, None if self.is_file else last)
        self._reservation = None

    def discard(self) -> None:
        """Delete the files of this rank that are not published. Never raises OSError."""
        if self._reservation is not None:
            self.medium.discard(self._reservation)
            self._reservation = None


class _Objects(Output):
    """The output of one call in an object store."""

    def __init__(self, path: ObjectPath, is_file: bool) -> None:
        super().__init__(path, is_file)
        self._complete: list[ObjectPath] = []
        """Objects that this rank has completed."""

    def begin(self) -> Where:
        token = f"{uuid.uuid4().hex}.saving"
        return self.path.parent / token if self.is_file else self.path / token

    @contextmanager
    def create(
        self, directory: Where, name: str, size: int, wrote: Callable[[int], None] = ignore
    ) -> Iterator[NewFile]:
        with super().create(directory, name, size, wrote) as file:
            yield file
        assert isinstance(directory, ObjectPath)
        self._complete.append(directory.parent / name)

    def publish(self, directory: Where, last: Mapping[str, bytes]) -> None:
        for name, data in last.items():
            with self.create(directory, name, len(data), ignore) as file:
                file.write(data)

    def discard(self) -> None:
        for path in self._complete:
            with suppress(OSError):
                client_of(path).delete([path.key])


def exists(path: Where) -> bool:
    """Return whether a path exists. A symbolic link without a target exists as well. Raises OSError."""
    return bool(medium_of(path).kind(path)) or is_link(path)


def has_appeared(path: Where) -> bool:
    """Return whether something has appeared at a path since a save to it began. In a store the files of the save are
    there, and its commit refuses to replace another checkpoint. Raises OSError."""
    return not isinstance(path, ObjectPath) and exists(path)


def output_at(path: Where, is_file: bool) -> Output:
    """Return a new output at a path."""
    return _Objects(path, is_file) if isinstance(path, ObjectPath) else Output(path, is_file)
