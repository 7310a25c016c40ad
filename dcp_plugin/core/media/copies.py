"""Targets of copies and of exports: how their files are named, completed and published on each medium.

On a disk a copy is made in a directory of its own, with the names of the source. A file has another name until it is
complete and durable, and the whole directory gets its final name at once. In a bucket each object has its final name
from the beginning. The data files of a checkpoint of this package get the token of the save into their names
(:mod:`dcp_plugin.core.format.packed`), which distinguishes them from the files of other saves to the same path.

An export (:class:`Output`) has the names that another tool expects. On a disk it appears complete at its path, or not
at all, as a save does. In an object store each object appears when it is complete. An export that fails there deletes
the objects that it has written, and no others.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, cast

from dcp_plugin.core.format import DATA_SUFFIX, METADATA, PACKED, packed
from dcp_plugin.core.media import medium_of
from dcp_plugin.core.media.medium import Medium, NewFile, Readable, Reservation, ignore
from dcp_plugin.core.media.objects.client import client_of
from dcp_plugin.core.media.places import tree
from dcp_plugin.core.paths import ObjectPath, Where, is_link

_PARTIAL = ".partial"
"""Suffix of the name of an incomplete file on a disk."""
_LAST = (f"/{METADATA}", ".index.json")
"""Endings of the names of files that name other files. They are copied last if files appear one by one."""
_MOST_LAST = 64 << 20


class CopyTarget:
    """A path on a disk.

    Args:
        is_ours: True if the copied checkpoint is of this package, false if it is of another tool.
        token: The token of the save, which all copies of the save have in common.
    """

    def __init__(self, path: Where, token: str, is_ours: bool) -> None:
        self.path, self.token, self.is_ours = path, token, is_ours
        self.medium: Medium = medium_of(path)

    def names_of(self, data_files: Iterable[str]) -> dict[str, str]:
        """Return the names of data files of this package at the target, by their present names; only changes."""
        return {}

    def name_of_extra_file(self, name: str) -> str:
        """Return the name of an extra file of a checkpoint of this package at the target."""
        return name

    def begin(self, is_file: bool) -> tuple[Where, Reservation[Any] | None]:
        """Return the directory for the files, and its reservation; None if the copy needs none. Raises SaveFailed."""
        reservation = self.medium.reserve(self.path, copy_of=self.token)
        return reservation.directory, reservation

    def published_last(self, sizes: Mapping[str, int]) -> list[str]:
        """Return the files of another tool that name its other files, to be published in this order after all."""
        return []

    def prepare(self, directory: Where, names: Iterable[str]) -> None:
        """Make the folders above new files."""
        for folder in {os.path.dirname(name) for name in names} - {""}:
            os.makedirs(f"{directory}/{folder}", exist_ok=True)

    @contextmanager
    def create(
        self, directory: Where, name: str, size: int, at_once: int = 1, modified: float | None = None
    ) -> Iterator[NewFile]:
        """Yield a new file, which gets its name when it is complete and durable.

        Args:
            at_once: As in :meth:`dcp_plugin.core.media.medium.Medium.create`.
            modified: The time that the file gets on a disk: other tools order files by their times.
        """
        incomplete = f"{directory}/{name}{_PARTIAL}"
        with self.medium.create(directory, f"{name}{_PARTIAL}", size, at_once=at_once) as file:
            yield file
        if modified is not None:
            os.utime(incomplete, (modified, modified))
        os.rename(incomplete, f"{directory}/{name}")

    def set_time(self, directory: Where, modified: float) -> None:
        """Give a directory the time of its source: other tools order checkpoints by the times of their folders."""
        os.utime(directory, (modified, modified))

    def is_complete(
        self, files: Readable, directory: Where, name: str, renamed: bool, size: int, is_unchanged: Callable[[], bool]
    ) -> bool:
        """Return whether an interrupted copy has completed a file. Raises OSError.

        Args:
            renamed: True if the name contains the token of the save.
            is_unchanged: Compares the contents of the file with the source.
        """
        return not os.path.islink(f"{directory}/{name}") and files.size(name) == size and is_unchanged()

    def delete_others(self, directory: Where, names: Collection[str]) -> None:
        """Delete the files of an interrupted copy except these, which are complete."""
        for name in tree(self.medium, directory):
            if name not in names:
                os.unlink(f"{directory}/{name}")

    def source_of_link(self, stored: Where, name: str, known: tuple[Where, bool] | None) -> tuple[Where, bool] | None:
        """Return a file that the medium links or copies to a new name by itself, and whether its bytes need no
        comparison; None if there is none.

        Args:
            stored: The path of the file in the source.
            name: The new name.
            known: A file at the target with the same contents, and whether its bytes were compared.
        """
        return known

    def unverified(self, stored: Where) -> tuple[str, ...]:
        """Return a note for a file whose bytes no process has compared since the medium has copied it."""
        return ()

    def may_be_begun(self, names: Collection[str], sizes: Collection[str]) -> bool:
        """Return whether the files at the path may come from an interrupted copy.

        Args:
            names: The names of the files at the path.
            sizes: The names of the files of the source.
        """
        return False

    def would_overwrite(self, path: Where) -> bool:
        """Return whether the copy would overwrite single files of the checkpoint that it replaces."""
        return False


class _Bucket(CopyTarget):
    """A prefix of objects."""

    def names_of(self, data_files: Iterable[str]) -> dict[str, str]:
        new: dict[str, str] = {}
        names = list(data_files)
        taken = {name for name in names if packed.token_in(name) == self.token}
        for name in names:
            rank, number = packed.position_of(name) or (0, 0)
            candidate = name
            while name not in taken and (candidate == name or candidate in taken):
                candidate = f"__{rank}_{number}-{self.token}{DATA_SUFFIX}"
                number += 1
            taken.add(candidate)
            new[name] = candidate
        return new

    def name_of_extra_file(self, name: str) -> str:
        return f"{PACKED}{self.token}/{name}"

    def begin(self, is_file: bool) -> tuple[Where, Reservation[Any] | None]:
        if is_file:  # the object has its name from the first moment
            return self.path.parent / f"{self.token}.saving", None
        return super().begin(is_file)

    def published_last(self, sizes: Mapping[str, int]) -> list[str]:
        small = (name for name in sizes if f"/{name}".endswith(_LAST) and sizes[name] <= _MOST_LAST)
        return sorted({*small, *({METADATA} & sizes.keys())}, key=lambda name: (name == METADATA, name))

    def prepare(self, directory: Where, names: Iterable[str]) -> None:
        """Do nothing: a bucket has no folders."""

    @contextmanager
    def create(
        self, directory: Where, name: str, size: int, at_once: int = 1, modified: float | None = None
    ) -> Iterator[NewFile]:
        with self.medium.create(directory, name, size, at_once=at_once) as file:
            yield file  # the object appears when it is complete

    def set_time(self, directory: Where, modified: float) -> None:
        """Do nothing: a bucket has no folders."""

    def is_complete(
        self, files: Readable, directory: Where, name: str, renamed: bool, size: int, is_unchanged: Callable[[], bool]
    ) -> bool:
        # Any other checkpoint may have files of the same names. Those with the token are of the same save.
        return renamed and files.size(name.removeprefix(f"{PACKED}{self.token}/")) == size

    def delete_others(self, directory: Where, names: Collection[str]) -> None:
        """Do nothing: the directory has complete objects only."""

    def source_of_link(self, stored: Where, name: str, known: tuple[Where, bool] | None) -> tuple[Where, bool] | None:
        assert isinstance(self.path, ObjectPath)
        if isinstance(stored, ObjectPath):
            within = stored.store == self.path.store and (not self.is_ours or stored.name.endswith(DATA_SUFFIX))
            known = (stored, True) if within else None
        return None if known is None or "/" in name else (known[0], True)

    def unverified(self, stored: Where) -> tuple[str, ...]:
        return (f"{stored}: copied by the store",)

    def may_be_begun(self, names: Collection[str], sizes: Collection[str]) -> bool:
        has_our_names = all("dcp_plugin-" in name or name.startswith("__") for name in names)
        return (self.is_ours and has_our_names) or set(names) <= set(sizes)

    def would_overwrite(self, path: Where) -> bool:
        # Files of another tool keep their names, and files of the same save have the same names.
        return not self.is_ours or any(self.token in name for name in tree(medium_of(path), path))


def copy_target(path: Where, token: str, is_ours: bool) -> CopyTarget:
    """Return the target of a copy at a path."""
    return (_Bucket if isinstance(path, ObjectPath) else CopyTarget)(path, token, is_ours)


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
