"""The file of the index: numpy columns in the safetensors format, without pickle, validated when they are read.

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
``hashed``, ``hash``    H, H x 2  optional: the chunks whose XXH3-128 is known, and these
``left_out``            text      optional: a JSON object of the keys left out -> the key in the base
``empty``               text      optional: a JSON list of the keys of empty mappings
``planner_data``        bytes     optional: what a planner made its own, as ``torch.save`` has it (weights only)
======================  ========  =====================================================================

:func:`validate` refuses items outside of files or over each other, and boxes that do not make up their tensors. Its
checks are over full columns, so a million items take a fraction of a second. It does not look at the data files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_columns
from safetensors.numpy import save as save_columns

from dcp_plugin.errors import CheckpointCorrupt
from dcp_plugin.format import values
from dcp_plugin.format.checksums import LARGEST_BLOCK, block_counts
from dcp_plugin.format.columns import NO_TENSOR, Column, Table, dtype_named, partitioned
from dcp_plugin.types import KeyPath

FORMAT_VERSION = 2


@dataclass(frozen=True)
class IndexFile:
    """What the file says. Whether the items fit the data files is for the index to check."""

    table: Table
    columns: dict[str, Column]
    files: dict[str, int]
    smallest_block: int
    left_out: dict[str, str]
    empty: Collection[str] = ()
    planner_data: tuple[Any, ...] = ()

    def encode(self) -> bytes:
        about = {
            "format": "dcp_plugin",
            "format_version": str(FORMAT_VERSION),
            "smallest_block": str(self.smallest_block),
            "dtypes": json.dumps(self.table.dtypes),
            "files": json.dumps(self.files),
            "paths": json.dumps({key: path_to_json(path) for key, path in self.table.paths.items()}),
        }
        more: dict[str, bytes] = {}
        if self.left_out:
            more["left_out"] = json.dumps(self.left_out).encode()
        if self.empty:
            more["empty"] = json.dumps(list(self.empty)).encode()
        if self.planner_data:
            more["planner_data"] = values.encode(self.planner_data[0])
        columns = {name: np.frombuffer(data, np.uint8) for name, data in more.items()}
        return save_columns({**self.columns, **columns}, metadata=about)

    @classmethod
    def decode(cls, data: bytes, sha256: str, where: str) -> IndexFile:
        """What the file says that has this fingerprint, if its columns fit each other.

        Args:
            where: What messages call the file.

        Raises:
            CheckpointCorrupt: It is another file, no index, or its columns contradict each other.
        """
        if hashlib.sha256(data).hexdigest() != sha256:
            raise CheckpointCorrupt(f"{where} is not the index that was saved (its SHA-256 differs)")
        try:
            columns = load_columns(data)  # validates the header
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            about = header.get("__metadata__", {})
            if about.get("format") != "dcp_plugin" or int(about["format_version"]) != FORMAT_VERSION:
                raise CheckpointCorrupt(
                    f"{where} is of format {about.get('format')!r} version {about.get('format_version')}; this version "
                    f"of dcp_plugin reads version {FORMAT_VERSION}. Upgrade dcp_plugin if it is older, or delete the "
                    f"file and dcp_plugin.json to read the checkpoint as a stock one."
                )
            return cls._checked(columns, about)
        except (
            SafetensorError, KeyError, ValueError, TypeError, IndexError, OverflowError, AttributeError,
            RecursionError,
        ) as error:  # fmt: skip
            raise CheckpointCorrupt(f"{where} is damaged: {error!r}") from error

    @classmethod
    def _checked(cls, columns: dict[str, Column], about: dict[str, str]) -> IndexFile:
        expected = {
            "keys": np.uint8, "key_ends": np.int64, "dtype": np.uint8, "ndim": np.uint8, "shape": np.int64,
            "chunk_ends": np.int64, "box": np.int64, "file": np.int32, "place": np.int64, "frame_crc": np.uint32,
            "block_ends": np.int64, "block_crc": np.uint32,
        }  # fmt: skip
        for name, dtype in expected.items():
            if columns[name].dtype != dtype or columns[name].ndim != (2 if name == "place" else 1):
                raise ValueError(f"column {name} is {columns[name].dtype}, {columns[name].ndim}-dimensional")
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
            dtype_named(name)
        if "hashed" in columns:
            _check_hashes(columns["hashed"], columns["hash"], chunks)
        if (columns["dtype"][columns["dtype"] != NO_TENSOR] >= len(dtypes)).any():
            raise ValueError("a key has a dtype that is not listed")
        files = {str(name): int(size) for name, size in json.loads(about["files"]).items()}
        paths = {key: _path_from_json(value) for key, value in json.loads(about["paths"]).items()}
        smallest_block = int(about["smallest_block"])
        if not 4096 <= smallest_block <= LARGEST_BLOCK or smallest_block & (smallest_block - 1):
            raise ValueError(f"block size {smallest_block}")
        table = Table(_split_keys(columns["keys"], columns["key_ends"]), dtypes, paths, columns)
        if len(table.slots) != count:
            raise ValueError("a key occurs twice")
        left_out: dict[str, str] = {}
        if "left_out" in columns:
            listed = json.loads(columns["left_out"].tobytes())
            left_out = {str(key): str(there) for key, there in listed.items() if key not in table.slots}
            if len(left_out) != len(listed):
                raise ValueError("a key is both stored and left out")
        if table.shape_starts[-1] != len(columns["shape"]) or table.box_starts[-1] != len(columns["box"]):
            raise ValueError("shapes and boxes do not fit the dimensions")
        empty = [str(key) for key in json.loads(columns["empty"].tobytes())] if "empty" in columns else ()
        planner_data: tuple[Any, ...] = ()
        if "planner_data" in columns:
            planner_data = (values.decode("planner_data", columns["planner_data"].tobytes()),)
        return cls(table, columns, files, smallest_block, left_out, empty, planner_data)


def _split_keys(text: Column, ends: Column) -> list[str]:
    data = text.tobytes()
    decoded = data.decode()
    spans = zip([0, *ends.tolist()], ends.tolist(), strict=False)
    if len(decoded) == len(data):  # ASCII: characters are bytes
        return [decoded[start:end] for start, end in spans]
    return [data[start:end].decode() for start, end in spans]


def _check_ends(name: str, ends: Column, total: int) -> None:
    counts = np.diff(ends, prepend=0)
    if (counts < 0).any() or (ends[-1] if len(ends) else 0) != total:
        raise ValueError(f"column {name} does not count up to {total}")


def _check_hashes(hashed: Column, hashes: Column, chunks: int) -> None:
    if hashed.dtype != np.int64 or hashes.dtype != np.uint64 or hashes.shape != (len(hashed), 2):
        raise ValueError("columns of hashes differ in length or type")
    if len(hashed) and (hashed[0] < 0 or hashed[-1] >= chunks or (np.diff(hashed) <= 0).any()):
        raise ValueError("hashes of chunks that do not exist, or are not in order")


def path_to_json(path: KeyPath) -> list[Any]:
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


def validate(
    table: Table,
    columns: dict[str, Column],
    files: dict[str, int],
    smallest_block: int,
    where: str,
    shares_bytes: bool = False,
) -> None:
    """Check every item against its file's size, every other item (unless they may share bytes), and its box.

    Raises:
        CheckpointCorrupt: Naming file and key.
    """
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name:
            raise CheckpointCorrupt(f"{where}: the index names {name!r}, which leaves the checkpoint")
    file = columns["file"]
    if len(file) == 0:
        return
    if file.min() < 0 or file.max() >= len(files):
        raise CheckpointCorrupt(f"{where}: an item is in a file that the index does not list")
    sizes = np.array(list(files.values()), np.int64)[file]
    offset, length, payload_offset, payload_length = columns["place"].T
    outside = (offset < 0) | (length < 0) | (offset > sizes - length) | (payload_length < 0)
    outside |= np.maximum(payload_offset, 0) > length - payload_length
    blocks = np.diff(columns["block_ends"], prepend=0)
    for bad, what in (
        (outside, "lies outside its file or item"),
        (_overlapping(columns) & (not shares_bytes), "overlaps another item"),
        ((blocks > 0) & (blocks != block_counts(payload_length, smallest_block)), "has a wrong number of checksums"),
    ):
        if bad.any():
            chunk = int(np.argmax(bad))
            key = table.keys[int(np.searchsorted(columns["chunk_ends"], chunk, side="right"))]
            raise CheckpointCorrupt(f"{where}: {key} in {list(files)[file[chunk]]} {what}")
    _check_boxes(table, columns["place"], where)


def _overlapping(columns: dict[str, Column]) -> Column:
    """Which items begin before another one has ended, unless they are the same in everything: that is an alias."""
    items = np.concatenate((columns["file"][:, None], columns["place"]), axis=1)
    order = np.lexsort((items[:, 2], items[:, 1], items[:, 0]))
    before, after = items[order[:-1]], items[order[1:]]
    bad = (after[:, 0] == before[:, 0]) & (after[:, 1] < before[:, 1] + before[:, 2]) & (before != after).any(axis=1)
    overlapping = np.zeros(len(items), bool)
    overlapping[order[1:][bad]] = True
    return overlapping


def _check_boxes(table: Table, place: Column, where: str) -> None:
    no_tensor = table.columns["dtype"] == NO_TENSOR
    counts = np.diff(table.chunk_starts)
    for slot in np.flatnonzero(no_tensor & (counts != 1)).tolist():
        raise CheckpointCorrupt(f"{where}: {table.keys[slot]} is a value with {counts[slot]} items")
    if (no_tensor & (table.columns["ndim"] > 0)).any():
        raise CheckpointCorrupt(f"{where}: a value has dimensions")
    itemsizes = np.zeros(NO_TENSOR + 1, np.int64)
    itemsizes[: len(table.dtypes)] = [dtype_named(name).itemsize for name in table.dtypes]
    for slots, chunks, boxes in table.by_ndim():
        of = np.repeat(np.arange(len(slots)), counts[slots])
        ndim = boxes.shape[2]
        shape = table.columns["shape"][table.shape_starts[slots][:, None] + np.arange(ndim)]
        offsets, sizes = boxes[:, 0], boxes[:, 1]
        outside = ((offsets < 0) | (sizes < 0) | (sizes > shape[of] - offsets)).any(axis=1)
        absurd = (shape < 0).any(axis=1) | (shape.astype(float).prod(axis=1) > 1 << 60)
        for slot in np.unique(np.concatenate((of[outside], np.flatnonzero(absurd))))[:1].tolist():
            raise CheckpointCorrupt(
                f"{where}: a chunk of {table.keys[slots[slot]]} lies outside its shape {tuple(shape[slot])}"
            )
        volumes = sizes.prod(axis=1)
        total = np.zeros(len(slots), np.int64)
        np.add.at(total, of, volumes)
        wrong = (total != shape.prod(axis=1)) | ~partitioned(offsets, sizes, shape, of, len(slots))
        for slot in np.flatnonzero(wrong & ~no_tensor[slots])[:1].tolist():
            raise CheckpointCorrupt(
                f"{where}: the chunks of {table.keys[slots[slot]]} do not add up to its shape "
                f"{tuple(shape[slot])}: there are holes, or chunks overlap"
            )
        expected = volumes * itemsizes[table.columns["dtype"][slots]][of]
        misfit = (place[chunks, 2] >= 0) & (place[chunks, 3] != expected) & ~no_tensor[slots][of]
        for slot in of[misfit][:1].tolist():
            raise CheckpointCorrupt(f"{where}: an item of {table.keys[slots[slot]]} has the wrong size for its shape")
