"""The output path of an export. The output appears complete, or not at all.

On a disk, the output is written to the workspace of saves (:mod:`dcp_plugin.media.disk.commit`), and renamed when all
files are durable. The next save in the same folder deletes the files of a crashed export. In an object store, each
object appears when it is complete. An export that fails deletes the objects that it has written, and no others.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from dcp_plugin.errors import SaveFailed
from dcp_plugin.media import Medium, NewFile, Reservation, medium_of
from dcp_plugin.media.disk import posix
from dcp_plugin.media.objects.client import client_of
from dcp_plugin.paths import ObjectPath, Where, is_link


class Place:
    """The output of one export. Rank 0 begins and publishes it, and sends its directory to the other ranks.

    Args:
        out: The path of the output.
        is_file: True for a single file, false for a folder of files.
    """

    def __init__(self, out: Where, is_file: bool) -> None:
        self.out = out
        self._is_file = is_file
        self._medium: Medium = medium_of(out)
        self._reservation: Reservation[Any] | None = None
        self._written: list[Where] = []
        """Objects that this rank has completed."""

    def begin(self) -> Where:
        """Check that the path is free, and return the directory for the files.

        Raises:
            SaveFailed: The path is taken, or cannot be written.
        """
        require_absent(self.out)
        if isinstance(self.out, ObjectPath):
            token = f"{uuid.uuid4().hex}.saving"
            return self.out.parent / token if self._is_file else self.out / token
        self._reservation = self._medium.reserve(self.out)
        return cast(Where, self._reservation.directory)

    @contextmanager
    def create(self, directory: Where, name: str, size: int, wrote: Callable[[int], None]) -> Iterator[NewFile]:
        """Write a new file of the output, see :meth:`~dcp_plugin.media.Medium.create`."""
        with self._medium.create(directory, name, size, wrote) as file:
            yield file
        self._written.append(directory.parent / name)

    def flush(self, directory: Where) -> None:
        """Make the names of this rank's files durable."""
        self._medium.flush(directory)

    def publish(self, directory: Where, last: Mapping[str, bytes]) -> None:
        """Write the last, small files, and publish the output under its name.

        Raises:
            SaveFailed: The path was taken meanwhile.
        """
        if self._reservation is None:
            for name, data in last.items():
                with self.create(directory, name, len(data), lambda count: None) as file:
                    file.write(data)
        elif self._is_file:
            made: Path = self._reservation.directory / self.out.name
            try:
                os.link(made, str(self.out))  # unlike a rename, a link replaces nothing
            except FileExistsError as error:
                raise SaveFailed(f"{self.out} has come while it was written. Nothing was replaced.") from error
            except OSError:  # a file system without hard links
                os.rename(made, str(self.out))
            posix.sync_directory(Path(str(self.out)).parent)
            self.discard(directory)
        else:
            require_absent(self.out, "has come while it was written. Nothing was replaced.")
            self._medium.publish(self._reservation, last)
            self._reservation = None

    def discard(self, directory: Where) -> None:
        """Delete the files that are not published yet. Never raise an error of the file system or the store."""
        if self._reservation is not None:
            self._medium.discard(self._reservation)
            self._reservation = None
        for path in self._written:
            if isinstance(path, ObjectPath):
                with suppress(OSError):
                    client_of(path).delete([path.key])


def require_absent(out: Where, otherwise: str = "exists. Name another one, or delete it first.") -> None:
    """Raise SaveFailed if ``out`` exists. A symbolic link without a target exists as well."""
    if medium_of(out).kind(out) or is_link(out):
        raise SaveFailed(f"{out} {otherwise}")
