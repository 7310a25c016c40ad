"""The output path of an export. The output appears complete, or not at all.

On a disk, the output is written to the workspace of saves (:mod:`dcp_plugin.media.disk.commit`), and renamed when all
files are durable. The next save in the same folder deletes the files of a crashed export. In an object store, each
object appears when it is complete. An export that fails deletes the objects that it has written, and no others.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from dcp_plugin.errors import CheckpointError, SaveFailed
from dcp_plugin.media import Medium, Reservation, medium_of
from dcp_plugin.media.objects.client import client_of
from dcp_plugin.paths import ObjectPath, Where, is_link
from dcp_plugin.storage.reader import ShardedReader
from dcp_plugin.tools.formats import OutFile
from dcp_plugin.tools.stream import Counter, Stream


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
        self._objects: list[ObjectPath] = []
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
        directory: Where = self._reservation.directory
        return directory

    def write(self, reader: ShardedReader, directory: Where, files: Sequence[OutFile], count: Counter) -> None:
        """Write files of the output, and make them durable.

        Raises:
            SaveFailed: The path cannot be written.
        """
        with named_failures(self.out):
            for file in files:
                with self._medium.create(directory, file.name, file.size, count.add) as new_file:
                    file.write(new_file, Stream(reader, file.parts))
                self._note_object(directory, file.name)
            self._medium.flush(directory)

    def publish(self, directory: Where, last: Mapping[str, bytes]) -> None:
        """Write the last, small files, and publish the output under its name.

        Raises:
            SaveFailed: The path was taken meanwhile, or cannot be written.
        """
        with named_failures(self.out):
            if self._reservation is not None:
                require_absent(self.out, "has come while it was written. Nothing was replaced.")
                self._medium.publish(self._reservation, None if self._is_file else last)
                self._reservation = None
                return
            for name, data in last.items():
                with self._medium.create(directory, name, len(data), lambda count: None) as new_file:
                    new_file.write(data)
                self._note_object(directory, name)

    def _note_object(self, directory: Where, name: str) -> None:
        if isinstance(directory, ObjectPath):
            self._objects.append(directory.parent / name)

    def discard(self) -> None:
        """Delete the files that are not published yet. Never raise an error of the file system or the store."""
        if self._reservation is not None:
            self._medium.discard(self._reservation)
            self._reservation = None
        for path in self._objects:
            with suppress(OSError):
                client_of(path).delete([path.key])


@contextmanager
def named_failures(out: Where) -> Iterator[None]:
    """Raise an error of the file system or the store as a SaveFailed that names ``out``."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise SaveFailed(f"cannot write {out}: {error}. {medium_of(out).advice}") from error


def require_absent(out: Where, otherwise: str = "exists. Name another one, or delete it first.") -> None:
    """Raise SaveFailed if ``out`` exists. A symbolic link without a target exists as well."""
    if medium_of(out).kind(out) or is_link(out):
        raise SaveFailed(f"{out} {otherwise}")
