"""Layer 2: where the bytes of a checkpoint are.

Named sequences of bytes go in, and ranges of them come out. A medium never sees a dtype, a key or another rank; what
the bytes mean is the matter of :mod:`dcp_plugin.format`. The rule it keeps: until :meth:`Medium.publish` returns, a
reader finds the checkpoint that was there before, complete, or nothing.

:class:`~dcp_plugin.media.disk.LocalDisk` is a file system that all ranks share. What other media need is thought of: an
object store reserves a prefix, writes a :class:`NewFile` as a multipart upload, publishes by a conditional put of
``.metadata`` as the last object, reads ranges by GET, and lists by prefix with ``/`` as the delimiter.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from dcp_plugin.format import Files

PAGE = 4096
"""Bytes. A device reads and writes memory directly if it begins at a multiple of this; no device in use wants more."""
IN_PLACE = 1 << 20
"""Payloads of at least this many bytes begin at a page of their file, and of the host copy of an asynchronous save."""


@dataclass(frozen=True)
class Reservation:
    """A save in flight. Only the rank that reserved has it; the others are told its directory."""

    final: Path
    """What the checkpoint will be called."""
    token: str
    """Unique to this save."""
    directory: Path
    """Where all ranks put their files until the save is published."""


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

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append. ``data`` may change as soon as this returns."""


class RangedFile(io.BufferedReader):
    """A file of a published checkpoint, seekable, that reads a range into several pieces of memory at once."""

    def read_into(self, memory: Sequence[memoryview], offset: int) -> int:
        """Fill the pieces in turn from byte ``offset`` on.

        Returns:
            How many bytes were read. It may be fewer than fit; 0 is the end of the file.
        """
        raise NotImplementedError


class Readable(Files, Protocol):
    """The files of one checkpoint. Threads may open them at the same time."""

    def open(self, name: str) -> RangedFile: ...

    def leads_elsewhere(self, name: str) -> bool:
        """Whether a file is a link to something outside of the checkpoint, where the medium has such links."""

    def keep(self, names: Iterable[str]) -> None:
        """Make sure, for as many of these files as is reasonable, that they can be opened until :meth:`close`, even if
        the checkpoint is deleted. From then on their contents are read by ``read_into`` only.

        Raises:
            OSError: One is not there.
        """

    def moved(self) -> bool:
        """Whether what is at the path now is not what these files are of: it was replaced or deleted, or has come."""

    def close(self) -> None:
        """Let go of what is held. May be called twice."""


@dataclass(frozen=True)
class Listed:
    """What :meth:`Medium.entries` finds. A link to a folder is not a folder."""

    path: Path
    is_folder: bool
    is_file: bool
    number: int = 0
    """Another one if something else has taken the name, where the medium tells that."""


class Medium(Protocol):
    """A place for checkpoints. All methods raise OSError for what the medium refuses."""

    def reserve(self, path: Path, among_other_files: bool = False) -> Reservation:
        """Begin a save to ``path``. On one rank.

        Args:
            among_other_files: ``path`` may have other things in it than a checkpoint. They stay.

        Raises:
            SaveFailed: It has other things in it than a checkpoint, or nothing can be written there.
        """

    def join(self, directory: Path, path: Path) -> None:
        """Take part in the save to ``path`` that another rank has reserved.

        Raises:
            SaveFailed: This rank does not see the reserved directory.
        """

    def create(self, directory: Path, name: str, size: int, wrote: Callable[[int], None]) -> NewFile:
        """Begin a new file of a save.

        Args:
            size: Its final size in bytes.
            wrote: Called with the number of bytes that went to the medium, as they go; from any thread.
        """

    def flush(self, directory: Path) -> None:
        """Make the names of the files durable that this rank has written. Their bytes are durable already."""

    def publish(self, reservation: Reservation, files: Mapping[str, bytes]) -> None:
        """Add these files to a save, in this order, and give it its final name, in place of what is there.

        All other files of the save are durable. The last of ``files`` is what makes a checkpoint of them.

        Raises:
            OSError: What was at the final name is as it was.
            DurabilityUnknown: The new checkpoint is there, but a loss of power may undo that.
        """

    def discard(self, reservation: Reservation) -> None:
        """Delete what a save has written that is not to be published. What it was to replace stays. Never raises
        OSError: what cannot be deleted now is left for the next save beside it."""

    def locate(self, path: Path) -> Path:
        """``path``, or where its checkpoint is after a crash in the middle of replacing it."""

    def uncommitted_reason(self, path: Path) -> str:
        """Why there is no committed checkpoint at ``path``; empty if there is one."""

    def open(self, path: Path) -> Readable:
        """The files of a checkpoint, or of a directory with those of a save in flight. Nothing is read yet."""

    def hold(self, path: Path) -> Readable:
        """The files of what is at ``path`` now, and of nothing that takes its name later. The caller closes it. If
        nothing is there, what it returns raises OSError when it is used."""

    def entries(self, root: Path) -> list[Listed]:
        """What is directly below ``root``, sorted by name."""

    def link(self, path: Path, target: Path) -> None:
        """Make ``path`` another name of the checkpoint ``target``, in place of what is there."""

    def remove(self, path: Path) -> None:
        """Delete a checkpoint, so that at no moment something half-deleted can be taken for one."""
