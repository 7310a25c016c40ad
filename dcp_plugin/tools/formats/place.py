"""Where an export goes: it appears there complete, or not at all.

On a disk it is made where saves are made (:mod:`dcp_plugin.media.disk.commit`), and renamed when all of it is durable;
what a crash leaves behind, the next save beside it deletes. In an object store each object appears when it is complete,
and an export that fails deletes the objects that it has written, and no others.
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
    """The output of one export. Rank 0 begins and ends it; the others are told its directory.

    Args:
        out: What it will be called.
        is_file: Whether it is one file, and not a folder of several.
    """

    def __init__(self, out: Where, is_file: bool) -> None:
        self.out = out
        self._is_file = is_file
        self._medium: Medium = medium_of(out)
        self._reservation: Reservation[Any] | None = None
        self._written: list[Where] = []
        """The complete objects of this rank."""

    def begin(self) -> Where:
        """Check that nothing is there, and make the directory that files are written into.

        Raises:
            SaveFailed: There is something already, or nothing can be written there.
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
        """Make durable which files this rank has written."""
        self._medium.flush(directory)

    def publish(self, directory: Where, last: Mapping[str, bytes]) -> None:
        """Write the last, small files, and give all of it its name.

        Raises:
            SaveFailed: Something has come there meanwhile.
        """
        if self._reservation is None:
            for name, data in last.items():
                with self.create(directory, name, len(data), lambda count: None) as file:
                    file.write(data)
        elif self._is_file:
            made: Path = self._reservation.directory / self.out.name
            try:
                os.link(made, str(self.out))  # unlike a rename, it replaces nothing
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
        """Delete what was written and has no name yet. Never raises what the place refuses."""
        if self._reservation is not None:
            self._medium.discard(self._reservation)
            self._reservation = None
        for path in self._written:
            if isinstance(path, ObjectPath):
                with suppress(OSError):
                    client_of(path).delete([path.key])


def require_absent(out: Where, otherwise: str = "exists. Name another one, or delete it first.") -> None:
    """Raises SaveFailed if anything is at ``out``, be it a link that leads nowhere."""
    if medium_of(out).kind(out) or is_link(out):
        raise SaveFailed(f"{out} {otherwise}")
