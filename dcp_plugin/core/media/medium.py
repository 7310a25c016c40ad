"""Vocabulary of the media: the protocols :class:`Medium`, :class:`Readable` and :class:`NewFile`, the records that they
take and return, and ranges of files.

The rule: this module imports no other module of the folder.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from dcp_plugin.core.format import Files, Pieces
from dcp_plugin.core.paths import ObjectPath, Where

P = TypeVar("P", Path, ObjectPath)

PAGE = 4096
"""Bytes. A device reads and writes memory directly if the memory begins at a multiple of this. No device in use needs a
larger multiple."""

IN_PLACE = 1 << 20
"""Payloads of at least this many bytes begin at a page of their file, and of the host copy of an asynchronous save."""


@dataclass(frozen=True)
class Reservation(Generic[P]):
    """A save in flight. The rank that reserved keeps it. Other ranks receive its directory."""

    final: P
    """The final path of the checkpoint."""
    token: str
    """Unique to this save."""
    directory: P
    """The directory for the files of all ranks until the save is published. Its stem is the token."""
    time: float | None = None
    """Recorded time of the save, in seconds since the epoch; None if it gets one when it is published."""


class NewFile(AbstractContextManager["NewFile", None], Protocol):
    """A file under construction, written once from front to back. It is durable when its ``with`` block ends."""

    def tell(self) -> int:
        """Return the number of bytes appended so far."""

    def takes_in_place(self, address: int) -> bool:
        """Return whether the next bytes are written without a copy if they are at this address of memory."""

    def write(self, data: bytes | bytearray | memoryview, kept: bool = False) -> None:
        """Append bytes.

        Args:
            kept: ``data`` does not change before the file is complete. Otherwise it may change after the call.
        """


class RawRanges(io.RawIOBase):
    """Raw file below a :class:`RangedFile`, whose bytes are read by ranges."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self._at = size, 0

    def read_at(self, memory: Sequence[memoryview], offset: int) -> int:
        """Read as :meth:`RangedFile.read_into` does."""
        raise NotImplementedError

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Prepare reads as :meth:`RangedFile.expect` does."""

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
    """Return the first pieces of memory, cut so that they have ``most`` bytes at most."""
    pieces = []
    for piece in memory:
        if most <= 0:
            break
        pieces.append(piece[:most])
        most -= len(piece)
    return pieces


def bytes_behind(memory: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return the pieces of memory without their first ``count`` bytes."""
    pieces = []
    for piece in memory:
        if count < len(piece):
            pieces.append(piece[count:])
        count = max(0, count - len(piece))
    return pieces


