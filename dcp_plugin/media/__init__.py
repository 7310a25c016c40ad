"""Places where the bytes of a checkpoint are.

Named sequences of bytes go in, and ranges of them come out. A medium never sees a dtype, a key or another rank; what
the bytes mean is the matter of :mod:`dcp_plugin.format`. The rule it keeps: until :meth:`Medium.publish` returns, a
reader finds the checkpoint that was there before, complete, or nothing.

:class:`~dcp_plugin.media.disk.LocalDisk` is a file system that all ranks share, and
:class:`~dcp_plugin.media.objects.ObjectStore` a store of objects that have URLs. :func:`medium_of` says which of them a
path is of.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, cast

from dcp_plugin.errors import SaveFailed, some
from dcp_plugin.format import Files
from dcp_plugin.paths import ObjectPath, Where

P = TypeVar("P", Path, ObjectPath)

WORKSPACE = ".dcp_plugin"
"""The directory beside checkpoints in which they are made, or noted while they are. Where one belongs to another user,
and cannot be written, this user's has the number of the user behind it."""
_OF_A_USER = re.compile(rf"{re.escape(WORKSPACE)}(-\d+)?")
_ACCELERATE_NUMBERED = re.compile(r"checkpoints/checkpoint_\d+")


def workspace_of(final: P) -> P:
    """Where a checkpoint is made and deleted: beside it. Only not among the numbered checkpoints of an Accelerate
    project: Accelerate takes every entry of that folder for one of them."""
    return cast(P, workspace_in(_folder_of(final)))


def workspaces_of(final: P) -> list[P]:
    """Return the workspaces of all users in which a checkpoint may be made, or set aside."""
    return cast(list[P], workspaces_in(_folder_of(final)))


def _folder_of(final: Where) -> Where:
    numbered = _ACCELERATE_NUMBERED.fullmatch(f"{final.parent.name}/{final.name}")
    return final.parent.parent if numbered else final.parent


def is_workspace(name: str) -> bool:
    """Return whether a directory of this name is a workspace."""
    return _OF_A_USER.fullmatch(name) is not None


def workspace_in(folder: Where) -> Where:
    """Return the workspace of this user in a folder of checkpoints, whether it exists or not."""
    usual = folder / WORKSPACE
    if isinstance(usual, Path) and hasattr(os, "geteuid"):
        with suppress(OSError):
            user = os.geteuid()
            if os.lstat(usual).st_uid != user and not os.access(usual, os.W_OK | os.X_OK, effective_ids=True):
                return folder / f"{WORKSPACE}-{user}"
    return usual


def workspaces_in(folder: Where) -> list[Where]:
    """Return the workspaces of all users in a folder of checkpoints, and the usual one whether it exists or not."""
    others: list[str] = []
    if isinstance(folder, Path):
        with suppress(OSError):
            others = sorted(name for name in os.listdir(folder) if is_workspace(name) and name != WORKSPACE)
    return [folder / name for name in (WORKSPACE, *others)]


def other_things(final: Where, names: Iterable[str]) -> SaveFailed:
    """Return the error for a save to a directory with these entries, none of which is of a checkpoint."""
    return SaveFailed(
        f"cannot save to {final}: it has other things in it than a checkpoint ({some(sorted(names))}), and a "
        f"checkpoint is replaced and deleted as a whole. Save first and write these afterwards: then they stay, also "
        f"when a later save replaces the checkpoint. Or save to a folder below, such as {final / 'checkpoint'}."
    )


def is_target(name: object) -> bool:
    """Whether this names a checkpoint relative to the parent of its workspace."""
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return "/" not in name or _ACCELERATE_NUMBERED.fullmatch(name) is not None


PAGE = 4096
"""Bytes. A device reads and writes memory directly if it begins at a multiple of this; no device in use wants more."""
IN_PLACE = 1 << 20
"""Payloads of at least this many bytes begin at a page of their file, and of the host copy of an asynchronous save."""


@dataclass(frozen=True)
class Reservation(Generic[P]):
    """A save in flight. Only the rank that reserved has it; the others are told its directory."""

    final: P
    """What the checkpoint will be called."""
    token: str
    """Unique to this save."""
    directory: P
    """Where all ranks put their files until the save is published. Its stem is the token."""
    time: float | None = None
    """When the save began, in seconds since the epoch, by a clock that all saves have in common, if there is one."""


class NewFile(Protocol):
    """A file under construction, written once from front to back. It is durable when its ``with`` block ends."""

    def __enter__(self) -> NewFile: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def tell(self) -> int:
        """Bytes appended so far."""

    def takes_in_place(self, address: int) -> bool:
        """Whether bytes at this address of memory, if appended next, are written without being copied."""

    def write(self, data: bytes | bytearray | memoryview, kept: bool = False) -> None:
        """Append.

        Args:
            kept: ``data`` does not change before the file is complete. Otherwise it may as soon as this returns.
        """


