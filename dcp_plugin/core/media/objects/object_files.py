"""Files of a checkpoint in a store, read while other processes publish, replace and delete checkpoints.

A single listing returns the objects, their sizes and their tags. Each later read requires the listed tag, so a read
never returns bytes of an object that has replaced the listed one. Small reads pass through a cache, because readers of
other tools' files read the same few ranges several times.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from dcp_plugin.core.format import METADATA
from dcp_plugin.core.format.summary import fingerprint
from dcp_plugin.core.media.medium import RangedFile, RawRanges, Readable, ReadCost, first_bytes
from dcp_plugin.core.media.objects.client import GAP, PART, STREAMS, Changed, Client, ObjectInfo, key_of
from dcp_plugin.core.paths import ObjectPath

_A_PAGE = 1000
"""Keys that a store lists in one answer."""
_BLOCK = 64 << 10
"""Bytes of a request for a small read, if the object is larger than :data:`GAP`. A smaller object is one request."""
_MOST_CACHED = 32 << 20


class _Cache:
    """Most recently used blocks of the objects below a prefix, by key, tag and number."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._blocks: OrderedDict[tuple[str, str, int], bytes] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def read(self, info: ObjectInfo, offset: int) -> memoryview:
        """Return at least one byte from ``offset`` on."""
        size = info.size if info.size <= GAP else _BLOCK
        number = offset // size
        if (data := self._known(info, number)) is None:
            in_turn = number > 0 and self._known(info, number - 1) is not None
            blocks = self._fetched(info, number, size, GAP // size if in_turn else 1)
            data = blocks[0]
        return memoryview(data)[offset - number * size :]

    def fetch(self, info: ObjectInfo, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch these ranges of an object at the same time."""
        size = info.size if info.size <= GAP else _BLOCK
        wanted = {number for begin, end in ranges for number in range(begin // size, -(-end // size))}
        lacking = sorted(number for number in wanted if self._known(info, number) is None)[: _MOST_CACHED // size]
        if lacking:
            with ThreadPoolExecutor(min(STREAMS, len(lacking)), thread_name_prefix="dcp-look") as pool:
                list(pool.map(lambda number: self._fetched(info, number, size, 1), lacking))

    def _known(self, info: ObjectInfo, number: int) -> bytes | None:
        with self._lock:
            place = info.key, info.tag, number
            if place in self._blocks:
                self._blocks.move_to_end(place)
            return self._blocks.get(place)

    def _fetched(self, info: ObjectInfo, number: int, size: int, count: int) -> list[bytes]:
        memory = bytearray(min(count * size, info.size - number * size))
        got = self._client.read(info.key, number * size, [memoryview(memory)], info.tag)
        if got < len(memory):
            raise OSError(errno.EIO, "the store has sent fewer bytes than there are", info.key)
        blocks = [bytes(memory[at : at + size]) for at in range(0, len(memory), size)]
        with self._lock:
            for place, block in enumerate(blocks, number):
                if (info.key, info.tag, place) not in self._blocks:
                    self._blocks[info.key, info.tag, place] = block
                    self._size += len(block)
            while self._size > _MOST_CACHED:
                self._size -= len(self._blocks.popitem(last=False)[1])
        return blocks


class _Object(RawRanges):
    """Object that is read by ranges."""

    def __init__(self, client: Client, cache: _Cache, info: ObjectInfo, where: str) -> None:
        super().__init__(info.size)
        self._client, self._cache, self._info, self._where = client, cache, info, where

    def readinto(self, memory: memoryview) -> int:  # type: ignore[override]
        memory = memoryview(memory).cast("B")
        if self._at >= self._info.size:
            return 0
        if len(memory) > _BLOCK and self._info.size > GAP:
            count = self.read_at([memory], self._at)
        else:
            with self._unless_replaced():
                data = self._cache.read(self._info, self._at)
            count = min(len(data), len(memory))
            memory[:count] = data[:count]
        self._at += count
        return count

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        with self._unless_replaced():
            self._cache.fetch(self._info, ranges)

    def read_at(self, memory: Sequence[memoryview], offset: int) -> int:
        rest_size = self._info.size - offset
        if rest_size <= 0:
            return 0
        with self._unless_replaced():
            return self._client.read(self._info.key, offset, first_bytes(memory, rest_size), self._info.tag)

    @contextmanager
    def _unless_replaced(self) -> Iterator[None]:
        try:
            yield
        except Changed:
            raise FileNotFoundError(errno.ENOENT, "another save has replaced the object", self._where) from None


class ObjectFiles(Readable):
    """Objects below a prefix, without a listing. The first use of an object determines its tag.

    No file needs a pin: a save that replaces a checkpoint keeps the old objects, and the next save deletes them.
    """

    cost = ReadCost(STREAMS, GAP, most=PART, hosts=1)

    def __init__(self, client: Client, path: ObjectPath) -> None:
        self._client, self.path = client, path
        self._cache = _Cache(client)
        self._known: dict[str, ObjectInfo] = {}

    @property
    def where(self) -> str:
        return str(self.path)

    def _find(self, name: str) -> ObjectInfo:
        if name not in self._known:
            item = self._client.head(key_of(self.path, name))
            if item is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.path}/{name}")
            self._known[name] = item
        return self._known[name]

    def names(self) -> list[str]:
        objects, folders = self._client.directly_below(self.path.key)
        names = [item.key.rpartition("/")[2] for item in objects if not item.key.endswith("/")]
        names += [f"{folder.rstrip('/').rpartition('/')[2]}/" for folder in folders]
        if not names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        return sorted(names)

    def size(self, name: str) -> int:
        return self._find(name).size

    def modified(self, name: str) -> float:
        return self._find(name).modified

    def version(self, names: Iterable[str]) -> str:
        return fingerprint(repr([(name, self.size(name), self.modified(name)) for name in sorted(names)]).encode())

    def open(self, name: str) -> RangedFile:
        item = self._find(name)
        ranges = _Object(self._client, self._cache, item, f"{self.path}/{name}")
        return RangedFile(ranges, item.tag, max(1, min(_BLOCK, item.size)))


class ListedFiles(ObjectFiles):
    """Objects of one listing of a prefix.

    Args:
        listed: The objects, by their names below the prefix; :meth:`moved` then makes no request. None: the first use
            lists them.
    """

    def __init__(self, client: Client, path: ObjectPath, listed: Mapping[str, ObjectInfo] | None = None) -> None:
        super().__init__(client, path)
        self._listed = listed
        self._is_given = listed is not None
        self._too_many = False

    def _all(self) -> Mapping[str, ObjectInfo]:
        if self._listed is None:
            start = key_of(self.path, "")
            listed: dict[str, ObjectInfo] = {}
            for item in self._client.below(self.path.key):
                if not item.key.endswith("/"):
                    listed[item.key.removeprefix(start)] = item
                # Keys are sorted, and this key precedes all others of a checkpoint.
                self._too_many = len(listed) >= _A_PAGE and METADATA not in listed
                if self._too_many:  # this may be a whole bucket
                    objects, _ = self._client.directly_below(self.path.key)
                    listed = {item.key.removeprefix(start): item for item in objects}
                    break
            self._listed = listed
        return self._listed

    def _find(self, name: str) -> ObjectInfo:
        listed = self._all()
        if name in listed:
            return listed[name]
        if self._too_many:
            return super()._find(name)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.path}/{name}")

    def names(self) -> list[str]:
        listed = self._all()
        if self._too_many:
            return super().names()
        if not listed:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        return sorted({name[: name.find("/") + 1] or name for name in listed})

    def modified(self, name: str) -> float:
        if not name:
            return max((item.modified for item in self._all().values()), default=0.0)
        return super().modified(name)

    def moved(self) -> bool:
        if self._is_given:
            return False
        try:
            before, now = self._all().get(METADATA), self._client.head(key_of(self.path, METADATA))
        except OSError:  # the state is unknown, and the caller already has an error
            return False
        return (before.tag if before else None) != (now.tag if now else None)
