"""Medium of a file system that all ranks share: :class:`LocalDisk`."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, cast

from dcp_plugin.core.errors import SaveFailed
from dcp_plugin.core.format import DATA_SUFFIX
from dcp_plugin.core.media import lease
from dcp_plugin.core.media.disk import commit, posix
from dcp_plugin.core.media.disk.direct_io import BlockFile
from dcp_plugin.core.media.disk.local_files import LocalFiles, PinnedFiles, link_file
from dcp_plugin.core.media.medium import FileStatus, InFlight, Leftover, Listed, Medium, Reservation, ignore

_VISIBLE_SECONDS = 10.0
"""Time limit for the appearance of a directory made by another rank: NFS clients cache missing names."""


@dataclass(frozen=True)
class LocalDisk:
    """A file system. Files are written with ``O_DIRECT``, and a save becomes visible by a rename or an exchange of
    names (:mod:`~dcp_plugin.core.media.disk.commit`).

    Args:
        direct_io: Write past the page cache; ``"auto"``: do so for files that are large for the available memory.
    """

    direct_io: bool | Literal["auto"] = "auto"

    advice = "Is the file system full, read-only or gone?"

    reserve = staticmethod(commit.reserve)
    discard = staticmethod(commit.discard)
    revoke = staticmethod(commit.revoke)
    link = staticmethod(commit.link)
    note = staticmethod(commit.note)
    remove = staticmethod(commit.remove)
    link_file = staticmethod(link_file)
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

    def create(
        self, directory: Path, name: str, size: int, wrote: Callable[[int], None] = ignore, at_once: int = 1
    ) -> BlockFile:
        return BlockFile(directory / name, size, self.direct_io, wrote)

    def publish(self, reservation: Reservation[Path], files: Mapping[str, bytes] | None) -> None:
        if files is None:
            commit.publish_file(reservation)
            return
        for name, data in files.items():
            path = reservation.directory / name
            path.parent.mkdir(exist_ok=True)
            with open(path, "xb") as file:
                file.write(data)
        posix.sync_tree(reservation.directory, but=DATA_SUFFIX)  # with what others have added
        commit.publish(reservation)

    def collect_garbage(self, workspace: Path, dry_run: bool = False) -> list[Leftover[Path]]:
        from dcp_plugin.core.media.usage import usage  # needed by `dcp-plugin prune` alone

        return commit.collect_garbage(workspace, lambda path: usage(cast(Medium, self), path).own, dry_run)

    def open(self, path: Path, pin: bool = False) -> LocalFiles:
        return PinnedFiles(path) if pin else LocalFiles(path)

    def entries(self, root: Path) -> list[Listed[Path]]:
        with os.scandir(root) as entries:
            listed = [
                Listed(
                    root / entry.name,
                    entry.is_dir(follow_symlinks=False),
                    entry.is_file(follow_symlinks=False),
                    status=partial(_status, entry),
                    number=entry.inode(),
                    in_flight=partial(_in_flight, root / entry.name),
                )
                for entry in entries
            ]
        return sorted(listed, key=lambda entry: entry.path)

    def kind(self, path: Path) -> Literal["folder", "file", "other", ""]:
        try:
            mode = os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return ""
        except OSError as error:
            if error.errno != errno.ELOOP:  # a link that leads to itself, and so nowhere
                raise
            return ""
        return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"


def _status(entry: os.DirEntry[str]) -> FileStatus:
    status = entry.stat(follow_symlinks=False)
    return FileStatus(status.st_size, (status.st_dev, status.st_ino), status.st_nlink)


def _in_flight(path: Path) -> InFlight | None:
    """Return the save of an entry of a workspace. Garbage of another user, which stays, counts as a save."""
    if path.suffix not in (".saving", ".deleted", ".aside"):
        return None
    with suppress(OSError):
        status = path.stat()
        user = None if status.st_uid == posix.user_in(path.parent.parent) else status.st_uid
        if user is not None or path.suffix == ".saving":
            return lease.in_flight(commit.record_of(path), status.st_mtime)._replace(user=user)
    return None