class RawRanges(io.RawIOBase):
    """What a buffered file reads from if its bytes come by ranges; :meth:`read_at` is where they come from."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self._at = size, 0

    def read_at(self, memory: Sequence[memoryview], offset: int) -> int:
        """As :meth:`RangedFile.read_into`."""
        raise NotImplementedError

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def readinto(self, memory: memoryview) -> int:  # type: ignore[override]
        count = self.read_at([memoryview(memory).cast("B")], self._at)
        self._at += count
        return count

    def readall(self) -> bytes:
        memory = bytearray(max(0, self._size - self._at))
        done = 0
        while done < len(memory) and (count := self.readinto(memoryview(memory)[done:])):
            done += count
        return bytes(memory[:done])


def first_bytes(memory: Sequence[memoryview], most: int) -> list[memoryview]:
    """The pieces of memory, cut so that they have at most so many bytes."""
    pieces = []
    for piece in memory:
        if most <= 0:
            break
        pieces.append(piece[:most])
        most -= len(piece)
    return pieces


def stretches(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The positions of things that lie one after the other, cut into ``count`` stretches of about the same size.

    Each thread reads a stretch: the system reads ahead of who goes on where it has stopped, and not of threads that
    take turns in one file.

    Example:
        >>> stretches([3, 1, 1, 1], 2)
        [[0], [1, 2, 3]]
    """
    total = max(1, sum(sizes))
    cut: list[list[int]] = [[] for _ in range(count)]
    before = 0
    for position, size in enumerate(sizes):
        cut[min(count - 1, (before + size // 2) * count // total)].append(position)
        before += size
    return cut


def scatter(chunks: Iterable[Any], memory: Sequence[memoryview]) -> int:
    """Copy chunks of bytes to the pieces of memory in turn; how many bytes."""
    done = 0
    left = [piece for piece in memory if len(piece)]
    for chunk in chunks:
        data = memoryview(chunk)
        while len(data) and left:
            count = min(len(left[0]), len(data))
            left[0][:count] = data[:count]
            left[0], data = left[0][count:], data[count:]
            done += count
            if not len(left[0]):
                del left[0]
    return done


class RangedFile(io.BufferedReader):
    """A file of a published checkpoint, seekable, that reads a range into several pieces of memory at once."""

    def read_into(self, memory: Sequence[memoryview], offset: int) -> int:
        """Fill the pieces in turn from byte ``offset`` on.

        Returns:
            How many bytes were read. It may be fewer than fit; 0 is the end of the file.
        """
        raise NotImplementedError

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """These ranges, each from one byte to before another, will be read in small pieces. Raises OSError."""


class Readable(Files, Protocol):
    """The files of one checkpoint. Threads may open them at the same time."""

    @property
    def streams(self) -> int:
        """How many ranges are worth reading at the same time, whatever the number of threads for files is; 0: it is
        that number."""

    @property
    def gap(self) -> int:
        """Bytes between two ranges that are cheaper to read than to skip."""

    def open(self, name: str) -> RangedFile: ...

    def leads_elsewhere(self, name: str) -> bool:
        """Return whether a file is a link out of the checkpoint. The blobs of Hugging Face's cache belong to it."""

    def keep(self, names: Iterable[str]) -> None:
        """Make sure, for as many of these files as is reasonable, that they can be opened until :meth:`close`, even if
        the checkpoint is deleted. From then on their contents are read by ``read_into`` only.

        Raises:
            OSError: One is not there.
        """

    def distrust(self, file: RangedFile) -> bool:
        """What was read from a file is not what was saved. Whether the same file, opened anew, comes from another place
        that has not failed."""

    def moved(self) -> bool:
        """Whether what is at the path now is not what these files are of: it was replaced or deleted, or has come."""

    def close(self) -> None:
        """Let go of what is held. May be called twice."""


@dataclass(frozen=True)
class Listed(Generic[P]):
    """What :meth:`Medium.entries` finds. A link to a folder is not a folder."""

    path: P
    is_folder: bool
    is_file: bool
    number: int = 0
    """Another one if something else has taken the name, where the medium tells that."""


@dataclass(frozen=True)
class Usage:
    """The bytes of some files, each counted once, whatever number of names (hard links) it has."""

    files: Mapping[Any, tuple[int, int, int]] = field(default_factory=dict)
    """By what identifies a file: its bytes, how many of its names were found, and how many it has in all."""

    @classmethod
    def of_all(cls, usages: Iterable[Usage]) -> Usage:
        """Of files in several places, which have no name in common."""
        files: dict[Any, tuple[int, int, int]] = {}
        for usage in usages:
            for identity, (nbytes, here, names) in usage.files.items():
                files[identity] = (nbytes, here + files.get(identity, (0, 0, 0))[1], names)
        return cls(files)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for nbytes, _, _ in self.files.values())

    @property
    def own(self) -> int:
        """Of these, what nothing else shares: deleting all the names that were found gives so much back."""
        return sum(nbytes for nbytes, here, names in self.files.values() if here >= names)


class InFlight(NamedTuple):
    """A save that has not ended, or was interrupted."""

    target: str
    """The name of its checkpoint, relative to the parent of the workspace."""
    time: float
    """When it was last heard of, in seconds since the epoch."""
    launch: object
    """The record of the launch that saves (:func:`dcp_plugin.launcher.launch_record`), if another process does."""


@dataclass(frozen=True)
class Leftover(Generic[P]):
    """What a process that has ended has left behind."""

    path: P
    what: str
    """In words."""
    nbytes: int | None
    """What deleting it gives back; None if nobody can tell, and 0 for what is put back where it was."""


class Medium(Protocol):
    """A place for checkpoints. All methods raise OSError for what the medium refuses."""

    @property
    def advice(self) -> str:
        """What to look at when the medium refuses, as a question."""

    @property
    def keeps_names(self) -> bool:
        """Whether the files of a save are, from the first moment, under the names at which they will be published,
        beside those of other saves. Then all data files have the save's token in their names."""

    def reserve(self, path: Where, among_other_files: bool = False, copy_of: str = "") -> Reservation[Any]:
        """Begin a save to ``path``. On one rank.

        Args:
            among_other_files: ``path`` may have other things in it than a checkpoint. They stay.
            copy_of: The token of what is copied there: the stem of the directory where the medium keeps names. What an
                earlier try of the same copy has left (:meth:`suspend`, or a process that died) is in the directory.

        Raises:
            SaveFailed: It has other things in it than a checkpoint, or nothing can be written there. Or the same copy
                is being made by another process.
        """

    def join(self, directory: Where, path: Where) -> None:
        """Take part in the save to ``path`` that another rank has reserved.

        Raises:
            SaveFailed: This rank does not see the reserved directory.
        """

    def create(self, directory: Where, name: str, size: int, wrote: Callable[[int], None], at_once: int = 1) -> NewFile:
        """Begin a new file of a save.

        Args:
            size: Its final size in bytes.
            at_once: How many files this rank writes at the same time: they share what may be on the way.
            wrote: Called with the number of bytes that went to the medium, as they go; from any thread.
        """

    def flush(self, directory: Where) -> None:
        """Make the names of the files durable that this rank has written. Their bytes are durable already."""

    def publish(self, reservation: Reservation[Any], files: Mapping[str, bytes] | None) -> None:
        """Add these files to a save, in this order, and give it its final name, in place of what is there.

        Where names are kept, what has no summary among them is of another tool, and its files have their own names.
        All other files of the save are durable. The last of ``files`` is what makes a checkpoint of them. None:
        the save is a copy of one file, which is called in the directory as it will be.

        Raises:
            OSError: What was at the final name is as it was.
            DurabilityUnknown: The new checkpoint is there, but a loss of power may undo that.
        """

    def discard(self, reservation: Reservation[Any], all_ended: bool = True) -> None:
        """Delete what a save has written that is not to be published. What it was to replace stays. Never raises
        OSError: what cannot be deleted now is left for the next save beside it.

        Args:
            all_ended: No rank writes to it any more. Otherwise what comes yet is left for the next save, too.
        """

    def suspend(self, reservation: Reservation[Any]) -> None:
        """End a copy that is not to be published now. Its files stay for the next reservation of the same copy, and
        any other save beside it deletes them."""

    def locate(self, path: Where) -> Where:
        """``path``, or where its checkpoint is after a crash in the middle of replacing it."""

    def uncommitted_reason(self, path: Where) -> str:
        """Why there is no committed checkpoint at ``path``; empty if there is one."""

    def open(self, path: Where, pin: bool = False) -> Readable:
        """The files of a checkpoint, or of a directory with those of a save in flight. Nothing is read yet.

        Args:
            pin: The files of what is at ``path`` now, and of nothing that takes its name later. The caller closes them.
                If nothing is there, they raise OSError when they are used.
        """

    def entries(self, root: Where) -> list[Listed[Any]]:
        """What is directly below ``root``, sorted by name."""

    def in_flight(self, entry: Where) -> InFlight | None:
        """The save in flight, or interrupted, that an entry of a workspace stands for; None if it stands for none."""

    def link(self, path: Where, target: Where) -> None:
        """Make ``path`` another name of the checkpoint ``target``, in place of what is there."""

    def remove(self, path: Where) -> None:
        """Delete a checkpoint, so that at no moment something half-deleted can be taken for one."""

    def collect_garbage(self, workspace: Where, dry_run: bool = False) -> list[Leftover[Any]]:
        """Delete the files of saves and removals beside a workspace whose processes have ended for sure, and put back
        what these had moved aside. Files that cannot be deleted stay for the next time. Return all garbage."""

    def usage(self, path: Where) -> Usage:
        """The bytes of the file or of all files at a path. Links are not followed."""

    def kind(self, path: Where) -> Literal["folder", "file", ""]:
        """What is at a path, or at what it links to; empty if nothing is."""

    def attach(self, directory: Where, put: Callable[[Path], None]) -> None:
        """Add the files to a save in flight that ``put`` writes into the local directory that it is given."""

    def note(self, path: Where, data: bytes, replaced: Iterable[Where] = (), only_new: bool = False) -> bool:
        """Make this small file what is at ``path``, in a workspace, then delete the files that it replaces. Another
        process sees the file before, or this one.

        Args:
            only_new: Leave a file that exists as it is, and return False. The new file is durable. It may be in a
                published checkpoint.
        """

    def linkable(self, *homes: Where, size: int | None = None) -> Linkable:
        """A data file, to be put into later checkpoints too.

        Args:
            homes: The names that it may have.
            size: Its size in bytes, if it was written by another process; None if this one has just written it.
        """

    def snapshot(self, root: Where) -> Medium:
        """This medium, as it was in one moment below ``root``, if it lists all of that at once: what is asked of its
        folders costs nothing then."""

    def may_have_base(self, path: Where) -> bool:
        """Whether another checkpoint may have what the one at a path leaves out, as far as names of files tell that."""

    def time_from_names(self, path: Where) -> float | None:
        """When the checkpoint was saved, as far as the names of its files tell that for sure."""


def files_below(medium: Medium, folder: Where, before: str = "") -> Iterator[tuple[str, Listed[Any]]]:
    """Yield the entries below a folder that are no folders themselves, with their names, ``/`` between folders. Raises
    OSError."""
    for entry in medium.entries(folder):
        if entry.path.parent != folder:  # a key with ".." in it, which is to lead out of the folder
            continue
        if entry.is_folder:
            yield from files_below(medium, entry.path, f"{before}{entry.path.name}/")
        else:
            yield before + entry.path.name, entry


def tree(folder: Where, medium: Medium | None = None) -> list[str]:
    """Return the names of all files below a folder, sorted. Links to folders are left out. Raises OSError."""
    medium = (medium or medium_of(folder)).snapshot(folder)
    below = files_below(medium, folder)
    return sorted(name for name, entry in below if entry.is_file or medium.kind(entry.path) != "folder")


class CannotLink(Exception):
    """A file cannot be put into another checkpoint; the message says why. Never reaches the user."""


class Linkable(Protocol):
    """A data file that was published, under the names that it is known to have. Any of them may be deleted."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def verified(self) -> bool:
        """Whether it is known to have the bytes that this process has written or verified."""

    def published(self, home: Where) -> Linkable:
        """The same file when its newest name has become ``home``."""

    def opened(self) -> AbstractContextManager[tuple[RangedFile, Linkable]]:
        """The file, open to be verified, and this object as verified.

        Raises:
            CannotLink: It is not there.
        """

    def link_to(self, target: Where) -> Linkable:
        """Make ``target`` this file, without its bytes passing through here.

        Raises:
            CannotLink: In words: why that cannot be; empty if nobody need hear of it.
        """


_HOMES = 4


def with_newest(homes: Sequence[P], home: P) -> tuple[P, ...]:
    """The names of a :class:`Linkable` when the newest of them has become ``home``."""
    names = [home]
    names += [path for path in homes[1:] if path != home]
    return tuple(names[:_HOMES])


def medium_of(path: Where, direct_io: bool | Literal["auto"] = "auto") -> Medium:
    """What a path is of.

    Args:
        direct_io: For a file system, see :class:`~dcp_plugin.media.disk.LocalDisk`.

    Raises:
        ValueError: A URL, and what talks to its store is not installed.
    """
    if isinstance(path, ObjectPath):
        from dcp_plugin.media.objects import ObjectStore  # only who has a URL needs it

        return cast(Medium, ObjectStore.of(path))
    from dcp_plugin.media.disk import LocalDisk

    return cast(Medium, LocalDisk(direct_io))  # each takes its own kind of path, and is given no other
