"""The item table of a checkpoint: which key is where, in which file, with which checksums.

In memory it is a set of numpy columns, on disk the same columns in a safetensors file (no pickle). A million items
open by mapping arrays; an entry becomes a Python object only when somebody asks for its key.

The columns, for K keys, C chunks (each key's chunks are neighbours) and B blocks:

======================  ========  =====================================================================
``keys``, ``key_ends``  K         UTF-8 text of all keys, and where each ends
``dtype``, ``ndim``     K         index into the dtype names (255: a value that is no tensor), dimensions
``shape``               ragged    global shape, ``ndim`` numbers per key
``chunk_ends``          K         running number of chunks
``box``                 ragged    per chunk ``ndim`` offsets, then ``ndim`` sizes
``file``                C         index into the files
``place``               C x 4     offset and length of the item in its file; payload's offset and length in the item
``frame_crc``           C         CRC32 of the item without its payload
``block_ends``          C         running number of checksum blocks
``block_crc``           B         running CRC32 of the payload at the end of each block
======================  ========  =====================================================================

Blocks are described in :mod:`~dcp_plugin.storage.checksums`; their size follows from the payload's length.

Two items may be the same bytes (tied weights, equal values): then all their columns agree. Any other overlap, and
anything outside a file, is refused by :meth:`CheckpointIndex.validate` before a byte is used.
"""

from __future__ import annotations

import functools
import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as save_columns

from dcp_plugin.errors import CheckpointCorrupt
from dcp_plugin.storage.checksums import LARGEST_BLOCK, SMALLEST_BLOCK, block_counts
from dcp_plugin.types import KeyPath, Shape

FORMAT_VERSION = 1
_NO_TENSOR = 255


@dataclass(frozen=True)
class Location:
    """Where an item is: ``length`` bytes at ``offset`` of ``file``, with the payload inside of them.

    ``checksums`` are the running CRC32 at the end of each block of the payload; None if nobody computed them.
    ``payload_offset`` is None for an item of unknown layout (a stock checkpoint): read it through ``torch.load``.
    """

    file: str
    offset: int
    length: int
    payload_offset: int | None
    payload_length: int
    frame_crc: int = 0
    checksums: np.ndarray[Any, np.dtype[np.uint32]] | None = None


@dataclass(frozen=True)
class StoredChunk:
    """A box of a stored tensor and the item that holds it."""

    offsets: Shape
    sizes: Shape
    location: Location


@dataclass(frozen=True)
class StoredTensor:
    dtype: torch.dtype
    shape: Shape
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True)
class StoredValue:
    """A value that is no tensor: ``torch.save`` bytes."""

    location: Location


Entry = StoredTensor | StoredValue


