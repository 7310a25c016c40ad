"""The files of one checkpoint, each byte from the nearest place that has it: this node, other nodes, the durable path.

A place that fails, or whose bytes turn out not to be those that were saved, is not asked for that file again; the next
place is. So a load mixes places by ranges of bytes, and ends in an error only if no place has a range.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dcp_plugin.keeper.wire import Address, Channel, connect
from dcp_plugin.media import RangedFile, RawRanges, Readable, first_bytes
from dcp_plugin.media.disk.files import LocalFile, LocalFiles

logger = logging.getLogger("dcp_plugin")

_CONNECT_SECONDS = 20.0
_READ_SECONDS = 60.0
"""How long a node may take to answer before another place is asked."""
OWN = "this node"
DURABLE = "durable"


class Place(Protocol):
    """Place that has some files of a checkpoint."""

    @property
    def name(self) -> str:
        """What a report calls it."""

    @property
    def files(self) -> Collection[str]: ...

    def open(self, name: str) -> RangedFile:
        """Raises OSError."""

    def close(self) -> None: ...


class OwnFolder:
    """Files in a folder of this node."""

    name = OWN

    def __init__(self, folder: Path, files: Collection[str]) -> None:
        self.files = files
        self._files = LocalFiles(folder)

    def open(self, name: str) -> LocalFile:
        return self._files.open(name)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class OtherNode:
    """Files that a rank of another node serves."""

    name: str
    files: Collection[str]
    address: Address
    key: bytes
    folder: str
    """Which save is meant."""

    def open(self, name: str) -> RangedFile:
        return _Ranged(_Remote(self, name))

    def close(self) -> None:
        pass


class DurablePlace:
    """The checkpoint at its path.

    Args:
        open_files: Opens it when it is first needed; may raise OSError.
    """

    name = DURABLE

    def __init__(self, files: Collection[str], open_files: Callable[[], Readable]) -> None:
        self.files = files
        self._open_files = open_files
        self._files: Readable | None = None
        self._lock = threading.Lock()

    def open(self, name: str) -> RangedFile:
        with self._lock:
            if self._files is None:
                self._files = self._open_files()
        return self._files.open(name)

    def close(self) -> None:
        files, self._files = self._files, None  # a load that begins anew opens them again
        if files is not None:
            files.close()


class _Ranged(RangedFile):
    def __init__(self, raw: RawRanges) -> None:
        super().__init__(raw)
        self._raw = raw

    def read_into(self, memory: Sequence[memoryview], offset: int) -> int:
        return self._raw.read_at(memory, offset)


class _Remote(RawRanges):
    """A file on another node, over a connection of its own."""

    def __init__(self, node: OtherNode, name: str) -> None:
        super().__init__(1 << 62)
        self._node, self._name = node, name
        self._channel: Channel | None = None

    def read_at(self, memory: Sequence[memoryview], offset: int) -> int:
        try:
            if self._channel is None:
                self._channel = connect(self._node.address, self._node.key, _CONNECT_SECONDS)
                self._channel.timeout(_READ_SECONDS)
            self._channel.send((self._node.folder, self._name, offset, sum(map(len, memory))))
            code, told = self._channel.receive()
            if code:
                raise OSError(code, told, self._name)
            self._channel.receive_into(first_bytes(memory, told))
        except EOFError as error:
            self._hang_up()
            raise OSError(errno.ECONNRESET, f"{self._node.name} has closed the connection", self._name) from error
        except OSError:
            self._hang_up()
            raise
        return int(told)

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def close(self) -> None:
        self._hang_up()
        super().close()


class NearestFile(RangedFile):
    """A file of :class:`NearestFiles`."""

    def __init__(self, files: NearestFiles, name: str) -> None:
        self.name_in = name
        self._nearest = _Nearest(files, name)
        super().__init__(self._nearest)

    @property
    def place(self) -> Place | None:
        """The place that was read from last."""
        return self._nearest.place

    def read_into(self, memory: Sequence[memoryview], offset: int) -> int:
        return self._nearest.read_at(memory, offset)


class _Nearest(RawRanges):
    def __init__(self, files: NearestFiles, name: str) -> None:
        super().__init__(files.size(name))
        self._files, self._name = files, name
        self.place: Place | None = None
        self._open: RangedFile | None = None

    def read_at(self, memory: Sequence[memoryview], offset: int) -> int:
        if offset >= self._size:
            return 0
        memory = first_bytes(memory, self._size - offset)
        while True:
            place = self._files.place_of(self._name)
            try:
                if self._open is None or place is not self.place:
                    self._let_go()
                    self._open, self.place = place.open(self._name), place
                count = self._open.read_into(memory, offset)
                if count == 0:
                    raise OSError(errno.EIO, "it is shorter than it was", self._name)
            except OSError as error:
                self._let_go()
                if not self._files.give_up(self._name, place, str(error.strerror or error)):
                    raise
                continue
            self._files.count(place, count)
            return count

    def _let_go(self) -> None:
        if self._open is not None:
            with suppress(OSError):
                self._open.close()
        self._open = None

    def close(self) -> None:
        self._let_go()
        super().close()


class NearestFiles:
    """A :class:`~dcp_plugin.media.Readable` over several places.

    Args:
        where: What messages call the checkpoint.
        sizes: All its files, and their bytes.
        places: Nearest first.
        written: When it was saved, in seconds since the epoch.
        is_at_path: Whether the path has the complete checkpoint, too.
        passed_over: The first of :attr:`problems`.
    """

    streams = 0
    gap = 8 << 10

    def __init__(
        self,
        where: str,
        sizes: Mapping[str, int],
        places: Sequence[Place],
        written: float,
        is_at_path: bool,
        passed_over: Sequence[str],
    ) -> None:
        self._where, self._sizes, self._places, self._written = where, dict(sizes), list(places), written
        self._lock = threading.Lock()
        self._given_up: dict[str, list[Place]] = {}
        self.bytes_from: Counter[str] = Counter()
        """Bytes that were read, by the name of the place."""
        self.problems = list(passed_over)
        """Parts that are not believed, and places that failed, with the reason."""
        self.is_at_path = is_at_path

    @property
    def where(self) -> str:
        return self._where

    def names(self) -> list[str]:
        return sorted({name[: name.find("/") + 1] or name for name in self._sizes})

    def all_names(self) -> list[str]:
        """Every file, with ``/`` between folders."""
        return sorted(self._sizes)

    def size(self, name: str) -> int:
        if name not in self._sizes:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self._where}/{name}")
        return self._sizes[name]

    def modified(self, name: str) -> float:
        if name:
            self.size(name)
        return self._written

    def open(self, name: str) -> NearestFile:
        self.place_of(name)
        return NearestFile(self, name)

    def leads_elsewhere(self, name: str) -> bool:
        return False

    def keep(self, names: Iterable[str]) -> None:
        pass

    def moved(self) -> bool:
        return False

    def close(self) -> None:
        for place in self._places:
            place.close()

    def distrust(self, file: RangedFile) -> bool:
        if not isinstance(file, NearestFile) or file.place is None:
            return False
        return self.give_up(file.name_in, file.place, "its bytes are not those that were saved")

    def place_of(self, name: str) -> Place:
        """The nearest place that has a file and has not failed. Raises OSError if there is none left."""
        size = self.size(name)
        with self._lock:
            bad = self._given_up.get(name, [])
            for place in self._places:
                if name in place.files and place not in bad:
                    return place
        raise OSError(errno.EIO, f"no place has it ({size:,} bytes)", f"{self._where}/{name}")

    def give_up(self, name: str, place: Place, why: str) -> bool:
        """Ask a place no more for a file; whether another one is left to ask."""
        with self._lock:
            bad = self._given_up.setdefault(name, [])
            if place not in bad:
                bad.append(place)
                self.problems.append(f"{name} of {place.name}: {why}")
                logger.warning("%s: %s cannot be read from %s: %s", self._where, name, place.name, why)
            return any(name in other.files and other not in bad for other in self._places)

    def count(self, place: Place, count: int) -> None:
        with self._lock:
            self.bytes_from[place.name] += count