def stretches(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Return the positions of neighbours in a file, cut into ``count`` stretches of about the same size.

    Each thread reads one stretch. The system reads ahead for a thread that reads in order. It does not read ahead for
    threads that take turns in one file.

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
    """Copy chunks of bytes to the pieces of memory in turn. Return the number of bytes."""
    done = 0
    pieces = [piece for piece in memory if len(piece)]
    for chunk in chunks:
        data = memoryview(chunk)
        while len(data) and pieces:
            count = min(len(pieces[0]), len(data))
            pieces[0][:count] = data[:count]
            pieces[0], data = pieces[0][count:], data[count:]
            done += count
            if not len(pieces[0]):
                del pieces[0]
    return done


class RangedFile(io.BufferedReader):
    """A seekable file of a published checkpoint. It reads a range into several pieces of memory at once.

    Args:
        identity: A value that no other file has. It changes with the contents of the file. None: unknown.
        buffer_size: Bytes that a small read asks for.
    """

    is_outside = False
    """True if the open file is the target of a link out of the checkpoint, see :meth:`Readable.leads_elsewhere`."""

    def __init__(self, ranges: RawRanges, identity: Any = None, buffer_size: int = io.DEFAULT_BUFFER_SIZE) -> None:
        super().__init__(ranges, buffer_size)
        self.ranges = ranges
        self.identity = identity

    def read_into(self, memory: Sequence[memoryview], offset: int) -> int:
        """Fill the pieces in turn from byte ``offset`` on.

        Returns:
            The number of bytes. It may be smaller than the memory; 0 is the end of the file.
        """
        return self.ranges.read_at(memory, offset)

    def fill(self, memory: Sequence[memoryview], offset: int) -> int:
        """Read as :meth:`read_into` until the memory is full or the file ends. Return the number of bytes."""
        total, done = sum(map(len, memory)), 0
        while done < total and (count := self.read_into(memory, offset + done)):
            done += count
            if done < total:
                memory = bytes_behind(memory, count)
        return done

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Prepare small reads within these ranges. A range is its first byte and the byte after its last. Raises
        OSError."""
        self.ranges.expect(ranges)


@dataclass(frozen=True)
class ReadCost:
    """The cost of reads from a medium, by which callers choose how to read many ranges. The defaults are those of a
    file system, where a read is a system call."""

    at_once: int = 1
    """Number of reads that are in flight at the same time if the caller asks for fewer threads."""
    gap: int = 8 << 10
    """Two ranges at most this many bytes apart are read together: reading the gap costs less than another read."""
    most: int = 2 << 20
    """Bytes of the largest read that ranges near each other share."""
    hosts: int = 8
    """Number of hosts that must want the same bytes before one host reads them for the others."""


_COST_ON_DISK = ReadCost()


class Readable(Files, Protocol):
    """The files of one checkpoint. Threads may open them at the same time. The methods that a subclass inherits are
    those of a place without links and pins, where a read is a system call."""

    @property
    def cost(self) -> ReadCost:
        """The cost of reads from these files."""
        return _COST_ON_DISK

    def open(self, name: str) -> RangedFile: ...

    def version(self, names: Iterable[str]) -> str:
        """Return a text that changes with the contents of these files. It is the same on all hosts. It is empty if only
        a read of the files shows a change. Raises OSError."""
        return ""

    def leads_elsewhere(self, name: str) -> bool:
        """Return whether a file is a link out of the checkpoint. The blobs of Hugging Face's cache belong to it."""
        return False

    def pin(self, names: Iterable[str]) -> None:
        """Pin files: they can be opened until :meth:`close`, even if the checkpoint is deleted. After that, only
        ``read_into`` reads their contents. A disk pins 256 files at most.

        Raises:
            OSError: A file is missing.
        """
        return

    def mark_unreliable(self, file: RangedFile) -> bool:
        """Mark the source of a file as unreliable: its bytes are not the saved bytes. Return whether the file has
        another source, which the next :meth:`open` uses."""
        return False

    def moved(self) -> bool:
        """Return whether the checkpoint at the path was created, replaced or deleted since these files were opened."""
        return False

    def close(self) -> None:
        """Close the pinned files. May be called twice."""
        return


@dataclass(frozen=True)
class FileStatus:
    """Size and identity of a file."""

    size: int
    identity: Any
    """Equal for all names of a file, and for no other file of the medium."""
    names: int = 1
    """Names (hard links) that the file has in all."""


@dataclass(frozen=True)
class Listed(Generic[P]):
    """An entry of :meth:`Medium.entries`. A link to a folder is not a folder."""

    path: P
    is_folder: bool
    is_file: bool
    status: Callable[[], FileStatus]
    """Returns the status of an entry that is a file. It may take a system call. Raises OSError."""
    number: int = 0
    """Changes if another file takes the name, on a medium that numbers its files."""
    in_flight: Callable[[], InFlight | None] = lambda: None
    """Returns the save in flight, or interrupted, of an entry of a workspace; None if the entry is of no save. It may
    read the record of the save."""


class InFlight(NamedTuple):
    """A save in flight, or an interrupted one."""

    target: str
    """The name of its checkpoint, relative to the parent of the workspace."""
    time: float
    """Time of its last heartbeat or change, in seconds since the epoch."""
    launch: object
    """The record of the launch that saves (:func:`dcp_plugin.core.ranks.launcher.launch_record`), if another process
    saves."""
    is_at_target: bool = False
    """True if the files are below the path of the checkpoint, as in a store."""
    user: int | None = None
    """The other user to whom it belongs; None: this user. Only its user can collect it as garbage."""


@dataclass(frozen=True)
class Leftover(Generic[P]):
    """Garbage of a process that has ended."""

    path: P
    what: str
    """Description for people."""
    nbytes: int | None
    """Bytes that its deletion frees; None if they are unknown, 0 for a checkpoint that gets its name back."""
    stays: bool = False
    """True if it belongs to another user, so that no call of this user changes it."""


def ignore(count: int) -> None:
    """Take the number of written bytes, which is not shown."""


class Medium(Protocol):
    """A place for checkpoints. A method raises OSError if the medium refuses its request."""

    @property
    def advice(self) -> str:
        """A question for the user: the usual reasons for an OSError."""

    def reserve(
        self, path: Where, among_other_files: bool = False, copy_of: str = "", recorded: float | None = None
    ) -> Reservation[Any]:
        """Begin a save to ``path``. One rank calls this.

        Args:
            among_other_files: ``path`` may have other files in it than a checkpoint. They stay.
            copy_of: The token of a checkpoint to be copied. In a store it is the stem of the directory. The directory
                has the files that an earlier try of the same copy kept (:meth:`discard`), or those of a process that
                died.
            recorded: The recorded time of the save, in seconds since the epoch, if it has one already.

        Raises:
            SaveFailed: It has other files in it than a checkpoint, or it cannot be written. Or another process makes
                the same copy.
        """

    def join(self, directory: Where, path: Where) -> None:
        """Take part in the save to ``path`` that another rank has reserved.

        Raises:
            SaveFailed: This rank does not see the reserved directory.
        """

    def create(
        self, directory: Where, name: str, size: int, wrote: Callable[[int], None] = ignore, at_once: int = 1
    ) -> NewFile:
        """Begin a new file of a save.

        Args:
            size: Its final size in bytes.
            at_once: Number of files that this rank writes at the same time: they share the bytes in flight.
            wrote: Called with the number of bytes of each write to the medium, from any thread.
        """

    def flush(self, directory: Where) -> None:
        """Make the names of this rank's files durable. Their bytes are durable already."""

    def publish(self, reservation: Reservation[Any], files: Mapping[str, bytes | Pieces] | None) -> None:
        """Add these files to a save, in this order, and give it its final name. An earlier checkpoint is replaced.

        All other files of the save are durable. The last of ``files`` commits the checkpoint. In a store, files without
        a summary among them belong to another tool, and keep their names. ``None``: the save is a copy of a single
        file, which has its final name in the directory.

        Raises:
            OSError: The final name is unchanged.
            SaveFailed: In a store: another process has published a save to the path meanwhile, or has taken this one
                for dead. The final name is unchanged.
            DurabilityUnknown: The checkpoint is published, but a loss of power may undo that.
        """

    def discard(self, reservation: Reservation[Any], all_ended: bool = True, keep: bool = False) -> None:
        """End a save or a copy that is not published, and delete its files. The checkpoint at its final name stays.
        Never raises OSError: the next save beside it deletes the files that cannot be deleted now.

        Args:
            all_ended: No rank writes to it any more. Otherwise a rank may add files to a store after this call, and the
                next save beside it looks for them. On a disk, the directory is gone, so no rank can add one.
            keep: Keep the files of a copy for the next reservation of the same copy. Any other save beside it deletes
                them.
        """

    def revoke(self, path: Where, token: str) -> None:
        """Prevent that another process publishes its save to ``path``, which has this token."""

    def open(self, path: Where, pin: bool = False) -> Readable:
        """Return the files of a checkpoint or of a save in flight. This reads nothing.

        Args:
            pin: Return the files of the checkpoint that has the name now, also after another one takes the name. The
                caller closes them. If no checkpoint has the name, their methods raise OSError.
        """

    def entries(self, root: Where) -> list[Listed[Any]]:
        """Return the entries of the folder ``root``, sorted by name."""

    def link(self, path: Where, target: Where) -> None:
        """Make ``path`` another name of the checkpoint ``target``. An earlier checkpoint is replaced."""

    def remove(self, path: Where) -> None:
        """Delete a checkpoint. A half-deleted one is never taken for a checkpoint."""

    def collect_garbage(self, workspace: Where, dry_run: bool = False) -> list[Leftover[Any]]:
        """Delete the files of saves and removals beside a workspace if their processes have certainly ended. Put the
        checkpoints back that these processes had moved aside. Files that cannot be deleted stay for the next time.

        Returns:
            The garbage that remains; with ``dry_run``, all of it.
        """

    def kind(self, path: Where) -> Literal["folder", "file", "other", ""]:
        """Return the kind of the entry at a path, or of its link target; empty if the path does not exist. A named pipe
        or a device is ``"other"``."""

    def note(self, path: Where, data: bytes, replaced: Iterable[Where] = (), only_new: bool = False) -> bool:
        """Write a small file in a workspace, then delete the files in ``replaced``. Another process sees the earlier
        file or this one.

        Args:
            only_new: Leave an existing file unchanged, and return False. With this, the file is durable when the call
                returns, and may also be in a published checkpoint.
        """

    def link_file(self, file: DataFile, target: Where) -> DataFile:
        """Make ``target`` another name or a copy of a data file, without reading its bytes. Return the file as it is
        there.

        Raises:
            CannotLink: In words: the reason; empty if it need not be logged.
        """


class CannotLink(Exception):
    """A file cannot be put into another checkpoint; the message says why. Never reaches the user."""


@dataclass(frozen=True)
class DataFile:
    """A data file of published checkpoints, to be put into later ones too. Any of its names may be deleted."""

    homes: tuple[Where, ...]
    """The names that it is known to have, newest first."""
    size: int
    """Bytes."""
    identity: Any = None
    """:attr:`RangedFile.identity` of the bytes that this process has written or verified; None before it has."""

    @classmethod
    def written(cls, files: Readable, path: Where) -> DataFile:
        """Return a file that this process has just written. Raises OSError.

        Args:
            files: Those of its directory.
        """
        with files.open(path.name) as file:
            return cls((path,), files.size(path.name), file.identity)

    def published(self, home: Where) -> DataFile:
        """Return the same file after its newest name has become ``home``."""
        homes = [home, *(path for path in self.homes[1:] if path != home)]
        return replace(self, homes=tuple(homes[:_MOST_HOMES]))

    @contextmanager
    def opened(self, medium: Medium) -> Iterator[tuple[RangedFile, DataFile]]:
        """Open the file to verify it, and yield it with this object, which has its identity then.

        Raises:
            CannotLink: It is gone. Or it is in a store, where reading it takes as long as writing it.
        """
        for home in self.homes:
            if isinstance(home, ObjectPath):
                raise CannotLink("")
            with suppress(OSError):
                files = medium.open(home.parent)
                if files.size(home.name) == self.size:
                    file = files.open(home.name)
                    break
        else:
            raise CannotLink(GONE)
        with file:
            yield file, replace(self, identity=file.identity)


_MOST_HOMES = 4

GONE = "its files are gone, or were written to since"
