"""Checkpoints in an object store: :class:`ObjectStore`, for paths that are URLs.

A *directory* of a save in flight is not there: it stands for the objects below the checkpoint's own prefix that have
the save's token in their names.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from dcp_plugin.errors import SaveFailed
from dcp_plugin.format import DAMAGED, INDEX, METADATA, PACKED, SUMMARY, uncommitted_reason
from dcp_plugin.format.packed import folders, time_of, token_in
from dcp_plugin.media import CannotLink, InFlight, Leftover, Listed, RangedFile, Usage, with_newest
from dcp_plugin.media.objects import commit
from dcp_plugin.media.objects.client import IN_FLIGHT, MOST_COPIED, PART, Client, Found, client_of
from dcp_plugin.media.objects.files import ListedFiles, ObjectFiles
from dcp_plugin.media.objects.upload import ObjectWriter
from dcp_plugin.media.packed import unpacked
from dcp_plugin.paths import ObjectPath

_SAME_MOMENT = 60.0
"""Seconds. The index is put just before ``.metadata``; if they are further apart, they may be of different saves."""


class Listing:
    """All that was below a root at some moment."""

    def __init__(self, found: Iterable[Found]) -> None:
        self._found = {one.key: one for one in found if not one.key.endswith("/")}
        self._keys = sorted(self._found)

    def below(self, path: ObjectPath) -> dict[str, Found]:
        """What is below a path, by the names there."""
        start = commit.below(path, "")
        first = bisect_left(self._keys, start)
        last = bisect_left(self._keys, start + chr(sys.maxunicode), first)
        return {key[len(start) :]: self._found[key] for key in self._keys[first:last]}

    def __contains__(self, key: str) -> bool:
        return key in self._found


@dataclass(frozen=True)
class ObjectStore:
    """A bucket.

    Args:
        listed: What is there, as it was at some moment; without it, everything is asked for.
    """

    client: Client
    listed: Listing | None = field(default=None, repr=False)

    advice = commit.ADVICE
    keeps_names = True

    reserve = staticmethod(commit.reserve)
    publish = staticmethod(commit.publish)
    discard = staticmethod(commit.discard)
    suspend = staticmethod(commit.suspend)
    link = staticmethod(commit.link)
    remove = staticmethod(commit.remove)

    @classmethod
    def of(cls, path: ObjectPath) -> ObjectStore:
        return cls(client_of(path))

    def join(self, directory: ObjectPath, path: ObjectPath) -> None:
        """There is nothing to wait for: what one rank puts, all ranks see."""
        if directory.store != path.store:
            raise SaveFailed(f"cannot save {path}: rank 0 saves to {directory.parent}")

    def create(
        self, directory: ObjectPath, name: str, size: int, wrote: Callable[[int], None], at_once: int = 1
    ) -> ObjectWriter:
        return ObjectWriter(self.client, commit.below(directory.parent, name), size, IN_FLIGHT // at_once, wrote)

    def flush(self, directory: ObjectPath) -> None:
        """An object that is there is durable."""

    def attach(self, directory: ObjectPath, put: Callable[[Path], None]) -> None:
        folder = f"{PACKED}{directory.stem}"
        with tempfile.TemporaryDirectory(prefix="dcp-plugin-") as local:
            put(Path(local))
            for parent, _, names in os.walk(local):
                for name in names:
                    path = Path(parent, name)
                    key = commit.below(directory.parent, f"{folder}/{path.relative_to(local).as_posix()}")
                    self._upload(key, path)

    def _upload(self, key: str, path: Path) -> None:
        size = path.stat().st_size
        with open(path, "rb") as file, ObjectWriter(self.client, key, size, IN_FLIGHT, lambda count: None) as there:
            while data := file.read(PART):
                there.write(data, kept=True)

    def note(self, path: ObjectPath, data: bytes, replaced: Iterable[ObjectPath] = (), only_new: bool = False) -> bool:
        if only_new and self.client.head(path.key) is not None:
            return False
        self.client.put(path.key, data)
        self.client.delete([one.key for one in replaced])
        return True

    def locate(self, path: ObjectPath) -> ObjectPath:
        return path

    def uncommitted_reason(self, path: ObjectPath) -> str:
        try:
            return uncommitted_reason([name.rstrip("/") for name in unpacked(self.open(path, pin=True)).names()])
        except FileNotFoundError:
            return "no such directory"

    def open(self, path: ObjectPath, pin: bool = False) -> ObjectFiles:
        if (within := _within_save(path)) is not None:
            return ListedFiles(self.client, path, self._of_save(*within))
        if self.listed is None:
            return ListedFiles(self.client, path) if pin else ObjectFiles(self.client, path)
        return ListedFiles(self.client, path, self.listed.below(path), frozen=True)

    def _of_save(self, directory: ObjectPath, folder: str) -> dict[str, Found]:
        """The objects of a save in flight, or of a folder there, under the names that they will have."""
        start = commit.below(directory.parent, "")
        there = {one.key.removeprefix(start): one for one in self.client.below(directory.parent.key)}
        mine = {name: one for name, one in there.items() if token_in(name) == directory.stem}
        usual = {name.removeprefix(f"{PACKED}{directory.stem}/"): one for name, one in mine.items()}
        return {name.removeprefix(folder): one for name, one in usual.items() if name.startswith(folder)}

    def entries(self, root: ObjectPath) -> list[Listed[ObjectPath]]:
        names = self.open(root).names()
        return [Listed(root / name.rstrip("/"), name.endswith("/"), not name.endswith("/")) for name in names]

    def in_flight(self, entry: ObjectPath) -> InFlight | None:
        found = self.client.head(entry.key) if entry.suffix == ".json" else None
        if found is None:
            return None
        target, launch = commit.noted_in(self.client, found)
        return InFlight(target or "?", found.modified, launch)

    def kind(self, path: ObjectPath) -> Literal["folder", "file", ""]:
        if self.listed is not None:
            return "folder" if self.listed.below(path) else "file" if path.key in self.listed else ""
        if next(self.client.below(path.key), None) is not None:
            return "folder"
        return "file" if path.key and self.client.head(path.key) is not None else ""

    def collect_garbage(self, workspace: ObjectPath, dry_run: bool = False) -> list[Leftover[ObjectPath]]:
        return commit.collect_garbage(self.client, workspace, dry_run)

    def usage(self, path: ObjectPath) -> Usage:
        there = {commit.below(path, name): one.size for name, one in self._names(path).items()}
        if not there and path.key and (found := self.client.head(path.key)) is not None:
            there = {found.key: found.size}
        return Usage({key: (size, 1, 1) for key, size in there.items()})

    def linkable(self, *homes: ObjectPath, size: int | None = None) -> CopiedObject:
        if size is not None:
            return CopiedObject(self.client, homes, size, verified=False)
        home = homes[0].parent.parent / homes[0].name  # it was written into the directory of a save in flight
        found = self.client.head(home.key)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(home))
        return CopiedObject(self.client, (home,), found.size, verified=True)

    def snapshot(self, root: ObjectPath) -> ObjectStore:
        return replace(self, listed=Listing(self.client.below(root.key)))

    def may_have_base(self, path: ObjectPath) -> bool:
        names = self._names(path)
        return SUMMARY in names or any(name.endswith(f"/{commit.HAS_BASE}") for name in names)

    def time_from_names(self, path: ObjectPath) -> float | None:
        names = self._names(path)
        saves = folders(names)
        if METADATA not in names or DAMAGED in names or SUMMARY in names or len(saves) != 1:
            return None
        (token,) = saves
        index = names.get(f"{PACKED}{token}/{INDEX}")
        if index is None or abs(names[METADATA].modified - index.modified) > _SAME_MOMENT:
            return None
        return time_of(token)

    def _names(self, path: ObjectPath) -> dict[str, Found]:
        listing = self.listed or Listing(self.client.below(path.key))
        return listing.below(path)


def _within_save(path: ObjectPath) -> tuple[ObjectPath, str] | None:
    """The directory of a save in flight that a path is in or is, and which folder of it."""
    for above in (path, *path.parents):
        if above.suffix == commit.SAVING and token_in(f"{PACKED}{above.stem}"):
            inner = path.key[len(above.key) :].lstrip("/")
            return above, f"{inner}/" if inner else ""
    return None


@dataclass(frozen=True)
class CopiedObject:
    """A data file that later checkpoints get as a copy, made by the store. Its name is used once, so it is known by
    that. One that another process has written would have to be read to be verified, which takes as long as to write it.
    """

    client: Client
    homes: tuple[ObjectPath, ...]
    """Newest first. Any of them may be deleted."""
    size: int
    verified: bool

    def published(self, home: ObjectPath) -> CopiedObject:
        return replace(self, homes=with_newest(self.homes, home))

    def opened(self) -> AbstractContextManager[tuple[RangedFile, CopiedObject]]:
        raise CannotLink("")

    def link_to(self, target: ObjectPath) -> CopiedObject:
        here = target.parent.parent / target.name  # its directory is that of a save in flight
        reason = "its objects are gone"
        for home in self.homes:
            try:
                found = self.client.head(home.key)
                if found is None or found.size != self.size:
                    continue
                if found.size > MOST_COPIED:
                    raise CannotLink("")
                self.client.copy(home.key, here.key)
                return replace(self, homes=(here, *self.homes))
            except FileNotFoundError:  # deleted just now
                continue
            except OSError as error:
                reason = f"the store does not copy it ({error})"
        raise CannotLink(reason)
