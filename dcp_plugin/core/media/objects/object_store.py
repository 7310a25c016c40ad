"""Medium of an object store: :class:`ObjectStore`, for paths that are URLs."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from dcp_plugin.core.errors import SaveFailed
from dcp_plugin.core.format import PACKED
from dcp_plugin.core.format.packed import token_in
from dcp_plugin.core.media import lease
from dcp_plugin.core.media.medium import CannotLink, DataFile, FileStatus, InFlight, Listed, ignore
from dcp_plugin.core.media.objects import commit
from dcp_plugin.core.media.objects.client import IN_FLIGHT, MOST_COPIED, Client, ObjectInfo, ObjectWriter, key_of
from dcp_plugin.core.media.objects.object_files import ListedFiles, ObjectFiles
from dcp_plugin.core.paths import ObjectPath


class Listing:
    """All objects below a root at some moment."""

    def __init__(self, objects: Iterable[ObjectInfo]) -> None:
        self._objects = {item.key: item for item in objects if not item.key.endswith("/")}
        self._keys = sorted(self._objects)

    def below(self, path: ObjectPath) -> dict[str, ObjectInfo]:
        """Return the objects below a path, by their names relative to it."""
        start = key_of(path, "")
        first = bisect_left(self._keys, start)
        last = bisect_left(self._keys, start + chr(sys.maxunicode), first)
        return {key[len(start) :]: self._objects[key] for key in self._keys[first:last]}

    def __contains__(self, key: str) -> bool:
        return key in self._objects


@dataclass(frozen=True)
class ObjectStore:
    """A bucket.

    Args:
        listed: A listing from some moment; without it, each method asks the store.
    """

    client: Client
    listed: Listing | None = field(default=None, repr=False)

    advice = commit.ADVICE

    reserve = staticmethod(commit.reserve)
    publish = staticmethod(commit.publish)
    discard = staticmethod(commit.discard)
    revoke = staticmethod(commit.revoke)
    link = staticmethod(commit.link)
    remove = staticmethod(commit.remove)
    collect_garbage = staticmethod(commit.collect_garbage)

    def join(self, directory: ObjectPath, path: ObjectPath) -> None:
        """Check the bucket. No rank waits: all ranks see the objects of a rank at once."""
        if directory.store != path.store:
            raise SaveFailed(f"cannot save {path}: rank 0 saves to {directory.parent}")

    def create(
        self, directory: ObjectPath, name: str, size: int, wrote: Callable[[int], None] = ignore, at_once: int = 1
    ) -> ObjectWriter:
        return self.client.create(key_of(directory.parent, name), size, IN_FLIGHT // at_once, wrote)

    def flush(self, directory: ObjectPath) -> None:
        """Do nothing: every object is durable."""

    def note(self, path: ObjectPath, data: bytes, replaced: Iterable[ObjectPath] = (), only_new: bool = False) -> bool:
        if only_new and self.client.head(path.key) is not None:
            return False
        self.client.put(path.key, data)
        self.client.delete([file.key for file in replaced])
        return True

    def open(self, path: ObjectPath, pin: bool = False) -> ObjectFiles:
        if (within := _within_save(path)) is not None:
            return ListedFiles(self.client, path, self._of_save(*within))
        if self.listed is None:
            return ListedFiles(self.client, path) if pin else ObjectFiles(self.client, path)
        return ListedFiles(self.client, path, self.listed.below(path))

    def _of_save(self, directory: ObjectPath, folder: str) -> dict[str, ObjectInfo]:
        """Return the objects of a save in flight, or of a folder in it, under their usual names."""
        objects = commit.objects_of(self.client, directory.parent)
        of_save = {name: item for name, item in objects.items() if token_in(name) == directory.stem}
        usual = {name.removeprefix(f"{PACKED}{directory.stem}/"): item for name, item in of_save.items()}
        return {name.removeprefix(folder): item for name, item in usual.items() if name.startswith(folder)}

    def entries(self, root: ObjectPath) -> list[Listed[ObjectPath]]:
        files = self.open(root)

        def status(name: str) -> FileStatus:
            return FileStatus(files.size(name), f"{root}/{name}")

        names = [(name.rstrip("/"), name.endswith("/")) for name in files.names()]
        return [
            Listed(
                *(root / name, is_folder, not is_folder, partial(status, name)),
                in_flight=partial(self._in_flight, root / name),
            )
            for name, is_folder in names
        ]

    def _in_flight(self, record: ObjectPath) -> InFlight | None:
        item = self.client.head(record.key) if record.suffix == ".json" else None
        if item is None:
            return None
        save = lease.in_flight(commit.json_in(self.client, item) or {}, item.modified)
        return save and save._replace(is_at_target=True)

    def kind(self, path: ObjectPath) -> Literal["folder", "file", "other", ""]:
        if self.listed is not None:
            return "folder" if self.listed.below(path) else "file" if path.key in self.listed else ""
        if next(self.client.below(path.key), None) is not None:
            return "folder"
        return "file" if path.key and self.client.head(path.key) is not None else ""

    def link_file(self, file: DataFile, target: ObjectPath) -> DataFile:
        """Make ``target`` a copy of the object. Its name is used once, so the object is known by that."""
        key = key_of(target.parent.parent, target.name)  # its directory is that of a save in flight
        reason = "its objects are gone"
        for home in file.homes:
            assert isinstance(home, ObjectPath)
            try:
                item = self.client.head(home.key)
                if item is None or item.size != file.size:
                    continue
                if item.size > MOST_COPIED:
                    raise CannotLink("")
                self.client.copy(home.key, key)
                return replace(file, homes=(target, *file.homes), identity=file.identity or item.tag)
            except FileNotFoundError:  # deleted just now
                continue
            except OSError as error:
                reason = f"the store does not copy it ({error})"
        raise CannotLink(reason)

    def snapshot(self, root: ObjectPath) -> ObjectStore:
        """Return this store with a listing of all objects below a root, unless it has one already."""
        return self if self.listed else replace(self, listed=Listing(self.client.below(root.key)))


def _within_save(path: ObjectPath) -> tuple[ObjectPath, str] | None:
    """Return the directory of the save in flight that a path is in or is, and the folder in it."""
    for above in (path, *path.parents):
        if above.suffix == commit.SAVING and token_in(f"{PACKED}{above.stem}"):
            inner = path.key[len(above.key) :].lstrip("/")
            return above, f"{inner}/" if inner else ""
    return None
