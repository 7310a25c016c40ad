"""Cache of small reads of objects: readers of other tools' files read the same few ranges several times."""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from dcp_plugin.media.objects.client import GAP, STREAMS, Client, Found

BLOCK = 64 << 10
"""Bytes that a small read asks for, of an object that is larger than :data:`GAP`: others are read whole."""
_MOST_CACHED = 32 << 20


class Cache:
    """Blocks of the objects below a prefix, by key, tag and number; the most recently used ones."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._blocks: OrderedDict[tuple[str, str, int], bytes] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def read(self, found: Found, offset: int) -> memoryview:
        """Return bytes from ``offset`` on, at least one."""
        size = found.size if found.size <= GAP else BLOCK
        number = offset // size
        if (data := self._known(found, number)) is None:
            in_turn = number > 0 and self._known(found, number - 1) is not None
            blocks = self._fetched(found, number, size, GAP // size if in_turn else 1)
            data = blocks[0]
        return memoryview(data)[offset - number * size :]

    def fetch(self, found: Found, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch these ranges of an object at the same time."""
        size = found.size if found.size <= GAP else BLOCK
        wanted = {number for begin, end in ranges for number in range(begin // size, -(-end // size))}
        lacking = sorted(number for number in wanted if self._known(found, number) is None)[: _MOST_CACHED // size]
        if lacking:
            with ThreadPoolExecutor(min(STREAMS, len(lacking)), thread_name_prefix="dcp-look") as pool:
                list(pool.map(lambda number: self._fetched(found, number, size, 1), lacking))

    def _known(self, found: Found, number: int) -> bytes | None:
        with self._lock:
            place = found.key, found.tag, number
            if place in self._blocks:
                self._blocks.move_to_end(place)
            return self._blocks.get(place)

    def _fetched(self, found: Found, number: int, size: int, count: int) -> list[bytes]:
        memory = bytearray(min(count * size, found.size - number * size))
        got = self._client.read(found.key, number * size, [memoryview(memory)], found.tag)
        if got < len(memory):
            raise OSError(errno.EIO, "the store has sent fewer bytes than there are", found.key)
        blocks = [bytes(memory[at : at + size]) for at in range(0, len(memory), size)]
        with self._lock:
            for place, block in enumerate(blocks, number):
                if (found.key, found.tag, place) not in self._blocks:
                    self._blocks[found.key, found.tag, place] = block
                    self._size += len(block)
            while self._size > _MOST_CACHED:
                self._size -= len(self._blocks.popitem(last=False)[1])
        return blocks