class CheckpointIndex(Mapping[str, Entry]):
    """All entries of a checkpoint by key, in the order in which they were saved."""

    def __init__(
        self,
        columns: dict[str, np.ndarray[Any, Any]],
        files: dict[str, int],
        dtypes: list[str],
        paths: dict[str, KeyPath],
        smallest_block: int = SMALLEST_BLOCK,
    ) -> None:
        self.columns = columns
        self.files = files
        """Data files and their sizes in bytes."""
        self.transforms: dict[tuple[str, int], tuple[str, ...]] = {}
        """By file and offset, what torch must undo to read an item. Only stock checkpoints have such items."""
        self.smallest_block = smallest_block
        self._file_names = list(files)
        self._dtypes = dtypes
        self._paths = paths
        self._entries: dict[str, Entry] = {}
        self._slots = {key: i for i, key in enumerate(_split_keys(columns["keys"], columns["key_ends"]))}
        ndim = columns["ndim"].astype(np.int64)
        chunk_ends = columns["chunk_ends"]
        self._shape_starts = np.concatenate(([0], np.cumsum(ndim)))
        self._chunk_starts = np.concatenate(([0], chunk_ends))
        self._box_starts = np.concatenate(([0], np.cumsum(2 * ndim * np.diff(self._chunk_starts))))
        self._block_starts = np.concatenate(([0], columns["block_ends"]))

    def __getitem__(self, key: str) -> Entry:
        if key not in self._entries:
            self._entries[key] = self._entry(self._slots[key])
        return self._entries[key]

    def _entry(self, slot: int) -> Entry:
        first, last = int(self._chunk_starts[slot]), int(self._chunk_starts[slot + 1])
        if self.columns["dtype"][slot] == _NO_TENSOR:
            return StoredValue(self._location(first))
        ndim = int(self.columns["ndim"][slot])
        shape = self.columns["shape"][self._shape_starts[slot] : self._shape_starts[slot + 1]]
        boxes = self.columns["box"][self._box_starts[slot] : self._box_starts[slot + 1]].reshape(last - first, 2, ndim)
        chunks = tuple(
            StoredChunk(tuple(box[0].tolist()), tuple(box[1].tolist()), self._location(chunk))
            for chunk, box in zip(range(first, last), boxes, strict=True)
        )
        return StoredTensor(_dtype(self._dtypes[self.columns["dtype"][slot]]), tuple(shape.tolist()), chunks)

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def under(self, prefix: str) -> list[str]:
        """The keys that start with ``prefix``, in the order of the index."""
        first = bisect_left(self._sorted, prefix)
        last = bisect_left(self._sorted, prefix[:-1] + chr(ord(prefix[-1]) + 1), lo=first)
        return sorted(self._sorted[first:last], key=self._slots.__getitem__)

    @functools.cached_property
    def _sorted(self) -> list[str]:
        return sorted(self._slots)

    def path_of(self, key: str) -> KeyPath:
        """Where the key sits in the nested state: its first segment and the rest, unless stored otherwise."""
        return self._paths.get(key) or default_path(key)

    @property
    def payload_bytes(self) -> int:
        """Payload bytes, those that several keys share counted once."""
        place = np.concatenate((self.columns["file"][:, None], self.columns["place"]), axis=1)
        return int(np.unique(place, axis=0)[:, 4].sum()) if len(place) else 0

    def _location(self, chunk: int) -> Location:
        offset, length, payload_offset, payload_length = self.columns["place"][chunk].tolist()
        blocks = self.columns["block_crc"][self._block_starts[chunk] : self._block_starts[chunk + 1]]
        checked = len(blocks) > 0 or (payload_length == 0 and payload_offset >= 0)
        return Location(
            self._file_names[self.columns["file"][chunk]],
            offset,
            length,
            payload_offset if payload_offset >= 0 else None,
            payload_length,
            int(self.columns["frame_crc"][chunk]),
            blocks if checked else None,
        )

    @classmethod
    def build(
        cls, entries: Iterable[tuple[str, Entry]], files: dict[str, int], paths: Mapping[str, KeyPath] | None = None
    ) -> CheckpointIndex:
        """The index of these entries. ``paths`` may name all keys; those that follow the default are not stored."""
        keys, dtype_names, dtype, ndim, shape, chunk_ends, box = [], {}, [], [], [], [], []  # type: ignore[var-annotated]
        locations: list[Location] = []
        for key, entry in entries:
            keys.append(key.encode())
            if isinstance(entry, StoredValue):
                dtype.append(_NO_TENSOR)
                ndim.append(0)
                locations.append(entry.location)
            else:
                dtype.append(dtype_names.setdefault(str(entry.dtype).removeprefix("torch."), len(dtype_names)))
                ndim.append(len(entry.shape))
                shape.extend(entry.shape)
                for chunk in entry.chunks:
                    box.extend((*chunk.offsets, *chunk.sizes))
                    locations.append(chunk.location)
            chunk_ends.append(len(locations))
        file_ids = {name: i for i, name in enumerate(files)}
        blocks = [where.checksums if where.checksums is not None else np.empty(0, np.uint32) for where in locations]
        place = [
            (w.offset, w.length, -1 if w.payload_offset is None else w.payload_offset, w.payload_length)
            for w in locations
        ]
        columns: dict[str, np.ndarray[Any, Any]] = {
            "keys": np.frombuffer(b"".join(keys), np.uint8),
            "key_ends": np.cumsum([len(key) for key in keys], dtype=np.int64),
            "dtype": np.array(dtype, np.uint8),
            "ndim": np.array(ndim, np.uint8),
            "shape": np.array(shape, np.int64),
            "chunk_ends": np.array(chunk_ends, np.int64),
            "box": np.array(box, np.int64),
            "file": np.array([file_ids[where.file] for where in locations], np.int32),
            "place": np.array(place, np.int64).reshape(-1, 4),
            "frame_crc": np.array([where.frame_crc for where in locations], np.uint32),
            "block_ends": np.cumsum([len(crcs) for crcs in blocks], dtype=np.int64),
            "block_crc": np.concatenate([*blocks, np.empty(0, np.uint32)]),
        }
        unusual = {key: path for key, path in (paths or {}).items() if path != default_path(key)}
        return cls(columns, files, list(dtype_names), unusual)

    def encode(self) -> bytes:
        about = {
            "format": "dcp_plugin",
            "format_version": str(FORMAT_VERSION),
            "smallest_block": str(self.smallest_block),
            "dtypes": json.dumps(self._dtypes),
            "files": json.dumps(self.files),
            "paths": json.dumps({key: _path_to_json(path) for key, path in self._paths.items()}),
        }
        return save_columns(self.columns, metadata=about)

    @classmethod
    def read(cls, path: Path) -> CheckpointIndex:
        """Open an index file and validate it against the data files beside it.

        Raises:
            CheckpointCorrupt: It is not an index, contradicts itself or the sizes of the data files.
        """
        try:
            with safe_open(str(path), framework="numpy") as file:
                about = file.metadata() or {}
                if about.get("format") != "dcp_plugin" or int(about["format_version"]) > FORMAT_VERSION:
                    raise CheckpointCorrupt(
                        f"{path} is of format {about.get('format')!r} version {about.get('format_version')}; this "
                        f"version reads dcp_plugin up to {FORMAT_VERSION}. Upgrade dcp_plugin, or delete the file and "
                        f"dcp_plugin.json to read the checkpoint as a stock one."
                    )
                columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            index = cls._checked(path, columns, about)
        except (SafetensorError, KeyError, ValueError, TypeError, IndexError, OverflowError) as error:
            raise CheckpointCorrupt(f"{path} is damaged: {error!r}") from error
        index.validate(path.parent)
        return index

    @classmethod
    def _checked(cls, path: Path, columns: dict[str, np.ndarray[Any, Any]], about: dict[str, str]) -> CheckpointIndex:
        expected = {
            "keys": np.uint8, "key_ends": np.int64, "dtype": np.uint8, "ndim": np.uint8, "shape": np.int64,
            "chunk_ends": np.int64, "box": np.int64, "file": np.int32, "place": np.int64, "frame_crc": np.uint32,
            "block_ends": np.int64, "block_crc": np.uint32,
        }  # fmt: skip
        for name, dtype in expected.items():
            if columns[name].dtype != dtype:
                raise ValueError(f"column {name} is {columns[name].dtype}")
        count, chunks = len(columns["key_ends"]), len(columns["file"])
        ends = (("key_ends", "keys"), ("chunk_ends", "file"), ("block_ends", "block_crc"))
        for name, counted in ends:
            _check_ends(name, columns[name], len(columns[counted]))
        if not (len(columns["dtype"]) == len(columns["ndim"]) == len(columns["chunk_ends"]) == count):
            raise ValueError("columns of keys differ in length")
        if columns["place"].shape != (chunks, 4) or not (
            len(columns["frame_crc"]) == len(columns["block_ends"]) == chunks
        ):
            raise ValueError("columns of chunks differ in length")
        dtypes = json.loads(about["dtypes"])
        for name in dtypes:
            _dtype(name)
        files = {str(name): int(size) for name, size in json.loads(about["files"]).items()}
        paths = {key: _path_from_json(value) for key, value in json.loads(about["paths"]).items()}
        smallest_block = int(about["smallest_block"])
        if not 4096 <= smallest_block <= LARGEST_BLOCK or smallest_block & (smallest_block - 1):
            raise ValueError(f"block size {smallest_block}")
        index = cls(columns, files, dtypes, paths, smallest_block)
        if len(index) != count:
            raise ValueError("a key occurs twice")
        if index._shape_starts[-1] != len(columns["shape"]) or index._box_starts[-1] != len(columns["box"]):
            raise ValueError("shapes and boxes do not fit the dimensions")
        return index

    def validate(self, directory: Path) -> None:
        """Check every item against the real files: sizes, bounds, overlaps, boxes inside their tensors.

        Raises:
            CheckpointCorrupt: Naming file and key.
        """
        self._validate_files(directory)
        place, file = self.columns["place"], self.columns["file"]
        if len(file) == 0:
            return
        if file.min() < 0 or file.max() >= len(self._file_names):
            raise CheckpointCorrupt(f"{directory}: an item is in a file that the index does not list")
        sizes = np.array(list(self.files.values()), np.int64)[file]
        offset, length, payload_offset, payload_length = place.T
        known = payload_offset >= 0
        bad = (offset < 0) | (length < 0) | (offset > sizes - length) | (payload_length < 0)
        bad |= known & (payload_offset > length - payload_length)
        if bad.any():
            self._fail(directory, int(np.argmax(bad)), "lies outside its file or item")
        self._validate_overlaps(directory)
        self._validate_boxes(directory, known)
        blocks = np.diff(self._block_starts)
        bad = (blocks > 0) & (blocks != block_counts(payload_length, self.smallest_block))
        if bad.any():
            self._fail(directory, int(np.argmax(bad)), "has a wrong number of checksums")

    def _validate_files(self, directory: Path) -> None:
        for name, size in self.files.items():
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name:
                raise CheckpointCorrupt(f"{directory}: the index names {name!r}, which leaves the checkpoint")
            if (directory / name).resolve().parent != directory.resolve() / PurePosixPath(name).parent:
                raise CheckpointCorrupt(f"{directory}: {name} is a link that leaves the checkpoint")
            try:
                found = (directory / name).stat().st_size
            except OSError as error:
                raise CheckpointCorrupt(f"{directory}: data file {name} is missing ({error.strerror})") from error
            if found < size:
                raise CheckpointCorrupt(f"{directory}: {name} is truncated: {found} of {size} bytes")

    def _validate_overlaps(self, directory: Path) -> None:
        items = np.concatenate((self.columns["file"][:, None], self.columns["place"]), axis=1).astype(np.int64)
        distinct, chunk = np.unique(items, axis=0, return_index=True)  # sorted by file, offset; aliases fall together
        ends = distinct[:, 1] + distinct[:, 2]
        bad = (distinct[1:, 0] == distinct[:-1, 0]) & (distinct[1:, 1] < ends[:-1])
        if bad.any():
            self._fail(directory, int(chunk[1:][np.argmax(bad)]), "overlaps another item")

    def _validate_boxes(self, directory: Path, known: np.ndarray[Any, Any]) -> None:
        for slot, key in enumerate(self._slots):
            first, last = int(self._chunk_starts[slot]), int(self._chunk_starts[slot + 1])
            if self.columns["dtype"][slot] == _NO_TENSOR:
                if last - first != 1:
                    raise CheckpointCorrupt(f"{directory}: {key} is a value with {last - first} items")
                continue
            shape = self.columns["shape"][self._shape_starts[slot] : self._shape_starts[slot + 1]]
            boxes = self.columns["box"][self._box_starts[slot] : self._box_starts[slot + 1]]
            boxes = boxes.reshape(last - first, 2, len(shape))
            offsets, sizes = boxes[:, 0], boxes[:, 1]
            if (shape < 0).any() or (offsets < 0).any() or (sizes < 0).any() or (offsets + sizes > shape).any():
                raise CheckpointCorrupt(f"{directory}: a chunk of {key} lies outside its shape {tuple(shape)}")
            volumes = sizes.prod(axis=1)
            if volumes.sum() != shape.prod():
                raise CheckpointCorrupt(f"{directory}: the chunks of {key} do not add up to its shape {tuple(shape)}")
            itemsize = _dtype(self._dtypes[self.columns["dtype"][slot]]).itemsize
            wrong = known[first:last] & (self.columns["place"][first:last, 3] != volumes * itemsize)
            if wrong.any():
                raise CheckpointCorrupt(f"{directory}: an item of {key} has the wrong size for its shape")

    def _fail(self, directory: Path, chunk: int, what: str) -> None:
        key = list(self._slots)[int(np.searchsorted(self.columns["chunk_ends"], chunk, side="right"))]
        raise CheckpointCorrupt(f"{directory}: {key} in {self._location(chunk).file} {what}")


def default_path(key: str) -> KeyPath:
    first, dot, rest = key.partition(".")
    return (first, rest) if dot else (first,)


def _split_keys(text: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> Iterator[str]:
    data = text.tobytes()
    start = 0
    for end in ends.tolist():
        yield data[start:end].decode()
        start = end


def _check_ends(name: str, ends: np.ndarray[Any, Any], total: int) -> None:
    counts = np.diff(ends, prepend=0)
    if (counts < 0).any() or counts.sum() != total:
        raise ValueError(f"column {name} does not count up to {total}")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}: this torch is too old for the checkpoint, or the index is damaged")
    return dtype


def _path_to_json(path: KeyPath) -> list[Any]:
    return [list(part) if isinstance(part, tuple) else part for part in path]


def _path_from_json(parts: Any) -> KeyPath:
    path = tuple(tuple(part) if isinstance(part, list) else part for part in parts)
    for part in path:
        known = isinstance(part, (str, int)) or (
            isinstance(part, tuple)
            and len(part) == 2
            and part[0] in ("t", "k")
            and isinstance(part[1], (int, float, bool, str))
        )
        if not known:
            raise ValueError(f"key path {parts!r}")
    return path
