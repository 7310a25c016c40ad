"""Checkpoints on a file system that all ranks share: :class:`LocalDisk`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dcp_plugin.errors import SaveFailed
from dcp_plugin.format import DATA_SUFFIX
from dcp_plugin.media import Listed, Reservation
from dcp_plugin.media.disk import commit, posix
from dcp_plugin.media.disk.direct_io import BlockFile
from dcp_plugin.media.disk.files import HeldFiles, LocalFiles

_VISIBLE_SECONDS = 10.0
"""How long a directory made by another rank may take to appear: NFS clients cache that a name does not exist."""


@dataclass(frozen=True)
class LocalDisk:
    """A file system. Files are written with ``O_DIRECT``, and a save becomes visible by a rename or an exchange of
    names (:mod:`~dcp_plugin.media.disk.commit`).

    Args:
        direct_io: Whether to write past the page cache; ``"auto"``: where the file system lets us.
    """

    direct_io: bool | Literal["auto"] = "auto"

    reserve = staticmethod(commit.reserve)
    discard = staticmethod(commit.discard)
    locate = staticmethod(commit.locate)
    uncommitted_reason = staticmethod(commit.uncommitted_reason)
    link = staticmethod(commit.link)
    remove = staticmethod(commit.remove)
    open = staticmethod(LocalFiles)
    hold = staticmethod(HeldFiles)
    flush = staticmethod(posix.sync_directory)

    def join(self, directory: Path, path: Path) -> None:
        deadline = time.monotonic() + _VISIBLE_SECONDS
        while not directory.is_dir():
            if time.monotonic() > deadline:
                raise SaveFailed(
                    f"cannot save {path}: this rank does not see {directory}, which rank 0 has made. The "
                    f"checkpoint directory must be on a file system that all ranks share."
                )
            with suppress(OSError):
                os.listdir(directory.parent)  # makes an NFS client look again
            time.sleep(0.1)

    def create(self, directory: Path, name: str, size: int, wrote: Callable[[int], None]) -> BlockFile:
        return BlockFile(directory / name, size, self.direct_io, wrote)

    def publish(self, reservation: Reservation, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            path = reservation.directory / name
            path.parent.mkdir(exist_ok=True)
            with open(path, "xb") as file:
                file.write(data)
        posix.sync_tree(reservation.directory, but=DATA_SUFFIX)  # with what others have added
        commit.publish(reservation)

    def entries(self, root: Path) -> list[Listed]:
        with os.scandir(root) as entries:
            found = [
                Listed(
                    *(root / one.name, one.is_dir(follow_symlinks=False), one.is_file(follow_symlinks=False)),
                    number=one.inode(),
                )
                for one in entries
            ]
        return sorted(found, key=lambda one: one.path)
