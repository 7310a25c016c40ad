"""A checkpoint that was saved in place (:mod:`dcp_plugin.core.format.packed`), seen as one that was not.

Its files have the usual names of a checkpoint, in an object store and in a directory with a copy of it. Files of other
saves to the same path are hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from dcp_plugin.core.format import DAMAGED, DATA_SUFFIX, INDEX, METADATA, PACKED, SUMMARY, json_object
from dcp_plugin.core.format.packed import END, end_of, folders, has_damaged_end, time_of, token_in
from dcp_plugin.core.media.medium import Medium, RangedFile, RawRanges, Readable, ReadCost, first_bytes, scatter
from dcp_plugin.core.paths import ObjectPath, Where

_SAME_MOMENT = 60.0
"""Seconds. The index is put just before ``.metadata``; if they are further apart, they may be of different saves."""
_TAIL = 64 << 10
"""Bytes; a summary has a few kilobytes, unless the state has very many modules."""


def packed_view(files: Readable, names: Collection[str]) -> Readable:
    """Return the files of a checkpoint under their usual names, see :func:`dcp_plugin.core.media.places.unpacked`.

    Args:
        names: The names that the files have.
    """
    tokens = folders(names)
    if METADATA not in names or not tokens:
        return files
    tail = last_bytes(files, _TAIL)
    end = end_of(tail)
    if end is None or end[0] not in tokens:
        if not has_damaged_end(tail):  # another tool has saved there
            return files
        end = max(tokens), 0  # without a summary, whose reader raises CheckpointCorrupt
    token, length = end
    if length + END > len(tail):
        tail = last_bytes(files, length + END)
    return PackedFiles(files, token, tail, length)


def last_bytes(files: Readable, count: int) -> bytes:
    """Return the last bytes of ``.metadata``."""
    size = files.size(METADATA)
    count = min(count, size)
    memory = bytearray(count)
    with files.open(METADATA) as file:
        return bytes(memory[: file.fill([memoryview(memory)], size - count)])


def time_from_names(path: Where, medium: Medium) -> float | None:
    """Return the time at which a checkpoint in a store was saved, if the names of its files are proof of it."""
    if not isinstance(path, ObjectPath):
        return None
    files = medium.open(path)
    try:
        names = files.names()
        saves = folders(names)
        if METADATA in names and not {DAMAGED, SUMMARY} & set(names) and len(saves) == 1:
            (token,) = saves
            apart = files.modified(METADATA) - files.modified(f"{PACKED}{token}/{INDEX}")
            return time_of(token) if abs(apart) <= _SAME_MOMENT else None
    except FileNotFoundError:
        pass
    return None


class PackedFiles(Readable):
    """The view of ``files``. ``tail`` is the end of ``.metadata``, with the summary in it."""

    def __init__(self, files: Readable, token: str, tail: bytes, length: int) -> None:
        self.files = files
        self.token = token
        self._folder = f"{PACKED}{token}/"
        self._summary = tail[len(tail) - END - length : len(tail) - END]
        self._before = tail[: len(tail) - END - length]
        self._metadata_size = files.size(METADATA) - END - length
        self._extra_files = _extra_files(self._summary)

    def _located(self, name: str) -> str:
        if name == SUMMARY:
            return METADATA
        return self._folder + name if self._is_in_folder(name) else name

    @property
    def where(self) -> str:
        return self.files.where

    @property
    def cost(self) -> ReadCost:
        return self.files.cost

    def modified(self, name: str) -> float:
        return self.files.modified(self._located(name))

    def leads_elsewhere(self, name: str) -> bool:
        return self.files.leads_elsewhere(self._located(name))

    def pin(self, names: Iterable[str]) -> None:
        self.files.pin(map(self._located, names))

    def moved(self) -> bool:
        return self.files.moved()

    def close(self) -> None:
        self.files.close()

    def _is_in_folder(self, name: str) -> bool:
        return name == INDEX or name.partition("/")[0] in self._extra_files

    def names(self) -> list[str]:
        names = [name for name in self.files.names() if not self._is_of_another(name)]
        return sorted({*names, SUMMARY, INDEX, *self._extra_files})

    def _is_of_another(self, name: str) -> bool:
        of_a_save = name.startswith(PACKED) or (name.endswith(DATA_SUFFIX) and token_in(name) not in ("", self.token))
        return of_a_save or name == SUMMARY

    def tree(self, names: Collection[str]) -> list[str]:
        """Return the usual names of all files of the checkpoint, given the names below its directory."""
        inside = (name.removeprefix(self._folder) for name in names if name.startswith(self._folder))
        moved = filter(self._is_in_folder, inside)
        return sorted({*moved, *(name for name in names if not self._is_of_another(name)), SUMMARY})

    def size(self, name: str) -> int:
        if name == SUMMARY:
            return len(self._summary)
        return self._metadata_size if name == METADATA else self.files.size(self._located(name))

    def open(self, name: str) -> RangedFile:
        if name == SUMMARY:
            return RangedFile(_KnownEnd(None, 0, self._summary))
        if name == METADATA:
            begin = self._metadata_size - len(self._before)
            return RangedFile(_KnownEnd(self.files.open(METADATA), begin, self._before))
        return self.files.open(self._located(name))


def _extra_files(summary: bytes) -> frozenset[str]:
    """Return the extra files of a summary; none of a damaged one, whose decoder raises CheckpointCorrupt."""
    try:
        names = json_object(summary)["attached"]
        return frozenset(name for name in names if isinstance(name, str) and "/" not in name and name.strip("."))
    except (ValueError, LookupError, TypeError):
        return frozenset()


class _KnownEnd(RawRanges):
    """The first bytes of a file, of which the last are known."""

    def __init__(self, file: RangedFile | None, begin: int, end: bytes) -> None:
        super().__init__(begin + len(end))
        self._file, self._begin, self._end = file, begin, end

    def read_at(self, memory: Sequence[memoryview], offset: int) -> int:
        if offset >= self._begin:
            return scatter([memoryview(self._end)[offset - self._begin :]], memory)
        assert self._file is not None, "there is nothing before what is known"
        return self._file.read_into(first_bytes(memory, self._begin - offset), offset)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()
