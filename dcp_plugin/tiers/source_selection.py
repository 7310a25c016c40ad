"""Files of one checkpoint, each byte from the nearest place that has it: this node, another node, the durable path.

A place that fails, or whose bytes are not the saved bytes, is not asked for that file again; the next place is. So a
load mixes places by ranges of bytes, and fails only if no place has a range.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from dcp_plugin.core.errors import logger
from dcp_plugin.core.format import INDEX, SUMMARY
from dcp_plugin.core.format.packed import position_of
from dcp_plugin.core.media import RangedFile, RawRanges, Readable, first_bytes
from dcp_plugin.tiers.wire import Address, connect

_CONNECT_SECONDS = 20.0
_READ_SECONDS = 60.0
"""Seconds in which a node has to answer before another place is asked."""
OWN = "this node"
DURABLE = "durable"


class OpenFile(Protocol):
    """An open file of a place."""

    def read_into(self, memory: Sequence[memoryview], offset: int) -> int:
        """Read as :meth:`dcp_plugin.core.media.medium.RangedFile.read_into` does."""

    def close(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Place:
    """A node or a path that has some files of a checkpoint."""

    name: str
    """The name of the place in reports."""
    files: Collection[str]
    open: Callable[[str], OpenFile]
    """Opens a file by its name. Raises OSError."""


class RemoteFile:
    """A file that a rank of another node sends in ranges, over its own connection.

    Args:
        token: The save that the file belongs to.
    """

    def __init__(self, address: Address, key: bytes, token: str, name: str) -> None:
        self._rank, self._token, self._name = connect(address, key, _CONNECT_SECONDS), token, name

    def read_into(self, memory: Sequence[memoryview], offset: int) -> int:
        most = sum(map(len, memory))
        count: int = self._rank.ask(_READ_SECONDS, "read", self._token, self._name, offset, most).get()
        self._rank.receive_into(first_bytes(memory, count))
        return count

    def close(self) -> None:
        self._rank.close()


class _Nearest(RawRanges):
    """A file of :class:`NearestFiles`, read from the nearest place that has it at each read."""

    def __init__(self, files: NearestFiles, name: str) -> None:
        super().__init__(files.size(name))
        self._files, self.file_name = files, name
        self.place: Place | None = None
        """The place of the last read."""
        self._open: OpenFile | None = None

    def read_at(self, memory: Sequence[memoryview], offset: int) -> int:
        if offset >= self._size:
            return 0
        memory = first_bytes(memory, self._size - offset)
        while True:
            place = self._files.place_of(self.file_name)
            try:
                if self._open is None or place is not self.place:
                    self._release()
                    self._open, self.place = place.open(self.file_name), place
                count = self._open.read_into(memory, offset)
                if count == 0:
                    raise OSError(errno.EIO, "it is shorter than it was", self.file_name)
            except OSError as error:
                self._release()
                if not self._files.give_up(self.file_name, place, str(error.strerror or error)):
                    raise
                continue
            self._files.count(place, count)
            return count

    def _release(self) -> None:
        if self._open is not None:
            with suppress(OSError):
                self._open.close()
        self._open = None

    def close(self) -> None:
        self._release()
        super().close()


class NearestFiles(Readable):
    """A :class:`~dcp_plugin.core.media.medium.Readable` over several places.

    Args:
        where: The checkpoint in messages.
        sizes: All its files, and their sizes in bytes.
        places: The nodes that have some of the files, nearest first.
        written: Recorded time of the save, in seconds since the epoch.
        open_path: Opens the files at the path when they are needed first; None if the path lacks the checkpoint.
        has_same_tables: False if the index and the summary at the path are those of the files there, not of the nodes'.
        passed_over: The first of :attr:`problems`.
    """

    def __init__(
        self,
        where: str,
        sizes: Mapping[str, int],
        places: Iterable[Place],
        written: float,
        open_path: Callable[[], Readable] | None,
        has_same_tables: bool,
        passed_over: Sequence[str],
    ) -> None:
        self._where, self._sizes, self._written = where, dict(sizes), written
        self._places = [*places]
        self.is_at_path = open_path is not None
        """True if the path has the complete checkpoint as well."""
        if open_path is not None:
            others = () if has_same_tables else (INDEX, SUMMARY)
            self._places.append(Place(DURABLE, self._sizes.keys() - others, partial(self._open_at_path, open_path)))
        self._at_path: Readable | None = None
        self._names_at_path: dict[str, str] = {}
        """Names of data files on the nodes -> at the path, once that is open."""
        self._lock = threading.Lock()
        self._failed: dict[str, list[Place]] = {}
        """The places that are not asked for a file again, by file."""
        self.bytes_from: Counter[str] = Counter()
        """Bytes read so far, by the name of the place."""
        self.problems = list(passed_over)
        """Parts that are unreliable, and places that failed, with the reason."""

    @property
    def where(self) -> str:
        return self._where

    def names(self) -> list[str]:
        return sorted({name[: name.find("/") + 1] or name for name in self._sizes})

    def all_names(self) -> list[str]:
        """Return the names of all files, with ``/`` between folders."""
        return sorted(self._sizes)

    def size(self, name: str) -> int:
        if name not in self._sizes:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self._where}/{name}")
        return self._sizes[name]

    def modified(self, name: str) -> float:
        if name:
            self.size(name)
        return self._written

    def open(self, name: str) -> RangedFile:
        self.place_of(name)
        return RangedFile(_Nearest(self, name))

    def _open_at_path(self, open_path: Callable[[], Readable], name: str) -> RangedFile:
        with self._lock:
            if self._at_path is None:
                self._at_path = open_path()
                # A data file has the token of its reservation in its name there, and that of the save on the nodes.
                names_at_path = {position_of(at_path): at_path for at_path in self._at_path.names()}
                self._names_at_path = {
                    ours: names_at_path.get(position, ours)
                    for ours in self._sizes
                    if (position := position_of(ours)) is not None
                }
        return self._at_path.open(self._names_at_path.get(name, name))

    def close(self) -> None:
        files, self._at_path = self._at_path, None  # the next attempt of a load opens them again
        if files is not None:
            files.close()

    def mark_unreliable(self, file: RangedFile) -> bool:
        nearest = file.ranges
        if not isinstance(nearest, _Nearest) or nearest.place is None:
            return False
        return self.give_up(nearest.file_name, nearest.place, "its bytes are not those that were saved")

    def place_of(self, name: str) -> Place:
        """Return the nearest place that has a file and has not failed. Raises OSError if no place is left."""
        size = self.size(name)
        with self._lock:
            failed = self._failed.get(name, [])
            for place in self._places:
                if name in place.files and place not in failed:
                    return place
        raise OSError(errno.EIO, f"no place has it ({size:,} bytes)", f"{self._where}/{name}")

    def give_up(self, name: str, place: Place, why: str) -> bool:
        """Do not ask a place for a file again; return whether another place is left."""
        with self._lock:
            failed = self._failed.setdefault(name, [])
            if place not in failed:
                failed.append(place)
                self.problems.append(f"{name} of {place.name}: {why}")
                logger.warning("%s: %s cannot be read from %s: %s", self._where, name, place.name, why)
            return any(name in other.files and other not in failed for other in self._places)

    def count(self, place: Place, count: int) -> None:
        """Add bytes that were read from a place to :attr:`bytes_from`."""
        with self._lock:
            self.bytes_from[place.name] += count
