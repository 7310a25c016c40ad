"""Where an export goes: it appears there complete, or not at all.

On a disk it is made where saves are made (:mod:`dcp_plugin.media.disk.commit`), and renamed when all of it is durable;
what a crash leaves behind, the next save beside it deletes. In an object store each object appears when it is complete,
and those of an export that fails are deleted.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from dcp_plugin.errors import CheckpointError, SaveFailed
from dcp_plugin.media import Medium, NewFile, Reservation, medium_of
from dcp_plugin.media.disk import posix
from dcp_plugin.paths import Where


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

    def begin(self) -> Where:
        """Check that nothing is there, and make the directory that files are written into.

        Raises:
            SaveFailed: There is something already, or nothing can be written there.
        """
        if self._medium.kind(self.out) or (isinstance(self.out, Path) and os.path.lexists(self.out)):
            raise SaveFailed(f"{self.out} exists. Name another one, or delete it first.")
        if self._medium.keeps_names:
            token = f"{uuid.uuid4().hex}.saving"
            return self.out.parent / token if self._is_file else self.out / token
        self._reservation = self._medium.reserve(self.out)
        return cast(Where, self._reservation.directory)

    def create(self, directory: Where, name: str, size: int, wrote: Callable[[int], None]) -> NewFile:
        """A new file of the output, see :meth:`~dcp_plugin.media.Medium.create`."""
        return self._medium.create(directory, name, size, wrote)

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
                with self._medium.create(directory, name, len(data), lambda count: None) as file:
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
            self._medium.publish(self._reservation, last)
            self._reservation = None

    def discard(self, directory: Where) -> None:
        """Delete what was written and has no name yet. Never raises what the place refuses."""
        if self._reservation is not None:
            self._medium.discard(self._reservation)
            self._reservation = None
        elif self._medium.keeps_names:
            with suppress(OSError, CheckpointError):
                self._medium.remove(self.out)
